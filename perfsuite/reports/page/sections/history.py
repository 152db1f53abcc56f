"""Performance over time: a chart of each case whose level changed, and the tables of a history."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfsuite.base.units import plural
from perfsuite.history.describe import steps_between, where
from perfsuite.history.findings import SUITE, Findings, HistoryChange
from perfsuite.history.git import short
from perfsuite.reports.beside_others import OverTime, history_grids
from perfsuite.reports.document import Block, Chart, Charts, Grid, Section, Table, Words, grid, grouped
from perfsuite.reports.ids import name_of
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts.look import time_unit
from perfsuite.reports.page.charts.rows import over_sessions

BESIDE_RUNS = 6  # Maximum charts of a history on the page of a run.
CAPTION = (
    "points: sessions, without the common shift of all cases; lines: levels; dashed: a level changed, with the commit; "
    "grey: a gradual change; triangles: the environment changed"
)


def section(material: Material) -> Section | None:
    """Return the section of the history of these runs; None without one."""
    return history_section(material.over_time, BESIDE_RUNS) if material.over_time is not None else None


def history_section(over_time: OverTime, most: int) -> Section:
    """Return the section of a history with at most ``most`` charts, the newest changes first."""
    by_case = grouped((change.case, change) for change in over_time.findings.changes)
    charts = [
        _chart(over_time.findings, case, changes[::-1], caption="" if index else CAPTION)
        for index, (case, changes) in enumerate(itertools.islice(by_case.items(), most))
    ]
    blocks: list[Block] = [Words(text=_sentence(by_case, len(charts)))]
    if charts:
        blocks.append(Charts(charts=charts))
    blocks += [Table(grid=grid(one.columns, one.rows, one.notes, one.title)) for one in history_grids(over_time)]
    return Section(key="history", title="Over time", blocks=blocks)


def _sentence(by_case: Mapping[str, Sequence[HistoryChange]], charts: int) -> str:
    cases = [case for case in by_case if case != SUITE]
    slower = sum(math.prod(change.ratio.value for change in by_case[case]) > 1 for case in cases)
    changed = f"{plural(len(cases), 'case')} changed: {slower} slower, {len(cases) - slower} faster"
    suite = "; the suite as a whole changed too" if SUITE in by_case else ""
    more = f"; {charts} are drawn, the newest first" if charts < len(by_case) else ""
    return f"{changed}{suite}{more}" if by_case else "These sessions show no change of a level"


@dataclass(frozen=True, kw_only=True)
class _Series:
    """One case over the sessions that measured it, oldest first."""

    rows: Sequence[int]  # Indices among the ordered sessions.
    values: Sequence[float]
    commits: Sequence[str]  # Short hashes; the day of a session without a commit.
    unit: str

    def place(self, row: int) -> int:
        """Return the place of an ordered session among these."""
        return bisect.bisect_left(self.rows, row)


def _series(findings: Findings, case: str) -> _Series:
    table = findings.table
    if case == SUITE:
        rows = [row for row, knows in enumerate(table.knows_shift) if knows]
        logs = [table.shifts[row] for row in rows]
        factor, unit = 1e2, "all cases, % of their middle"
    else:
        column = table.cases.index(case)
        rows, logs = table.rows_of(column), table.values_of(column)
        unit, unit_s = time_unit(math.exp(sorted(logs)[len(logs) // 2]))
        factor = 1 / unit_s
    sessions = [findings.ordered.sessions[row] for row in rows]
    return _Series(
        rows=rows,
        values=[math.exp(log) * factor for log in logs],
        commits=[short(one.revision.commit) if one.revision.commit else one.time[:10] for one in sessions],
        unit=unit,
    )


def _chart(findings: Findings, case: str, changes: Sequence[HistoryChange], caption: str) -> Chart:
    """Return the chart of one case; ``changes``: oldest first."""
    series = _series(findings, case)
    sessions = findings.ordered.sessions
    points = [
        {"at": index, "value": value, "tip": f"{commit} {sessions[row].time[:16]}: {value:.4g}"}
        for index, (row, commit, value) in enumerate(zip(series.rows, series.commits, series.values, strict=True))
    ]
    ends = [0, *(series.place(at) for change in changes for at, _ in change.steps), len(points)]
    levels = [
        {"begin": low - 0.5, "end": high - 0.5, "value": statistics.geometric_mean(series.values[low:high])}
        for low, high in itertools.pairwise(ends)
    ]
    marks = []
    for change in changes:
        begin, at = (series.place(row) - 0.5 for row in (change.at, change.until))
        label, tone = f"{_commits(series, change)} {change.ratio.percent}", "bad" if change.ratio.value > 1 else "good"
        marks.append({"begin": begin, "at": at, "tone": tone, "label": label, "tip": _tip(findings, change)})
    environment = [
        {"at": series.place(at) - 0.5, "tip": f"environment: {'; '.join(phrases)}"}
        for at, phrases in findings.environment
        if at <= series.rows[-1]
    ]
    return Chart(
        title=name_of(case),
        spec=over_sessions(points, levels, marks, environment, (series.commits, series.unit)),
        grid=_grid(findings, series, changes),
        caption=caption,
    )


def _commits(series: _Series, change: HistoryChange) -> str:
    ends = sorted({series.place(change.at), series.place(change.until)})
    return "..".join(series.commits[at][:7] for at in ends)


def _tip(findings: Findings, change: HistoryChange) -> str:
    place = (where(findings.ordered, change).rstrip(":"), steps_between(findings.ordered, change))
    return f"{change.ratio} {'; '.join(filter(None, place))}"


def _grid(findings: Findings, series: _Series, changes: Sequence[HistoryChange]) -> Grid:
    """Return a row per session, the newest first, with its changes."""
    tips = ((series.place(change.until), _tip(findings, change)) for change in changes)
    others = ((series.place(at), "environment: " + "; ".join(phrases)) for at, phrases in findings.environment)
    notes = grouped((*tips, *others))
    cells = [
        (findings.ordered.sessions[row].time[:16], commit, f"{value:.4g}", "; ".join(notes.get(index, ())))
        for index, (row, commit, value) in enumerate(zip(series.rows, series.commits, series.values, strict=True))
    ]
    return grid(("session", "commit", series.unit, "change"), cells[::-1])
