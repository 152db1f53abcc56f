"""nvbandwidth: matrices of bandwidth and latency between host and devices.

GB/s are 1e9 bytes. Pairs are measured one by one, except in tests of all pairs at once. A cell of 0.00 or N/A was not
measured. SUM is the sum of the cells; a matrix with another sum lost a line. A bidirectional test measures one of the
two directions, except in a table of totals. Source: nvbandwidth 0.4 to 0.8.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

from perfsuite.imports.lines import Line
from perfsuite.imports.row import Format, Imported, ImportedRow, Meaning, Refused, Source
from perfsuite.published.numbers import printed

_RUNNING = re.compile(r"^\s*Running (?P<test>\w+)\.\s*$")
_KIND = re.compile(
    r"^\s*(?P<what>(?:memcpy|memory latency)(?: \w+)?(?: [A-Z]PU\(row\) (?:<->|->|<-))? [A-Z]PU\(column\)"
    r"(?: (?:Read|Write)[12]| Total)?(?: bandwidth)?) \((?P<unit>[^()]+)\)\s*$"
)
_SUM = re.compile(r"^\s*SUM (?P<test>\w+)\s+(?P<value>\d+\.\d+)\s*$")
_PART = re.compile(r"\b(?:Read[12]|Write[12]|Total)\b")  # A bidirectional test between devices has three matrices.
_INDEX = re.compile(r"\s*\d+(?:\s+\d+)*\s*")
_CELL = re.compile(r"\d+\.\d{2}|N/A")
_UNITS: Mapping[str, Meaning] = MappingProxyType(
    {"GB/s": ("bandwidth_gb_per_s", "GB/s", "higher"), "ns": ("latency_ns", "ns", "lower")}
)


@dataclass(kw_only=True)
class _Matrix:
    """One matrix of a test: names of its columns, and its rows."""

    test: str
    line: int
    what: str = ""
    unit: str = ""
    columns: tuple[str, ...] = ()
    rows: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    total: str = ""
    has_text: bool = False  # Other text follows a row.
    is_mixed: bool = False  # A row follows other text, so it may be of another program.
    broken: list[Refused] = field(default_factory=list)


def _read(source: Source) -> Imported:
    rows: list[ImportedRow] = []
    refused: list[Refused] = []
    unmeasured = 0
    matrices = _matrices(source.labelled)
    names = Counter(matrix.test for matrix in matrices)
    seen: Counter[str] = Counter()
    for matrix in matrices:
        seen[matrix.test] += 1
        refused += matrix.broken
        if why := _why_refused(matrix):
            refused.append(Refused(line=matrix.line, text=matrix.what, why=why))
            continue
        run = f"run {seen[matrix.test]}" if names[matrix.test] > 1 else ""
        figures = list(_figures(source, matrix, run))
        unmeasured += sum(len(cells) - 1 for _, cells in matrix.rows) - len(figures)
        rows += figures
    if not rows:
        line, why = (refused[0].line, refused[0].why) if refused else (1, "no matrix of nvbandwidth")
        raise source.fault(line, why, "give its whole output")
    notes = [f"{unmeasured} cells of N/A or 0.00 left out: not measured"] if unmeasured else []
    return source.imported(rows, refused=refused, notes=notes)


def _matrices(lines: Sequence[Line]) -> list[_Matrix]:
    """Return all matrices; a bidirectional test between devices has three."""
    found: list[_Matrix] = []
    test, is_new = "", False
    for line in lines:
        if match := _RUNNING.match(line.text):
            test = match["test"]
            is_new = True
        elif match := _KIND.match(line.text):
            if found and not found[-1].columns and found[-1].what == match["what"]:
                continue  # printed twice
            part = _PART.search(match["what"])
            name = f"{test} {part[0]}" if part else test
            if not is_new and not (part and found and _PART.search(found[-1].what)):
                name = ""
            found.append(_Matrix(test=name, line=line.number, what=match["what"], unit=match["unit"]))
            is_new = False
        elif found and not found[-1].total:
            _add(found[-1], line)
    return found


def _add(matrix: _Matrix, line: Line) -> None:
    cells = tuple(line.text.split())
    match = _SUM.match(line.text)
    if match:
        if not matrix.test and not _PART.search(matrix.what):  # the line above was not given
            matrix.test = match["test"]
        elif not match["test"].startswith(matrix.test.partition(" ")[0]):
            matrix.test = ""
        matrix.total = match["value"]
    elif not matrix.columns and _INDEX.fullmatch(line.text):
        matrix.columns = cells
    elif matrix.columns and cells and all(_CELL.fullmatch(cell) or cell.isdecimal() for cell in cells[:2]):
        is_whole = len(cells) == len(matrix.columns) + 1 and cells[0].isdecimal()
        if cells == matrix.columns or cells in [row for _, row in matrix.rows]:
            return  # printed twice
        if is_whole and all(map(_CELL.fullmatch, cells[1:])) and cells[0] not in [row[0] for _, row in matrix.rows]:
            matrix.rows.append((line.number, cells))
            matrix.is_mixed |= matrix.has_text
        else:
            matrix.broken.append(Refused(line=line.number, text=" ".join(cells), why="the row is cut or broken"))
    else:
        matrix.has_text |= bool(matrix.rows and cells)


def _why_refused(matrix: _Matrix) -> str:
    if not matrix.test:
        return "no line 'Running ...' above, or one of another test than SUM: the test is not named"
    if not matrix.rows:
        return "the test has no matrix: it was waived, or it failed"
    if matrix.unit not in _UNITS:
        return f"the unit is {matrix.unit!r:.20}, not {' or '.join(_UNITS)}"
    if not matrix.total:
        return "other text is between its rows, and no SUM shows that all are its own" if matrix.is_mixed else ""
    numbers = [printed(cell).numbers[0].interval for _, row in matrix.rows for cell in row[1:] if cell != "N/A"]
    low, high = (sum((getattr(one, end) for one in numbers), Fraction(0)) for end in ("low", "high"))
    total = printed(matrix.total).numbers[0].interval
    if low > total.high or (high < total.low and not matrix.broken):
        return f"the cells give {float((low + high) / 2):.2f}, SUM says {matrix.total}: a line is lost or cut"
    return ""


def _figures(source: Source, matrix: _Matrix, run: str) -> Iterator[ImportedRow]:
    both = ""
    if "bidirectional" in matrix.test:
        both = "; both directions added" if matrix.test.endswith(" Total") else "; one direction of two at once"
    for line, cells in matrix.rows:
        for column, cell in zip(matrix.columns, cells[1:], strict=True):
            if cell == "N/A" or float(cell) == 0:
                continue
            yield source.row(
                line,
                ", ".join(filter(None, [f"{matrix.test} row {cells[0]} column {column}", run])),
                _UNITS[matrix.unit],
                source.number(line, cell, matrix.test),
                printed=cell,
                convention=f"nvbandwidth: {matrix.what}{both}",
                settings={"row": cells[0], "column": column},
            )


FORMAT = Format(
    name="nvbandwidth",
    about="nvbandwidth's matrices",
    recognises=lambda source: (
        any(_KIND.match(line) for line in source.lines)
        and any(_RUNNING.match(line) or _SUM.match(line) for line in source.lines)
    ),
    read=_read,
)
