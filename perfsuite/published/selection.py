"""Reports and tables by the names that users give them, and the recipes that run their rows."""

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

    Raises ConfigurationError for an unknown name; the message lists those that exist.
    """
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


def _unknown(name: str, known: Collection[str]) -> str:
    report = name.partition("/")[0]
    among = sorted(full for full in known if full.startswith(f"{report}/")) or sorted(known)
    same = sorted(full for full in known if name.zfill(3) == full or full.endswith(f"/{name}"))
    near = same or nearest(name, among)[:2]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    there = f"tables of report {report}: {', '.join(among)}; " if report in known else ""
    reports = ", ".join(sorted(full for full in known if "/" not in full))
    return (
        f"no published report or table is called {name!r}; {meant}{there}reports: {reports}; "
        "perfsuite published lists all"
    )


def tables_of_runs(names: Sequence[str]) -> tuple[str, ...]:
    """Return the tables among these whose rows are of runs, in the reports' order.

    Raises ConfigurationError for an unknown name, and for one that no row of a run belongs to.
    """
    having = list(dict.fromkeys(map(table_of, rows(shipped()))))
    for name in names:
        if all(f"{report.report}/{table.id}" not in having for report, table in chosen([name])):
            report = name.partition("/")[0]
            there = [table for table in having if table.startswith(f"{report}/")]
            raise ConfigurationError(
                f"{name} has no row of a run, so no case reproduces it; tables of report {report} that have: "
                f"{', '.join(there)}"
            )
    tables = {f"{report.report}/{table.id}" for report, table in chosen(names)}
    return tuple(table for table in having if table in tables)


def rows_of(tables: Collection[str]) -> Iterator[PublishedRun]:
    """Yield the rows of these tables that are of a run, in the reports' order, those without a figure included."""
    return (row for row in rows(shipped()) if table_of(row) in tables)


def recipes_of(row: PublishedRun) -> tuple[Recipe, ...]:
    """Return every recipe that runs a row; none for a row that nobody can run."""
    return tuple(recipe for recipe in recipes() if (table_of(row), row.line) in recipe.rows)
