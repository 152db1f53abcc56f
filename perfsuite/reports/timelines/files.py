"""Where timelines lie on disk: a trace and a picture per case, named by its id, whole or not there at all."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.files import make_folder, write_file
from perfsuite.record.step import Timeline
from perfsuite.reports.timelines.picture import timeline_svg
from perfsuite.reports.timelines.write import trace_text

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
    name = re.sub(r"[^\w.=+-]+", "-", case.partition("::")[2] or case, flags=re.ASCII).strip("-.")
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
    write_file(picture, timeline_svg(timeline, title=case.partition("::")[2] or case))
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
