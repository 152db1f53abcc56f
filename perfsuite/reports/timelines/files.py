"""Write timelines to disk: a trace and a picture per case, named by its id."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.text import printable
from perfsuite.base.units import seconds_to_us
from perfsuite.base.writing import make_folder, write_file
from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio, bubble_to_ideal, step_bounds_s
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.reports.ids import name_of
from perfsuite.reports.timelines.picture import timeline_svg

TRACE, PICTURE = ".trace.json", ".svg"
_LONGEST = 120  # Maximum characters of a case in a file name; most file systems allow 255 bytes.


def file_stem(case: str) -> str:
    """Return the beginning of the file names of a case: its name without the test file, and eight digits of a hash.

    >>> file_stem("test_perf/test_pipeline.py::test_schedule[cpu-ws4-1f1b-m8]")
    'test_schedule-cpu-ws4-1f1b-m8-5ef71bda'

    A dash replaces characters that a shell or a file system may not accept.  The hash is of the whole id, so two cases
    never have the same file.
    """
    name = re.sub(r"[^\w.=+-]+", "-", name_of(case), flags=re.ASCII).strip("-.")
    return f"{name[:_LONGEST].rstrip('-.')}-{hashlib.sha256(case.encode(errors='backslashreplace')).hexdigest()[:8]}"


def write_case(case: str, timeline: Timeline, folder: Path) -> tuple[Path, Path]:
    """Write trace and picture of a case's step into ``folder``, which is made if missing, and return their paths.

    Files of an earlier run are replaced; a simulated step has files of its own.  Raises ConfigurationError where a file
    cannot be written, and InvalidParameter for a bad timeline.
    """
    check_timeline(timeline)
    stem = file_stem(case) + (".simulated" if timeline.source == "simulated" else "")
    make_folder(folder)
    trace, picture = folder / f"{stem}{TRACE}", folder / f"{stem}{PICTURE}"
    write_file(trace, trace_text(timeline))
    write_file(picture, timeline_svg(timeline, title=name_of(case)))
    return trace, picture


def check_timeline(timeline: Timeline) -> None:
    """Raise InvalidParameter for an event with an illegal rank, with infinite times, or that ends before its start."""
    for event in timeline.events:
        event_words = f"the timeline of {timeline.schedule or 'a pipeline'} has a {event.kind} of stage {event.stage}"
        if not 0 <= event.rank < timeline.ranks:
            raise InvalidParameter(f"{event_words} on rank {event.rank}; its ranks are 0 to {timeline.ranks - 1}")
        if not (math.isfinite(event.start_s) and math.isfinite(event.end_s)) or event.end_s < event.start_s:
            raise InvalidParameter(
                f"{event_words} from {float(event.start_s)} s to {float(event.end_s)} s; record finite times in order"
            )


INDEX = "index.html"
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>timelines</title>'
    '<meta name="viewport" content="width=device-width,initial-scale=1"></head>\n<body><h1>Timelines</h1>\n'
)


def write_index(pictures: Iterable[tuple[str, Path, Path]], folder: Path) -> Path:
    """Write the page of cases with their trace and picture, all in ``folder``, and return its path.

    Raises ConfigurationError where it cannot be written.  Equal cases give equal bytes.
    """
    path, entries = folder / INDEX, []
    for case, trace, picture in pictures:
        name, image = escape(printable(case)), escape(picture.name)
        shown = f'<a href="{image}"><img src="{image}" alt="timeline of {name}"></a>'
        link = f'<a href="{escape(trace.name)}">trace for ui.perfetto.dev</a>'
        entries.append(f"<h2>{name}</h2>\n<p>{shown}</p>\n<p>{link}</p>\n")
    write_file(path, f"{_HEAD}{''.join(entries)}</body></html>\n")
    return path


_TRACKS = ("compute", "wait", "messages")  # Tracks of a rank, by thread id.


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the timeline as a JSON object for https://ui.perfetto.dev or chrome://tracing.

    The format is https://perfetto.dev/docs/getting-started/other-formats.  Each rank is a process with a track each for
    computing, waiting and messages.  Times are microseconds since the start of the first event.  Arguments of an event
    are stage and micro-batch; ``otherData`` has schedule, source and both bubbles.  Raises InvalidParameter for a
    timeline without actions.
    """
    first, last = step_bounds_s(timeline)
    zero = min(event.start_s for event in timeline.events)
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        events += _named("process", timeline.name_of(rank), rank, {"pid": rank, "tid": 0})
        for track, name in enumerate(_TRACKS):
            events += _named("thread", name, track, {"pid": rank, "tid": track})
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
    """Return :func:`chrome_trace` as one line of JSON; raises ValueError for NaN and infinity, which viewers reject."""
    return json.dumps(chrome_trace(timeline), allow_nan=False) + "\n"


def _named(what: str, name: str, index: int, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield {"name": f"{what}_name", "ph": "M", **place, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", "ph": "M", **place, "args": {"sort_index": index}}


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
