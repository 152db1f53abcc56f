"""Tables of imported figures with the measured ones, each row with a label of its origin."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perfsuite.base.text import escaped, markdown_text
from perfsuite.base.units import format_bytes, plural, significant
from perfsuite.history.describe import commit_lines, head_lines, steps_between, where
from perfsuite.history.file import HistoryFile
from perfsuite.history.findings import Findings
from perfsuite.history.git import short
from perfsuite.imports.row import Imported, ImportedRow
from perfsuite.reports.document import Grid
from perfsuite.reports.ids import numbered
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.grids import markdown

SIZES = 8  # Sizes of an imported collective that are shown where nothing was measured here at the same size.
FIGURES = 24  # Figures of other kinds that are shown of a file.
NEVER = "imported figures are neither measured here nor published: never a baseline, never gated"
_OWN = re.compile(r"[-+\d., %\[\]]*")  # A figure with its interval, which cannot be a mark.
_COLLECTIVE = ("latency_us", "algbw_gb_per_s", "busbw_gb_per_s")


def imported_grids(files: Sequence[Imported], cases: Sequence[TableCase]) -> list[Grid]:
    """Return a table of collectives, with the measured ones of the same kind, and a table of all other figures."""
    return [grid for grid in (_collectives(files, cases), _others(files)) if grid.rows]


def foreign_markdown(grid: Grid) -> list[str]:
    """Return the grid as Markdown, with the text of imported files escaped."""
    rows = tuple(tuple(cell if _OWN.fullmatch(cell) else markdown_text(cell) for cell in row) for row in grid.rows)
    return markdown(dataclasses.replace(grid, rows=rows, notes=tuple(map(markdown_text, grid.notes))), level=2)


def label(row: ImportedRow) -> str:
    """``imported: nccl-tests, h200``."""
    return f"imported: {row.tool}{f', {escaped(row.platform)}' if row.platform else ''}"


def _collectives(files: Sequence[Imported], cases: Sequence[TableCase]) -> Grid:
    measured = [
        one for one in cases if one.values and "collective" in one.settings and "message_bytes" in one.parameters
    ]
    measured.sort(
        key=lambda one: (str(one.settings["collective"]), _size(one), str(one.parameters.get("dtype")), one.ranks)
    )
    sizes = {_size(case) for case in measured}
    rows: list[tuple[str, ...]] = []
    kinds: set[str] = set()
    notes = [NEVER]
    for imported in files:
        points = _points(imported.rows)
        kinds |= {first.collective for first, _ in points}
        shown = _chosen(points, sizes)
        rows += [_collective_row(first, figures) for first, figures in shown]
        if len(shown) < len(points):
            count = f"{len(shown)} of {plural(len(points), 'row')}"
            notes.append(f"{escaped(imported.source)}: {count}, out of place first")
    if rows:
        rows += [_measured_row(case) for case in measured if case.settings["collective"] in kinds]
    return Grid(
        title="Collectives of other tools and measured ones",
        columns=("label", "collective", "dtype", "ranks", "size", "time us", "algbw GB/s", "busbw GB/s", "convention"),
        rows=tuple(rows),
        notes=tuple(notes),
    )


_Point = tuple[ImportedRow, dict[str, float]]


def _points(rows: Iterable[ImportedRow]) -> list[_Point]:
    points: dict[tuple[str, str], _Point] = {}
    for row in rows:
        if row.collective and row.metric in _COLLECTIVE:
            _, figures = points.setdefault((row.name, row.settings.get("rank", "")), (row, {}))
            figures[row.metric] = row.value
    return list(points.values())


def _chosen(points: Sequence[_Point], sizes: set[float]) -> list[_Point]:
    """Return the out-of-place figures of measured sizes, and SIZES more at even distances."""
    whole = [point for point in points if point[0].settings.get("place", "out of place") == "out of place"]
    step = max(1, -(-len(whole) // SIZES))
    ends = {len(whole) - 1 - step * index for index in range(SIZES)}
    return [point for index, point in enumerate(whole) if index in ends or point[0].message_bytes in sizes]


def _collective_row(row: ImportedRow, figures: dict[str, float]) -> tuple[str, ...]:
    size = format_bytes(int(row.message_bytes)) if row.message_bytes and row.message_bytes % 1 == 0 else ""
    return (
        label(row),
        row.collective,
        escaped(row.dtype),
        str(row.ranks or ""),
        size or (f"{row.message_bytes:.4g}B" if row.message_bytes else ""),
        *(significant(figures[name]) if name in figures else "" for name in _COLLECTIVE),
        escaped(row.convention),
    )


def _size(case: TableCase) -> float:
    return float(case.parameters["message_bytes"])


def _measured_row(case: TableCase) -> tuple[str, ...]:
    return (
        f"measured: {case.platform}",
        str(case.settings["collective"]),
        str(case.parameters.get("dtype", "")),
        str(case.ranks),
        format_bytes(int(_size(case))),
        *(significant(case.values[name]) if name in case.values else "" for name in _COLLECTIVE),
        "nccl-tests",
    )


def _others(files: Sequence[Imported]) -> Grid:
    rows: list[tuple[str, ...]] = []
    notes = [NEVER]
    for imported in files:
        figures = [row for row in imported.rows if not row.collective]
        for row in figures[:FIGURES]:
            text = (escaped(row.name), row.metric, significant(row.value), row.unit, escaped(row.convention))
            rows.append((label(row), *text, f"{escaped(row.source)}:{row.line}"))
        if len(figures) > FIGURES:
            count = f"{FIGURES} of {len(figures)} figures"
            notes.append(f"{escaped(imported.source)}: {count}; perfsuite import --all prints every one")
    columns = ("label", "what", "metric", "value", "unit", "convention", "source")
    return Grid(title="Figures of other tools", columns=columns, rows=tuple(rows), notes=tuple(notes))


NAMED = 4  # Commits of a change that are named.


@dataclass(frozen=True, kw_only=True)
class OverTime:
    """A history and its findings."""

    history: HistoryFile
    findings: Findings


def history_grids(over_time: OverTime) -> list[Grid]:
    """Changes, accumulated changes and environment, those that are there; the first has the head's lines as notes."""
    history, findings = over_time.history, over_time.findings
    columns, rows = ("case", "change", "since"), tuple(_accumulated_rows(findings))
    sums = Grid(title="Over time: sums of small changes", columns=columns, rows=rows)
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
