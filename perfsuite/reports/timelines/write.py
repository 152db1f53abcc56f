"""A pipeline's timeline for other programs: a trace that Perfetto opens.

It is the Chrome trace event format, https://perfetto.dev/docs/getting-started/other-formats: a process per rank,
in it a track each for computing, waiting and messages; complete (``X``) events in microseconds.
"""

from __future__ import annotations

import json
from typing import Any

from perfsuite.base.units import seconds_to_us
from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio, bubble_to_ideal, step_bounds_s
from perfsuite.record.step import Timeline, TimelineEvent

_TRACKS = ("compute", "wait", "messages")
"""Tracks of a rank; a track's number is its thread id."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a JSON object for https://ui.perfetto.dev or chrome://tracing; zero is the first event's start.

    Events keep stage and micro-batch as arguments; schedule, source and both bubbles stand in ``otherData``.  Raises
    InvalidParameter for a timeline without actions.
    """
    first, last = step_bounds_s(timeline)
    zero = min(event.start_s for event in timeline.events)
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        events.append(_name("process_name", rank, 0, {"name": timeline.name_of(rank)}))
        events.append(_name("process_sort_index", rank, 0, {"sort_index": rank}))
        for track, name in enumerate(_TRACKS):
            events.append(_name("thread_name", rank, track, {"name": name}))
            events.append(_name("thread_sort_index", rank, track, {"sort_index": track}))
    events.extend(_complete(event, zero) for event in timeline.events)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timeline.schedule,
            "source": timeline.source,
            "ranks": timeline.ranks,
            **({"pipeline": timeline.place} if timeline.place else {}),
            "step_us": float(seconds_to_us(last - first)),
            "bubble_ratio": float(bubble_ratio(timeline)),
            "bubble_to_ideal_ratio": float(bubble_to_ideal(timeline)),
        },
    }


def trace_text(timeline: Timeline) -> str:
    """:func:`chrome_trace` as one line of JSON, without NaN or infinity, which viewers refuse."""
    return json.dumps(chrome_trace(timeline), allow_nan=False) + "\n"


def _name(kind: str, rank: int, track: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": arguments}


def _complete(event: TimelineEvent, zero: float) -> dict[str, Any]:
    track = 0 if event.kind in COMPUTE else 1 if event.kind == "wait" else 2
    return {
        "name": f"{event.kind} {event.micro_batch}",
        "cat": event.kind,
        "ph": "X",
        "pid": event.rank,
        "tid": track,
        "ts": float(seconds_to_us(event.start_s - zero)),
        "dur": float(seconds_to_us(event.end_s - event.start_s)),
        "args": {"stage": event.stage, "micro_batch": event.micro_batch},
    }
