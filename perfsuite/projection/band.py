"""How far projections were off where the truth was known: the 80 % band of a regime, from the stored back-tests.

``python -m benchmarks.backtest --write-bands`` writes ``bands.json``: of each regime the 10th and 90th percentile of
measured over predicted, and of how many rows.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.projection.calibration import Regime

FILE = Path(__file__).with_name("bands.json")
PER_OCTAVE = 0.2
"""By which the band widens for every doubling of devices beyond what was measured: from one node to eight of
llm-foundry on H100 the 90th percentile grows about as much."""
LARGEST_TESTED = 2048
"""Devices of the largest row of the back-test."""
OUTSIDE = 1.5
"""By which it widens where kernels are outside of what was measured."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Of measured over projected."""

    low: float
    high: float
    regime: str
    """In words: what was measured, one node or more, how far from it."""
    source: str
    """The back-test and its rows."""


def find_band(regime: Regime, *, nodes: int, octaves: float, outside: bool = False) -> Band:
    """The band of a projection so far from what its calibration saw.

    >>> band = find_band("platform row only", nodes=1, octaves=0.0)
    >>> band.low < 1 < band.high
    True
    """
    stored = _stored()[regime]
    wide = 1 + PER_OCTAVE * octaves + (OUTSIDE - 1) * outside
    place = "one node" if nodes == 1 else f"{nodes} nodes"
    beyond = f", {octaves:.1f} doublings beyond what was measured" if octaves >= 0.05 else ""
    return Band(
        low=1 / (1 + wide * (1 / min(stored["low"], 0.999) - 1)),
        high=1 + wide * (max(stored["high"], 1.001) - 1),
        regime=f"{regime}, {place}{beyond}{', outside of the measured shapes' if outside else ''}",
        source=f"80 % of {stored['rows']} rows of the back-test ({stored['tables']})",
    )


@functools.lru_cache(maxsize=1)
def _stored() -> Mapping[str, Any]:
    plain: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return plain
