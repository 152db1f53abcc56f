"""Every case beside what it is compared with: effect and interval, the worst first, what passed folded."""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.base.text import bare_name
from perfsuite.base.units import change
from perfsuite.reports.changes import CaseChange
from perfsuite.reports.document import MOST_BARS, Block, Chart, Charts, Grid, Section, Table, grid
from perfsuite.reports.ids import name_of
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels

MOST_CHARTS = 2


def section(material: Material) -> Section | None:
    """Forests of what moved, then of the rest as far as there is room."""
    known = sorted((one for one in material.changes if one.effect is not None), key=_order)
    apart = [(name_of(one.node), one.word) for one in material.changes if one.effect is None]
    if not material.changes:
        return None
    moved = [one for one in known if one.tone != "plain"]
    drawn = (moved or known)[: MOST_CHARTS * 2 * MOST_BARS]
    charts = [
        _chart(drawn[at : at + 2 * MOST_BARS], "further" if at else "") for at in range(0, len(drawn), 2 * MOST_BARS)
    ]
    blocks: list[Block] = [Charts(charts=charts)] if charts else []
    if moved:
        blocks.append(Table(grid=_grid(moved, "What moved")))
    if rest := [one for one in known if one.tone == "plain"]:
        blocks.append(Table(grid=_grid(rest, "Not shown to have moved"), folded=True))
    if apart:
        blocks.append(Table(grid=grid(("case", "why"), apart, (), "Without a figure")))
    return Section(key="comparison", title="Comparison", blocks=blocks)


def _order(one: CaseChange) -> tuple[bool, float]:
    return one.tone == "plain", -(one.effect or 0)


def _chart(changes: Sequence[CaseChange], more: str) -> Chart:
    names = labels([bare_name(one.node).removeprefix("test_") for one in changes], 30)
    values = [
        {
            "row": row,
            "at": one.effect,
            "low": one.low,
            "high": one.high,
            "tone": one.tone,
            "told": f"{bare_name(one.node)}: {change(one.effect or 0)} {one.between.strip()} {one.word}",
        }
        for row, one in zip(names, changes, strict=True)
    ]
    title = f"Change, right is slower{', ' if more else ''}{more}"
    caption = "" if more else "bars are 95 % intervals; a point without one is unsure"
    return Chart(title=title, spec=rows.forest(values, names, "change of the time"), caption=caption)


def _grid(changes: Sequence[CaseChange], title: str) -> Grid:
    told = [
        (
            name_of(one.node),
            change(one.effect or 0),
            one.between.strip(),
            one.before,
            one.after,
            one.word,
            one.runs,
        )
        for one in changes
    ]
    return grid(("case", "change", "95 % interval, %", "before", "after", "verdict", "rests on"), told, (), title)
