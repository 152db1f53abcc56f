"""Selection of published reports and tables by name, and the recipes that run their rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from perfsuite.base.errors import ConfigurationError, nearest
from perfsuite.published.lookup import PublishedRun, rows, shipped
from perfsuite.published.recipes import Recipe, recipes
from perfsuite.published.records import PublishedReport, PublishedTable

Tables = Sequence[tuple[PublishedReport, PublishedTable]]


def table_of(row: PublishedRun) -> str:
    """Return the name of a row's table, as recipes have it: ``002/performance``."""
    return f"{row.report}/{row.table}"


def chosen(names: Sequence[str]) -> Tables:
    """Return the tables of these reports (``002``) or tables (``002/batch``) in the reports' order; all without a name.
    Raises ConfigurationError for an unknown name; the message lists the existing ones.
    """
    all_tables = [(report, table) for report in shipped() for table in report.tables]
    legal = {report.report for report, _ in all_tables} | {f"{one.report}/{table.id}" for one, table in all_tables}
    for name in names:
        if name not in legal:
            raise ConfigurationError(_unknown(name, legal))
    return [
        (report, table)
        for report, table in all_tables
        if not names or report.report in names or f"{report.report}/{table.id}" in names
    ]


def _unknown(name: str, legal: Collection[str]) -> str:
    report = name.partition("/")[0]
    among = sorted(full for full in legal if full.startswith(f"{report}/")) or sorted(legal)
    same = sorted(full for full in legal if name.zfill(3) == full or full.endswith(f"/{name}"))
    near = same or nearest(name, among)[:2]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    there = f"tables of report {report}: {', '.join(among)}; " if report in legal else ""
    reports = ", ".join(sorted(full for full in legal if "/" not in full))
    return (
        f"no published report or table is called {name!r}; {meant}{there}reports: {reports}; "
        "perfsuite published lists all"
    )


def tables_of_runs(names: Sequence[str]) -> tuple[str, ...]:
    """Return those of these tables with rows that are runs, in order; ConfigurationError for other names."""
    having = list(dict.fromkeys(map(table_of, rows(shipped()))))
    for name in names:
        if all(f"{report.report}/{table.id}" not in having for report, table in chosen([name])):
            report = name.partition("/")[0]
            there = [table for table in having if table.startswith(f"{report}/")]
            raise ConfigurationError(
                f"{name} has no row that is a run, so no case reproduces it; tables of report {report} with runs: "
                f"{', '.join(there)}"
            )
    tables = {f"{report.report}/{table.id}" for report, table in chosen(names)}
    return tuple(table for table in having if table in tables)


def rows_of(tables: Collection[str]) -> Iterator[PublishedRun]:
    """Yield the rows of these tables that are runs, in the reports' order, also those without a figure."""
    return (row for row in rows(shipped()) if table_of(row) in tables)


def recipes_of(row: PublishedRun) -> tuple[Recipe, ...]:
    """Return every recipe that runs a row; empty for a row that cannot be run."""
    return tuple(recipe for recipe in recipes() if (table_of(row), row.line) in recipe.rows)
