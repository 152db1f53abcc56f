"""The projection of one case as a record of its own kind: beside results, and never one of them.

No baseline keeps it, no gate judges it, no A/B pairs it and no rule of physics examines it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from perfsuite.record.result import Metric, Training


@dataclass(frozen=True, kw_only=True)
class Projected:
    """What a case would measure, or why nobody can tell."""

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
    """Why nothing is projected; empty where it is."""
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
    """Of the step, by the resource that is waited for."""
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
        """Of the metric of this name; None where it is not projected."""
        return next((known.value for known in self.metrics if known.name == metric), None)
