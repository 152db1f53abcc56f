"""Driver side of a pipeline's timeline: what the ranks kept of the same step, put together."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio, idle_share
from perfsuite.record.result import Record
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.runtime.ranks.timeline import MESSAGES
from perfsuite.runtime.transports.base import Message
from perfsuite.schedules import replay

_Kept = dict[str, Any]
"""What :meth:`perfsuite.runtime.ranks.timeline.StepKeeper.report` made."""


def join(reports: Sequence[Message]) -> tuple[Timeline | None, tuple[Record, ...]]:
    """The timeline of the step nearest to the median; as records, the bubble over all steps and what simulations say.

    Of several pipelines side by side it is that of the one whose step took longest.  None and nothing for ranks that
    kept no steps.
    """
    pipelines: dict[int, list[_Kept]] = defaultdict(list)
    for report in reports:
        if kept := report.get("steps"):
            pipelines[kept["pipeline"]].append(kept)
    whole = [sorted(ranks, key=lambda kept: kept["rank"]) for ranks in pipelines.values()]
    whole = [ranks for ranks in whole if len(ranks) == ranks[0]["ranks"]]
    if not whole:
        return None, ()
    timelines = [_timeline(ranks) for ranks in whole]
    longest = max(range(len(whole)), key=lambda index: max(event.end_s for event in timelines[index].events))
    timeline = timelines[longest]
    return timeline, (*_bubbles(whole[longest]), *_simulated(timeline))


def _timeline(ranks: Sequence[_Kept]) -> Timeline:
    zero = min(start_s for kept in ranks for _, _, _, start_s, _ in kept["parts"])
    events = [event for kept in ranks for event in _events(kept, zero)]
    place = ranks[0]["place"]
    return Timeline(
        ranks=len(ranks),
        events=tuple(events),
        source="measured",
        schedule=ranks[0]["schedule"],
        world_ranks=tuple(kept["world_rank"] for kept in ranks) if place else (),
        place=place,
    )


def _events(kept: _Kept, zero: float) -> list[TimelineEvent]:
    """A rank's events in the order they began; what an action did in two parts (the last stage's loss) is one event."""
    events: list[TimelineEvent] = []
    for name, stage, micro_batch, start_s, end_s in sorted(kept["parts"], key=lambda part: part[3]):
        event = TimelineEvent(
            kind=name,
            rank=kept["rank"],
            stage=stage,
            micro_batch=micro_batch,
            start_s=start_s - zero,
            end_s=(start_s if name in MESSAGES else end_s) - zero,
        )
        if events and name in COMPUTE and _same_action(events[-1], event):
            event = dataclasses.replace(event, start_s=events.pop().start_s)
        events.append(event)
    return events


def _same_action(one: TimelineEvent, other: TimelineEvent) -> bool:
    return (one.kind, one.stage, one.micro_batch) == (other.kind, other.stage, other.micro_batch)


def _bubbles(ranks: Sequence[_Kept]) -> tuple[Record, ...]:
    """Median and quartiles of bubble_ratio over the steps of all samples."""
    bubbles = []
    for step in zip(*(kept["busy"] for kept in ranks), strict=True):
        length_s = max(last for _, _, last in step) - min(first for _, first, _ in step)
        if length_s > 0:
            bubbles.append(idle_share([busy for busy, _, _ in step], length_s))
    if not bubbles:
        return ()
    low, high = (min(bubbles), max(bubbles))
    if len(bubbles) > 1:
        low, _, high = statistics.quantiles(bubbles, n=4, method="inclusive")
    return (
        _ratio("bubble_ratio_median", statistics.median(bubbles)),
        _ratio("bubble_ratio_low", low),
        _ratio("bubble_ratio_high", high),
    )


def _simulated(timeline: Timeline) -> tuple[Record, ...]:
    """What the schedule gives with this timeline's durations, as they are and spread evenly, and which stage binds.

    Nothing for a schedule that is not in the catalogue, or a timeline that lacks actions of it.
    """
    imbalance = replay(timeline).imbalance
    if imbalance is None:
        return ()
    return (
        _ratio("bubble_ratio_simulated", bubble_ratio(imbalance.simulated)),
        _ratio("bubble_ratio_balanced", bubble_ratio(imbalance.balanced)),
        _ratio("binding_stage_excess", imbalance.excess),
        Record(name="binding_stage", value=float(imbalance.stage), unit="", reduce="equal"),
    )


def _ratio(name: str, value: float) -> Record:
    return Record(name=name, value=float(value), unit="ratio", reduce="equal")
