"""Simulate the schedule of a timeline with the durations of the timeline.

Records, the gate, the terminal, pictures and traces compare a step with this simulation.  Durations come from the
timeline, from its means per kind, or from stage times.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.schedules.catalog import make_schedule
from perfsuite.schedules.schedule import LETTERS, Action, Durations, Schedule, simulate


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Durations that depend only on stage and kind; call the object with an action.

    >>> times = StageTimes.in_proportion([1, 3], forward_s=2, backward_input_s=2, backward_weight_s=1)
    >>> times(Action(kind="forward", stage=1, micro_batch=0)), times(Action(kind="backward", stage=1, micro_batch=0))
    (6, 9)
    """

    forward_s: tuple[float, ...]  # Per stage.
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]  # Per stage; a whole backward takes the sum of both.

    def __post_init__(self) -> None:
        if not len(self.forward_s) == len(self.backward_input_s) == len(self.backward_weight_s):
            raise InvalidParameter(
                f"stage times for {len(self.forward_s)}, {len(self.backward_input_s)} and "
                f"{len(self.backward_weight_s)} stages; give forward, backward_input and backward_weight of every stage"
            )

    @classmethod
    def in_proportion(
        cls, costs: Sequence[float], *, forward_s: float = 1, backward_input_s: float = 1, backward_weight_s: float = 1
    ) -> StageTimes:
        """Return times where a stage of cost c takes c times these seconds; ``[1] * n``: n equal stages."""
        return cls(
            forward_s=tuple(cost * forward_s for cost in costs),
            backward_input_s=tuple(cost * backward_input_s for cost in costs),
            backward_weight_s=tuple(cost * backward_weight_s for cost in costs),
        )

    def __call__(self, action: Action) -> float:
        """Return the seconds of ``action``."""
        stage = action.stage
        if action.kind == "forward":
            return self.forward_s[stage]
        if action.kind == "backward":
            return self.backward_input_s[stage] + self.backward_weight_s[stage]
        return (self.backward_input_s if action.kind == "backward_input" else self.backward_weight_s)[stage]


def _actions(timeline: Timeline) -> list[TimelineEvent]:
    return [event for event in timeline.events if event.kind in LETTERS]


def durations_of(timeline: Timeline) -> Durations:
    """Return the durations in ``timeline``; they raise InvalidParameter for an action that it lacks."""
    took = {(event.kind, event.stage, event.micro_batch): event.end_s - event.start_s for event in _actions(timeline)}

    def seconds(action: Action) -> float:
        try:
            return took[action.kind, action.stage, action.micro_batch]
        except KeyError:
            raise InvalidParameter(
                f"the timeline of {timeline.schedule or 'a pipeline'} has no {action}; record every action of the step"
            ) from None

    return seconds


def evened_durations(timeline: Timeline) -> Durations:
    """Return the mean durations of each kind over the stages: those of a perfectly balanced split."""
    took: dict[str, list[float]] = defaultdict(list)
    for event in _actions(timeline):
        took[event.kind].append(event.end_s - event.start_s)
    mean: dict[str, float] = {kind: sum(seconds) / len(seconds) for kind, seconds in took.items()}
    return lambda action: mean[action.kind]


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """The distribution of the work of a step over the ranks."""

    rank: int  # The busiest rank; a step is at least as long as its work.
    stage: int  # The stage with the most work on that rank: the bottleneck.
    busy_s: float  # Seconds of work of that rank.
    mean_busy_s: float  # Mean seconds of work of a rank.
    simulated: Timeline  # The schedule with these durations, with waits and messages.
    balanced: Timeline  # The schedule with the same work distributed evenly over the stages.

    @property
    def excess(self) -> float:
        """Return the work of the busiest rank over the mean, minus 1; 0 for an even distribution."""
        return max(0.0, self.busy_s / self.mean_busy_s - 1)


def find_imbalance(schedule: Schedule, timeline: Timeline, *, communication_s: float = 0) -> Imbalance:
    """Return the bottleneck of ``timeline`` and both simulations of its schedule.  Raises InvalidParameter when the
    timeline lacks an action of the schedule.
    """
    if timeline.ranks != schedule.ranks:
        raise InvalidParameter(
            f"a timeline of {timeline.ranks} ranks for a schedule of {schedule.ranks}; give the schedule that ran"
        )
    by_rank: dict[int, float] = defaultdict(float)
    by_stage: dict[int, float] = defaultdict(float)
    for event in _actions(timeline):
        by_rank[event.rank] += event.end_s - event.start_s
        by_stage[event.stage] += event.end_s - event.start_s
    simulated = simulate(schedule, durations_of(timeline), communication_s=communication_s, detail=True)
    rank = max(range(schedule.ranks), key=lambda index: by_rank[index])
    return Imbalance(
        rank=rank,
        stage=max(schedule.stages_of(rank), key=lambda stage: by_stage[stage]),
        busy_s=by_rank[rank],
        mean_busy_s=sum(by_rank.values()) / schedule.ranks,
        simulated=replace(simulated, world_ranks=timeline.world_ranks, place=timeline.place),
        balanced=simulate(schedule, evened_durations(timeline), communication_s=communication_s),
    )


_KEPT = 64  # Replays in the cache; all users of a case's replay run within few cases.


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The simulation of a timeline's schedule."""

    schedule: Schedule | None  # None for a schedule that is not in the catalog.
    imbalance: Imbalance | None
    """Both simulations and the bottleneck; None without a schedule, or where the timeline lacks an action."""
    reason: str = ""  # The reason where there is no simulation.

    @property
    def simulated(self) -> Timeline | None:
        """Return the simulation with waits and messages; a step cannot be shorter."""
        return self.imbalance.simulated if self.imbalance else None


def schedule_of(timeline: Timeline) -> Schedule:
    """Return the schedule that ``timeline`` names, with the numbers of stages and micro-batches of its actions.

    >>> from perfsuite.schedules.replay import StageTimes
    >>> from perfsuite.schedules.schedule import simulate
    >>> times = StageTimes.in_proportion([1] * 4)
    >>> ran = schedule_of(simulate(make_schedule("zbv", ranks=2, num_micro_batches=5), times))
    >>> ran.name, ran.ranks, ran.stages_per_rank, ran.num_micro_batches
    ('zbv', 2, 2, 5)

    Raises InvalidParameter for a schedule that is not in the catalog, and for a stage on another rank than in the
    schedule.  :func:`durations_of` checks that no action is missing.
    """
    actions = _actions(timeline)
    stages = 1 + max((event.stage for event in actions), default=-1)
    micro_batches = 1 + max((event.micro_batch for event in actions), default=-1)
    name = timeline.schedule or "a pipeline"
    if not actions or stages % timeline.ranks:
        raise InvalidParameter(
            f"the timeline of {name} has {stages} stages on {timeline.ranks} ranks; "
            "a schedule has the same number of stages on each rank"
        )
    schedule = make_schedule(
        timeline.schedule,
        ranks=timeline.ranks,
        num_micro_batches=micro_batches,
        stages_per_rank=stages // timeline.ranks,
    )
    placed = schedule.rank_of_stage
    for event in actions:
        if placed[event.stage] != event.rank:
            raise InvalidParameter(
                f"the timeline of {name} has stage {event.stage} on rank {event.rank}; "
                f"the schedule has it on rank {placed[event.stage]}"
            )
    return schedule


@functools.lru_cache(maxsize=_KEPT)
def replay(timeline: Timeline) -> Replay:
    """Return the simulation of the schedule that ``timeline`` names, with its durations.

    >>> from perfsuite.schedules.schedule import simulate
    >>> timeline = simulate(make_schedule("gpipe", ranks=2, num_micro_batches=2), lambda action: 1, detail=True)
    >>> replay(timeline).simulated == timeline
    True
    """
    schedule = None
    try:
        schedule = schedule_of(timeline)
        return Replay(schedule=schedule, imbalance=find_imbalance(schedule, timeline))
    except InvalidParameter as reason:  # a schedule outside the catalog, or an action is missing
        return Replay(schedule=schedule, imbalance=None, reason=str(reason))
