"""All compared cases: effect and interval, the worst first; cases that passed are folded."""

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
    """Return charts and a table of the cases that changed, or of all cases where none did."""
    if not material.changes:
        return None
    effects = [one for one in material.changes if one.effect is not None]
    compared = sorted(effects, key=lambda one: (one.tone == "plain", -(one.effect or 0)))
    changed = [one for one in compared if one.tone != "plain"]
    drawn = (changed or compared)[: MOST_CHARTS * 2 * MOST_BARS]
    parts = [drawn[at : at + 2 * MOST_BARS] for at in range(0, len(drawn), 2 * MOST_BARS)]
    shown = _grid(changed or compared, "")
    charts = [_chart(part, None if index else shown, changed=bool(changed)) for index, part in enumerate(parts)]
    blocks: list[Block] = [Charts(charts=charts)] if charts else []
    if changed and (rest := [one for one in compared if one.tone == "plain"]):
        blocks.append(Table(grid=_grid(rest, "Unchanged or undecided cases"), folded=True))
    if apart := [(name_of(one.node), one.word) for one in material.changes if one.effect is None]:
        blocks.append(Table(grid=grid(("case", "reason"), apart, (), "Cases that were not compared")))
    return Section(key="comparison", title="Changes", blocks=blocks)


def _chart(changes: Sequence[CaseChange], shown: Grid | None, *, changed: bool) -> Chart:
    names = labels([bare_name(one.node).removeprefix("test_") for one in changes], 30)
    values = [
        {
            "row": row,
            "at": one.effect,
            "low": one.low,
            "high": one.high,
            "tone": one.tone,
            "tip": f"{bare_name(one.node)}: {change(one.effect or 0)} {one.between.strip()} {one.word}",
        }
        for row, one in zip(names, changes, strict=True)
    ]
    spec = rows.forest(values, names, "change of the time; right is slower")
    title = f"{'Changed' if changed else 'Compared'} cases"
    if shown is None:
        return Chart(title=f"{title}, continued", spec=spec)
    caption = "bars: 95 % intervals; a point without a bar is one run against one"
    return Chart(title=title, spec=spec, grid=shown, caption=caption)


def _grid(changes: Sequence[CaseChange], title: str) -> Grid:
    columns = ("case", "before", "after", "change", "95 % interval, %", "verdict", "evidence")
    cells = [
        (name_of(one.node), one.before, one.after, change(one.effect or 0), one.between.strip(), one.word, one.runs)
        for one in changes
    ]
    return grid(columns, cells, (), title)
