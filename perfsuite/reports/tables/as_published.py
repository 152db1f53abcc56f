"""A published table by itself: every cell as printed, with the label of each figure and why it has that label."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from perfsuite.published.records import PublishedColumn, PublishedReport, PublishedRow, PublishedTable
from perfsuite.published.roles import ROLES
from perfsuite.reports.document import Grid

_BREAK = re.compile(r"(\s*<br\s*/?>\s*)+")
_JUDGED = ("result", "claim")
"""Kinds of tables whose figures are results: there M is a statement too."""


def published_grid(report: PublishedReport, table: PublishedTable) -> Grid:
    """The table with its columns, rows and labels; rows that print nothing at all are left out."""
    columns = table.printed_columns
    rows = [row for row in table.rows if any(cell is not None for cell in row.cells)]
    return Grid(
        title=f"{report.report}/{table.id}: {table.title}",
        columns=("line", *map(_title, columns)),
        rows=tuple((str(row.line), *(_cell(table, row, column) for column in columns)) for row in rows),
        notes=tuple(_notes(report, table, rows)),
    )


def _title(column: PublishedColumn) -> str:
    unit = f" {column.unit_published}" if column.unit_published else ""
    return f"{column.name.replace('_', ' ')}{unit}"


def _cell(table: PublishedTable, row: PublishedRow, column: PublishedColumn) -> str:
    cell = table.cell(row, column)
    if column.prose or cell is None:
        return ""
    text = _BREAK.sub(" ", cell.text)
    return f"{text} [{table.judge(row, column).label}]" if _is_judged(table, row, column) else text


def _is_judged(table: PublishedTable, row: PublishedRow, column: PublishedColumn) -> bool:
    """Whether a cell's label is shown: it is a figure that came out of a run, or one that is not as it should be."""
    cell, kind = table.cell(row, column), ROLES[column.role].kind
    if cell is None or not (cell.numbers or cell.out_of_memory) or kind == "configuration" or column.role == "case":
        return False
    is_result = table.kind in _JUDGED and kind in ("measured", "derived")
    return is_result or table.judge(row, column).label != "M"


def _notes(report: PublishedReport, table: PublishedTable, rows: list[PublishedRow]) -> Iterator[str]:
    facts = (table.model, table.hardware, *(f"{stated.role} {stated.text}" for stated in table.stated))
    text = "; ".join(fact for fact in facts if fact)
    yield f"{report.file}, {table.heading or table.title}{f': {text}' if text else ''}"
    if any(column.prose for column in table.columns):
        yield "sentences are not copied: their cells are empty"
    reasons: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        for column in table.printed_columns:
            judgement = table.judge(row, column)
            if judgement.reason and _is_judged(table, row, column):
                by_column = reasons.setdefault(f"[{judgement.label}] {{}}: {judgement.reason}", {})
                by_column.setdefault(column.name.replace("_", " "), []).append(row.line)
    for reason, by_column in reasons.items():
        lines = sorted({line for numbers in by_column.values() for line in numbers})
        where = f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines))}"
        yield reason.format(f"{', '.join(by_column)}; {where}")
    yield from _meanings(table)


def _meanings(table: PublishedTable) -> Iterator[str]:
    """Columns whose figures are something else than their title says, or are counted in a way that must be known."""
    for column in table.columns:
        unit = column.unit if column.unit and column.unit != column.unit_published else ""
        text = "; ".join(filter(None, (f"in {unit}" if unit else "", column.convention)))
        if text:
            yield f"{column.name.replace('_', ' ')}: {text}"


def published_cells(report: PublishedReport, table: PublishedTable) -> Iterator[dict[str, Any]]:
    """Yield every printed figure and text for other programs: place, meaning, label and reason.

    ``value`` is the number of the cell in ``unit``; None for text and bounds.
    """
    for row in table.rows:
        for column in table.columns:
            cell = table.cell(row, column)
            if cell is None or column.prose:
                continue
            number, judgement = cell.number(column.index), table.judge(row, column)
            yield {
                "report": report.report,
                "table": table.id,
                "line": row.line,
                "column": column.name,
                "text": cell.text,
                "value": None if number is None else float(number.value),
                "unit": column.unit or column.unit_published,
                "metric": column.metric,
                "label": judgement.label,
                "reason": judgement.reason,
            }
