"""``perfsuite published``: the tables of the five published reports as printed, or the cases that reproduce them."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.cli.main import EXIT_OK, Command, platform_file_argument, print_json
from perfsuite.platforms import load_catalog
from perfsuite.published.selection import Tables, chosen
from perfsuite.reports.tables.as_published import published_cells, published_grid
from perfsuite.reports.tables.markdown import markdown
from perfsuite.reports.tables.report import LABELS


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        nargs="*",
        metavar="REPORT[/TABLE]",
        help="003, or one of its tables: 003/results; without any, what there is",
    )
    parser.add_argument(
        "--format",
        choices=("markdown", "json", "csv"),
        default="markdown",
        help="markdown to read; json and csv have a record for every cell, or with --cases for every case",
    )
    parser.add_argument(
        "--cases",
        action="store_true",
        help="list the case that reproduces each row, or why it is skipped, in place of the figures",
    )
    parser.add_argument(
        "--platform", metavar="NAME", help="with --cases: the cases of this platform; default: those of each row"
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="with --cases: skip cases of more than N ranks; default: the devices found here, else those of one node",
    )
    platform_file_argument(parser)


def _run(options: argparse.Namespace) -> int:
    if not options.cases:
        for name in ("platform", "devices"):
            if getattr(options, name) is not None:
                raise ConfigurationError(f"--{name} is of the list of cases; add --cases, or leave --{name} out")
        return _print_tables(options)
    if options.devices is not None and options.devices < 1:
        raise ConfigurationError(f"--devices={options.devices} is not a number of devices; give at least 1")
    from perfsuite.cli.published_cases import case_records, cases_grids  # they load NumPy

    records = case_records(options.names, options.platform, options.devices, load_catalog(options.platform_file))
    if options.format == "markdown":
        print("\n".join(line for grid in cases_grids(records) for line in markdown(grid, level=2)).rstrip("\n"))
    else:
        _print_records([record.plain for record in records], options.format)
    return EXIT_OK


def _print_tables(options: argparse.Namespace) -> int:
    tables = chosen(options.names)
    if options.format == "markdown":
        print("\n".join(_pages(tables) if options.names else _index(tables)).rstrip("\n"))
    else:
        _print_records([cell for report, table in tables for cell in published_cells(report, table)], options.format)
    return EXIT_OK


def _print_records(records: Sequence[Mapping[str, Any]], format: str) -> None:
    """Print a record per line of CSV, or all of them as a JSON array."""
    if format == "json":
        print_json(records)
        return
    writer = csv.DictWriter(sys.stdout, fieldnames=list(records[0]) if records else ["report"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)


def _index(tables: Tables) -> Iterator[str]:
    """Reports with their tables, a line each."""
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
    help="print the tables of the published reports as they were printed, with labels and reasons",
    arguments=_arguments,
    run=_run,
)
