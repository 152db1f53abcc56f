"""Print the verdict of a fleet as text and JSON, and write own expectations from it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import bare_name, listed, printable
from perfsuite.base.units import format_bytes, percent, plural, significant
from perfsuite.expectations.judge import AnswerLine, Expected
from perfsuite.fleet.nodes import Fleet, FleetQuantity
from perfsuite.fleet.rule import FEWEST_NODES, Slow, level_of
from perfsuite.fleet.standing import NodeStanding, Standing, Standings

_NAMED = 6  # Most absent nodes and quantities in one line.
_SLOW = 3  # Most quantities in the line of a slow device.
_LABEL = 13


def fleet_lines(standings: Standings, fleet: Fleet, *, most: int = 40) -> Iterator[AnswerLine]:
    """Yield the screen: nodes, populations, judged quantities, a line per finding, and the verdict."""
    yield _line("fleet", _counted(standings))
    yield from (_line("populations", text) for text in _population_lines(standings))
    yield _line("judged", _judged(standings, fleet))
    for text in standings.notes:
        yield _line("note", text)
    for text in standings.modes:
        yield _line("two groups", text, mark="doubt")
    for group, case, slow in standings.groups:
        yield _line("SLOW", f"group {group}: {bare_name(case)} {_slower(slow)}", mark="bad")
    for entry, below, of in standings.alike:
        who = f"all {of} nodes" if below == of else f"{below} of {of} nodes"
        text = f"{who}: {entry.question} {entry.size}: {_figure(entry)}: every node alike: software, not a device"
        yield _line("BELOW", text, mark="bad")
    for link in standings.links:
        change = f"{percent(link.slower, signed=True)} time, {percent(link.again, signed=True)} when tried again"
        yield _line("SLOW", f"link {' - '.join(link.ends)}: {bare_name(link.case)} {change}", mark="bad")
    findings = [line for node in standings.nodes.values() for line in _node_lines(node, fleet)]
    yield from findings[:most]
    if len(findings) > most:
        yield _line("", f"and {len(findings) - most} more findings: --json has all", mark="bad")
    good = [node.node for node in standings.nodes.values() if node.passes]
    yield _line("pass", plural(len(good), "node"))
    yield AnswerLine(text="PASS") if standings.passes else AnswerLine(text=f"FAIL: {_why(standings)}", mark="bad")


def _line(label: str, text: str, mark: Any = "") -> AnswerLine:
    return AnswerLine(text=f"{label:<{_LABEL}}{printable(text, 1000)}", mark=mark)


def _counted(standings: Standings) -> str:
    absent = [node for node in standings.nodes.values() if node.standing == "absent"]
    total = len(standings.nodes) + standings.missing_count
    names = [f"{node.node} ({node.reason})" for node in absent]
    if standings.missing_count:
        names.append(f"{plural(standings.missing_count, 'node')} without a journal")
    tail = f"; absent: {listed(names, _NAMED)}" if names else ""
    devices = standings.populations[0][0].get("accelerator", "") if standings.populations else ""
    return f"{total - len(absent) - standings.missing_count} of {plural(total, 'node')}, {devices or 'cpu'}{tail}"


def _population_lines(standings: Standings) -> Iterator[str]:
    """Yield one line if all nodes have one key, else the differing keys and a line for each population."""
    populations = standings.populations
    if len(populations) == 1:
        yield f"1 ({plural(len(populations[0][1]), 'node')})"
        return
    names = dict.fromkeys(name for key, _ in populations for name in key)
    differing = [name for name in names if len({key.get(name, "") for key, _ in populations}) > 1]
    yield f"{len(populations)}, compared apart; they differ in {', '.join(differing)}:"
    for key, nodes in populations:
        facts = "; ".join(f"{name} {key.get(name) or 'unknown'}" for name in differing)
        yield f"  {plural(len(nodes), 'node')} ({listed(list(nodes), 3)}): {facts}"


def _judged(standings: Standings, fleet: Fleet) -> str:
    entries = [entry for runs in fleet.nodes.values() for entry in runs[0].expected]
    asked = {entry.question for entry in entries}
    by_row = {entry.question for entry in entries if entry.verdict != "not judged"}
    within = [one for one in standings.judgements if one.is_judged]
    smallest: dict[str, float] = {}
    for one in within:
        name = bare_name(one.quantity.case)
        smallest[name] = max(smallest.get(name, 0.0), one.smallest)
    ordered = sorted(smallest.items(), key=lambda pair: -pair[1])
    listing = listed([f"{name} {percent(value)}" for name, value in ordered], _NAMED)
    cases = {one.quantity.case for one in standings.judgements}
    text = (
        f"{len(by_row)} of {plural(len(asked), 'question')} by expectation, "
        f"{len({one.quantity.case for one in within})} of {len(cases)} quantities within the fleet"
    )
    text = f"{text}; smallest slowdown named: {listing}" if listing else text
    unjudged = {bare_name(one.quantity.case): len(one.values) for one in standings.judgements if not one.is_judged}
    if not unjudged:
        return text
    few = listed([f"{name} ({plural(count, 'node')})" for name, count in unjudged.items()], _NAMED)
    return f"{text}; too few equal nodes, it takes {FEWEST_NODES}: {few}"


def _node_lines(node: NodeStanding, fleet: Fleet) -> Iterator[AnswerLine]:
    by_device: dict[str, list[tuple[str, Slow]]] = defaultdict(list)
    for case, slow in node.slow:
        by_device[slow.member[1]].append((case, slow))
    runs = fleet.nodes.get(node.node, ())
    looks = f"; second look: slow in all {len(runs)} runs" if len(runs) > 1 else ""
    for device, found in by_device.items():
        uuid = runs[0].devices.get(device, "") if runs else ""
        who = " ".join(filter(None, [node.node, device or "node", uuid]))
        slowest = ", ".join(f"{bare_name(case)} {_slower(slow)}" for case, slow in found[:_SLOW])
        more = f" and {len(found) - _SLOW} more" if len(found) > _SLOW else ""
        facts = f"; {node.facts[device]}" if device in node.facts else ""
        yield _line("SLOW", f"{who}: {slowest}{more}{looks}{facts}", mark="bad")
    for entry in node.below:
        yield _line("BELOW", f"{node.node}: {entry.question} {entry.size}: {_figure(entry)}", mark="bad")
    if node.standing == "incomplete":
        yield _line("INCOMPLETE", f"{node.node}: {node.reason}", mark="bad")
    for entry in node.looks:
        yield _line("look", f"{node.node}: {entry.question} {entry.size}: {_figure(entry)}", mark="doubt")
    if node.standing == "not judged":
        yield _line("not judged", f"{node.node}: no expectation, and too few equal nodes", mark="doubt")


def _slower(slow: Slow) -> str:
    return f"{percent(slow.slower, signed=True)} time (z {slow.deviations:.1f})"


def _figure(entry: Expected) -> str:
    return f"{significant(entry.metric.value or 0.0)} {entry.metric.unit}, {entry.reason}"


def _why(standings: Standings) -> str:
    counts = Counter(node.standing for node in standings.nodes.values())
    counts["absent"] += standings.missing_count
    bad: tuple[Standing, ...] = ("absent", "below", "slow", "incomplete", "not judged")
    parts = [f"{counts[name]} {name}{' expectation' * (name == 'below')}" for name in bad if counts[name]]
    parts += [f"{plural(len(standings.alike), 'question')} below expectation on all nodes"] * bool(standings.alike)
    parts += [f"{plural(len({group for group, *_ in standings.groups}), 'group')} slow"] * bool(standings.groups)
    parts += [f"{plural(len(standings.links), 'link')} slow"] * bool(standings.links)
    return ", ".join(parts) or "no node"


def fleet_json(standings: Standings, fleet: Fleet) -> dict[str, Any]:
    """Return the verdict of the fleet as plain values."""

    def plain(entry: Expected) -> dict[str, Any]:
        return {
            "case": entry.case, "metric": entry.metric.name, "value": entry.metric.value, "unit": entry.metric.unit,
            "verdict": entry.verdict, "low": entry.low, "high": entry.high, "reason": entry.reason,
            "sources": [row.source for row in entry.rows],
        }  # fmt: skip

    def found(case: str, slow: Slow) -> dict[str, Any]:
        node, device = slow.member
        runs = fleet.nodes.get(node, ())
        uuid = runs[0].devices.get(device, "") if runs else ""
        figures = {"slower": slow.slower, "deviations": slow.deviations}
        return {"case": case, "device": device, "uuid": uuid, **figures}

    return {
        "passes": standings.passes,
        "nodes": {
            name: {
                "standing": node.standing,
                "reason": node.reason,
                "slow": [found(case, slow) for case, slow in node.slow],
                "below": [plain(entry) for entry in node.below],
                "look": [plain(entry) for entry in node.looks],
                "journals": [str(run.path) for run in fleet.nodes.get(name, ())],
            }
            for name, node in standings.nodes.items()
        },
        "nodes_without_name": standings.missing_count,
        "populations": [{"key": dict(key), "nodes": list(nodes)} for key, nodes in standings.populations],
        "quantities": [
            {
                "case": one.quantity.case, "population": one.population, "judged": one.is_judged,
                "nodes": len(one.values),
                "smallest_slowdown": one.smallest if one.is_judged else None,
                "device_spread": one.devices.spread if one.devices else None,
                "node_spread": one.nodes.spread if one.nodes else None,
            }
            for one in standings.judgements
        ],
        "every_node_alike": [{**plain(entry), "nodes": below, "of": of} for entry, below, of in standings.alike],
        "slow_groups": [{"group": group, "case": case, "slower": slow.slower, "deviations": slow.deviations}
                        for group, case, slow in standings.groups],
        "slow_links": [dataclasses.asdict(link) for link in standings.links],
        "two_groups": list(standings.modes),
        "notes": list(standings.notes),
    }  # fmt: skip


FEWEST_TO_LEARN = 4  # Fewest nodes of a population from which expectations are made.


def own_rows(standings: Standings, fleet: Fleet, date: str) -> list[str]:
    """Return the lines of a TOML file with an own row for each quantity of the largest population.  Low and high are
    the median over nodes that pass or get a look. Raises ConfigurationError while the fleet is below a shipped row, and
    for fewer than four such nodes: a slow fleet would make slowness normal.
    """
    if standings.alike:
        entry, below, of = standings.alike[0]
        raise ConfigurationError(
            f"--write-expectations: {below} of {of} nodes are below a known figure ({entry.question}: {entry.reason}); "
            "find the cause first: expectations made of a slow fleet would make slowness normal"
        )
    key, members = standings.populations[0] if standings.populations else ({}, ())
    good = [name for name in members if standings.nodes[name].passes]
    if len(good) < FEWEST_TO_LEARN:
        raise ConfigurationError(
            f"--write-expectations: {plural(len(good), 'node')} of the largest population pass; it takes "
            f"{FEWEST_TO_LEARN} to know their spread"
        )
    lines = [f"# Made of {plural(len(good), 'node')} by perfsuite fleet --write-expectations on {date}."]
    written: set[tuple[object, ...]] = set()
    for case, quantity in fleet.quantities.items():
        values = [fleet.nodes[name][0].values[case] for name in good if fleet.nodes[name][0].values.get(case, 0) > 0]
        if not quantity.metric or len(values) < FEWEST_TO_LEARN:
            continue
        row = (quantity.workload, str(_said(quantity)), quantity.ranks_per_node, quantity.metric)
        if row in written:
            lines += ["", f"# Left out: {printable(case)}: another case has the same row."]
        elif odd := [name for name, value in _said(quantity).items() if not isinstance(value, (bool, int, float, str))]:
            lines += ["", f"# Left out: {printable(case)}: a row cannot have its {odd[0]}."]
        else:
            written.add(row)
            lines += _row_lines(quantity, values, key, date)
    return lines


def _row_lines(quantity: FleetQuantity, values: Sequence[float], key: Mapping[str, str], date: str) -> Iterable[str]:
    level = level_of([math.log(value) for value in values], prior=0.01)
    parameters = ", ".join(f"{name} = {_toml(name, value)}" for name, value in _said(quantity).items())
    middle = float(f"{math.exp(level.middle):.5g}")
    yield ""
    yield "[[expectation]]"
    yield f'platform = "{quantity.platform}"'
    yield f'workload = "{quantity.workload}"'
    yield f"parameters = {{ {parameters} }}"
    yield f"ranks_per_node = {quantity.ranks_per_node}"
    yield f'metric = "{quantity.metric}"'
    yield f'unit = "{quantity.unit}"'
    yield 'kind = "own"'
    yield f"low = {middle}"
    yield f"high = {middle}"
    yield f"spread = {level.spread:.4f}"
    if key.get("software"):
        yield f"software = {_quoted(key['software'])}"
    yield f'date = "{date}"'
    yield f"source = {_quoted(f'{len(values)} nodes of this site')}"


def _said(quantity: FleetQuantity) -> Mapping[str, Any]:
    """Return the parameters with other values than the defaults."""
    missing = object()
    return {name: value for name, value in quantity.parameters.items() if quantity.defaults.get(name, missing) != value}


def _toml(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and isinstance(value, int):
        return f'"{format_bytes(value)}"'
    if isinstance(value, (int, float)):
        return str(value)
    return _quoted(str(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
