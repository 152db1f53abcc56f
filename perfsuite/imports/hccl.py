"""hccl_test: collectives between Ascend devices.

alg_bandwidth is data_size over aveg_time. Its GB are 1e9 bytes in some versions and 2**30 in others. Rows are checked
with it; the imported algbw is computed from size and time. The collective comes from the command (``all_reduce_test``)
or from ``--collective``, the ranks from ``--ranks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial

from perfsuite.base.units import gb_per_s, plural
from perfsuite.imports.nccl_table import KINDS, collective_named, factor
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
from perfsuite.published.numbers import Interval, printed

_NAMES = re.compile(r"data_size\(Bytes\):?|(?:aveg|avg)_time\(us\):?|alg_bandwidth\(GB/s\):?|check_result:?")
_COLUMNS = ("data_size", "time", "alg_bandwidth", "check_result")
_COMMAND = re.compile(r"[\s/](?P<name>[a-z]\w*)_test(?=\s+-|\s*$)")
_CHECKED = ("success", "NULL")
_WHOLE = ("all_reduce", "broadcast", "reduce")  # Collectives whose data_size is the size S of busbw.
_SPARE = Fraction(1, 1000)


def _title(line: str) -> str:
    match = _COMMAND.search(line)
    return collective_named(match["name"]) if match else ""


def _names(line: str) -> tuple[str, ...]:
    text = line.replace("|", " ").strip()
    return _COLUMNS if len(_NAMES.findall(text)) == len(_COLUMNS) and not _NAMES.sub("", text).strip() else ()


def _read(source: Source) -> Imported:
    asked = source.options.collective
    if asked and not collective_named(asked):
        raise source.fault(1, f"--collective {asked!r} is none of {', '.join(KINDS)}", "choose one of these")
    lines = [replace(line, text=line.text.replace("|", " ")) for line in source.labelled]
    tables, refused = read_tables(lines, _title, _names, ("check_result",))
    for table in tables:
        if table.title and asked and table.title != collective_named(asked):
            reason = f"the command above is of {table.title}, --collective says {asked}"
            raise source.fault(table.line, reason, "leave the option out")
    tables = [replace(table, title=table.title or collective_named(asked)) for table in tables]
    untitled = "the collective is not named; say which: --collective NAME"
    figures = partial(_figures, source)
    rows = figures_of_tables(source, tables, refused, untitled=untitled, why_refused=_why_refused, figures=figures)
    unchecked = sum(row.cells[3] == "NULL" for table in tables for row in table.rows)
    notes = [f"the values of {plural(unchecked, 'row')} were not checked"] if unchecked else []
    return source.imported(rows, refused=refused, notes=notes)


def _why_refused(_: LogTable, row: LogRow) -> str:
    size, time, bandwidth, checked = row.cells
    if checked not in _CHECKED:
        return f"the check says {checked!r:.20}: the result is wrong, or the row is cut"
    if not re.fullmatch(r"\d{1,18}", size):
        return f"the size is {size!r:.40}"
    for text in (time, bandwidth):
        if not re.fullmatch(r"\d+\.\d{2,}", text):
            return f"{text!r:.40} has no two decimals: the row is cut"
    exact = Interval.exactly(Fraction(int(size), 1000)).over(printed(time).numbers[0].interval)
    if exact is None or not any(_fits(bandwidth, exact, unit) for unit in (10**9, 2**30)):
        return f"alg_bandwidth {bandwidth} is not size over time, {exact} GB/s: the row is not consistent"
    return ""


def _fits(bandwidth: str, exact: Interval, unit: int) -> bool:
    """Return whether a printed bandwidth equals the exact one in GB/s, if a GB has ``unit`` bytes."""
    scale = Fraction(10**9, unit)
    right = Interval(low=exact.low * scale * (1 - _SPARE), high=exact.high * scale * (1 + _SPARE))
    return printed(bandwidth).numbers[0].interval.meets(right)


def _figures(source: Source, table: LogTable, row: LogRow) -> Iterator[ImportedRow]:
    collective = table.title
    size, time, bandwidth, _ = row.cells
    ranks = source.options.ranks
    algbw = gb_per_s(int(size), float(time) / 1e6)
    figures: list[tuple[Meaning, float, str, str]] = [
        (("latency_us", "us", "lower"), float(time), time, "hccl_test: mean of its iterations"),
        (("algbw_gb_per_s", "GB/s", "higher"), algbw, bandwidth, "hccl_test; from size and time"),
    ]
    if ranks and ranks > 1 and collective in _WHOLE:
        busbw = algbw * factor(collective, ranks)
        figures.append((("busbw_gb_per_s", "GB/s", "higher"), busbw, bandwidth, "nccl-tests busbw over --ranks"))
    of_ranks = f" {ranks} ranks" if ranks else ""
    for meaning, value, text, convention in figures:
        yield source.row(
            row.line,
            ", ".join(filter(None, [f"{collective} {size} B{of_ranks}", table.run, row.repeat])),
            meaning,
            value,
            printed=text,
            convention=convention,
            collective=collective,
            message_bytes=float(size),
            ranks=ranks,
        )


FORMAT = Format(
    name="hccl-test",
    about="hccl_test of Ascend devices",
    recognises=lambda source: any(_names(line) for line in source.lines),
    read=_read,
    options=("collective", "ranks"),
)
