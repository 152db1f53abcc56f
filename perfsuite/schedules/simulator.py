"""The event simulator: a schedule and the duration of every action give a timeline, with no process and no clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.schedules.action import Action, Durations, Kind
from perfsuite.schedules.schedule import Schedule
from perfsuite.schedules.walk import Walk


def simulate(schedule: Schedule, seconds: Durations, *, communication_s: float = 0, detail: bool = False) -> Timeline:
    """When each action starts and ends if ranks only wait for their inputs.

    ``seconds`` gives an action's duration; ``communication_s`` is how long an output travels to another rank, during
    which neither rank is held up.  With ``detail``, for traces and pictures, the timeline has besides the actions a
    ``wait`` wherever a rank stands idle before one, and of no length a ``send`` when an output leaves and a ``receive``
    when an input arrives.  Times are only added and compared: integers and fractions stay exact.  Raises
    InvalidParameter for a negative delay.

    >>> from perfsuite.schedules.catalog import make_schedule
    >>> from perfsuite.schedules.durations import StageTimes
    >>> timeline = simulate(make_schedule("gpipe", ranks=2, num_micro_batches=1), StageTimes.in_proportion([1, 1]))
    >>> [(event.kind, event.start_s, event.end_s) for event in timeline.events if event.rank == 0]
    [('forward', 0, 1), ('backward', 4, 6)]
    """
    if communication_s < 0:
        raise InvalidParameter(f"communication_s={communication_s} is negative; give the seconds a message travels")
    walk = schedule.walk(seconds, communication_s=communication_s)
    events: list[TimelineEvent] = []
    for rank, order in enumerate(schedule.orders):
        free: float = 0
        held: Action | None = None
        for action, (start, end) in zip(order, walk.times[rank], strict=True):
            if detail:
                events.extend(_before(walk, rank, action, free, start))
            events.append(_event(action.kind, rank, action, start, end))
            if detail:
                sent = (held, None if action.joined else action)
                events.extend(
                    _event("send", rank, output, end, end) for output in sent if output and walk.sends(output)
                )
            held = action if action.joined else None
            free = end
    return Timeline(ranks=schedule.ranks, events=tuple(events), source="simulated", schedule=schedule.name)


def _before(walk: Walk, rank: int, action: Action, free: float, start: float) -> Iterator[TimelineEvent]:
    """The wait for ``action`` and the arrival of its input."""
    if start > free:
        yield _event("wait", rank, action, free, start)
    arrived = walk.arrival_s(action)
    if arrived is not None:
        yield _event("receive", rank, action, arrived, arrived)


def _event(
    kind: Kind | Literal["send", "receive", "wait"], rank: int, action: Action, start: float, end: float
) -> TimelineEvent:
    return TimelineEvent(
        kind=kind, rank=rank, stage=action.stage, micro_batch=action.micro_batch, start_s=start, end_s=end
    )
