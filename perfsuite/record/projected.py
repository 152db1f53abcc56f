"""The projection of one case: a record of its own kind that baselines, the gate and A/B do not use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from perfsuite.record.result import Metric, Training


@dataclass(frozen=True, kw_only=True)
class Projected:
    """The projected figures of a case, or the reason why there are none."""

    kind: Literal["projected"]
    case: str
    """pytest node id: a measured and a projected one of a case have the same."""
    platform: str
    world_size: int
    workload: str = ""
    """``package.module:TrainStep``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the workload, as a result has them."""
    reason: str = ""
    """Why nothing is projected; empty for a projection."""
    not_measured: str = ""
    """Why the case was skipped; empty where it was measured."""
    training: Training | None = None
    step_time_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    """Ends of the 80 % band."""
    metrics: tuple[Metric, ...] = ()
    memory_bytes: float = 0.0
    """Allocated at most, on the fullest rank."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by the resource that it waits for."""
    binding: str = ""
    """The resource that most of the step waits for."""
    regime: str = ""
    band_source: str = ""
    """Where the band comes from."""
    calibration: str = ""
    """Where the constants come from."""
    flags: tuple[str, ...] = ()
    lower_bound: bool = False
    """The step takes this long or longer."""
    simulated: bool = False
    """Of a simulated device."""

    def value(self, metric: str) -> float | None:
        """Return the value of a metric by name; None if it is not projected."""
        return next((one.value for one in self.metrics if one.name == metric), None)
