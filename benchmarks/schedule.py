"""The picture and the bubble of a pipeline schedule, simulated; nothing is run.

python benchmarks/schedule.py 1f1b --ranks 4 --micro-batches 8 --out timeline.svg
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parent.parent))

from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.base.units import format_seconds, plural
from perfsuite.base.writing import write_file
from perfsuite.cli.main import EXIT_OK, EXIT_USAGE
from perfsuite.metrics.pipeline import (
    bubble_ratio,
    bubble_to_ideal,
    in_flight_micro_batches,
    step_bounds_s,
)
from perfsuite.record.step import Timeline
from perfsuite.reports.pipeline import binding_sentence
from perfsuite.reports.timelines.files import trace_text
from perfsuite.reports.timelines.picture import timeline_svg
from perfsuite.schedules import (
    SCHEDULES,
    Schedule,
    StageTimes,
    find_imbalance,
    find_schedule,
    formula_bubble,
    make_schedule,
    simulate,
)

_ENDINGS = (".svg", ".json")
_LISTED_RANKS = 8
"""Of more ranks only the least and the most of a quantity are printed."""


@dataclass(frozen=True, kw_only=True)
class _Times:
    """What the options say that a stage's actions take."""

    forward_s: float
    backward_s: float
    """A whole backward; a schedule that splits it gives each half of it."""
    communication_s: float
    stage_costs: tuple[float, ...]
    """By stage, relative; empty for equal stages."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--ranks", type=int, required=True, metavar="P", help="ranks along the pipeline")
    parser.add_argument("--micro-batches", type=int, required=True, metavar="M", help="micro-batches of a step")
    parser.add_argument(
        "--stages-per-rank", type=int, metavar="V", help="stages of each rank; default: the fewest that NAME can have"
    )
    parser.add_argument(
        "--forward-s", type=float, default=1.0, metavar="S", help="seconds of a stage's forward (default 1)"
    )
    parser.add_argument(
        "--backward-s", type=float, metavar="S", help="seconds of a stage's whole backward (default: twice the forward)"
    )
    parser.add_argument(
        "--communication-s", type=float, default=0.0, metavar="S", help="seconds of a message's way (default 0)"
    )
    parser.add_argument(
        "--stage-costs",
        type=float,
        nargs="+",
        default=[],
        metavar="C",
        help="for unequal stages: a stage of cost C takes C times as long, one per stage",
    )
    parser.add_argument(
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write a picture (.svg) or a Perfetto trace (.json); repeatable",
    )


def run(options: argparse.Namespace) -> int:
    """Simulate, print, write; raises PerfsuiteError that names the legal choices for what cannot be."""
    times = _read_times(options)
    for path in options.out:
        if path.suffix.lower() not in _ENDINGS:
            raise ConfigurationError(f"--out {path} ends in neither .svg (picture) nor .json (trace); choose one")
    schedule = make_schedule(
        options.name,
        ranks=options.ranks,
        num_micro_batches=options.micro_batches,
        stages_per_rank=options.stages_per_rank,
    )
    timeline = _simulate(schedule, times)
    for line in _lines(schedule, times, timeline):
        print(line)
    for path in options.out:
        write_file(path, timeline_svg(timeline) if path.suffix.lower() == ".svg" else trace_text(timeline))
        print(f"wrote {path}")
    return EXIT_OK


def _read_times(options: argparse.Namespace) -> _Times:
    backward_s = 2 * options.forward_s if options.backward_s is None else options.backward_s
    for option, seconds, least in (
        ("--forward-s", options.forward_s, "above 0"),
        ("--backward-s", backward_s, "above 0"),
        ("--communication-s", options.communication_s, "at least 0"),
        *(("--stage-costs", cost, "above 0") for cost in options.stage_costs),
    ):
        if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and least == "above 0"):
            raise ConfigurationError(f"{option} {seconds:g} is no duration; give a number {least}")
    return _Times(
        forward_s=options.forward_s,
        backward_s=backward_s,
        communication_s=options.communication_s,
        stage_costs=tuple(options.stage_costs),
    )


def _simulate(schedule: Schedule, times: _Times) -> Timeline:
    costs = times.stage_costs or (1.0,) * schedule.num_stages
    if len(costs) != schedule.num_stages:
        raise ConfigurationError(
            f"--stage-costs has {len(costs)} numbers for {schedule.ranks} ranks x {schedule.stages_per_rank} stages; "
            f"give {schedule.num_stages}, from the first stage to the last"
        )
    stages = StageTimes.in_proportion(
        [_as_written(cost) for cost in costs],
        forward_s=_as_written(times.forward_s),
        backward_input_s=_as_written(times.backward_s) / 2,
        backward_weight_s=_as_written(times.backward_s) / 2,
    )
    return simulate(schedule, stages, communication_s=_as_written(times.communication_s), detail=True)


def _as_written(number: float) -> float:
    """A tenth for 0.1: the ratios are then as exact as the options."""
    return cast(float, Fraction(str(number)))  # the simulator adds and compares, nothing that a fraction cannot


def peak_activations(timeline: Timeline, stage_sizes: Sequence[float] | None = None) -> tuple[float, ...]:
    """The most activations that a rank holds at one time, by rank; every stage counts 1 without ``stage_sizes``."""
    peaks = []
    for rank in range(timeline.ranks):
        held: float = 0
        peak: float = 0
        for event in sorted((event for event in timeline.events if event.rank == rank), key=lambda one: one.start_s):
            size = 1 if stage_sizes is None else stage_sizes[event.stage]
            held += size * ((event.kind == "forward") - (event.kind in ("backward", "backward_weight")))
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _lines(schedule: Schedule, times: _Times, timeline: Timeline) -> Iterator[str]:
    first, last = step_bounds_s(timeline)
    spec = find_schedule(schedule.name)
    halves = (
        f", as input and weight gradients of {format_seconds(times.backward_s / 2)}" if spec.splits_backward else ""
    )
    stages = f"{plural(schedule.stages_per_rank, 'stage')} per rank"
    yield f"{spec.title}: p={schedule.ranks} ranks, v={stages}, m={schedule.num_micro_batches} micro-batches"
    cost = ", times its cost" if times.stage_costs else ""
    message = format_seconds(times.communication_s) if times.communication_s else "no time"
    yield (
        f"a stage's forward {format_seconds(times.forward_s)}, backward {format_seconds(times.backward_s)}{halves}"
        f"{cost}; a message {message}"
    )
    yield f"step                     {format_seconds(float(last - first))} (simulated)"
    yield f"bubble_ratio             {_exact(bubble_ratio(timeline))} (simulated)"
    yield f"formula, equal stages    {_formula(schedule)}"
    yield f"bubble_to_ideal          {_exact(bubble_to_ideal(timeline))} (idle / busy)"
    yield f"micro-batches in flight  {_by_rank(in_flight_micro_batches(timeline))}"
    yield f"activations held         {_by_rank(peak_activations(timeline))}, one per micro-batch and stage"
    imbalance = find_imbalance(schedule, timeline, communication_s=_as_written(times.communication_s))
    if imbalance.excess > 0:
        yield binding_sentence(imbalance)


def _exact(ratio: float | Fraction) -> str:
    """``0.273 = 3/11`` where the fraction is short: times are fractions, so it is exact."""
    short = Fraction(ratio)
    return f"{float(ratio):.3f}{f' = {short}' if short.denominator < 10_000 else ''}"


def _formula(schedule: Schedule) -> str:
    spec = find_schedule(schedule.name)
    if spec.bubble is None or formula_bubble(schedule) is None:
        return "none: it depends on how forward and the two halves of a backward compare"
    return _exact(spec.bubble(schedule.ranks, schedule.num_micro_batches, schedule.stages_per_rank))


def _by_rank(values: tuple[float, ...]) -> str:
    if len(values) > _LISTED_RANKS:
        return f"{min(values)} to {max(values)} over the ranks"
    return " ".join(str(value) for value in values) + " by rank"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code is 4 for what cannot be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    try:
        return run(parser.parse_args(arguments))
    except PerfsuiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    raise SystemExit(main())
