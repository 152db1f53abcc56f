"""Where timelines lie on disk: a trace and a picture per case, named by its id, whole or not there at all."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.files import make_folder, write_file
from perfsuite.base.text import printable
from perfsuite.base.units import seconds_to_us
from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio, bubble_to_ideal, step_bounds_s
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.reports.ids import name_of
from perfsuite.reports.timelines.picture import timeline_svg

TRACE, PICTURE = ".trace.json", ".svg"
_LONGEST = 120
"""Characters of a case's name in a file's name; most file systems end at 255 bytes."""


def file_stem(case: str) -> str:
    """What the files of a case begin with: its name without the test file, and eight digits that tell ids apart.

    >>> file_stem("test_perf/test_pipeline.py::test_schedule[cpu-ws4-1f1b-m8]")
    'test_schedule-cpu-ws4-1f1b-m8-5ef71bda'

    What a shell or a file system might take amiss becomes a dash; the digits are of the whole id, so two cases never
    share a file, on no system.
    """
    name = re.sub(r"[^\w.=+-]+", "-", name_of(case), flags=re.ASCII).strip("-.")
    return f"{name[:_LONGEST].rstrip('-.')}-{hashlib.sha256(case.encode(errors='backslashreplace')).hexdigest()[:8]}"


def write_case(case: str, timeline: Timeline, folder: Path) -> tuple[Path, Path]:
    """Write trace and picture of a case's step into ``folder``, over those of an earlier run; their paths.

    The folder is made where it is missing; a simulated step lies beside the measured one.  Raises ConfigurationError
    when they cannot be written, InvalidParameter for a timeline that cannot be shown; no half-written file is left.
    """
    check_timeline(timeline)
    stem = file_stem(case) + (".simulated" if timeline.source == "simulated" else "")
    make_folder(folder)
    trace, picture = folder / f"{stem}{TRACE}", folder / f"{stem}{PICTURE}"
    write_file(trace, trace_text(timeline))
    write_file(picture, timeline_svg(timeline, title=name_of(case)))
    return trace, picture


def check_timeline(timeline: Timeline) -> None:
    """Raise InvalidParameter for an event that is on no rank, has no finite times or ends before it starts."""
    for event in timeline.events:
        said = f"the timeline of {timeline.schedule or 'a pipeline'} has a {event.kind} of stage {event.stage}"
        if not 0 <= event.rank < timeline.ranks:
            raise InvalidParameter(f"{said} on rank {event.rank}; its ranks are 0 to {timeline.ranks - 1}")
        if not (math.isfinite(event.start_s) and math.isfinite(event.end_s)) or event.end_s < event.start_s:
            raise InvalidParameter(
                f"{said} from {float(event.start_s)} s to {float(event.end_s)} s; record finite times in order"
            )


INDEX = "index.html"
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>timelines</title>'
    '<meta name="viewport" content="width=device-width,initial-scale=1"></head>\n<body><h1>Timelines</h1>\n'
)


def write_index(pictures: Iterable[tuple[str, Path, Path]], folder: Path) -> Path:
    """Write the page of cases with their trace and picture, all in ``folder``; its path.

    Raises ConfigurationError when it cannot be written.  The same cases give the same bytes.
    """
    path = folder / INDEX
    write_file(path, f"{_HEAD}{''.join(_entry(*picture) for picture in pictures)}</body></html>\n")
    return path


def _entry(case: str, trace: Path, picture: Path) -> str:
    name = escape(printable(case))
    shown = f'<a href="{escape(picture.name)}"><img src="{escape(picture.name)}" alt="timeline of {name}"></a>'
    return f'<h2>{name}</h2>\n<p>{shown}</p>\n<p><a href="{escape(trace.name)}">trace for ui.perfetto.dev</a></p>\n'


_TRACKS = ("compute", "wait", "messages")
"""Tracks of a rank; a track's number is its thread id."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a JSON object for https://ui.perfetto.dev or chrome://tracing; zero is the first event's start.

    The format is https://perfetto.dev/docs/getting-started/other-formats: a process per rank, in it a track each for
    computing, waiting and messages; complete (``X``) events in microseconds.

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
