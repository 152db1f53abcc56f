"""Imported figures, and the description of a format."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ImportFailed
from perfsuite.base.units import plural
from perfsuite.imports.lines import Line, labelled_lines, split_lines
from perfsuite.record.own_metrics import Better

_GROUPS = re.compile(r"(?<=\d),(?=\d{3}(?:,\d{3})*(?:\.\d*)?$)(?<![\d]{4},)")
"""A comma between groups of thousands; ``4,02`` and ``1234,567`` have none."""


@dataclass(frozen=True, kw_only=True)
class ImportedRow:
    """One figure."""

    name: str  # Human-readable subject of the measurement; figures of one run share it.
    metric: str  # perfsuite's metric if the meaning is the same, else the tool's name; it ends in the unit.
    value: float
    unit: str
    better: Better
    printed: str  # The figure before any conversion, as printed in the source.
    source: str
    line: int  # Line in the file, from 1.
    tool: str
    convention: str  # Definition of the figure, and conversions.
    collective: str = ""  # perfsuite's name of the collective; empty for other figures.
    message_bytes: float | None = None
    dtype: str = ""
    ranks: int | None = None
    platform: str = ""  # The option --platform.
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A figure that was not imported."""

    line: int
    text: str
    why: str  # The broken rule and the remedy.


@dataclass(kw_only=True)
class LogFigures:
    """The figures, refusals and notes of a file read so far."""

    rows: list[ImportedRow] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of lines or values that are not imported, by (noun, reason or empty)."""

    def refuse(self, line: int, text: str, why: str) -> None:
        """Refuse a text of a line with a reason."""
        self.refused.append(Refused(line=line, text=text.strip()[:200], why=why))

    def add(self, other: LogFigures) -> None:
        """Add the figures, refusals and notes of other lines."""
        self.rows += other.rows
        self.refused += other.refused
        self.notes += [note for note in other.notes if note not in self.notes]

    def counted(self) -> list[str]:
        """Return a note for each kind of lines or values that are left out."""
        return [
            f"{plural(count, noun)} left out{f': {why}' if why else ''}" for (noun, why), count in self.left_out.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """The figures, refusals and notes of one file."""

    source: str
    tool: str
    rows: tuple[ImportedRow, ...]
    refused: tuple[Refused, ...] = ()
    notes: tuple[str, ...] = ()  # Remarks on all rows.


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The options of the command; each applies if the file does not contain the fact itself."""

    platform: str = ""
    collective: str = ""  # Collective of the log.
    ranks_per_node: int | None = None  # Ranks per node with which a bandwidth was computed.
    ranks: int | None = None  # Number of ranks of the collective.
    dtype: str = ""  # dtype of the figures.
    run: int | None = None  # The run to read of a file with several, from 1.


Meaning = tuple[str, str, Better]  # Metric, unit and direction of a figure.


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to import, with its format."""

    path: Path
    text: str
    options: ImportOptions = field(default_factory=ImportOptions)
    tool: str = ""

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines without ends and prefixes of launchers, containers and time stamps."""
        return [line.text for line in self.labelled]

    @cached_property
    def labelled(self) -> list[Line]:
        """Return the same lines, each with the rank or host in its prefix."""
        return labelled_lines(split_lines(self.text))

    @cached_property
    def json(self) -> Any:
        """Return the whole file as JSON; None for other files. Raises ImportFailed for NaN and infinities."""
        try:
            return json.loads(self.text, parse_constant=self._refuse_constant)
        except ValueError:
            return None
        except RecursionError:
            raise self.fault(1, "brackets are nested too deep", "give the output of the tool") from None

    def _refuse_constant(self, name: str) -> float:
        raise self.fault(self.line_of(name), f"{name} is not a figure", "remove it, or run the tool again")

    def line_of(self, needle: str, nth: int = 0) -> int:
        """Return the line of the ``nth`` occurrence of a text, from 1; the first line without any."""
        at = -1
        for _ in range(nth + 1):
            at = self.text.find(needle, at + 1)
        return self.text.count("\n", 0, max(at, 0)) + 1

    def row(
        self, line: int, name: str, meaning: Meaning, value: float, *, printed: str, convention: str, **more: Any
    ) -> ImportedRow:
        """Return a figure of a line; ``more`` are optional fields of ImportedRow."""
        metric, unit, better = meaning
        return ImportedRow(
            name=name,
            metric=metric,
            value=value,
            unit=unit,
            better=better,
            printed=printed,
            source=str(self.path),
            line=line,
            tool=self.tool,
            convention=convention,
            platform=self.options.platform,
            **more,
        )

    def imported(
        self, rows: Iterable[ImportedRow], *, refused: Iterable[Refused] = (), notes: Iterable[str] = ()
    ) -> Imported:
        """Return the result of the file."""
        return Imported(
            source=str(self.path), tool=self.tool, rows=tuple(rows), refused=tuple(refused), notes=tuple(notes)
        )

    def fault(self, line: int, reason: str, remedy: str) -> ImportFailed:
        """Return the error of a line."""
        return ImportFailed(f"{self.path}:{line}: {reason}; {remedy}")

    def number(self, line: int, text: object, what: str) -> float:
        """Return a finite number of a line. Raises ImportFailed for other text."""
        try:
            value = float(_GROUPS.sub("", str(text)))
        except ValueError:
            value = math.nan
        if isinstance(text, bool) or not math.isfinite(value):
            raise self.fault(line, f"{what} is {str(text)!r:.40}, no finite number", "remove the line, or run again")
        return value

    def whole(self, line: int, text: object, what: str, least: int = 0) -> int:
        """Return a whole number of a line, a size or a rank. Raises ImportFailed for other text and below ``least``."""
        value = self.number(line, text, what)
        if value != int(value) or not least <= value < 2**63:
            reason = f"{what} is {str(text)!r:.40}, no whole number from {least} on"
            raise self.fault(line, reason, "remove the line, or run again")
        return int(value)


@dataclass(frozen=True, kw_only=True)
class Format:
    """The output of one tool."""

    name: str  # Name on the command line.
    about: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source], Imported]  # Returns all figures. Raises ImportFailed with line, reason and remedy.
    options: tuple[str, ...] = ()
    """Fields of :class:`ImportOptions` that it uses, without platform and dtype, which apply to all formats."""


_FIGURE = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf|N/A", re.IGNORECASE)
_MESSAGE = "a message stands in the row; remove it, or run again"
_NONE = "not a row"


@dataclass(frozen=True, kw_only=True)
class LogRow:
    """One row."""

    line: int
    cells: tuple[str, ...]
    text: str  # Text of the row without surrounding blanks.
    repeat: str = ""  # ``repeat 2`` for a repeated first cell; else empty.


@dataclass(frozen=True, kw_only=True)
class LogTable:
    """One table of a log."""

    title: str  # Title of the test; empty without one.
    run: str  # ``run 2`` for a repeated title; else empty.
    line: int
    columns: tuple[str, ...]
    rows: tuple[LogRow, ...]
    above: tuple[str, ...]  # Lines between the previous table and this one.


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
    return next((name for line in reversed(lines[stop + 1 : start]) if (name := title(line.text))), "")


def _why_refused(cells: Sequence[str], names: Sequence[str], texts: Sequence[str]) -> str | None:
    """Return why a row is broken; None for a whole row or another line."""
    numbers = sum(bool(_FIGURE.fullmatch(cell)) for cell in cells)
    if not cells or not _FIGURE.fullmatch(cells[0]):
        return None if not cells else _NONE
    if 2 * numbers < len(cells):
        return _MESSAGE
    if len(cells) != len(names):
        what = "it" if len(cells) < len(names) else "the line of column names"
        return f"the row has {len(cells)} columns, not {len(names)}: {what} is cut; remove it, or run again"
    for cell, name in zip(cells, names, strict=True):
        if name in texts:
            continue
        if not _FIGURE.fullmatch(cell) or (cell != "N/A" and not math.isfinite(float(cell))):
            return f"{name} is {cell!r:.40}, no finite number; remove the row, or run again"
    return None
