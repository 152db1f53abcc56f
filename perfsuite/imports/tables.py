"""Tables of numbers below a line of titles, as in microbenchmarks; a broken row is refused alone.

A format defines the lines with the title of a test and with column names. Rows are found and checked here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from perfsuite.imports.lines import Line
from perfsuite.imports.row import ImportedRow, Refused, Source

_FIGURE = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf|N/A", re.IGNORECASE)
_MESSAGE = "a message stands in the row; remove it, or run again"
_NONE = "not a row"


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """One row."""

    line: int
    cells: tuple[str, ...]
    text: str
    """Text of the row without surrounding blanks."""
    repeat: str = ""
    """``repeat 2`` for a repeated first cell; else empty."""


@dataclass(frozen=True, kw_only=True)
class LogTable:
    """One table of a log."""

    title: str
    """Title of the test; empty without one."""
    run: str
    """``run 2`` for a repeated title; else empty."""
    line: int
    columns: tuple[str, ...]
    rows: tuple[LogRow, ...]
    above: tuple[str, ...]
    """Lines between the previous table and this one."""


def read_tables(
    lines: Sequence[Line],
    title: Callable[[str], str],
    columns: Callable[[str], tuple[str, ...]],
    texts: Sequence[str] = (),
) -> tuple[list[LogTable], list[Refused]]:
    """Return the tables of a log, and broken rows.

    ``title`` and ``columns`` return the names in a line, empty for other lines; ``texts`` are columns without a number.
    """
    starts = _starts(lines, columns)
    tables: list[LogTable] = []
    refused: list[Refused] = []
    titles = Counter(_title(lines, start, stop, title) for stop, start in zip([-1, *starts], starts, strict=False))
    seen: Counter[str] = Counter()
    for stop, start, end in zip([-1, *starts], starts, [*starts[1:], len(lines)], strict=False):
        name = _title(lines, start, stop, title)
        seen[name] += 1
        names = columns(lines[start].text)
        rows: list[LogRow] = []
        broken: list[Refused] = []
        for line in lines[start + 1 : end]:
            if title(line.text):
                break
            cells = tuple(line.text.split())
            why = _why_refused(cells, names, texts)
            if why is not None:
                broken.append(Refused(line=line.number, text=" ".join(cells), why=why))
            elif cells:
                rows.append(LogRow(line=line.number, cells=cells, text=line.text.strip()))
        last = rows[-1].line if rows else 0
        # A message that begins with a number counts as a broken row only between rows.
        refused += [one for one in broken if one.why != _NONE and (one.why != _MESSAGE or one.line < last)]
        once = _numbered(list({row.cells: row for row in reversed(rows)}.values())[::-1])  # a line may be printed twice
        run = f"run {seen[name]}" if titles[name] > 1 else ""
        above = tuple(line.text for line in lines[max(0, stop) : start])
        tables.append(LogTable(title=name, run=run, line=lines[start].number, columns=names, rows=once, above=above))
    return [table for table in tables if table.rows], refused


def figures_of_tables(
    source: Source,
    tables: Iterable[LogTable],
    refused: list[Refused],
    *,
    untitled: str,
    why_refused: Callable[[LogTable, LogRow], str],
    figures: Callable[[LogTable, LogRow], Iterable[ImportedRow]],
) -> list[ImportedRow]:
    """Return the figures of all whole rows, and refuse the other rows and tables without a title.

    ``untitled`` is the reason of the latter.  Raises ImportFailed without figures.
    """
    rows: list[ImportedRow] = []
    for table in tables:
        if not table.title:
            refused.append(Refused(line=table.line, text="the whole table", why=untitled))
        for row in table.rows if table.title else ():
            if why := why_refused(table, row):
                refused.append(Refused(line=row.line, text=" ".join(row.cells), why=why))
            else:
                rows += figures(table, row)
    if not rows:
        line, why = (refused[0].line, refused[0].why) if refused else (1, f"no table of {source.tool}")
        raise source.fault(line, why.partition("; ")[0], why.partition("; ")[2] or "give its whole output")
    return rows


def _numbered(rows: Sequence[LogRow]) -> tuple[LogRow, ...]:
    """Return the rows; those with the same first cell are numbered."""
    seen: Counter[str] = Counter()
    numbered: list[LogRow] = []
    for row in rows:
        seen[row.cells[0]] += 1
        nth = seen[row.cells[0]]
        numbered.append(replace(row, repeat=f"repeat {nth}") if nth > 1 else row)
    return tuple(numbered)


def _starts(lines: Sequence[Line], columns: Callable[[str], tuple[str, ...]]) -> list[int]:
    """Return the first lines of tables; a repeated line of columns counts once."""
    starts: list[int] = []
    for index, line in enumerate(lines):
        if columns(line.text):
            if starts and not any(between.text.strip() for between in lines[starts[-1] + 1 : index]):
                continue
            starts.append(index)
    return starts


def _title(lines: Sequence[Line], start: int, stop: int, title: Callable[[str], str]) -> str:
    """Return the last title between the previous table and this one."""
    return next((name for line in reversed(lines[stop + 1 : start]) if (name := title(line.text))), "")


def _why_refused(cells: Sequence[str], names: Sequence[str], texts: Sequence[str]) -> str | None:
    """Return why a row is broken; None for a whole row or another line."""
    numbers = sum(bool(_FIGURE.fullmatch(cell)) for cell in cells)
    if not cells or not _FIGURE.fullmatch(cells[0]):
        return None if not cells else _NONE
    if 2 * numbers < len(cells):
        return _MESSAGE
    if len(cells) != len(names):
        return f"the row has {len(cells)} columns, not {len(names)}: it is cut; remove it, or run again"
    for cell, name in zip(cells, names, strict=True):
        if name in texts:
            continue
        if not _FIGURE.fullmatch(cell) or (cell != "N/A" and not math.isfinite(float(cell))):
            return f"{name} is {cell!r:.40}, no finite number; remove the row, or run again"
    return None
