"""Steps of pipelines for tests: simulated, and as real ranks would have measured them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from perfsuite.record.result import Record, Result
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.schedules import Schedule, StageTimes, make_schedule, simulate
from perfsuite.schedules.schedule import Action
from test_correctness.helpers import measurements
from test_correctness.helpers.scripted_driver import measured_on

METRICS = ("bubble_ratio", "bubble_to_ideal_ratio", "in_flight_micro_batches")
COMPUTE = ("forward", "backward", "backward_input", "backward_weight")


def staged(
    *, schedule: str = "1f1b", num_micro_batches: int = 8, stages_per_rank: int | None = None, **case: Any
) -> Any:
    """Fields of a training step, or of its twin, whose strategy has stages."""
    interleaved = {"stages_per_rank": stages_per_rank} if stages_per_rank else {}
    options = {"schedule": schedule, **interleaved}
    return {"strategy": "hybrid", "options": options, "accumulation": num_micro_batches, **case}


def event_of(kind: Any, rank: int, start_s: float, end_s: float) -> TimelineEvent:
    """An event of micro-batch 0 in the only stage of a rank."""
    return TimelineEvent(kind=kind, rank=rank, stage=rank, micro_batch=0, start_s=start_s, end_s=end_s)


def simulated(
    name: str,
    *,
    ranks: int = 4,
    num_micro_batches: int = 8,
    stages_per_rank: int | None = None,
    costs: tuple[float, ...] = (),
    unit_s: float = 0.04,
) -> Timeline:
    """A step without overhead; ``unit_s`` is a stage's forward, twice that its backward."""
    schedule = make_schedule(name, ranks=ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    times = StageTimes.in_proportion([unit_s * cost for cost in costs or (1,) * schedule.num_stages])
    return simulate(schedule, times, detail=True)


def measured(schedule: Schedule, *, seed: int = 0, gap_s: float = 0.002, jitter: float = 0.1) -> Timeline:
    """A step as a correct clock sees it: durations vary, and after an action the rank is busy elsewhere for a while."""
    draw = random.Random(seed)
    gaps: dict[tuple[str, int, int], float] = {}

    def seconds(action: Action) -> float:
        gap = gaps[action.kind, action.stage, action.micro_batch] = gap_s * draw.random()
        return 0.04 * (1 + jitter * draw.random()) + gap

    whole = simulate(schedule, seconds, communication_s=gap_s * draw.random())
    events = [
        dataclasses.replace(event, end_s=event.end_s - gaps[event.kind, event.stage, event.micro_batch])
        for event in whole.events
    ]
    return dataclasses.replace(whole, events=tuple(events), source="measured")


def seen_without_waiting(timeline: Timeline, *, lost: float = 1.0) -> Timeline:
    """The step as a clock sees it that is read before the device is done: ``lost`` of every wait is missing.

    With all of it lost every rank's actions stand back to back from 0, long before their inputs exist.
    """
    free = [0.0] * timeline.ranks
    events = []
    for event in timeline.events:
        start_s = event.start_s + lost * (free[event.rank] - event.start_s)
        length_s = event.end_s - event.start_s
        events.append(dataclasses.replace(event, start_s=start_s, end_s=start_s + length_s))
        free[event.rank] += length_s
    return dataclasses.replace(timeline, events=tuple(events))


def result_of(case: str, timeline: Timeline | None, *, records: tuple[Record, ...] = (), **changes: Any) -> Result:
    """What the session makes of a measurement with this timeline."""
    facts = measured_on(2, timeline=timeline, records=records)
    return measurements.result_of(facts, case, metrics=METRICS, **changes)
