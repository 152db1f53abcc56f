"""``perfsuite published``: print the tables of the five published reports, or the cases that reproduce them."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.cli.main import EXIT_OK, Command, platform_file_argument, print_json, print_lines, screen_width
from perfsuite.platforms import load_catalog
from perfsuite.published.lookup import Tables, chosen
from perfsuite.published.records import ROLES, PublishedColumn, PublishedReport, PublishedRow, PublishedTable
from perfsuite.reports.document import Grid
from perfsuite.reports.layout import grid_lines
from perfsuite.reports.tables.grids import markdown
from perfsuite.reports.tables.report import LABELS

_BREAK = re.compile(r"(\s*<br\s*/?>\s*)+")
_JUDGED = ("result", "claim")  # Kinds of tables whose figures are results: there M is a statement too.


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


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="REPORT[/TABLE]",
        help="print these reports or tables, such as 003 or 003/results (default: a list of all)",
    )
    parser.add_argument(
        "--format",
        choices=("text", "markdown", "json", "csv"),
        help="select the format; json and csv have a record per cell, or per case with --cases "
        "(default: text on a terminal, else markdown)",
    )
    parser.add_argument(
        "--cases",
        action="store_true",
        help="list the case that reproduces each row, or the reason to skip it, instead of the figures",
    )
    parser.add_argument(
        "--platform", metavar="NAME", help="list cases of this platform, with --cases (default: those of each row)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="skip cases of more than N ranks, with --cases (default: the devices found here, else those of one node)",
    )
    platform_file_argument(parser)


def _run(options: argparse.Namespace) -> int:
    if not options.cases:
        for name in ("platform", "devices"):
            if getattr(options, name) is not None:
                raise ConfigurationError(f"--{name} is for a list of cases; add --cases, or leave --{name} out")
        return _print_tables(options)
    if options.devices is not None and options.devices < 1:
        raise ConfigurationError(f"--devices={options.devices} is not a number of devices; give at least 1")
    from perfsuite.cli.published_cases import case_records, cases_grids  # they load NumPy

    records = case_records(options.names, options.platform, options.devices, load_catalog(options.platform_file))
    form = _format(options)
    if form in ("json", "csv"):
        _print_records([record.plain for record in records], form)
    elif form == "text":
        print_lines(grid_lines(cases_grids(records), screen_width())[1:])
    else:
        print("\n".join(line for grid in cases_grids(records) for line in markdown(grid, level=2)).rstrip("\n"))
    return EXIT_OK


def _format(options: argparse.Namespace) -> str:
    return options.format or ("markdown" if screen_width() is None else "text")


def _print_tables(options: argparse.Namespace) -> int:
    tables, form = chosen(options.names), _format(options)
    if form in ("json", "csv"):
        _print_records([cell for report, table in tables for cell in published_cells(report, table)], form)
    elif form == "text" and options.names:
        print_lines([f"labels: {LABELS}", *grid_lines((published_grid(*one) for one in tables), screen_width())])
    elif form == "text":
        print_lines(_index(tables))
    else:
        print("\n".join(_pages(tables) if options.names else _index(tables)).rstrip("\n"))
    return EXIT_OK


def _print_records(records: Sequence[Mapping[str, Any]], format: str) -> None:
    if format == "json":
        print_json(records)
        return
    writer = csv.DictWriter(sys.stdout, fieldnames=list(records[0]) if records else ["report"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)


def _index(tables: Tables) -> Iterator[str]:
    title = ""
    for report, table in tables:
        if report.title != title:
            title = report.title
            yield f"{report.report}  {title} ({report.file})"
        rows = sum(any(cell is not None for cell in row.cells) for row in table.rows)
        label = f" [{table.judgement.label}]" if table.kind == "result" else ""
        yield f"  {f'{report.report}/{table.id}':24} {plural(rows, 'row'):8} {table.title}{label}"
    yield ""
    yield f"labels: {LABELS}; perfsuite published REPORT[/TABLE] prints the tables"


def _pages(tables: Tables) -> Iterator[str]:
    title = ""
    for report, table in tables:
        if report.title != title:
            title = report.title
            yield from (f"# {report.report}: {title}", "", f"as printed in {report.file}; {LABELS}", "")
        yield from markdown(published_grid(report, table), level=2)


PUBLISHED = Command(
    help="print the tables of the published reports with labels and reasons",
    example="perfsuite published 003/results",
    arguments=_arguments,
    run=_run,
)
