"""Pipelines: measured and simulated bubble of each case, and the stage that binds an uneven one."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.units import format_seconds, plural, readable_unit, significant
from perfsuite.metrics.pipeline import (
    COMPUTE,
    SIMULATION_TOLERANCE,
    bubble_ratio,
    bubble_to_ideal,
    impossible_bubble,
    in_flight_micro_batches,
    step_bounds_s,
)
from perfsuite.record.result import Measurement, Result
from perfsuite.record.step import Timeline
from perfsuite.reports.document import Grid
from perfsuite.reports.timelines.files import check_timeline
from perfsuite.schedules import Imbalance, formula_bubble, replay

EVEN = 0.05  # Excess work of the busiest rank over the average from which on its stage binds.
GAIN = 0.01  # Least gain of an even split for a stage to bind.
_MOST_LINES = 4  # Uneven cases that are listed for each test; the others are counted.
_LISTED = 4  # Values of ranks in one cell; of more, the smallest and the largest are printed.
_ACTIVATIONS = re.compile(r"peak_activations_bytes_rank(\d+)")


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """The figures of one case's timeline; None is unknown."""

    case: str
    schedule: str  # Name of the schedule; ``-`` without one.
    ranks: int
    stages_per_rank: int | None
    num_micro_batches: int | None
    bubble_ratio: float
    bubble_to_ideal: float
    simulated: float | None  # bubble_ratio of the schedule with this step's durations and no other delays.
    formula: float | None  # bubble_ratio of equal stages.
    in_flight: tuple[int, ...]  # The most micro-batches in flight, by rank.
    peak_activations_bytes: tuple[float, ...]
    """Peak allocation of forwards and backwards, by rank; empty if it was not recorded."""
    imbalance: Imbalance | None  # The stage that binds; None if stages are even.

    @property
    def impossible(self) -> bool:
        """Whether the measured bubble is an error of measurement."""
        return self.simulated is not None and impossible_bubble(self.bubble_ratio, self.simulated)


def pipeline_row(case: str, timeline: Timeline, measurement: Measurement | None = None) -> PipelineRow:
    """Return the figures of ``timeline``; InvalidParameter if it is damaged or has no action."""
    check_timeline(timeline)
    again = replay(timeline)
    schedule = again.schedule
    return PipelineRow(
        case=case,
        schedule=timeline.schedule or "-",
        ranks=timeline.ranks,
        stages_per_rank=schedule.stages_per_rank if schedule else None,
        num_micro_batches=schedule.num_micro_batches if schedule else None,
        bubble_ratio=float(bubble_ratio(timeline)),
        bubble_to_ideal=float(bubble_to_ideal(timeline)),
        simulated=float(bubble_ratio(again.simulated)) if again.simulated else None,
        formula=formula_bubble(schedule) if schedule else None,
        in_flight=in_flight_micro_batches(timeline),
        peak_activations_bytes=peak_activations_bytes(measurement),
        imbalance=_lasting(again.imbalance, timeline) if again.imbalance else None,
    )


def _lasting(imbalance: Imbalance, timeline: Timeline) -> Imbalance | None:
    """Return the imbalance if it lasts for the whole step and an even split gains time; else None."""
    usual = _usual_work(timeline)
    busiest = max(usual, key=usual.__getitem__)
    excess = usual[busiest] * len(usual) / sum(usual.values()) - 1 if usual[busiest] else 0
    lasting = busiest == imbalance.rank and min(excess, imbalance.excess) > EVEN
    gains = _length_s(imbalance.balanced) < (1 - GAIN) * _length_s(imbalance.simulated)
    return imbalance if lasting and gains else None


def _usual_work(timeline: Timeline) -> Mapping[int, float]:
    """Return seconds of each rank's actions if each took the median of its stage and kind."""
    took: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in COMPUTE:
            took[event.rank, event.stage, event.kind].append(event.end_s - event.start_s)
    work: dict[int, float] = defaultdict(float)
    for (rank, _, _), lengths in took.items():
        work[rank] += statistics.median(lengths) * len(lengths)
    return work


def peak_activations_bytes(measurement: Measurement | None) -> tuple[float, ...]:
    """Return peak bytes by rank, from the records of the memory build; empty unless every rank has one."""
    sizes = {
        int(match[1]): record.value
        for record in (measurement.records if measurement else ())
        if (match := _ACTIVATIONS.fullmatch(record.name))
    }
    return tuple(sizes[rank] for rank in sorted(sizes)) if sorted(sizes) == list(range(len(sizes))) else ()


def pipeline_grids(results: Iterable[Result]) -> list[Grid]:
    """Return a table per test of the cases with a timeline; the last one has notes on the columns and on errors."""
    tests: dict[str, list[PipelineRow]] = {}
    unreadable: list[str] = []
    for result in results:
        measurement = result.measurement
        if measurement is None or measurement.timeline is None or result.outcome != "measured":
            continue
        try:
            pipeline = pipeline_row(result.case, measurement.timeline, measurement)
        except InvalidParameter as damage:
            unreadable.append(f"{result.case}: {damage}")
        else:
            tests.setdefault(result.case.partition("[")[0], []).append(pipeline)
    grids = [_grid(test, members) for test, members in tests.items()]
    together = [pipeline for members in tests.values() for pipeline in members]
    notes = (*_explanation(together), *unreadable)
    if not grids:
        return [Grid(title="", columns=(), rows=(), notes=notes)] if notes else []
    return [*grids[:-1], replace(grids[-1], notes=(*grids[-1].notes, *notes))]


def _grid(test: str, pipelines: Sequence[PipelineRow]) -> Grid:
    name, unit = readable_unit([size for row in pipelines for size in row.peak_activations_bytes])
    in_names = all(row.schedule in _short(row) for row in pipelines)
    columns: Mapping[str, list[str]] = {
        "pipeline": [_short(row) for row in pipelines],
        "schedule": ["" if in_names else row.schedule for row in pipelines],
        "p": [str(row.ranks) for row in pipelines],
        "v": [_count(row.stages_per_rank) for row in pipelines],
        "m": [_count(row.num_micro_batches) for row in pipelines],
        "bubble\n_ratio": [f"{row.bubble_ratio:.3f}{' !' if row.impossible else ''}" for row in pipelines],
        "simu-\nlated": [_ratio(row.simulated) for row in pipelines],
        "\nformula": [_ratio(row.formula) for row in pipelines],
        "bubble\n_to_ideal": [f"{row.bubble_to_ideal:.3f}" for row in pipelines],
        "in flight\nby rank": [_few([str(count) for count in row.in_flight]) for row in pipelines],
        f"activations\n{name} by rank": [
            _few([significant(count / unit, 3) for count in row.peak_activations_bytes]) for row in pipelines
        ],
    }
    kept = {heading: cells for heading, cells in columns.items() if any(cells)}
    rows = tuple(zip(*kept.values(), strict=True))
    return Grid(title=test, columns=tuple(kept), rows=rows, notes=tuple(_binding(pipelines)))


def _short(pipeline: PipelineRow) -> str:
    return pipeline.case.partition("[")[2].removesuffix("]") or "-"


def _count(count: int | None) -> str:
    return "-" if count is None else str(count)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{float(ratio):.3f}"


def _few(values: Sequence[str]) -> str:
    """Return all values by rank: ``4 3 2 1``; one if all are equal; of many the smallest and the largest."""
    if len(set(values)) <= 1:
        return " ".join(values[:1])
    if len(values) <= _LISTED:
        return " ".join(values)
    return f"{min(values, key=float)} to {max(values, key=float)}"


def _explanation(pipelines: Sequence[PipelineRow]) -> Iterator[str]:
    if pipelines:
        yield "bubble_ratio: idle share of all the ranks' time; bubble_to_ideal: idle over busy time"
        yield "simulated: bubble_ratio of the schedule with this step's own durations; formula: of equal stages"
    if any(row.imbalance for row in pipelines):
        yield "a stage binds where its rank has so much more work than the average; both steps are simulated"
    if any(row.impossible for row in pipelines):
        yield f"! more than {SIMULATION_TOLERANCE} below the simulation of its own durations: an error of measurement"


def _binding(pipelines: Sequence[PipelineRow]) -> Iterator[str]:
    uneven = [(row.imbalance, row) for row in pipelines if row.imbalance]
    uneven.sort(key=lambda pair: -pair[0].excess)
    for imbalance, row in uneven[:_MOST_LINES]:
        yield f"{_short(row)}: {binding_sentence(imbalance)}"
    if len(uneven) > _MOST_LINES:
        yield f"and {plural(len(uneven) - _MOST_LINES, 'more case')} with a stage that binds"


def binding_sentence(imbalance: Imbalance) -> str:
    """Return the stage that binds, and the simulated step with an even split of the same work."""
    now, even = imbalance.simulated, imbalance.balanced
    return (
        f"stage {imbalance.stage} binds, rank {imbalance.rank} has {imbalance.excess:+.0%} work; an even split: "
        f"bubble_ratio {float(bubble_ratio(now)):.3f} -> {float(bubble_ratio(even)):.3f}, "
        f"step {format_seconds(_length_s(now))} -> {format_seconds(_length_s(even))}"
    )


def _length_s(timeline: Timeline) -> float:
    first, last = step_bounds_s(timeline)
    return float(last - first)
