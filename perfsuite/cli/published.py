"""``perfsuite published``: print the tables of the five published reports, or the cases that reproduce them."""

from __future__ import annotations

import argparse
import csv
import functools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite import workloads
from perfsuite.base.errors import ConfigurationError, InvalidParameter, first_line
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import plural
from perfsuite.cli.main import Command, platform_file_argument, print_json, print_lines, screen_width
from perfsuite.platforms import Catalog, Machine, detect_machine, load_catalog
from perfsuite.platforms.detection import too_few_devices
from perfsuite.published.lookup import (
    PublishedRun,
    Tables,
    chosen,
    recipes_of,
    rows_of,
    shipped,
    table_of,
    tables_of_runs,
)
from perfsuite.published.recipes import Recipe, why_none
from perfsuite.published.recipes.recipe import DEVICES_PER_NODE
from perfsuite.published.records import ROLES, PublishedColumn, PublishedReport, PublishedRow, PublishedTable
from perfsuite.record.workload import Workload
from perfsuite.reports.document import Grid, grouped
from perfsuite.reports.layout import grid_lines
from perfsuite.reports.tables.grids import markdown
from perfsuite.reports.tables.report import LABELS
from perfsuite.suite import runnable
from perfsuite.workloads.training.train_step import TrainStep, why_not_fit

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


def _run(options: argparse.Namespace) -> None:
    if not options.cases:
        for name in ("platform", "devices"):
            if getattr(options, name) is not None:
                raise ConfigurationError(f"--{name} is for a list of cases; add --cases, or leave --{name} out")
        _print_tables(options)
        return
    if options.devices is not None and options.devices < 1:
        raise ConfigurationError(f"--devices={options.devices} is not a number of devices; give at least 1")

    records = case_records(options.names, options.platform, options.devices, load_catalog(options.platform_file))
    form = _format(options)
    if form in ("json", "csv"):
        _print_records([record.plain for record in records], form)
    elif form == "text":
        print_lines(grid_lines(cases_grids(records), screen_width())[1:])
    else:
        print("\n".join(line for grid in cases_grids(records) for line in markdown(grid, level=2)).rstrip("\n"))


def _format(options: argparse.Namespace) -> str:
    return options.format or ("markdown" if screen_width() is None else "text")


def _print_tables(options: argparse.Namespace) -> None:
    tables, form = chosen(options.names), _format(options)
    if form in ("json", "csv"):
        _print_records([cell for report, table in tables for cell in published_cells(report, table)], form)
    elif form == "text" and options.names:
        print_lines([f"labels: {LABELS}", *grid_lines((published_grid(*one) for one in tables), screen_width())])
    elif form == "text":
        print_lines(_index(tables))
    else:
        print("\n".join(_pages(tables) if options.names else _index(tables)).rstrip("\n"))


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


@dataclass(frozen=True, kw_only=True)
class RowCase:
    """One published row on one platform: the case that reproduces it, or the reason why there is none."""

    row: PublishedRun
    name: str  # The settings that the report prints in the row.
    platform: str
    title: str  # Title of the platform, such as MTT S4000.
    case: str  # Node id; empty for a row without a case.
    ranks: int | None
    why_not: str  # Reason of the skip; empty if the case runs.

    @property
    def plain(self) -> dict[str, Any]:
        """Return the row as a record for JSON and CSV."""
        return {
            "report": self.row.report,
            "table": self.row.table,
            "line": self.row.line,
            "row": self.name,
            "published_for": " ".join(self.row.platforms),
            "platform": self.platform,
            "ranks": self.ranks,
            "case": self.case,
            "skipped": self.why_not,
        }


def case_records(names: Sequence[str], platform: str | None, devices: int | None, catalog: Catalog) -> list[RowCase]:
    """Return the cases of every row of these reports or tables, on ``platform`` or on the platforms of each row.

    ``devices`` is the number of devices of a run; None: those found here, else those of one node of the platform.
    Raises ConfigurationError for an unknown report, table or platform.
    """
    tables = tables_of_runs(names)
    machine_of = functools.cache(functools.partial(detect_machine, catalog))
    machines = [machine_of(platform)] if platform else []
    records: list[RowCase] = []
    for row in rows_of(tables):
        for machine in machines or [machine_of(name) for name in row.platforms]:
            records += _of_row(row, machine, devices)
    return records


def _of_row(row: PublishedRun, machine: Machine, devices: int | None) -> Iterator[RowCase]:
    for recipe in recipes_of(row) or (None,):
        yield RowCase(
            row=row,
            name=_name(row),
            platform=machine.name,
            title=machine.model.title,
            case=recipe.case(machine.name) if recipe else "",
            ranks=recipe.world_size if recipe else row.world_size,
            why_not=_why_not(recipe, machine, devices)
            if recipe
            else f"impossible as declared: {why_none(table_of(row), row.line)}",
        )


def _why_not(recipe: Recipe, machine: Machine, devices: int | None) -> str:
    """Return the reason to skip a case on a platform, whether or not its device is here; empty if it runs."""
    workload, ranks = _workload(recipe), recipe.world_size
    try:
        workload.work(MeshShape.on(ranks, workload.layout()))
    except InvalidParameter as error:
        return f"impossible as declared: {first_line(error)}"
    if machine.scale == "small":
        return f"only at --perf-scale=full; else {recipe.small} runs"
    dtype, model = workload.native_dtype(), machine.model
    dtypes = {*model.tflops, *model.native}
    if dtype and not (dtype in dtypes if machine.absent and dtypes else machine.natively(dtype)):
        return f"no native {dtype} on {model.title}"
    if isinstance(workload, TrainStep) and (why := why_not_fit(workload, ranks, model)):
        return f"cannot fit: {why}"
    node = int(model.devices_per_node.value) if model.devices_per_node else DEVICES_PER_NODE
    there = devices or machine.device_count or node
    if ranks > there and not machine.family.shareable:
        return f"{ranks} ranks, on {plural(there, 'device')}" if devices else too_few_devices(ranks, there)
    return ""


def _workload(recipe: Recipe) -> Workload:
    name = "".join(part.capitalize() for part in recipe.workload.split("_"))
    workload: Workload = getattr(workloads, name)(**recipe.parameters)
    return workload


@functools.cache
def _tables() -> dict[str, PublishedTable]:
    return {f"{report.report}/{table.id}": table for report in shipped() for table in report.tables}


def _name(row: PublishedRun) -> str:
    """Return the name of a row, else the settings in its cells: ``8``, ``GPipe 16``."""
    table = _tables()[table_of(row)]
    printed = next(one for one in table.rows if one.line == row.line)
    cells = [(column, table.cell(printed, column)) for column in table.printed_columns]
    settings = [cell.text for column, cell in cells if cell and ROLES[column.role].kind == "configuration"]
    return row.name or " ".join(settings)


def cases_grids(records: Sequence[RowCase]) -> Iterator[Grid]:
    """Yield a table per published table and platform: line, row, ranks, case, and the reason of a skip."""
    groups = grouped(((table_of(record.row), record.platform, record.title), record) for record in records)
    for (table, platform, title), members in groups.items():
        rows = [("line", "row", "published for", "ranks", "case", "skipped there because")]
        rows += [
            (
                str(one.row.line),
                one.name,
                " or ".join(one.row.platforms),
                "" if one.ranks is None else str(one.ranks),
                one.case,
                one.why_not,
            )
            for one in members
        ]
        kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
        lines = {one.row.line for one in members}
        can_run = {one.row.line for one in members if not one.why_not}
        yield Grid(
            title=f"{table} on {title} ({platform})",
            columns=tuple(rows[0][at] for at in kept),
            rows=tuple(tuple(row[at] for at in kept) for row in rows[1:]),
            notes=(
                f"{len(can_run)} of {plural(len(lines), 'row')} can run there: "
                + runnable(f"pytest test_perf --perf-published={table} -k {platform}"),
            ),
        )
