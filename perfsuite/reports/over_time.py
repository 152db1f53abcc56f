"""A history as tables: changes with their commits, sums of small changes, and changes of the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from perfsuite.base.text import escaped
from perfsuite.history.describe import commit_lines, head_lines, steps_between, where
from perfsuite.history.file import HistoryFile
from perfsuite.history.findings import Findings
from perfsuite.history.git import short
from perfsuite.reports.document import Grid
from perfsuite.reports.ids import numbered

NAMED = 4
"""Commits of a change that are named."""


@dataclass(frozen=True, kw_only=True)
class OverTime:
    """A history and its findings."""

    history: HistoryFile
    findings: Findings


def history_grids(over_time: OverTime) -> list[Grid]:
    """Changes, accumulated changes and environment, those that are there; the first has the head's lines as notes."""
    history, findings = over_time.history, over_time.findings
    sums = Grid(
        title="Over time: sums of small changes",
        columns=("case", "change", "since"),
        rows=tuple(_accumulated_rows(findings)),
    )
    return [_changes(history, findings), *(grid for grid in (sums, _environment(findings)) if grid.rows)]


def _changes(history: HistoryFile, findings: Findings) -> Grid:
    rows, names = [], {session.host.name for session in history.sessions} - {""}
    hide = numbered(sorted(names, key=lambda name: (-len(name), name)))
    for change in findings.changes:
        commits = commit_lines(findings.ordered, change, NAMED)
        place = [where(findings.ordered, change).rstrip(":"), steps_between(findings.ordered, change)]
        text = "; ".join(filter(None, (*place, *commits, *change.environment)))
        rows.append((escaped(change.case), str(change.ratio), escaped(text)))
    return Grid(
        title="Over time: changes of level, newest first",
        columns=("case", "time after over before", "where"),
        rows=tuple(rows),
        notes=tuple(hide(escaped(line)) for line in head_lines(history, findings)),
    )


def _accumulated_rows(findings: Findings) -> Iterator[tuple[str, str, str]]:
    steps: Counter[str] = Counter()
    for change in findings.changes:
        steps[change.case] += len(change.steps)
    for one in findings.accumulated:
        if steps[one.case] == 1:  # the table of changes has this one step
            continue
        commit = short(findings.ordered.sessions[one.since].revision.commit)
        since = f"its best, reached at {commit}" if one.is_best else findings.since
        yield escaped(one.case), str(one.ratio), escaped(since)


def _environment(findings: Findings) -> Grid:
    sessions = findings.ordered.sessions
    return Grid(
        title="Over time: changes of the environment",
        columns=("since", "commit", "what"),
        rows=tuple(
            (
                escaped(sessions[at].time)[:16],
                escaped(short(sessions[at].revision.commit)),
                escaped("; ".join(phrases)),
            )
            for at, phrases in findings.environment
        ),
    )
