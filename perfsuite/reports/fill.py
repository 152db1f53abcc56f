"""Write measured values into the empty cells of a report's own Markdown tables, and change nothing else.

A table is recognised by the columns of a published table, in order and as printed; a row by its settings as printed.
A value comes from the case that reproduces the row, on the platform of the row.  Each filled cell has a footnote at the
end of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import code_text, printable
from perfsuite.base.units import significant
from perfsuite.published.lookup import PublishedRun, recipes_of, rows, shipped, table_of
from perfsuite.published.records import ROLES, PublishedColumn, PublishedReport, PublishedRow, PublishedTable
from perfsuite.record.run import INSTRUMENTED, NOT_QUIET, THROTTLED
from perfsuite.reports.stored import Recording
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.grids import escape, why_empty
from perfsuite.reports.tables.placement import differing_settings
from perfsuite.reports.tables.published import plain_id
from perfsuite.reports.tables.recording import gathered

_MEANT = {"throughput_per_device": "samples_per_s_per_device", "loss": "final_loss"}
"""Metrics by role where report 000 or 002 printed figures of another kind in the column than its title says."""
_WHOLE_DEVICE = "whole_device_gib"
_DOUBTS = (INSTRUMENTED, NOT_QUIET, THROTTLED)  # Beginnings of warnings that are copied into footnotes.
_PERCENT, _PALM = "mfu_percent", "mfu_palm_percent"
_CODE = re.compile(r" {0,3}(```+|~~~+)")
_RULE = re.compile(r"\|?(\s*:?-+:?\s*\|)+(\s*:?-+:?)?")
_BREAK = re.compile(r" ?<br ?/?> ?")
_PIPE = re.compile(r"(?<!\\)\|")
_FOOTNOTE = re.compile(r"\[\^perfsuite-(\d{1,9})\]")


Material = Sequence[tuple[Recording, Sequence[TableCase]]]
"""Each file with its cases, whose ratios are counted within the file."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """The file with its cells filled."""

    text: str
    cells: int  # Cells that were filled.
    left: Mapping[str, int]  # Why other cells of the report's rows are empty -> how many.
    tables: tuple[str, ...]  # The report's tables in the file: ``002/performance``.


@dataclass(frozen=True, kw_only=True)
class _Line:
    number: int  # From 0.
    cells: tuple[tuple[int, int], ...]  # Begin and end of each cell in the line.
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        """The cells as they compare with a published table."""
        return tuple(_plain(self.text[begin:end]) for begin, end in self.cells)


_Found = tuple[PublishedReport, PublishedTable, Sequence[tuple[_Line, PublishedRow]]]
"""A published table in the file: pairs of its rows there and the published rows."""


def filled(text: str, name: str, recordings: Sequence[Recording]) -> Filled:
    """Return the text of file ``name`` with measured values in the empty cells of its report's tables.

    Raises ConfigurationError where the file has no table of a published report.
    """
    lines = text.split("\n")
    found = _found(lines, name)
    filling = _Filling(
        material=[(recording, gathered([recording], None).cases) for recording in recordings],
        first=1 + max(map(int, _FOOTNOTE.findall(text)), default=0),
    )
    names = [f"{report.report}/{table.id}" for report, table, _ in found]
    for title, (report, table, pairs) in zip(names, found, strict=True):
        runs = {row.line: row for row in rows((report,)) if table_of(row) == title}
        for line, row in pairs:
            if row.line in runs:
                cells = dict(filling.values(table, line, runs[row.line]))
                lines[line.number] = _with_cells(line, cells)
                filling.count += len(cells)
    whole = "\n".join(lines)
    if filling.notes:
        end = "\r\n" if "\r\n" in text else "\n"
        numbered = (f"[^perfsuite-{number}]: {note}{end}" for number, note in enumerate(filling.notes, filling.first))
        whole += ("" if whole.endswith("\n") else end) + end + "".join(numbered)
    return Filled(text=whole, cells=filling.count, left=filling.left, tables=tuple(names))


# -- the file's tables -------------------------------------------------------------------------------------------


def _plain(cell: str) -> str:
    """Return a cell as two of them compare: spaces and ways to write a line break do not count."""
    return _BREAK.sub("<br/>", " ".join(cell.split()))


def _cells(line: str, count: int) -> tuple[tuple[int, int], ...]:
    """Return begin and end of each of ``count`` cells; empty for a line of more or fewer.

    A pipe before the first cell and one after the last are optional, unless a cell would then be missing.
    """
    at = [match.start() for match in _PIPE.finditer(line)]
    spans = list(zip([0, *(place + 1 for place in at)], [*at, len(line)], strict=True))
    blank = [not line[begin:end].strip() for begin, end in spans]
    if len(spans) == count + 2 and blank[0] and blank[-1]:
        spans = spans[1:-1]
    elif len(spans) == count + 1 and (blank[0] or blank[-1]):
        spans = spans[1:] if blank[0] and not (blank[-1] and not line.lstrip().startswith("|")) else spans[:-1]
    return tuple(spans) if len(spans) == count and at else ()


def _tables(lines: Sequence[str]) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield the line of each table's titles and the lines of its rows; code is left out."""
    fence, number = "", 0
    while number < len(lines):
        line = lines[number]
        if match := _CODE.match(line):
            fence = "" if fence and match[1].startswith(fence) else fence or match[1]
        below = lines[number + 1] if number + 1 < len(lines) else ""
        if not fence and not match and _PIPE.search(line) and _RULE.fullmatch(below.strip()):
            end = number + 2
            while end < len(lines) and _PIPE.search(lines[end]):
                end += 1
            yield number, range(number + 2, end)
            number = end
        else:
            number += 1


def _found(lines: Sequence[str], name: str) -> list[_Found]:
    """Return the report's tables of a file; ConfigurationError without any."""
    results = [
        (report, table)
        for report in shipped()
        for table in report.tables
        if table.kind == "result" and table.layout == "table" and table.rows
    ]
    found: list[_Found] = []
    near = ""
    for head, numbers in _tables(lines):
        alike = [(report, table) for report, table in results if _has_titles(lines[head], table)]
        texts = [lines[at] for at in numbers]
        options = [(report, table, _paired(table, texts, numbers[0])) for report, table in alike if numbers]
        best = max(options, key=lambda option: len(option[2]), default=None)
        if best is not None and best[2]:
            found.append(best)
        elif alike:
            columns_of = f"{alike[0][0].report}/{alike[0][1].id}"
            near = f"; the table of line {head + 1} has the columns of {columns_of} and none of its rows"
    if not found:
        raise ConfigurationError(
            f"{printable(name)} has no Markdown table of a published report{near}; titles and settings must be as "
            "printed (perfsuite published REPORT/TABLE), and tables drawn in code are not filled"
        )
    return found


def _has_titles(line: str, table: PublishedTable) -> bool:
    titles = [_plain(column.title) for column in table.printed_columns]
    line = line.lstrip("\ufeff").rstrip("\r")
    cells = _cells(line, len(titles))
    return [_plain(line[begin:end]) for begin, end in cells] == titles


def _paired(table: PublishedTable, lines: Sequence[str], first: int) -> list[tuple[_Line, PublishedRow]]:
    """Return pairs of rows of the file and of the report; rows with equal settings are paired in order."""
    free = [row for row in table.rows if any(cell is not None for cell in row.cells)]
    pairs = []
    for number, text in enumerate(lines, first):
        line = _Line(number=number, cells=_cells(text.rstrip("\r"), len(table.printed_columns)), text=text)
        match = next((row for row in free if line.cells and _is_row(table, row, line.words)), None)
        if match is not None:
            free.remove(match)
            pairs.append((line, match))
    return pairs


def _is_row(table: PublishedTable, row: PublishedRow, words: Sequence[str]) -> bool:
    for column, word in zip(table.printed_columns, words, strict=True):
        cell = table.cell(row, column)
        says = ROLES[column.role].kind == "configuration" or column.role in ("case", "note", "setting")
        printed = _plain(cell.text) if cell else ""
        if says and printed != word and (printed or column.role != "note"):
            return False
    return True


# -- the values --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Filling:
    """Fills cells; keeps the footnotes, the count, and the reasons of empty cells."""

    material: Material
    first: int  # Number of the first footnote.
    notes: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def values(self, table: PublishedTable, line: _Line, run: PublishedRun) -> Iterator[tuple[int, str]]:
        """Yield the place and text of each empty cell of a row that has a value; count the reasons of the others."""
        case, recording, reason = _case_of(run, self.material)
        for at, column in enumerate(table.printed_columns):
            key = _metric(column)
            if line.words[at] or not (key or column.role == "note"):
                continue  # it has a figure, or is a setting that the report leaves blank
            why = reason if key else "no figure of perfsuite's"
            why = why or (_why_not(case, key, run) if case else "")
            if case is None or recording is None or why:
                left = f"{column.name.replace('_', ' ')}: {why}"
                self.left[left] = self.left.get(left, 0) + 1
                continue
            scale = column.scale if key in (column.metric, _PALM) else 1.0
            figure = f"{significant(case.values[key] / scale)}{_unit(table, column, key)}"
            note = _note(case, recording, run)
            self.notes += [note] if note not in self.notes else []
            yield at, f"{figure} [^perfsuite-{self.first + self.notes.index(note)}]"


def _metric(column: PublishedColumn) -> str:
    if column.role == "memory" and column.metric and not column.metric.endswith("_gib"):
        return _WHOLE_DEVICE
    if column.metric == _PERCENT and column.convention == "PaLM":
        return _PALM
    return _MEANT.get(column.role, column.metric) if column.metric else ""


def _case_of(run: PublishedRun, material: Material) -> tuple[TableCase | None, Recording | None, str]:
    """Return the case that reproduces a row, with its recording; measured before projected, the last file first."""
    recipes = recipes_of(run)
    if not recipes:
        return None, None, "no recipe runs this row"
    ids = [plain_id(recipe.case("x")) for recipe in recipes]
    candidates = [
        (case.projected, case.simulated, -index, ids.index(plain_id(case.case)), case, recording)
        for index, (recording, cases) in enumerate(material)
        for case in cases
        if plain_id(case.case) in ids
    ]
    here = [one for one in candidates if one[4].platform in run.platforms]
    tried = [one for one in here if not one[0]] or here  # a run out of memory is not replaced by a projection
    if there := [one for one in tried if one[4].values]:
        *_, case, recording = min(there, key=lambda one: one[:4])
        return case, recording, ""
    if tried:
        return None, None, tried[-1][4].missing
    others = sorted({case.platform for *_, case, _ in candidates if case.values})
    elsewhere = f"of {', '.join(others)} alone, and the row is of {' or '.join(run.platforms)}"
    return None, None, elsewhere if others else "not measured"


def _why_not(case: TableCase, key: str, run: PublishedRun) -> str:
    if key not in case.values:
        return why_empty(case, key) or f"not {'projected' if case.projected else 'measured'}"
    smallest = min(row.world_size or 1 for row in rows(shipped()) if table_of(row) == table_of(run))
    if key in case.bases and case.base_ranks != smallest:
        return f"counted over {case.bases[key]}, and the report counts over {smallest}"
    return ""


def _unit(table: PublishedTable, column: PublishedColumn, key: str) -> str:
    """Return the suffix of a figure: that of the column's other cells, else the unit if the title has none."""
    texts = [cell.text for row in table.rows if (cell := table.cell(row, column)) and cell.number()]
    ends = {re.sub(r"^[\s\d.,]+", lambda match: " " * match[0].endswith(" "), text) for text in texts}
    memory = key.endswith("_gib")
    unit = "GiB" if memory and not (key == column.metric and column.unit_published == "MiB") else column.unit_published
    unit = "%" if key in (_PERCENT, _PALM) else "MiB" if memory and unit == "MiB" else unit
    if key == column.metric and len(ends) == 1 and (end := ends.pop()).strip() and (not memory or unit in end):
        return end
    if unit in ("", "x") or unit in column.title:
        return ""
    return unit if unit == "%" else f" {unit}"


def _note(case: TableCase, recording: Recording, run: PublishedRun) -> str:
    """Return the text of a footnote: kind of the values, journal, case, commit, and how the run differs."""
    run_of_case = recording.run
    kind = case.missing if case.projected else "measured"
    if case.simulated and not case.projected:
        kind = "simulated, not measured on a device"
    commit = escape(run_of_case.revision.commit[:12]) or "unknown"
    commit += " with changes" if run_of_case.revision.dirty else ""
    differing = "; ".join(differing_settings(case, run))
    same = f"differs from the row: {escape(differing)}" if differing else "the row's run, as far as is stated"
    doubts = [warning for warning in run_of_case.end.warnings if warning.startswith(_DOUBTS)] if run_of_case.end else []
    doubted = "" if case.projected else "".join(f"; {escape(warning)}" for warning in doubts)
    journal = code_text(PurePath(run_of_case.name).name)
    return f"perfsuite, {kind}: journal {journal}, case {code_text(case.case)}, commit {commit}; {same}{doubted}"


def _with_cells(line: _Line, cells: Mapping[int, str]) -> str:
    """Return the line with these cells; a cell keeps its width if the text is shorter."""
    parts, end = [], 0
    for at, text in sorted(cells.items()):
        begin, stop = line.cells[at]
        parts += [line.text[end:begin], f" {text} ".ljust(stop - begin)]
        end = stop
    return "".join([*parts, line.text[end:]])
