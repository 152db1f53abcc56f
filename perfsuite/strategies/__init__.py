"""Ways to spread a training step over ranks, by name; what each offers is in :mod:`.base`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from perfsuite.errors import InvalidParameter
from perfsuite.strategies.base import Plan, Strategy
from perfsuite.strategies.ddp import Ddp
from perfsuite.strategies.deepspeed.zero import Zero
from perfsuite.strategies.fsdp import Fsdp
from perfsuite.strategies.hybrid import Hybrid
from perfsuite.strategies.single import Single
from perfsuite.strategies.zero_redundancy import ZeroRedundancy

__all__ = ["STRATEGIES", "Plan", "Strategy", "find"]

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "single": Single(),
        "ddp": Ddp(),
        "fsdp": Fsdp(),
        "zero_redundancy": ZeroRedundancy(),
        "zero0": Zero(stage=0),
        "zero1": Zero(stage=1),
        "zero2": Zero(stage=2),
        "zero3": Zero(stage=3),
        "hybrid": Hybrid(),
    }
)
"""Every strategy by name, with its default options."""


def find(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy of this name with some of its options set.

    Raises InvalidParameter for a name or option that there is not, and for options that contradict each other.
    """
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=3, cutoff=0.4) or list(STRATEGIES)
        raise InvalidParameter(f"strategy {name!r} is unknown; did you mean {' or '.join(near)}?")
    if not options:
        return STRATEGIES[name]
    known = [each.name for each in dataclasses.fields(STRATEGIES[name]) if each.name != "stage"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise InvalidParameter(f"strategy {name} has no option {', '.join(unknown)}; {has}")
    return dataclasses.replace(STRATEGIES[name], **options)
