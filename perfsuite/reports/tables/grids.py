"""The tables of a style: a row per case with its published row below, then published rows of other hardware."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.text import code_text, escaped, padded
from perfsuite.base.units import GIB, readable_unit, significant
from perfsuite.gate.physics import speed_up_violation
from perfsuite.reports.document import Grid, grouped
from perfsuite.reports.ids import token_of, without_ranks
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.placement import PlacedLine, notes_of, placed, shared_out
from perfsuite.reports.tables.published import PublishedLine, id_of_row, plain_id, published_of
from perfsuite.reports.tables.recording import RATIOS, ReportCases
from perfsuite.reports.tables.spec import CASE, ColumnSpec, Style, TableSpec

# Why a cell of a measured case is empty.

_BUILD_OF: Mapping[str, str] = {
    "final_loss": "loss",
    "time_to_target_s": "loss",
    "communication_share": "exposed",
    "communication_overhead": "exposed",
}
_SOURCES: Mapping[str, str] = {
    "communication_share": "exposed_communication_percent",
    "communication_overhead": "exposed_communication_percent",
    "mfu_palm_percent": "mfu_percent",
}
"""Metrics that values of tables follow from."""


def why_empty(case: TableCase, key: str) -> str:
    """Why a measured case has no value for a column; empty when it has, or when nothing of it was measured."""
    if key in case.values or case.missing or (key == "over_base" and key not in case.reasons):
        return ""
    reason = case.reasons.get(_SOURCES.get(key, key), "")
    build = _BUILD_OF.get(key, "memory" if key.endswith("_gib") else "")
    ran = bool(build) and build in case.parameters.get("builds", ()) and key != "time_to_target_s"
    if reason and not (ran and reason == f"no {build} build was run"):
        return reason
    if ran:
        return f"the {build} build does not report it here"
    if key == "steps_per_epoch":
        return "synthetic data have no end"
    return f"the case has no {build} build" if build else "not measured by this case"


def grids_of(style: Style, material: ReportCases) -> Iterator[Grid]:
    """The tables that have a measured row, in the style's order."""
    for spec in style.tables:
        published = published_of(spec.published)
        ids = {id_of_row(line.table, line.line) for line in published}
        rows = list(spec.rows([case for case in material.cases if spec.select(case)]))
        there = {case.case for case in rows}
        rows += [case for case in material.cases if plain_id(case.case) in ids and case.case not in there]
        if not any(case.values for case in rows):
            continue
        named = (one.settings.get(spec.per) or one.settings.get("kernel", "") if spec.per else "" for one in rows)
        groups = grouped(zip(map(str, named), rows, strict=True))
        beside = shared_out(published, groups, spec.pair_by)
        for group in sorted({*groups, *beside}):
            title = f"{spec.title}: {group}" if group else spec.title
            yield _grid(title, spec, groups.get(group, ()), material, beside.get(group, ()))


def _grid(
    title: str, spec: TableSpec, cases: Sequence[TableCase], material: ReportCases, published: Sequence[PublishedLine]
) -> Grid:
    columns = [column for column in spec.columns if not column.optional or any(_cell(case, column) for case in cases)]
    if material.base and any(column.key == "speedup" for column in columns):
        at = [column.key for column in columns].index("speedup") + 1
        columns.insert(at, ColumnSpec(title=f"times {material.base}, same ranks", key="over_base"))
    least: dict[str, int] = {}
    for case in cases:
        series = without_ranks(case.case)
        least[series] = min(case.ranks, least.get(series, case.ranks))
    ordered = sorted(cases, key=lambda case: _order(case, columns, least))
    lines = placed(published, ordered, spec.pair_by, material.rest)
    columns = _readable(_told_apart(columns, ordered), ordered, lines)
    platforms = {case.platform for case in ordered}
    below = [row.after if platforms & set(row.line.run.platforms) else len(ordered) for row in lines]
    placed_rows = [
        (index, (*(_cell(case, column, columns) for column in columns), case.missing))
        for index, case in enumerate(ordered)
    ]
    for row, place in zip(lines, below, strict=True):
        placed_rows.append((place, (*(_published_cell(row.line, column) for column in columns), row.missing)))
    rows = [cells for _, cells in sorted(placed_rows, key=lambda placed: placed[0])]  # stable: cases come first
    remarks = any(row[-1] for row in rows)
    shown = {column.key: column.title for column in columns if column.value}
    doubts = (*_doubts(ordered, shown), *_empty(ordered, columns))
    return Grid(
        title=title,
        columns=(*(column.title for column in columns), *(["not measured because"] if remarks else [])),
        rows=tuple(row if remarks else row[:-1] for row in rows),
        notes=(*spec.notes, *spec.remarks(ordered), *doubts, *notes_of(lines, shown)),
    )


def _told_apart(columns: Sequence[ColumnSpec], cases: Sequence[TableCase]) -> list[ColumnSpec]:
    """Return the columns, with the cases' names before the first value if two rows have equal settings."""
    settings = [column for column in columns if not column.value]
    rows = [tuple(_cell(case, column) for column in settings) for case in cases]
    if len(set(rows)) == len(rows):
        return list(columns)
    at = next((index for index, column in enumerate(columns) if column.value), len(columns))
    return [*columns[:at], CASE, *columns[at:]]


def _readable(
    columns: Sequence[ColumnSpec], cases: Sequence[TableCase], rows: Sequence[PlacedLine]
) -> list[ColumnSpec]:
    """The columns of sizes in one unit, that in which all their figures, published ones among them, read best."""
    keys = [column.key for column in columns if column.in_gib]
    published = [figure.metric_value for row in rows for key, figure in row.line.figures.items() if key in keys]
    sizes = [*(case.values.get(key, 0.0) for case in cases for key in keys), *published]
    unit, unit_bytes = readable_unit([size * GIB for size in sizes])
    return [
        dataclasses.replace(column, title=column.title.replace("GiB", unit), scale=GIB / unit_bytes)
        if column.in_gib
        else column
        for column in columns
    ]


def _order(case: TableCase, columns: Sequence[ColumnSpec], least: Mapping[str, int]) -> tuple[Any, ...]:
    """Platforms apart; then columns left of the layout, the ranks, and the settings right of it; numbers by size.

    Where a table has speed-ups, the cases that they are counted over stand together: first the series with the fewest
    ranks, of which ``least`` has the number.
    """
    keys = [column.key for column in columns if not column.value]
    at = keys.index("layout") if "layout" in keys else 0
    left, right = keys[:at], keys[at + 1 :]
    scales, series = any(column.key in RATIOS for column in columns), without_ranks(case.case)
    return (
        case.platform,
        case.fingerprint,
        *(_sortable(case, key) for key in left),
        *((least[series], series) if scales else ()),
        case.ranks,
        *(_sortable(case, key) for key in right),
        case.case,
    )


def _sortable(case: TableCase, key: str) -> tuple[int, float, str]:
    value = case.settings.get(f"{key}_order", case.settings.get(key))
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    return (1, 0.0, str(value or ""))


def _cell(case: TableCase, column: ColumnSpec, columns: Sequence[ColumnSpec] = ()) -> str:
    if column is CASE:
        return token_of(case.case, case.platform)
    if not column.value:
        return _setting(case.settings.get(column.key), column)
    number = case.values.get(column.key)
    if number is None:
        return ""
    if column.key not in case.bases:
        return f"{significant(number * column.scale)}{_interval(case, column)}"
    return f"{significant(number * column.scale, 3)}{_over(case, column, columns)}"


def _over(case: TableCase, column: ColumnSpec, columns: Sequence[ColumnSpec]) -> str:
    """Return the base of a ratio, for the first ratio of a row only."""
    if column.key != next((other.key for other in columns if other.key in RATIOS), column.key):
        return ""
    return " (base)" if case.ranks == case.base_ranks else f" vs {case.bases[column.key]}"


def _setting(value: object, column: ColumnSpec) -> str:
    if column.scale != 1 and isinstance(value, (int, float)):
        return significant(value * column.scale)
    return "" if value is None else str(value)


def _interval(case: TableCase, column: ColumnSpec) -> str:
    ends = [case.values.get(f"{column.key}_{end}") for end in ("low", "high")]
    low, high = (None if end is None else significant(end * column.scale, 2) for end in ends)
    return "" if low is None or high is None or low == high else f" ({low} to {high})"


def _published_cell(line: PublishedLine, column: ColumnSpec) -> str:
    if column.key == "layout":
        return line.name
    if not column.value:
        return _setting(line.setting(column.key), column)
    figure = line.figures.get(column.key)
    if figure is None:
        label = line.run.out_of_memory.get(column.key)
        return f"OOM [{label}]" if label else ""
    return f"{significant(figure.metric_value * column.scale)} [{figure.label}]"


def _empty(cases: Sequence[TableCase], columns: Sequence[ColumnSpec]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for column in columns:
        measured = [case for case in cases if case.values] if column.value else []
        for reason in dict.fromkeys(filter(None, (why_empty(case, column.key) for case in measured))):
            count = sum(why_empty(case, column.key) == reason for case in measured)
            whole = f"empty: {{}}: {reason}" if count == len(measured) else f"empty in {count} rows: {{}}: {reason}"
            reasons.setdefault(whole.replace("1 rows", "1 row"), []).append(column.title)
    for text, titles in reasons.items():
        yield text.replace("{}", "; ".join(titles))


def _doubts(cases: Sequence[TableCase], shown: Mapping[str, str]) -> Iterator[str]:
    """Yield doubts about speed-ups: ranks that share a device, or a speed-up above linear."""
    if not {*RATIOS} & set(shown):
        return
    if any(case.shared for case in cases):
        yield "ranks share one device: a linear speed-up is impossible"
    for case in cases:
        speed_up = case.values.get("speedup")
        if speed_up is not None and (above := speed_up_violation(speed_up, case.ranks, case.base_ranks)):
            yield f"{above}, look at the base: {code_text(case.case)}"


_FIGURE = re.compile(r"-?[\d.]+(e-?\d+)?( \[[MRX?]+\])?( vs .*| \(base\))?")  # A figure, its label, its base.


_TAG_OR_LINK = re.compile(r"<(?=[A-Za-z/!?])|(?<!\\)\](?=\()")


_NEITHER = {"<": "&lt;", "]": "]\\"}


def markdown(grid: Grid, level: int = 3) -> list[str]:
    r"""The grid as lines of Markdown, ending with an empty one.

    >>> print("\n".join(markdown(Grid(title="T", columns=("card", "x/s"), rows=(("1 x 8", "12.5"),)))))
    ### T
    <BLANKLINE>
    | card  |  x/s |
    | ----- | ---: |
    | 1 x 8 | 12.5 |
    <BLANKLINE>
    """
    table = [[escape(cell) for cell in row] for row in (grid.columns, *grid.rows)]
    widths = [max(3, *(len(padded(row[index])) for row in table)) for index in range(len(grid.columns))]
    right = [_is_right(grid.rows, index) for index in range(len(grid.columns))]
    lines = [f"{'#' * level} {escape(grid.title)}", ""]
    table.insert(1, ["-" * (width - 1) + "-:"[to_right] for width, to_right in zip(widths, right, strict=True)])
    for row in table:
        cells = []
        for cell, width, to_right in zip(row, widths, right, strict=True):
            room = " " * (width - len(padded(cell)))
            cells.append(room + cell if to_right else cell + room)
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {escape(note)}" for note in grid.notes]
    return [*lines, "", *notes, *([""] if notes else [])]


def escape(text: str) -> str:
    r"""Text for one cell or list item, which is neither a tag nor a link.

    >>> print(escape("a | b <i>[c](d)"))
    a \| b &lt;i>[c]\(d)
    """
    return _TAG_OR_LINK.sub(lambda match: _NEITHER[match[0]], escaped(" ".join(text.split()))).replace("|", "\\|")


def _is_right(rows: Sequence[Sequence[str]], column: int) -> bool:
    cells = [row[column] for row in rows if row[column]]
    return bool(cells) and all(_FIGURE.fullmatch(cell) for cell in cells)
