"""The page of a fleet: verdict, nodes by quantities, devices of the named nodes, populations, and the rows used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from perfsuite.base.text import bare_name
from perfsuite.base.units import percent, plural, significant
from perfsuite.expectations.judge import Expected
from perfsuite.fleet.lines import fleet_lines
from perfsuite.fleet.nodes import Fleet
from perfsuite.fleet.standing import QuantityJudgement, Standings
from perfsuite.reports.document import Block, Chart, Charts, Item, Items, Section, Table, grid
from perfsuite.reports.page.charts.rows import heat_map
from perfsuite.statistics.robust import median

MOST_NODES = 100
"""Rows of the map of nodes: those that are named, then the slowest."""
MOST_DEVICES = 12
"""Nodes whose devices are drawn."""


def fleet_sections(standings: Standings, fleet: Fleet) -> list[Section]:
    """Everything that is known of a fleet, host names included: naming them is the purpose."""
    lines = list(fleet_lines(standings, fleet, most=200))
    tones = {"bad": "bad", "doubt": "doubt", "": "plain"}
    items = [Item(text=line.text, tone=tones[line.mark]) for line in lines]  # type: ignore[arg-type]
    sections = [Section(key="verdict", title="Verdict", blocks=[Items(items=items)])]
    order = _order(standings)
    if maps := _node_map(standings, order):
        sections.append(Section(key="nodes", title="Nodes and quantities", blocks=maps))
    if devices := list(_device_maps(standings)):
        sections.append(Section(key="devices", title="Devices of the named nodes", blocks=[Charts(charts=devices)]))
    if fleet.pairs:
        sections.append(Section(key="pairs", title="Pairs of nodes", blocks=list(_pairs(fleet))))
    sections.append(Section(key="standing", title="Standing of every node", blocks=[_standing(standings)]))
    sections.append(Section(key="populations", title="Populations", blocks=[_populations(standings)]))
    if used := _rows_used(fleet):
        sections.append(Section(key="rows", title="Expectations used", blocks=[used]))
    return sections


def _order(standings: Standings) -> list[str]:
    """Return the nodes, those that are not good first."""
    return sorted(standings.nodes, key=lambda name: (standings.nodes[name].passes, name))


def _away(judgement: QuantityJudgement) -> dict[str, float]:
    """Return by how much each node is slower than the median node of its population."""
    per_node = {node: median(list(devices.values())) for node, devices in judgement.values.items()}
    middle = median(list(per_node.values()))
    return {node: math.exp(value - middle) - 1 for node, value in per_node.items()}


def _node_map(standings: Standings, order: Sequence[str]) -> list[Block]:
    cells: dict[tuple[str, str], float] = {}
    for judgement in standings.judgements:
        for node, away in _away(judgement).items():
            cells[node, bare_name(judgement.quantity.case)] = away
    quantities = list(dict.fromkeys(quantity for _, quantity in cells))
    shown = order[:MOST_NODES]
    if not cells:
        return []
    chart = _chart("Nodes and quantities", cells, shown, quantities, ("node", "quantity"), standings)
    left = [f"{plural(len(order) - len(shown), 'more node')}: --json has all"] if len(order) > len(shown) else []
    rows = [(node, *(_text(cells.get((node, quantity))) for quantity in quantities)) for node in shown]
    return [Charts(charts=[chart]), Table(grid=grid(("node", *quantities), rows, left), folded=True)]


def _chart(  # noqa: PLR0917 - cells, their order and names
    title: str,
    cells: Mapping[tuple[str, str], float],
    first: Sequence[str],
    second: Sequence[str],
    titles: tuple[str, str],
    standings: Standings,
) -> Chart:
    values = []
    for node in first:
        for name in second:
            away = cells.get((node, name))
            absent = node in standings.nodes and standings.nodes[node].standing == "absent"
            text = _text(away) if away is not None else "absent" if absent else "-"
            values.append(
                {"first": node, "second": name, "away": away, "text": text, "told": f"{node}, {name}: {text}"}
            )
    caption = "slower than the median of the population; grey: absent or not measured"
    return Chart(title=title, spec=heat_map(values, first, second, titles), caption=caption)


def _text(away: float | None) -> str:
    return "-" if away is None else percent(away, signed=True)


def _device_maps(standings: Standings) -> Iterator[Chart]:
    """Yield a chart for each node with a slow device: its devices by the quantities that every device has."""
    named = [node.node for node in standings.nodes.values() if any(slow.member[1] for _, slow in node.slow)]
    for node in named[:MOST_DEVICES]:
        cells = {}
        for judgement in standings.judgements:
            devices = judgement.values.get(node, {})
            if judgement.devices is not None:
                for device, value in devices.items():
                    cells[device, bare_name(judgement.quantity.case)] = judgement.devices.slower(value)
        devices_there = list(dict.fromkeys(device for device, _ in cells))
        quantities = list(dict.fromkeys(quantity for _, quantity in cells))
        yield _chart(f"Devices of {node}", cells, devices_there, quantities, ("device", "quantity"), standings)


def _pairs(fleet: Fleet) -> Iterator[Block]:
    for case, times in fleet.pairs.items():
        middle = median(list(times.values())) if times else 0.0
        ordered = sorted(times.items(), key=lambda item: -item[1])
        rows = [(one, other, _text(math.exp(value - middle) - 1)) for (one, other), value in ordered[:MOST_NODES]]
        notes = [f"{plural(len(ordered) - len(rows), 'faster pair')} left out"] if len(ordered) > len(rows) else []
        yield Table(grid=grid(("node", "and node", "against the median pair"), rows, notes, bare_name(case)))


def _standing(standings: Standings) -> Table:
    rows = []
    for name in _order(standings):
        node = standings.nodes[name]
        worst = node.slow[0] if node.slow else None
        reason = node.reason
        if worst is not None:
            reason = f"{worst[1].member[1] or 'node'}: {bare_name(worst[0])} {_text(worst[1].slower)}"
        elif node.below:
            reason = node.below[0].reason
        rows.append((name, node.standing, reason))
    return Table(grid=grid(("node", "standing", "reason"), rows))


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
    rows = [
        (
            f"{entry.question} {entry.size}",
            row.kind,
            significant(row.low) if row.low == row.highest else f"{significant(row.low)} to {significant(row.highest)}",
            row.unit,
            row.date,
            row.software,
            row.source,
        )
        for entry in entries.values()
        for row in entry.rows
    ]
    columns = ("question", "kind", "figure", "unit", "date", "software", "source")
    return Table(grid=grid(columns, rows)) if rows else None
