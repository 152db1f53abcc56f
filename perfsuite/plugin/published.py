"""Cases that reproduce rows of the published reports: the marker ``published`` and the option --perf-published."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.plugin import collisions

MARKER = "published"
_NAMED = 3  # Most tests to list if nothing was selected.


asked_key = pytest.StashKey[tuple[frozenset[str], str, bool]]()
"""Selected tables such as ``002/performance``; the option or ini key with its value; whether it is the option.

The option also deselects tests other than perf cases, the ini key does not.
"""


def configure(config: pytest.Config) -> None:
    """Read the selection.  Raises UsageError with the existing reports or tables for an unknown name."""
    option, ini = collisions.option(config, "perf_published"), collisions.ini(config, "perf_published")
    text = ini if option is None else option
    names = [name for name in (part.strip() for part in text.split(",")) if name] or [text] * bool(text)
    where, tables = "ini perf_published" if option is None else "--perf-published", frozenset[str]()
    if names:
        from perfsuite.published.lookup import tables_of_runs

        try:
            tables = frozenset(tables_of_runs(names))
        except ConfigurationError as error:
            raise pytest.UsageError(f"{where}: {error}") from None
    config.stash[asked_key] = (tables, f"{where}={text}", option is not None)


def platforms(config: pytest.Config) -> frozenset[str]:
    """Return the platforms of the selected rows."""
    tables, *_ = config.stash[asked_key]
    if not tables:
        return frozenset()
    from perfsuite.published.lookup import rows_of

    return frozenset(platform for row in rows_of(tables) for platform in row.platforms)


def select(
    config: pytest.Config, items: list[pytest.Item], cases: Sequence[pytest.Item], chosen: Collection[str]
) -> None:
    """Mark the ``cases`` that reproduce published rows, and deselect those that reproduce no selected row.

    On the ``chosen`` platforms, the session's own and those of the command line, a case reproduces rows of all
    platforms; on other platforms only rows of its platform.  Raises UsageError if no collected case reproduces a
    selected row.
    """
    asked, written, alone = config.stash[asked_key]
    if not asked and MARKER not in re.findall(r"\w+", config.getoption("markexpr") or ""):
        return
    tables = {case: _mark(case, chosen) for case in cases}
    if not asked or not (cases or alone):
        return
    if not any(asked & of for of in tables.values()):
        raise pytest.UsageError(_nothing(asked, written, len(cases)))
    kept = [item for item in items if (asked & tables[item] if item in tables else not alone)]
    there = set(kept)
    dropped = [item for item in items if item not in there]
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def _mark(case: pytest.Item, chosen: Collection[str]) -> frozenset[str]:
    from perfsuite.published.lookup import rows_of, table_of
    from perfsuite.reports.tables.published import rows_of_case

    own = rows_of_case(case.nodeid)
    mark = case.get_closest_marker("perf_platform")
    tables = frozenset(table for table, _ in own)
    if mark and mark.kwargs["name"] not in chosen:
        lines = ((table_of(row), row) for row in rows_of(tables) if mark.kwargs["name"] in row.platforms)
        tables = frozenset(table for table, row in lines if (table, row.line) in own)
    for table in sorted(tables):
        case.add_marker(pytest.mark.published(report=table.partition("/")[0], table=table))
    return tables


def _nothing(tables: frozenset[str], written: str, count: int) -> str:
    from perfsuite.base.text import listed
    from perfsuite.published.lookup import recipes_of, rows_of

    tests = list(dict.fromkeys(recipe.test for row in rows_of(tables) for recipe in recipes_of(row)))
    return (
        f"{written}: none of {plural(count, 'collected perf case')} reproduces a row of it; run "
        f"{listed(tests, _NAMED)}, at the full scale (--perf-scale=full)"
    )
