"""A user's own metrics: numbers that ranks record with the time, with unit, direction and rule of the gate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from perfsuite.base.errors import InvalidParameter

Better = Literal["higher", "lower", "neither"]
Reduce = Literal["max", "min", "mean", "sum", "equal", "only"]
"""How the values of the ranks become one: ``equal`` and ``only`` allow one value, of all ranks or of one."""
Over = Literal["last", "mean", "max", "min", "sum"]
"""How the values that a rank records in its timed iterations become one."""

RESERVED = frozenset(
    {"time", "mean", "p95", "all samples", "outcome", "verdict", "platform", "parameters", "defaults", "world_size"}
    | {"backend", "process", "transport", "iterations_per_sample", "slowest_rank", "rank_spread", "fingerprint"}
    | {"simulated", "median_s"}
)
"""Names that baselines, JUnit files and pytest-benchmark's extra_info have for something else."""
_LONGEST_NAME = 100
_LONGEST_UNIT = 30


@dataclass(frozen=True, kw_only=True)
class OwnMetric:
    """A metric of your own; ``pytest_perfsuite_metrics`` registers it for all cases.

    Raises InvalidParameter for an invalid name, unit or rule.
    """

    name: str  # Name in ``rank.record(name, value)``: ``memory``, ``memory/max_reserved(GiB)``.
    unit: str = ""  # Printed unit: ``GiB``, ``GB/s``; empty for a pure number.
    better: Better = "neither"
    """Direction of an improvement: higher, lower or neither. ``neither`` is judged only if it is exact."""
    reduce: Reduce | Literal[""] = ""
    """Value of the case from its ranks: max, min, mean, sum, equal or only (default: the worst rank)."""
    over: Over = "last"  # Value of a rank from its iterations: last, mean, max, min or sum.
    exact: bool = False
    """Whether equal code gives equal values, so that one run decides; False: judged by statistics."""
    tolerance: float | None = None
    """Accepted relative change for the worse; None: that of the time, and 0 if exact."""
    floor: float = 0.0  # Accepted change of an exact metric, in its unit.

    def __post_init__(self) -> None:
        _check_text(self.name, "name", _LONGEST_NAME)
        if self.unit:
            _check_text(self.unit, f"unit of {self.name}", _LONGEST_UNIT)
        if self.name in RESERVED:
            raise InvalidParameter(f"{self.name!r} is a name of perfsuite's own records; choose another for the metric")
        for field, allowed in (("better", Better), ("over", Over)):
            _check_choice(self.name, field, getattr(self, field), get_args(allowed))
        if self.reduce != "":
            _check_choice(self.name, "reduce", self.reduce, get_args(Reduce))
        for field, most in (("tolerance", 1.0), ("floor", math.inf)):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value < most):
                raise InvalidParameter(f"{field}={value!r} of {self.name} is not valid; {_RANGES[field]}")
        if self.floor and not self.exact:
            raise InvalidParameter(
                f"floor={self.floor} of {self.name} is for exact metrics; add exact=True or use tolerance="
            )
        if self.tolerance is not None and self.better == "neither" and not self.exact:
            raise InvalidParameter(f"tolerance of {self.name} needs a direction; add better='lower' or better='higher'")
        if not self.reduce:
            object.__setattr__(self, "reduce", "min" if self.better == "higher" else "max")

    @property
    def convention(self) -> str:
        """Text about ``reduce`` and ``over``, for exports."""
        ranks = f"{self.reduce} over ranks" if self.reduce not in ("equal", "only") else f"{self.reduce} rank value"
        return ranks if self.over == "last" else f"{ranks}, {self.over} over iterations"


_RANGES = {"tolerance": "give a share from 0 up to 1, 0.05 for 5 %", "floor": "give a number of at least 0 in its unit"}


def _check_text(text: object, what: str, longest: int) -> None:
    usable = isinstance(text, str) and text.isprintable() and text.strip() == text and 0 < len(text) <= longest
    if not usable:
        raise InvalidParameter(
            f"{what} is {text!r:.120}; give 1 to {longest} printable characters without spaces at the ends"
        )


def _check_choice(name: str, field: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise InvalidParameter(f"{field}={value!r} of {name} is not valid; use {', '.join(map(str, allowed))}")


def registered(parts: Iterable[object]) -> tuple[OwnMetric, ...]:
    """Return the metrics of the hook's results; InvalidParameter for other objects and for two of one name."""
    by_name: dict[str, OwnMetric] = {}
    for part in parts:
        for metric in part if isinstance(part, (list, tuple)) else (part,):
            if not isinstance(metric, OwnMetric):
                raise InvalidParameter(
                    f"pytest_perfsuite_metrics returned {metric!r:.80}; return a list of perfsuite.OwnMetric"
                )
            if by_name.setdefault(metric.name, metric) != metric:
                raise InvalidParameter(
                    f"pytest_perfsuite_metrics registers {metric.name} twice, as {by_name[metric.name]} and as "
                    f"{metric}; keep one"
                )
    return tuple(by_name.values())


MEANING = frozenset({"unit", "better", "reduce", "over", "exact", "tolerance", "floor"})
"""Fields that a record may set in addition to name and value."""


def agreed(metric: OwnMetric, fields: Mapping[str, Any], whose: str) -> OwnMetric:
    """Return ``metric`` if a record has no other fields; InvalidParameter names the fields that differ."""
    differing = [f"{field}={value!r}" for field, value in fields.items() if value != getattr(metric, field)]
    if differing:
        expected = (f"{field}={getattr(metric, field)!r}" for field in fields)
        raise InvalidParameter(
            f"{metric.name} was recorded with {', '.join(differing)}, but {whose} has it with {', '.join(expected)}; "
            "leave these out of rank.record, or use another name"
        )
    return metric
