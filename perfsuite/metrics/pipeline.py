"""Pipelines: idle share of a step, its phases, and activations in memory.

Everything is read off a :class:`~perfsuite.record.step.Timeline`, by the same functions whether it was measured or
simulated.  A rank is *busy* during its forwards and backwards and idle otherwise: waiting, sending or doing nothing.

Two bubbles are in use, and they are not the same number.  ``bubble_ratio`` is the idle share of all the time that the p
ranks had, 1 - sum of busy / (p x T); for GPipe and 1F1B with equal stages (p - 1) / (m + p - 1).  ``bubble_to_ideal``
is idle time over busy time, the extra over a pipeline without bubble; for GPipe and 1F1B (p - 1) / m, as in Narayanan
et al. 2021, arXiv:2104.04473, section 2.2.  With b the first, the second is b / (1 - b).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.units import gib
from perfsuite.metrics.spec import MetricSpec, MetricValue, recorded, unknown
from perfsuite.record.result import Measurement, Peaks, Work
from perfsuite.record.step import Timeline, TimelineEvent

COMPUTE = frozenset({"forward", "backward", "backward_input", "backward_weight"})
"""Kinds of events during which a rank is busy."""

ENDS_HOLDING = frozenset({"backward", "backward_weight"})
"""Kinds that free the activations of their stage and micro-batch: a split backward needs the inputs of its layers until
the weight gradient has run."""

SIMULATION_TOLERANCE = 0.02
"""How far a measured bubble_ratio may lie below the simulated one before it is an error of measurement."""


@dataclass(frozen=True, kw_only=True)
class RankPhases:
    """How one rank spends a step; the three phases add up to the step's T."""

    rank: int
    warm_up_s: float  # From the step's start to the start of the rank's first backward.
    steady_s: float  # From there to the end of its last forward; 0 where all forwards come first.
    cool_down_s: float  # The rest.


def _compute_by_rank(timeline: Timeline) -> list[list[TimelineEvent]]:
    """The busy events of every rank; InvalidParameter without any, for then there is no T."""
    by_rank: list[list[TimelineEvent]] = [[] for _ in range(timeline.ranks)]
    for event in timeline.events:
        if event.kind in COMPUTE:
            by_rank[event.rank].append(event)
    if not any(by_rank):
        raise InvalidParameter(
            f"the timeline of {timeline.schedule or 'a pipeline'} has no forward or backward; record the step's actions"
        )
    return by_rank


def _bounds(by_rank: Sequence[Sequence[TimelineEvent]]) -> tuple[float, float]:
    first = min(event.start_s for events in by_rank for event in events)
    last = max(event.end_s for events in by_rank for event in events)
    if last <= first:
        raise InvalidParameter(f"the timeline's actions last {last - first} s; a bubble needs actions that take time")
    return first, last


def step_bounds_s(timeline: Timeline) -> tuple[float, float]:
    """Start of the first action and end of the last on any rank; InvalidParameter without actions."""
    return _bounds(_compute_by_rank(timeline))


def busy_s(timeline: Timeline) -> tuple[float, ...]:
    """Seconds of forwards and backwards, by rank."""
    return tuple(sum(event.end_s - event.start_s for event in events) for events in _compute_by_rank(timeline))


def bubble_ratio(timeline: Timeline) -> float:
    """Idle share: 1 - sum of busy / (p x T), T from the first action's start to the last action's end on any rank.

    >>> def event(kind, rank, start_s, end_s):
    ...     return TimelineEvent(kind=kind, rank=rank, stage=rank, micro_batch=0, start_s=start_s, end_s=end_s)
    >>> events = (event("forward", 0, 0, 1), event("backward", 0, 4, 6), event("forward", 1, 1, 2))
    >>> timeline = Timeline(ranks=2, events=(*events, event("backward", 1, 2, 4)), source="simulated")
    >>> bubble_ratio(timeline), bubble_to_ideal(timeline)  # p = 2, m = 1: (p - 1) / (m + p - 1) and (p - 1) / m
    (0.5, 1.0)
    """
    first, last = step_bounds_s(timeline)
    return idle_share(busy_s(timeline), last - first)


def idle_share(busy_s: Sequence[float], length_s: float) -> float:
    """1 - sum of busy / (p x T), as :func:`bubble_ratio`, from each rank's busy seconds and T.

    >>> idle_share([3, 3], 6)
    0.5
    """
    return 1 - sum(busy_s) / (len(busy_s) * length_s)


def bubble_to_ideal(timeline: Timeline) -> float:
    """Idle time over busy time, (p x T - sum of busy) / sum of busy: the excess over an ideal step."""
    first, last = step_bounds_s(timeline)
    busy = sum(busy_s(timeline))
    return (timeline.ranks * (last - first) - busy) / busy


def phases(timeline: Timeline) -> tuple[RankPhases, ...]:
    """Warm-up, steady state and cool-down of every rank that computes, as the ranks' own actions divide the step."""
    by_rank = _compute_by_rank(timeline)
    first, last = _bounds(by_rank)
    found = []
    for rank, events in enumerate(by_rank):
        if events:
            turn = min((event.start_s for event in events if event.kind != "forward"), default=last)
            drain = max([turn, *(event.end_s for event in events if event.kind == "forward")])
            spent = {"warm_up_s": turn - first, "steady_s": drain - turn, "cool_down_s": last - drain}
            found.append(RankPhases(rank=rank, **spent))
    return tuple(found)


def in_flight_micro_batches(timeline: Timeline) -> tuple[int, ...]:
    """The most micro-batches of which a rank holds activations at one time, by rank.  GPipe m on every rank; 1F1B
    min(m, p - r) on rank r; naive 1.
    """
    peaks = []
    for events in _compute_by_rank(timeline):
        stages_held: Counter[int] = Counter()
        peak = in_flight = 0
        for event in sorted(events, key=lambda event: event.start_s):
            if event.kind == "forward":
                stages_held[event.micro_batch] += 1
                in_flight += stages_held[event.micro_batch] == 1
                peak = max(peak, in_flight)
            elif event.kind in ENDS_HOLDING:
                stages_held[event.micro_batch] -= 1
                in_flight -= stages_held[event.micro_batch] == 0
        peaks.append(peak)
    return tuple(peaks)


def impossible_bubble(measured: float, simulated: float) -> bool:
    """Whether a measured bubble_ratio is an error of measurement: more than 0.02 below the simulation of its durations.

    >>> impossible_bubble(0.24, 0.273), impossible_bubble(0.26, 0.273)
    (True, False)
    """
    return measured < simulated - SIMULATION_TOLERANCE


def _of_timeline(
    work: Work, measurement: Measurement, peaks: Peaks, *, formula: Callable[[Timeline], float]
) -> MetricValue:
    if measurement.timeline is None:
        return unknown(_NO_TIMELINE)
    return MetricValue(value=formula(measurement.timeline))


def _percent_of_step(timeline: Timeline, *, phase: str) -> float:
    first, last = step_bounds_s(timeline)
    took_s = [getattr(rank_phases, phase) for rank_phases in phases(timeline)]
    return float(100 * sum(took_s) / len(took_s) / (last - first))


_NO_TIMELINE = "no timeline of a pipeline was recorded"
_NO_SIMULATION = "no timeline of a schedule in the catalogue was recorded"

METRICS = (
    MetricSpec("bubble_ratio", "ratio", "lower", "idle / (p x T)", partial(_of_timeline, formula=bubble_ratio),
               deterministic=True, tolerance=0.01, absolute_floor=0.01,
               doc="Share of all ranks' time in which they are not busy with a forward or backward, 0 to 1."),
    MetricSpec("bubble_to_ideal_ratio", "ratio", "lower", "idle / busy",
               partial(_of_timeline, formula=bubble_to_ideal), observed=True,
               doc="Idle time over busy time of all ranks: the extra over a pipeline without bubble, (p - 1) / m "
                   "for 1F1B."),
    MetricSpec("in_flight_micro_batches", "micro_batches", "lower", "forward begun, backward not ended",
               partial(_of_timeline, formula=lambda timeline: max(in_flight_micro_batches(timeline))),
               deterministic=True, observed=True,
               doc="The most micro-batches of which any rank holds activations at one time."),
    MetricSpec("median_bubble_ratio", "ratio", "lower", "idle / (p x T), median over steps",
               recorded("bubble_ratio_median", _NO_TIMELINE), observed=True,
               doc="bubble_ratio over the steps of all samples; its quartiles are recorded too."),
    MetricSpec("simulated_bubble_ratio", "ratio", "lower", "simulated with the step's durations",
               recorded("bubble_ratio_simulated", _NO_SIMULATION), observed=True, headline=False,
               doc="bubble_ratio that the schedule has with the actions as long as they were and nothing else "
                   "taking time."),
    MetricSpec("balanced_bubble_ratio", "ratio", "lower", "simulated with even stages",
               recorded("bubble_ratio_balanced", _NO_SIMULATION), observed=True, headline=False,
               doc="bubble_ratio that the schedule would have with the same work spread evenly over the stages."),
    *(
        MetricSpec(f"{name}_percent", "percent", "neither", "mean over ranks",
                   partial(_of_timeline, formula=partial(_percent_of_step, phase=f"{name}_s")),
                   observed=True, headline=False, doc=doc)
        for name, doc in (
            ("warm_up", "Share of the step from its start to a rank's first backward."),
            ("steady", "Share of the step from a rank's first backward to its last forward."),
            ("cool_down", "Share of the step from a rank's last forward to the step's end."),
        )
    ),
    MetricSpec("peak_activations_gib", "GiB", "lower", "most of any rank",
               recorded("peak_activations_bytes", "no memory build was run", gib),
               doc="Most that a step's forwards and backwards allocate beyond weights, gradients and optimizer.  "
                   "2**30 bytes."),
)  # fmt: skip
