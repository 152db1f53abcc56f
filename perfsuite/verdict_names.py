"""The names of verdicts: what the gate says, what files keep of it, and what options name."""

from __future__ import annotations

from typing import Literal

VerdictName = Literal[
    "pass",
    "regressed",
    "drifted",
    "environment",
    "improved",
    "inconclusive",
    "impossible",
    "no-baseline",
    "learning",
    "not-comparable",
    "unstable-host",
]
