"""The projection of one case as a record of its own kind: beside results, and never one of them.

No baseline keeps it, no gate judges it, no A/B pairs it and no rule of physics examines it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from perfsuite.metrics import TIMED, derive
from perfsuite.record.result import ClockFacts, Measurement, Metric, Peaks, RankFacts, Sample, Training, Work

if TYPE_CHECKING:
    from perfsuite.projection.step import Projection  # every journal has the record; few runs project anything


@dataclass(frozen=True, kw_only=True)
class Projected:
    """What a case would measure, or why nobody can tell."""

    kind: Literal["projected"]
    case: str
    """pytest node id: a measured and a projected one of a case have the same."""
    platform: str
    world_size: int
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


def projected(
    case: str, projection: Projection, work: Work, peaks: Peaks, *, not_measured: str = "", simulated: bool = False
) -> Projected:
    """The record of a projection; ``work`` is that of the case on all its ranks."""
    named = dict(projection.by_resource.items())
    return Projected(
        kind="projected",
        case=case,
        platform=projection.platform,
        world_size=projection.world_size,
        not_measured=not_measured,
        training=projection.training,
        step_time_s=projection.step_time_s,
        low_s=projection.low_s,
        high_s=projection.high_s,
        metrics=metrics_of(projection.step_time_s, projection.world_size, work, peaks),
        memory_bytes=projection.memory.total,
        seconds={str(resource): seconds for resource, seconds in named.items() if seconds},
        binding=projection.binding,
        regime=projection.regime,
        band_source=projection.band_source,
        calibration=projection.calibration,
        flags=tuple(f"{flag.name}: {flag.text}" for flag in projection.flags),
        lower_bound=projection.lower_bound,
        simulated=simulated,
    )


def metrics_of(step_time_s: float, world_size: int, work: Work, peaks: Peaks) -> tuple[Metric, ...]:
    """Metrics of a step that takes so long, through the registry that measured ones come from."""
    ranks = tuple(
        RankFacts(
            rank=rank,
            host="",
            device=str(rank),
            threads=1,
            cores=None,
            median_s=step_time_s,
            min_s=step_time_s,
            max_s=step_time_s,
            cpu_share=1.0,
            max_rss_bytes=0,
        )
        for rank in range(world_size)
    )
    as_if_measured = Measurement(
        samples=(Sample(time_s=step_time_s),),
        iterations=1,
        warmup_iterations=0,
        warmup_steady=True,
        aligned=False,
        clock=ClockFacts(name="projected", resolution_s=0.0, cost_s=0.0),
        ranks=ranks,
        backend="",
        process="fresh",
        transport="",
    )
    known = derive(TIMED, work=work, measurement=as_if_measured, peaks=peaks)
    return tuple(metric for metric in known if metric.value is not None)
