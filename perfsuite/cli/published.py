"""``perfsuite published``: print the tables of the five published reports, or the cases that reproduce them."""

from __future__ import annotations

import argparse
import csv
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def _published_grid(report: PublishedReport, table: PublishedTable) -> Grid:
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
    for column in table.columns:  # columns with another unit than their title has, or with a convention
        unit = column.unit if column.unit and column.unit != column.unit_published else ""
        text = "; ".join(filter(None, (f"in {unit}" if unit else "", column.convention)))
        if text:
            yield f"{column.name.replace('_', ' ')}: {text}"


def _published_cells(report: PublishedReport, table: PublishedTable) -> Iterator[dict[str, Any]]:
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

    records = _case_records(options.names, options.platform, options.devices, load_catalog(options.platform_file))
    form = _format(options)
    if form in ("json", "csv"):
        _print_records([record for _, record in records], form)
    elif form == "text":
        print_lines(grid_lines(_cases_grids(records), screen_width())[1:])
    else:
        print("\n".join(line for grid in _cases_grids(records) for line in markdown(grid, level=2)).rstrip("\n"))


def _format(options: argparse.Namespace) -> str:
    return options.format or ("markdown" if screen_width() is None else "text")


def _print_tables(options: argparse.Namespace) -> None:
    tables, form = chosen(options.names), _format(options)
    if form in ("json", "csv"):
        _print_records([cell for report, table in tables for cell in _published_cells(report, table)], form)
    elif form == "text" and options.names:
        print_lines([f"labels: {LABELS}", *grid_lines((_published_grid(*one) for one in tables), screen_width())])
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
        yield from markdown(_published_grid(report, table), level=2)


PUBLISHED = Command(
    help="print the tables of the published reports with labels and reasons",
    example="perfsuite published 003/results",
    arguments=_arguments,
    run=_run,
)


def _case_records(
    names: Sequence[str], platform: str | None, devices: int | None, catalog: Catalog
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the cases of every row of these reports or tables, on ``platform`` or on the platforms of each row.

    Each has the title of its platform, such as MTT S4000.  ``devices`` is the number of devices of a run; None: those
    found here, else those of one node of the platform.  Raises ConfigurationError for an unknown report, table or
    platform.
    """
    machine_of = functools.cache(functools.partial(detect_machine, catalog))
    for row in rows_of(tables_of_runs(names)):
        for machine in map(machine_of, [platform] if platform else row.platforms):
            for recipe in recipes_of(row) or (None,):
                why_not = f"impossible as declared: {why_none(table_of(row), row.line)}"
                record = {
                    "report": row.report,
                    "table": row.table,
                    "line": row.line,
                    "row": _name(row),
                    "published_for": " ".join(row.platforms),
                    "platform": machine.name,
                    "ranks": recipe.world_size if recipe else row.world_size,
                    "case": recipe.case(machine.name) if recipe else "",
                    "skipped": _why_not(recipe, machine, devices) if recipe else why_not,
                }
                yield machine.model.title, record


def _why_not(recipe: Recipe, machine: Machine, devices: int | None) -> str:
    """Return the reason to skip a case on a platform, whether or not its device is here; empty if it runs."""
    name, ranks = "".join(part.capitalize() for part in recipe.workload.split("_")), recipe.world_size
    workload: Workload = getattr(workloads, name)(**recipe.parameters)
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


def _cases_grids(records: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Grid]:
    """Yield a table per published table and platform: line, row, ranks, case, and the reason of a skip."""
    groups = grouped(((f"{one['report']}/{one['table']}", one["platform"], title), one) for title, one in records)
    for (table, platform, title), members in groups.items():
        rows = [("line", "row", "published for", "ranks", "case", "skipped there because")]
        for one in members:
            published_for, ranks = one["published_for"].replace(" ", " or "), one["ranks"]
            ranks_text = "" if ranks is None else str(ranks)
            rows.append((str(one["line"]), one["row"], published_for, ranks_text, one["case"], one["skipped"]))
        kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
        lines = {one["line"] for one in members}
        can_run = {one["line"] for one in members if not one["skipped"]}
        columns, *cells = (tuple(row[at] for at in kept) for row in rows)
        command = runnable(f"pytest test_perf --perf-published={table} -k {platform}")
        note = f"{len(can_run)} of {plural(len(lines), 'row')} can run there: {command}"
        yield Grid(title=f"{table} on {title} ({platform})", columns=columns, rows=tuple(cells), notes=(note,))
