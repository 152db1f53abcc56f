"""A timeline's schedule once more, with the timeline's own durations and nothing else that takes time.

The runtime's records, the gate's rule, the terminal, pictures and traces hold a step against it; it is simulated once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.step import Timeline
from perfsuite.schedules.action import LETTERS
from perfsuite.schedules.catalog import make_schedule
from perfsuite.schedules.imbalance import Imbalance, find_imbalance
from perfsuite.schedules.schedule import Schedule

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

    >>> from perfsuite.schedules.durations import StageTimes
    >>> from perfsuite.schedules.simulator import simulate
    >>> times = StageTimes.in_proportion([1] * 4)
    >>> ran = schedule_of(simulate(make_schedule("zbv", ranks=2, num_micro_batches=5), times))
    >>> ran.name, ran.ranks, ran.stages_per_rank, ran.num_micro_batches
    ('zbv', 2, 2, 5)

    Raises InvalidParameter when the catalogue has no such schedule, or when a stage ran on another rank than the
    schedule puts it on.  That every action is there, :func:`~perfsuite.schedules.durations.durations_of` finds out.
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

    >>> from perfsuite.schedules.simulator import simulate
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
