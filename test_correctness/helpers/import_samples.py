"""Logs of other programs: samples and logs written down for a test, read, and with one line damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from perfsuite.imports.formats import find_format, read_file
from perfsuite.imports.row import Imported, ImportOptions

SAMPLES = Path(__file__).parent.parent / "samples"
NOISE = (
    "node-a:11:22 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0",
    "2024-05-01 10:00:00,123 [INFO] epoch 3",
    "[INFO] node-1: loaded 12 files: 34 % done ",
    "WARNING: x=5, y: 6  ",
    "[rank1]: INFO step 7: 8 ms",
    "INFO 3 ok",
)
"""Messages of other ranks and programs."""
PREFIXES = (" 0: ", "[0] ", "[1,0]<stdout>:", "2026-03-11T10:26:41Z ")
"""Of launchers and containers, which change no figure even before one line alone."""
OTHERS = (
    "[rank3]: ",
    "[1,3]<stdout>: ",
    "2024-03-11T10:26:41.5Z stdout F ",
    "node-3/0 | ",
    "worker-1  | ",
    "INFO: ",
    "  ",
)


def read(log: str | Path, known: str = "", **told: Any) -> Imported:
    """The figures of a sample by its name, or of a file; ``known`` is its format if the log need not tell it."""
    return read_file(SAMPLES / log, ImportOptions(**told), find_format(known) if known else None)


def written(folder: Path, *lines: str, name: str = "log.txt") -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def damaged(draw: Callable[[Any], Any], lines: Sequence[str], ways: Sequence[str]) -> tuple[str, str]:
    """Which of these ways one line was damaged, and the text: cut, doubled, or another line printed into it."""
    at = draw(st.sampled_from([number for number, line in enumerate(lines) if line.strip()]))
    line, place = lines[at], draw(st.integers(1, max(1, len(lines[at]) - 1)))
    way, left, right = draw(st.sampled_from(ways)), line[:place], line[place:]
    noise = draw(st.sampled_from({"prefixed": PREFIXES, "prefixed otherwise": OTHERS}.get(way, NOISE)))
    changed = {
        "lost": [],
        "end cut": [left],
        "begin cut": [right],
        "doubled": [line, line],
        "doubled in a line": [line + line],
        "prefixed": [noise + line],
        "prefixed otherwise": [noise + line],
        "before": [noise, line],
        "joined before": [noise + line],
        "joined behind": [line + noise],
        "inside": [left + noise + right],
        "split": [left + noise, right],
        "split before": [left, noise + right],
        "apart": [left, noise, right],
    }
    last_of_json = at + 1 < len(lines) and lines[at + 1] == "}" and not line.endswith(",")
    # What is left of the last number may be valid JSON: nothing tells that it was cut.
    assume(not last_of_json or way not in ("lost", "end cut"))
    return way, "\n".join([*lines[:at], *changed[way], *lines[at + 1 :]])
