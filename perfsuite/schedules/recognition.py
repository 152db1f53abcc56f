"""Which schedule of the catalogue a timeline is of."""

from __future__ import annotations

from perfsuite.errors import InvalidParameter
from perfsuite.records import Timeline
from perfsuite.schedules.action import LETTERS
from perfsuite.schedules.catalog import make_schedule
from perfsuite.schedules.schedule import Schedule


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
