"""``perfsuite published``: the tables of the five published reports as printed, with labels and reasons."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence

from perfsuite.base.errors import ConfigurationError, nearest
from perfsuite.base.units import plural
from perfsuite.cli.main import EXIT_OK, Command, print_json
from perfsuite.published.lookup import shipped
from perfsuite.published.records import PublishedReport, PublishedTable
from perfsuite.reports.tables.as_published import published_cells, published_grid
from perfsuite.reports.tables.markdown import markdown
from perfsuite.reports.tables.report import LABELS

Tables = Sequence[tuple[PublishedReport, PublishedTable]]


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
        help="markdown to read; json and csv have a record for every cell",
    )


def _run(options: argparse.Namespace) -> int:
    chosen = chosen_tables(options.names)
    if options.format == "markdown":
        print("\n".join(_pages(chosen) if options.names else _index(chosen)).rstrip("\n"))
        return EXIT_OK
    cells = [cell for report, table in chosen for cell in published_cells(report, table)]
    if options.format == "json":
        print_json(cells)
        return EXIT_OK
    writer = csv.DictWriter(sys.stdout, fieldnames=list(cells[0]) if cells else ["report"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return EXIT_OK


def chosen_tables(names: Sequence[str]) -> Tables:
    """The tables of these reports, in the reports' order; all without a name.  ConfigurationError for a wrong name."""
    ours = [(report, table) for report in shipped() for table in report.tables]
    known = {report.report for report, _ in ours} | {f"{report.report}/{table.id}" for report, table in ours}
    for name in names:
        if name not in known:
            raise ConfigurationError(_unknown(name, known))
    return [
        (report, table)
        for report, table in ours
        if not names or report.report in names or f"{report.report}/{table.id}" in names
    ]


def _unknown(name: str, known: set[str]) -> str:
    report = name.partition("/")[0]
    among = sorted(full for full in known if full.startswith(f"{report}/")) or sorted(known)
    same = sorted(full for full in known if name.zfill(3) == full or full.endswith(f"/{name}"))
    near = same or nearest(name, among)[:2]
    reports = ", ".join(sorted(full for full in known if "/" not in full))
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    return f"no published report or table is called {name!r}; {meant}reports: {reports}; perfsuite published lists all"


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
