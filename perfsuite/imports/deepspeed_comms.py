"""The summary of DeepSpeed's communication logger: a table of operations by size, and one of stragglers without rates.

Rates are Gbit/s and sizes MiB printed as MB.  Its throughput of all_reduce counts 2 S, so only busbw is taken.  If the
throughput of an all_gather counts more than its size, the size belongs to one rank.  Also in a smaller group, the rates
count all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from perfsuite.base.units import GIB, KIB, MIB, TIB, plural
from perfsuite.imports.lines import split_lines
from perfsuite.imports.row import ImportedRow, LogFigures, Meaning, Source

LOGGER = re.compile(r"\bComm\. Op\s+Message Size\s+Count\s+Total Latency")
_STRAGGLERS = re.compile(r"(?i)straggler|\bTotal comm lat")
_OPERATION = re.compile(r"^(?P<name>\w+)(?: \| \[Caller Func: [^\]]*\]?)?\s*$")
_SIZE = re.compile(
    r"^\s+(?P<size>\d+(?:\.\d+)?) ?(?P<unit>B|KB|MB|GB|TB)\s+(?P<count>\d+)\s+(?P<total>\d+\.\d\d)"
    r"\s+(?P<average>\d+\.\d\d)\s+(?P<tput>\d+\.\d\d)\s+(?P<busbw>\d+\.\d\d)\s*$"
)
_LIKE_SIZE = re.compile(r"^\s*\d[\d.]* ?[KMGT]?B\s+\d+\s|^[\s\dKMGTB.]*\d[\s\dKMGTB.]*$|(?:\s\d+\.\d\d){4}\s*$")
"""A row of the logger, whole or cut."""
_LONGEST = 400  # Most characters of a row.
_OWN_LINE = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR)\b|\d\d:\d\d:\d\d")
"""Text in lines of other programs; any other line may be the rest of an operation's name."""
_OPERATIONS: Mapping[str, str] = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "inference_all_reduce"), "all_reduce"),
    **dict.fromkeys(("all_gather", "all_gather_into_tensor", "all_gather_base", "all_gather_coalesced"), "all_gather"),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_base"), "reduce_scatter"),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), "all_to_all"),
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter")},
}
"""The collective by the logger's name."""
_ROOTED = ("reduce", "gather", "scatter")
"""Collectives whose busbw equals their throughput; these names can also be the rest of a longer, cut name."""
_BYTES: Mapping[str, int] = {"B": 1, "KB": KIB, "MB": MIB, "GB": GIB, "TB": TIB}


def tables_in(source: Source) -> LogFigures:
    """Return the rows of the tables that have rates."""
    tables = _Tables(source)
    for number, (line, raw) in enumerate(zip(source.lines, split_lines(source.text), strict=True), start=1):
        if LOGGER.search(line):
            tables.begin(number, line)
        elif tables.count:
            tables.take(number, line, raw)
    return tables.result()


class _Tables:
    """Reads the tables of a file, line by line."""

    def __init__(self, source: Source) -> None:
        blank = [not line.strip() for line in source.lines]
        self.count = 0
        self._source = source
        self._is_spaced = 2 * sum(blank) >= len(blank) - 2
        self._operation = ""
        self._has_unit = False
        self._is_straggler = False
        self._found = LogFigures()
        self._empty = self._stragglers = 0

    def begin(self, number: int, line: str) -> None:
        """Begin the table with these names of columns."""
        self.count += 1
        self._operation, self._is_straggler, self._has_unit = "", False, "busbw_avg (Gbps)" in line
        if not self._has_unit:
            why = "the unit of the rates (Gbps) is missing: the rows below are left out"
            self._found.refuse(number, line, why)

    def take(self, number: int, line: str, raw: str) -> None:
        """Take a line below the names of the columns; ``raw`` has its prefixes."""
        if _STRAGGLERS.search(line):
            self._is_straggler = True
        elif not line.strip():  # the logger prints no such line: it may have been a name
            self._operation = self._operation if self._is_spaced else ""
        elif match := _OPERATION.match(line):
            self._operation = match["name"]
        elif self._is_straggler or not self._has_unit:
            self._stragglers += self._is_straggler and len(line) <= _LONGEST and bool(_LIKE_SIZE.search(line))
        elif len(line) <= _LONGEST and _LIKE_SIZE.search(line):
            self._take_row(number, line)
        elif _may_name(line.strip()) or not (line.startswith("    ") or _OWN_LINE.search(raw)):
            self._operation = line.strip()[:40]

    def _take_row(self, number: int, line: str) -> None:
        match = _SIZE.match(line)
        if match and not float(match["size"]):
            self._empty += 1
        elif match is None or _why_not(self._operation, match):
            cut = "the row was cut, or another line was printed into it"
            self._found.refuse(number, line, _why_not(self._operation, match) if match else cut)
        else:
            self._found.rows += _row(self._source, number, self._operation, self.count, match)

    def result(self) -> LogFigures:
        """Return the figures and refusals of all tables."""
        found = self._found
        found.notes += ["every call was synchronised while it was logged"] if found.rows else []
        found.notes += [f"{plural(self._empty, 'row')} of 0 B left out: nothing was sent"] if self._empty else []
        found.notes += (
            [f"{plural(self._stragglers, 'row')} of stragglers left out: no rates"] if self._stragglers else []
        )
        return found


def _may_name(line: str) -> bool:
    """Return whether a line may be the name of an operation with another line printed into it."""
    names = (*_OPERATIONS, "barrier", "send", "recv", "broadcast_object_list")
    return "[Caller Func" in line or any(
        line.startswith(name[:place]) and line.endswith(name[place:])
        for name in names
        for place in range(len(name) + 1)
    )


def _why_not(operation: str, match: re.Match[str]) -> str:
    """Return why a row has no figure; empty for a valid row."""
    collective = _OPERATIONS.get(operation)
    if collective is None:
        return f"{operation or 'the operation'} is not the name of a collective: other, or cut"
    if collective in _ROOTED and match["busbw"] != match["tput"]:
        return f"busbw of {collective} is its throughput, but {match['busbw']} is not {match['tput']}: the name was cut"
    times, tput, busbw = _times(match), float(match["tput"]), float(match["busbw"])
    if collective == "reduce_scatter" and busbw < tput and times > max(1.5, tput / (tput - busbw) / 1.5):
        return f"its rates count {times:.3g} times its size, once per rank: DeepSpeed did so from 2023 to 2026"
    return ""


def _times(match: re.Match[str]) -> float:
    """Return the bytes that the throughput counts over the printed size."""
    counted_bytes = float(match["tput"]) * 1e9 / 8 * float(match["average"]) / 1e3
    return counted_bytes / (float(match["size"]) * _BYTES[match["unit"]])


def _row(source: Source, number: int, operation: str, table: int, match: re.Match[str]) -> Iterator[ImportedRow]:
    size = f"{match['size']} {match['unit']}"
    name = f"{operation} {size}" if table == 1 else f"table {table}: {operation} {size}"
    printed_bytes = float(match["size"]) * _BYTES[match["unit"]]
    is_part = _OPERATIONS[operation] == "all_gather" and _times(match) > 1.5
    figures: tuple[tuple[Meaning, str, float, str], ...] = (
        (("latency_us", "us", "lower"), match["average"], 1e3, "deepspeed: mean of the middle 80 % of calls, in ms"),
        (
            ("busbw_gb_per_s", "GB/s", "higher"),
            match["busbw"],
            1 / 8,
            "nccl-tests busbw, all ranks; printed in Gbit/s",
        ),
    )
    for meaning, text, scale, convention in figures:
        yield source.row(
            number,
            name,
            meaning,
            float(text) * scale,
            printed=text,
            convention=convention,
            collective=_OPERATIONS[operation],
            message_bytes=None if is_part else printed_bytes,
            settings={"count": match["count"], "printed size": f"{size}, a power of two{', of one rank' * is_part}"},
        )
