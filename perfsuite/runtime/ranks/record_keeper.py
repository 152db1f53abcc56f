"""The numbers that one build of a case records beside its time, kept until they are read after the last sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from perfsuite.base.errors import InvalidParameter
from perfsuite.metrics import REGISTRY
from perfsuite.record.own_metrics import MEANING, OwnMetric, agreed
from perfsuite.record.workload import Workload

_COMBINE: Mapping[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = MappingProxyType(
    {"max": (max, torch.maximum), "min": (min, torch.minimum)}
)
"""By ``over``: of two plain numbers, and of two tensors; every other way adds."""


@dataclass(kw_only=True)
class _Kept:
    """One number."""

    given: Mapping[str, Any]
    """What the record said beside the value: the same in every iteration, so it is looked at once."""
    reduce: str
    metric: OwnMetric | None
    value: Any = None
    count: int = 0
    timed: bool = False
    """Whether ``value`` is of timed iterations: then nothing of the warm-up is in it."""

    def take(self, value: Any, timed: bool) -> None:
        """Take a value in."""
        over = self.metric.over if self.metric else "last"
        if over == "last" or not self.count or (timed and not self.timed):
            if over != "last" and isinstance(value, torch.Tensor):  # a copy; a sum of bf16 ends at 256 ones
                value = value.to(value.dtype if over in _COMBINE else torch.float64, copy=True)
            self.value, self.count = value, 1
        elif over in _COMBINE:
            plain, tensors = _COMBINE[over]
            both = type(value) is not float and isinstance(self.value, torch.Tensor)
            self.value = (tensors if both else plain)(self.value, value)
        else:
            self.value, self.count = self.value + value, self.count + 1
        self.timed = timed

    @property
    def number(self) -> float:
        """The one value; reading a device's tensor synchronises."""
        mean = self.metric is not None and self.metric.over == "mean"
        return float(self.value) / (self.count if mean else 1)


class RecordKeeper:
    """What one build on one rank records."""

    def __init__(self, workload: Workload, registered: Collection[OwnMetric]) -> None:
        """``registered`` are the metrics that a conftest.py or a plugin registers."""
        self._derived = frozenset(workload.metrics)
        self._registered = {metric.name: metric for metric in registered}
        self._kept: dict[str, _Kept] = {}

    def keep(self, name: str, value: Any, given: Mapping[str, Any], *, timed: bool, users: bool = True) -> None:
        """Keep a value; ``given`` is what the record says of it.  InvalidParameter for what is no number.

        ``users``: code outside of perfsuite records it.
        """
        value = value if type(value) is float else _number(name, value)  # floats are most, and this is timed
        kept = self._kept.get(name)
        if kept is None or kept.given != given:
            metric = self._metric(name, given, users)
            if kept is not None and kept.metric != metric:
                raise InvalidParameter(f"{name} was recorded in two ways, with {kept.given} and with {given}; keep one")
            if kept is None or metric is None:
                reduce = metric.reduce if metric else given.get("reduce", "max")
                kept = self._kept[name] = _Kept(given=given, reduce=str(reduce), metric=metric)
            kept.given = given
        kept.take(value, timed)

    def read(self) -> dict[str, Any]:
        """By name: value, unit, how ranks are combined, and the fields of the metric that it is; None for none."""
        return {
            name: (
                kept.number,
                kept.metric.unit if kept.metric else kept.given.get("unit", ""),
                kept.reduce,
                dataclasses.asdict(kept.metric) if kept.metric else None,
            )
            for name, kept in self._kept.items()
        }

    def _metric(self, name: str, given: Mapping[str, Any], users: bool) -> OwnMetric | None:
        """The metric of the case that a record is; None for what formulas and reports read.

        Those are the records of perfsuite's own code, and what a metric of the workload is made of.
        """
        unknown = sorted(set(given) - MEANING)
        if unknown:
            raise InvalidParameter(
                f"{name} was recorded with {', '.join(unknown)}; a record may have {', '.join(sorted(MEANING))}"
            )
        registered = self._registered.get(name)
        if registered is not None:
            return agreed(registered, given, "its registration")
        if name in self._derived:
            if "better" in given:
                raise InvalidParameter(
                    f"{name} is a metric that perfsuite derives for this case; record yours under another name"
                )
            return None
        if not users and "better" not in given:
            return None
        spec = REGISTRY.get(name)
        if spec is not None:
            said = {field: value for field, value in given.items() if field in ("unit", "better")}
            agreed(OwnMetric(name=name, unit=spec.unit, better=spec.better), said, "perfsuite")
            given = {**given, "unit": spec.unit, "better": spec.better}
        return OwnMetric(name=name, **given)


def _number(name: object, value: Any) -> Any:
    """The value, a tensor detached and not read; InvalidParameter for what is not one real number."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
        told = f"a {'complex ' if value.is_complex() else ''}tensor of {value.numel()} elements"
    elif isinstance(value, (str, bytes)):
        told = f"the text {value!r:.60}"
    else:
        try:
            return float(value)
        except (TypeError, ValueError):
            told = f"{value!r:.60} of type {type(value).__name__}"
    raise InvalidParameter(f"{name!r:.60} was recorded with {told}; a record is one number, its unit goes to unit=")
