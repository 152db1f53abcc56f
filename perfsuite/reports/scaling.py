"""Speed-up and efficiency of cases that differ in their number of ranks alone; the base is the smallest, and named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.base.units import plural
from perfsuite.metrics.disturbance import disturbance
from perfsuite.metrics.spec import Kind, efficiency, kind_of, speed_up
from perfsuite.record.result import Result
from perfsuite.reports.document import Grid, grouped
from perfsuite.reports.ids import name_of, without_ranks


@dataclass(frozen=True, kw_only=True)
class Point:
    """The ranks, work and time of one measured case."""

    case: str  # pytest node id.
    series: tuple[str, ...]  # Everything but the ranks, equal in the cases of one series.
    ranks: int
    work: float  # Samples of a step on all ranks, tokens where there are no samples.
    time_s: float  # Median seconds of a step.
    devices: int | None = None  # Distinct devices behind the ranks; None if it is unknown.
    disturbed: str = ""  # Why its time is disturbed, see :func:`perfsuite.metrics.disturbance`; empty if it is not.


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How one case scales over its base."""

    point: Point
    base: Point  # The smallest number of ranks of the series.
    kind: Kind
    speed_up: float
    efficiency: float  # Speed-up over times the ranks; 1 is linear.

    @property
    def base_name(self) -> str:
        """``1 rank``, ``2 ranks``."""
        return plural(self.base.ranks, "rank")

    @property
    def doubt(self) -> str:
        """Why the efficiency cannot be true: a disturbed time, or a speed-up above linear; else empty."""
        for point in (self.point, self.base):
            if point.disturbed:
                return f"{name_of(point.case)} was disturbed: {point.disturbed}"
        from perfsuite.gate.physics import speed_up_violation  # a run without scaling does not load the gate

        above = speed_up_violation(self.speed_up, self.point.ranks, self.base.ranks)
        return f"{above}, look at the base" if above else ""

    @property
    def shared(self) -> bool:
        """Whether the base has as many devices: then more ranks cannot make it faster."""
        return self.point.devices is not None and self.point.devices == self.base.devices


def series_of(case: str, workload: str, parameters: Mapping[str, Any], *hardware: str) -> tuple[str, ...]:
    """Return the key of a series: test, workload, hardware and the parameters that do not depend on the ranks."""
    follow = ("mesh", "accumulation") if parameters.get("global_batch_size") else ("mesh",)
    kept = sorted(f"{name}={value!r}" for name, value in parameters.items() if name not in follow)
    return (without_ranks(case), workload, *hardware, *kept)


def point_of(result: Result) -> Point | None:
    """Return the point of a result; None if nothing was measured or its work is unknown."""
    work = result.work.samples or result.work.tokens
    if result.outcome != "measured" or not work or result.measurement is None or result.median_s <= 0:
        return None
    return Point(
        case=result.case,
        series=series_of(result.case, result.workload, result.parameters, result.platform, result.fingerprint),
        ranks=result.world_size,
        work=work,
        time_s=result.median_s,
        devices=len({(rank.host, rank.device) for rank in result.measurement.ranks}),
        disturbed=disturbance(result),
    )


def scale(points: Iterable[Point]) -> dict[str, Scaling]:
    """Return the scaling of every point of a series with several numbers of ranks, by node id; the base has 1."""
    by_case: dict[str, Scaling] = {}
    for members in grouped((point.series, point) for point in points).values():
        base = min(members, key=lambda point: point.ranks)
        if all(point.ranks == base.ranks for point in members):
            continue
        for point in sorted(members, key=lambda point: point.ranks):
            faster = speed_up(point.work, point.time_s, base.work, base.time_s)
            largest = max(members, key=lambda point: point.ranks)
            ends = largest if point is base else point  # the base has the kind of its series
            by_case[point.case] = Scaling(
                point=point,
                base=base,
                kind=kind_of(ends.work, ends.ranks, base.work, base.ranks),
                speed_up=faster,
                efficiency=efficiency(faster, point.ranks, base.ranks),
            )
    return by_case


def scalings(results: Iterable[Result]) -> dict[str, Scaling]:
    """Return the scaling of the results of one run, by node id."""
    return scale(point for result in results if (point := point_of(result)) is not None)


def scaling_grid(found: Iterable[Scaling]) -> Grid:
    """Return a row per case of a series: kind, speed-up, base and efficiency."""
    scaled = list(found)
    rows, notes = [], []
    for scaling in scaled:
        point, name = scaling.point, name_of(scaling.point.case)
        cells = ("base", "", "")
        if point is not scaling.base:
            sign, share = ("~", "") if scaling.doubt else ("", f"{scaling.efficiency:.0%}")
            cells = (f"{sign}{scaling.speed_up:.3g}", f"vs {scaling.base_name}", share)
            notes += [f"~ {name}: {scaling.doubt}"] if sign else []
        rows.append((name, str(point.ranks), scaling.kind, *cells))
    if any(scaling.shared and scaling.point is not scaling.base for scaling in scaled):
        notes.append("ranks share one device: a linear speed-up is impossible")
    columns = ("scaling", "ranks", "kind", "speed-up", "over", "efficiency")
    return Grid(title="", columns=columns, rows=tuple(rows), notes=tuple(notes))
