"""The page of a fleet: verdict, heat maps of nodes and of devices, populations, and the expectations used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from perfsuite.base.text import bare_name
from perfsuite.base.units import plural, significant
from perfsuite.expectations.judge import Expected
from perfsuite.fleet.lines import fleet_lines
from perfsuite.fleet.nodes import Fleet
from perfsuite.fleet.standing import Standings
from perfsuite.reports.document import Block, Chart, Charts, Grid, Item, Items, Section, Table, Words, grid
from perfsuite.reports.ids import short_name
from perfsuite.reports.page.charts.look import labels
from perfsuite.reports.page.charts.rows import heat_map
from perfsuite.statistics.robust import median

MOST_NODES = 100  # Maximum nodes of a map and of a table: nodes that do not pass come first.
MOST_DEVICES = 12  # Maximum nodes whose devices are drawn.
_CAPTION = (
    "difference from the median of the population; red: slower, blue: faster, full colour at 20 %; "
    "grey: absent or not measured"
)


def fleet_sections(standings: Standings, fleet: Fleet) -> list[Section]:
    """Return the sections; they name hosts, because a fleet's page is about its hosts."""
    lines = list(fleet_lines(standings, fleet, most=200))
    tones = {"bad": "bad", "doubt": "warn", "": "plain"}
    items = [Item(text=line.text, tone=tones[line.mark]) for line in lines[:-1]]  # type: ignore[arg-type]
    blocks: list[Block] = [Words(text=lines[-1].text, tone="plain" if standings.passes else "bad"), Items(items=items)]
    sections = [Section(key="verdict", title="Verdict", blocks=blocks)]
    order = sorted(standings.nodes, key=lambda name: (standings.nodes[name].passes, name))
    if maps := _node_map(standings, order):
        sections.append(Section(key="nodes", title="Nodes by quantity", blocks=maps))
    if devices := list(_device_maps(standings)):
        blocks = [Charts(charts=devices, wide=True)]
        sections.append(Section(key="devices", title="Devices of the slow nodes", blocks=blocks))
    if fleet.pairs:
        sections.append(Section(key="pairs", title="Pairs of nodes", blocks=list(_pairs(fleet))))
    sections.append(Section(key="standing", title="Nodes that do not pass", blocks=_standing(standings, order)))
    sections.append(Section(key="populations", title="Populations", blocks=[_populations(standings)]))
    if used := _rows_used(fleet):
        sections.append(Section(key="rows", title="Expectations used", blocks=[used]))
    return sections


def _node_map(standings: Standings, order: Sequence[str]) -> list[Block]:
    """Return the heat map of the slowdown of each node against the median node of its population."""
    cells = {}
    for judgement in standings.judgements:
        per_node = {node: median(list(devices.values())) for node, devices in judgement.values.items()}
        middle = median(list(per_node.values()))
        for node, value in per_node.items():
            cells[node, bare_name(judgement.quantity.case)] = math.exp(value - middle) - 1
    if not cells:
        return []
    shown = order[:MOST_NODES]
    chart = _chart("Time of each node against the median node", cells, shown, "node", standings)
    more = len(order) - len(shown)
    blocks: list[Block] = [Words(text=f"{plural(more, 'more node')}: --json prints all")] if more else []
    return [Charts(charts=[chart], wide=True), *blocks]


def _chart(
    title: str, cells: Mapping[tuple[str, str], float], first: Sequence[str], noun: str, standings: Standings
) -> Chart:
    """Return the heat map of ``first`` by the quantities in ``cells``, and its folded table."""
    quantities = list(dict.fromkeys(quantity for _, quantity in cells))
    names = labels([short_name(quantity) for quantity in quantities], 30)
    values = []
    for row in first:
        for quantity, name in zip(quantities, names, strict=True):
            away = cells.get((row, quantity))
            absent = row in standings.nodes and standings.nodes[row].standing == "absent"
            text = _text(away) if away is not None else "absent" if absent else "-"
            tip = f"{row}, {quantity}: {text}"
            values.append({"first": row, "second": name, "away": away, "text": text, "tip": tip})
    table = Grid(
        title="",
        columns=(noun, *names),
        rows=tuple((row, *(_text(cells.get((row, quantity))) for quantity in quantities)) for row in first),
    )
    return Chart(title=title, spec=heat_map(values, first, names, (noun, "")), grid=table, caption=_CAPTION)


def _text(away: float | None) -> str:
    return "-" if away is None else f"{round(100 * away, 1) + 0.0:+.1f} %"


def _device_maps(standings: Standings) -> Iterator[Chart]:
    slow = [node.node for node in standings.nodes.values() if any(found.member[1] for _, found in node.slow)]
    for node in slow[:MOST_DEVICES]:
        cells = {
            (device, bare_name(judgement.quantity.case)): judgement.devices.slower(value)
            for judgement in standings.judgements
            if judgement.devices is not None
            for device, value in judgement.values.get(node, {}).items()
        }
        devices = list(dict.fromkeys(device for device, _ in cells))
        yield _chart(f"Time of each device of {node} against the median device", cells, devices, "device", standings)


def _pairs(fleet: Fleet) -> Iterator[Block]:
    for case, times in fleet.pairs.items():
        middle = median(list(times.values())) if times else 0.0
        ordered = sorted(times.items(), key=lambda item: -item[1])
        rows = [(one, other, _text(math.exp(value - middle) - 1)) for (one, other), value in ordered]
        columns = ("node", "node 2", "time against the median pair")
        yield Table(grid=_cut(columns, rows, "faster pair", bare_name(case)))


def _cut(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], noun: str, title: str = "") -> Grid:
    left = len(rows) - MOST_NODES
    notes = (f"{plural(left, noun)} left out",) if left > 0 else ()
    return Grid(title=title, columns=columns, rows=tuple(rows[:MOST_NODES]), notes=notes)


def _standing(standings: Standings, order: Sequence[str]) -> list[Block]:
    rows = []
    for name in order:
        node = standings.nodes[name]
        worst = node.slow[0] if node.slow else None
        reason = node.reason
        if worst is not None:
            reason = f"{worst[1].member[1] or 'node'}: {bare_name(worst[0])} {_text(worst[1].slower)}"
        elif node.below:
            reason = node.below[0].reason
        if not node.passes or reason:
            rows.append((name, node.standing, reason))
    passing = sum(node.passes for node in standings.nodes.values())
    table: list[Block] = [Table(grid=_cut(("node", "standing", "reason"), rows, "more node"))] if rows else []
    return [*table, Words(text=f"{plural(passing, 'node')} of {len(order)} pass.")]


def _populations(standings: Standings) -> Table:
    names = list(dict.fromkeys(name for key, _ in standings.populations for name in key))
    rows = [
        (str(len(nodes)), *(key.get(name, "") or "unknown" for name in names), ", ".join(nodes[:6]))
        for key, nodes in standings.populations
    ]
    return Table(grid=grid(("nodes", *names, "such as"), rows))


def _rows_used(fleet: Fleet) -> Table | None:
    entries: dict[str, Expected] = {}
    for runs in fleet.nodes.values():
        for entry in runs[0].expected:
            if entry.rows:
                entries.setdefault(f"{entry.case} {entry.metric.name}", entry)
    rows = []
    for question, row in ((f"{entry.question} {entry.size}", row) for entry in entries.values() for row in entry.rows):
        figure = " to ".join(dict.fromkeys(map(significant, (row.low, row.highest))))
        rows.append((question, row.kind, figure, row.unit, row.date, row.software, row.source))
    columns = ("question", "kind", "figure", "unit", "date", "software", "source")
    return Table(grid=grid(columns, rows)) if rows else None
