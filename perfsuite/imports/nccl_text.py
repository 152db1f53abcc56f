"""The text of nccl-tests, of all ages.

A row is read from its right end, because columns were added on the left and a blank operation shifts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from perfsuite.imports.factors import collective_named
from perfsuite.imports.row import Source

_BEGIN = re.compile(r"# nThread\s+(\d+)\s+nGpus\s+(\d+)\s+minBytes")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s")
_NAMED = re.compile(r"# Collective test starting:\s*(\S+)")
_PREFIX = re.compile(r"^\[\d+,\d+\]<std\w+>:\s?")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+[a-z]\w*\s")
_STAMP = re.compile(r"^\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\S*\s")
"""What ``-S`` puts before a row."""


@dataclass(frozen=True, kw_only=True)
class LogPoint:
    """One size, one side."""

    line: int
    size: int
    dtype: str
    reduces: bool
    root: int | None
    in_place: bool
    time_us: float
    printed: tuple[str, str, str]
    """time, algbw, busbw."""
    wrong: str


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a run of nccl-tests printed."""

    points: tuple[LogPoint, ...]
    ranks: int
    named: str
    """The collective, where the log names one; else empty."""
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def is_text(source: Source) -> bool:
    """Whether a file is a log of nccl-tests."""
    return any(_BEGIN.search(line) for line in source.lines)


def read_text(source: Source) -> Log:
    """What a log says; ImportFailed with line, reason and remedy."""
    lines = [_PREFIX.sub("", line) for line in source.lines]
    begins = [number for number, line in enumerate(lines, start=1) if _BEGIN.search(line)]
    if not begins and source.text.lstrip().startswith("{"):
        raise source.fault(
            1, "no JSON of -J (version, config, results): it is cut, or of another tool", "give all of it"
        )
    if not begins:
        raise source.fault(1, "no line '# nThread ... nGpus ...', so this is no log of nccl-tests", "name its format")
    if len(begins) > 1:
        raise source.fault(begins[1], f"another run begins here, the first in line {begins[0]}", "give a file for each")
    named = [(number, match[1]) for number, line in enumerate(lines, start=1) if (match := _NAMED.search(line))]
    if len({name for _, name in named}) > 1:
        raise source.fault(named[1][0], f"a second collective, {named[1][1]}", "give a file for each")
    ranks = sum(bool(_RANK.match(line)) for line in lines)
    if not ranks:
        raise source.fault(
            begins[0], "no line '#  Rank', so it is unknown how many ranks there were", "keep the header"
        )
    sides = _sides(source, lines)
    points = tuple(_points(source, lines, sides))
    cut = () if any("Out of bounds values" in line for line in lines) else ("the log ends before its last lines",)
    name = collective_named(named[0][1]) if named else ""
    return Log(points=points, ranks=ranks, named=name, notes=cut)


def _sides(source: Source, lines: Sequence[str]) -> int:
    """Columns of each side: 4, or 8 with the extremes of single iterations (``-I 1``)."""
    for number, line in enumerate(lines, start=1):
        words = line.lstrip("# ").split()
        if words[:3] == ["size", "count", "type"]:
            if "(us)" not in " ".join(lines[number : number + 1]):
                raise source.fault(number, "the units below the columns' names are missing", "keep the whole header")
            times = [index for index, word in enumerate(words) if word == "time"]
            return times[1] - times[0] if len(times) == 2 else 4
    raise source.fault(1, "no line with the names of the columns (size count type)", "keep the whole header")


def _points(source: Source, lines: Sequence[str], side: int) -> Iterator[LogPoint]:
    columns = 0
    for number, line in enumerate(lines, start=1):
        row = _STAMP.sub("", line)
        if not _ROW.match(row):
            continue
        words = row.split()
        columns = columns or len(words)
        left = words[: len(words) - 2 * side]
        if len(words) != columns or not 3 <= len(left) <= 5:
            reason = f"the row has {len(words)} columns, others {columns}: it was cut"
            raise source.fault(number, reason, "remove it, or run again")
        size = source.whole(number, left[0], "size")
        has_root = len(left) > 3 and re.fullmatch(r"-?\d+", left[-1]) is not None
        operation = left[3] if len(left) > 3 + has_root else ""
        for in_place in (False, True):
            start = len(words) - side * (1 if in_place else 2)
            time, algbw, busbw = words[start : start + 3]
            if time == "N/A":
                continue
            for what, text in (("time", time), ("algbw", algbw), ("busbw", busbw)):
                source.number(number, text, what)
            yield LogPoint(
                line=number,
                size=size,
                dtype=left[2],
                reduces=operation not in ("", "none"),
                root=int(left[-1]) if has_root else None,
                in_place=in_place,
                time_us=source.number(number, time, "time"),
                printed=(time, algbw, busbw),
                wrong=words[start + 3],
            )
