"""OSU micro-benchmarks: latency, bandwidth and collectives between MPI ranks.

MB/s are 1e6 bytes. The latency between two ranks is half a round trip. The size of allgather, alltoall, gather and
scatter is per rank. Source: osu-micro-benchmarks 5.9 to 7.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

from perfsuite.imports.row import (
    Format,
    Imported,
    ImportedRow,
    LogRow,
    LogTable,
    Meaning,
    Source,
    figures_of_tables,
    read_tables,
)

_TITLE = re.compile(r"#?\s*OSU (?P<test>\w[\w/ -]*?)(?: Test)? v\d[\w.]*\s*$")
_COLUMNS: Mapping[str, tuple[Meaning | None, float]] = MappingProxyType(
    {
        "Size": (None, 1.0),
        "Avg Latency(us)": (("latency_us", "us", "lower"), 1.0),
        "Min Latency(us)": (("latency_min_us", "us", "lower"), 1.0),
        "Max Latency(us)": (("latency_max_us", "us", "lower"), 1.0),
        **{f"P{nth} Tail Lat(us)": ((f"latency_p{nth}_us", "us", "lower"), 1.0) for nth in (50, 90, 95, 99)},
        "Latency (us)": (("latency_us", "us", "lower"), 1.0),
        "Bi-Bandwidth (MB/s)": (("bandwidth_gb_per_s", "GB/s", "higher"), 1e-3),
        "Bandwidth (MB/s)": (("bandwidth_gb_per_s", "GB/s", "higher"), 1e-3),
        "MB/s": (("bandwidth_gb_per_s", "GB/s", "higher"), 1e-3),
        "Messages/s": (("messages_per_s", "messages/s", "higher"), 1.0),
        "Overall(us)": (("overall_us", "us", "lower"), 1.0),
        "Compute(us)": (("compute_us", "us", "lower"), 1.0),
        "Pure Comm.(us)": (("communication_us", "us", "lower"), 1.0),
        "Overlap(%)": (("overlap_percent", "percent", "higher"), 1.0),
        "Iterations": (None, 1.0),
        "Validation": (None, 1.0),
    }
)
_NAMES = re.compile("|".join(re.escape(name).replace(r"\ ", r"\s*") for name in _COLUMNS))
_ENDS = (28, 30)
"""Columns in which the first figure ends, since version 4 and before; a row that lost its first digits ends earlier."""
_OF_ONE_RANK = re.compile(r"\b(?:I?All-?gather|I?All-?to-?all|I?Gather|I?Scatter)v?w?\b", re.IGNORECASE)
_WHOLE = re.compile(r"\b(?P<name>Allreduce|Broadcast|Bcast|Reduce) Latency$")
_KINDS = {"Allreduce": "all_reduce", "Broadcast": "broadcast", "Bcast": "broadcast", "Reduce": "reduce"}


def _title(line: str) -> str:
    match = _TITLE.match(line)
    return match["test"] if match else ""


def _names(line: str) -> tuple[str, ...]:
    """Return the column names of a line; empty for any other or cut line."""
    text = line.lstrip("# ").strip()
    names = tuple(
        next(name for name in _COLUMNS if name.replace(" ", "") == re.sub(r"\s", "", found))
        for found in _NAMES.findall(text)
    )
    return names if names and not _NAMES.sub("", text).strip() and any(_COLUMNS[name][0] for name in names) else ()


def _read(source: Source) -> Imported:
    tables, refused = read_tables(source.labelled, _title, _names, ("Validation",))
    untitled = "no line '# OSU ... Test v...' above: one direction and both have one header; add the line"
    figures = partial(_figures, source)
    rows = figures_of_tables(source, tables, refused, untitled=untitled, why_refused=_why_refused, figures=figures)
    return source.imported(rows, refused=refused)


def _why_refused(table: LogTable, row: LogRow) -> str:
    """Return why a row is broken: sizes must all be powers of two or none, figures must have two decimals."""
    cells = dict(zip(table.columns, row.cells, strict=True))
    if cells.get("Validation", "Pass") != "Pass":
        return "the validation failed: the result is wrong"
    for name, cell in cells.items():
        meaning = _COLUMNS[name][0]
        if meaning and not re.fullmatch(r"\d+\.\d{2,}", cell):
            return f"{name} is {cell!r:.40}, without two decimals: the row is cut"
    if "Size" in cells and "   " in row.text:  # else the blanks are collapsed
        end = row.text.index(row.cells[1], len(row.cells[0])) + len(row.cells[1])
        if end not in _ENDS:
            return f"the first figure ends in column {end}, not {' or '.join(map(str, _ENDS))}: the row is cut"
    sizes = [each.cells[0] for each in table.rows] if "Size" in cells else []
    if sizes and not re.fullmatch(r"\d{1,18}", row.cells[0]):
        return f"the size is {row.cells[0]!r:.40}"
    odd = [size for size in sizes if re.fullmatch(r"[0-9]{1,18}", size) and int(size) & (int(size) - 1)]
    if sizes and len(sizes) > 2 and odd == [row.cells[0]]:
        return f"{odd[0]} B is not a power of two, as the other sizes are: the row is cut"
    return ""


def _figures(source: Source, table: LogTable, row: LogRow) -> Iterator[ImportedRow]:
    cells = dict(zip(table.columns, row.cells, strict=True))
    size = cells.get("Size", "")
    share = " per rank" if _OF_ONE_RANK.search(table.title) else ""
    whole = _WHOLE.search(table.title)
    name = ", ".join(filter(None, [f"OSU {table.title}{f' {size} B{share}' if size else ''}", table.run, row.repeat]))
    extras = {"iterations": cells.get("Iterations", ""), "run": table.run}
    for column, cell in cells.items():
        meaning, scale = _COLUMNS[column]
        if meaning is None or cell == "N/A":
            continue
        yield source.row(
            row.line,
            name,
            meaning,
            source.number(row.line, cell, column) * scale,
            printed=cell,
            convention=_convention(table.title, meaning[0]),
            collective=_KINDS[whole["name"]] if whole and meaning[0] == "latency_us" else "",
            message_bytes=float(size) if size and not share else None,
            ranks=source.options.ranks,
            settings={key: text for key, text in extras.items() if text},
        )


def _convention(title: str, metric: str) -> str:
    if "bandwidth" in metric or metric == "messages_per_s":
        both = "both directions added" if re.search("bi-?directional", title, re.IGNORECASE) else "one direction"
        pairs = ", all pairs added" if "Multiple" in title else ""
        return f"osu: {both}{pairs}" + ("; printed in MB/s of 1e6 bytes" if "bandwidth" in metric else "")
    if re.fullmatch(r"(?:MPI|NCCL|RCCL)(?:-\w+)*(?: Multi| Multi-\w+| Persistent)? Latency", title):
        return "osu: one way, half of a round trip"
    if re.match(r"\w+_\w+ latency", title, re.IGNORECASE):
        return "osu: one-sided, until it is complete"
    return "osu: mean over the ranks" if metric == "latency_us" else "osu"


FORMAT = Format(
    name="osu",
    about="OSU micro-benchmarks",
    recognises=lambda source: any(_TITLE.match(line) for line in source.lines),
    read=_read,
    options=("ranks",),
)
