"""A timeline's schedule once more, with the timeline's own durations and nothing else that takes time.

The runtime's records, the gate's rule, the terminal, pictures and traces hold a step against it; it is simulated once.
How long an action takes comes from the timeline, evened out over the stages, or from stage times.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.step import Timeline
from perfsuite.schedules.catalog import make_schedule
from perfsuite.schedules.schedule import LETTERS, Action, Durations, Schedule, simulate


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Durations that depend on the stage and the kind alone; call it with an action.

    >>> times = StageTimes.in_proportion([1, 3], forward_s=2, backward_input_s=2, backward_weight_s=1)
    >>> times(Action(kind="forward", stage=1, micro_batch=0)), times(Action(kind="backward", stage=1, micro_batch=0))
    (6, 9)
    """

    forward_s: tuple[float, ...]
    """By stage."""
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    """By stage; a whole backward takes both."""

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
        """A stage of cost c takes c times the given seconds; ``[1] * n`` is n equal stages."""
        return cls(
            forward_s=tuple(cost * forward_s for cost in costs),
            backward_input_s=tuple(cost * backward_input_s for cost in costs),
            backward_weight_s=tuple(cost * backward_weight_s for cost in costs),
        )

    def __call__(self, action: Action) -> float:
        """Seconds of ``action``."""
        stage = action.stage
        if action.kind == "forward":
            return self.forward_s[stage]
        if action.kind == "backward":
            return self.backward_input_s[stage] + self.backward_weight_s[stage]
        return (self.backward_input_s if action.kind == "backward_input" else self.backward_weight_s)[stage]


def durations_of(timeline: Timeline) -> Durations:
    """What each action took in ``timeline``; asking for one that it lacks raises InvalidParameter."""
    took = {
        (event.kind, event.stage, event.micro_batch): event.end_s - event.start_s
        for event in timeline.events
        if event.kind in LETTERS
    }

    def seconds(action: Action) -> float:
        try:
            return took[action.kind, action.stage, action.micro_batch]
        except KeyError:
            raise InvalidParameter(
                f"the timeline of {timeline.schedule or 'a pipeline'} has no {action}; record every action of the step"
            ) from None

    return seconds


def evened_durations(timeline: Timeline) -> Durations:
    """Every stage takes what the stages of ``timeline`` took on average, kind by kind: a perfectly balanced split."""
    took: dict[str, list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.kind in LETTERS:
            took[event.kind].append(event.end_s - event.start_s)
    mean: dict[str, float] = {kind: sum(seconds) / len(seconds) for kind, seconds in took.items()}

    def seconds(action: Action) -> float:
        return mean[action.kind]

    return seconds


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """How unevenly the work of a step lies on the ranks."""

    rank: int
    """The busiest rank: no step is shorter than its work."""
    stage: int
    """The stage with the most work on that rank: the one that binds."""
    busy_s: float
    """Work of that rank."""
    mean_busy_s: float
    """Work of a rank on average."""
    simulated: Timeline
    """The schedule with the durations as they are, waits and messages included."""
    balanced: Timeline
    """The schedule with the same work spread evenly over the stages."""

    @property
    def excess(self) -> float:
        """Work of the busiest rank over the average, minus 1; 0 is even, where an average may round to more."""
        return max(0.0, self.busy_s / self.mean_busy_s - 1)


def find_imbalance(schedule: Schedule, timeline: Timeline, *, communication_s: float = 0) -> Imbalance:
    """The stage that binds in ``timeline``, measured or simulated, and both simulations of its schedule.

    Raises InvalidParameter when the timeline lacks an action of the schedule.
    """
    if timeline.ranks != schedule.ranks:
        raise InvalidParameter(
            f"a timeline of {timeline.ranks} ranks for a schedule of {schedule.ranks}; give the schedule that ran"
        )
    by_rank: dict[int, float] = defaultdict(float)
    by_stage: dict[int, float] = defaultdict(float)
    for event in timeline.events:
        if event.kind in LETTERS:
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


_KEPT = 64
"""Timelines whose replay is kept: all who ask for that of a case do so within few cases."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What can be known of a timeline by simulating it again."""

    schedule: Schedule | None
    """None for one that is not in the catalogue."""
    imbalance: Imbalance | None
    """Both simulations and which stage binds; None without a schedule, or where the timeline lacks an action of it."""
    reason: str = ""
    """Why there is no simulation."""

    @property
    def simulated(self) -> Timeline | None:
        """The schedule with the timeline's durations, waits and messages included: no step can be shorter."""
        return self.imbalance.simulated if self.imbalance else None


def schedule_of(timeline: Timeline) -> Schedule:
    """The schedule that ``timeline`` names, with the counts of stages and micro-batches that its actions have.

    >>> from perfsuite.schedules.replay import StageTimes
    >>> from perfsuite.schedules.schedule import simulate
    >>> times = StageTimes.in_proportion([1] * 4)
    >>> ran = schedule_of(simulate(make_schedule("zbv", ranks=2, num_micro_batches=5), times))
    >>> ran.name, ran.ranks, ran.stages_per_rank, ran.num_micro_batches
    ('zbv', 2, 2, 5)

    Raises InvalidParameter when the catalogue has no such schedule, or when a stage ran on another rank than the
    schedule puts it on.  That every action is there, :func:`~perfsuite.schedules.replay.durations_of` finds out.
    """
    actions = [event for event in timeline.events if event.kind in LETTERS]
    stages = 1 + max((event.stage for event in actions), default=-1)
    micro_batches = 1 + max((event.micro_batch for event in actions), default=-1)
    name = timeline.schedule or "a pipeline"
    if not actions or stages % timeline.ranks:
        raise InvalidParameter(
            f"the timeline of {name} has {stages} stages on {timeline.ranks} ranks; a schedule has as many on each"
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
    """The schedule that ``timeline`` names, simulated with its durations.

    >>> from perfsuite.schedules.schedule import simulate
    >>> timeline = simulate(make_schedule("gpipe", ranks=2, num_micro_batches=2), lambda action: 1, detail=True)
    >>> replay(timeline).simulated == timeline
    True
    """
    schedule = None
    try:
        schedule = schedule_of(timeline)
        return Replay(schedule=schedule, imbalance=find_imbalance(schedule, timeline))
    except InvalidParameter as reason:  # somebody's own schedule, or an action is missing
        return Replay(schedule=schedule, imbalance=None, reason=str(reason))
