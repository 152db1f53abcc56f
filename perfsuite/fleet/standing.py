"""Judge every node: against the expectation, within its population, and for completeness."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import plural
from perfsuite.expectations.judge import Expected, differences_of
from perfsuite.expectations.rows import Expectation
from perfsuite.fleet.nodes import PRIORS, Fleet, FleetQuantity, NodeRun
from perfsuite.fleet.rule import FEWEST_GROUPS, Position, Slow, SlowLink, compare, level_of, slow_in_pairs, two_groups
from perfsuite.statistics.robust import median

Standing = Literal["absent", "below", "slow", "incomplete", "look", "not judged", "pass"]
ALIKE = 0.9  # Share of the judged nodes below expectation above which the cause is software, not a device.
FEWEST_ALIKE = 2
_FEWEST_NODES_OF_A_SUITE = 3
_WORLD_SIZE = re.compile(r"-ws\d+")


@dataclass(frozen=True, kw_only=True)
class QuantityJudgement:
    """One quantity of one population."""

    quantity: FleetQuantity
    population: int  # Index in :attr:`Standings.populations`.
    devices: Position | None
    nodes: Position | None
    slow: tuple[Slow, ...]
    values: Mapping[str, Mapping[str, float]]

    @property
    def is_judged(self) -> bool:
        """Return whether there were enough members on any level."""
        return self.devices is not None or self.nodes is not None

    @property
    def smallest(self) -> float:
        """Return the smallest slowdown that is reported on the finest level."""
        level = self.devices or self.nodes
        assert level is not None
        return level.smallest


@dataclass(frozen=True, kw_only=True)
class NodeStanding:
    """The verdict of one node."""

    node: str
    standing: Standing
    slow: tuple[tuple[str, Slow], ...] = ()  # Case and finding within the fleet.
    below: tuple[Expected, ...] = ()  # Findings against the expectation, without those that nearly every node has.
    looks: tuple[Expected, ...] = ()
    reason: str = ""  # Reason why the node is absent or incomplete.
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Return whether the node passes."""
        return self.standing in ("pass", "look")


@dataclass(frozen=True, kw_only=True)
class Standings:
    """The verdict of a fleet."""

    nodes: Mapping[str, NodeStanding]
    populations: tuple[tuple[Mapping[str, str], tuple[str, ...]], ...]  # Key and nodes of each, the largest first.
    judgements: tuple[QuantityJudgement, ...]
    alike: tuple[tuple[Expected, int, int], ...]
    """Findings of nearly every node: the entry of one node, the number of nodes below, the number of all."""
    groups: tuple[tuple[str, str, Slow], ...] = ()  # Group, case and finding of slow groups.
    links: tuple[SlowLink, ...] = ()  # Slow links between nodes that are not slow.
    modes: tuple[str, ...] = ()  # Sentences on two groups of nodes without a difference in a recorded key.
    missing_count: int = 0  # Number of absent nodes, if only a number of nodes is expected.
    notes: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        """Return whether all expected nodes are present, judged, and neither slow nor below expectation."""
        good = all(node.passes for node in self.nodes.values())
        return bool(self.nodes) and good and not (self.alike or self.groups or self.links or self.missing_count)


def judge_fleet(
    fleet: Fleet,
    rows: Sequence[Expectation],
    *,
    expected_nodes: Sequence[str] | int = 0,
    groups: Mapping[str, str] | None = None,
) -> Standings:
    """Judge every node. Raises ConfigurationError if most nodes have no quantity in common."""
    present = {name: runs for name, runs in fleet.nodes.items() if not runs[0].absent}
    populations = _populations(present)
    _refuse_mixed_suites(present, populations)
    judgements: list[QuantityJudgement] = []
    slow_groups: list[tuple[str, str, Slow]] = []
    modes: list[str] = []
    for index, (_, members) in enumerate(populations):
        for quantity, having in _shared(fleet, present, members):
            runs = {name: present[name] for name in having}
            judgement, slow = _judge(quantity, index, runs, rows, groups or {})
            judgements.append(judgement)
            slow_groups += [(group, quantity.case, found) for group, found in slow]
            modes += _two_modes(judgement)
    alike = _alike(present)
    found: dict[str, list[tuple[str, Slow]]] = defaultdict(list)
    for judgement in judgements:
        for each in judgement.slow:
            found[each.member[0]].append((judgement.quantity.case, each))
    judged = {name for one in judgements if one.is_judged for name in one.values}
    for case, times in fleet.pairs.items():
        judged |= {node for pair in times for node in pair}
        for each in slow_in_pairs(times):
            found[each.member[0]].append((case, each))
    lacking = _lacking(present, populations)
    nodes: dict[str, NodeStanding] = {
        name: _standing(
            name, fleet.nodes[name], slow=found[name], alike=alike, judged=name in judged, lacking=lacking.get(name, "")
        )
        for name in fleet.nodes
    }
    count, names = (expected_nodes, ()) if isinstance(expected_nodes, int) else (0, expected_nodes)
    for name in names:
        if name not in nodes:
            nodes[name] = NodeStanding(node=name, standing="absent", reason="no journal")
    unexpected = [name for name in fleet.nodes if names and name not in names]
    return Standings(
        nodes=nodes,
        populations=tuple(populations),
        judgements=tuple(judgements),
        alike=tuple(alike.values()),
        groups=tuple(slow_groups),
        links=fleet.links,
        modes=tuple(dict.fromkeys(modes)),
        missing_count=max(0, count - len(fleet.nodes)),
        notes=(*fleet.notes, *(f"{name} is not among the expected nodes" for name in unexpected)),
    )


def _populations(present: Mapping[str, tuple[NodeRun, ...]]) -> list[tuple[Mapping[str, str], tuple[str, ...]]]:
    by_key: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for name, runs in present.items():
        by_key[tuple(sorted(runs[0].key.items()))].append(name)
    return [(dict(key), tuple(names)) for key, names in sorted(by_key.items(), key=lambda item: -len(item[1]))]


def _refuse_mixed_suites(
    present: Mapping[str, tuple[NodeRun, ...]], populations: Sequence[tuple[Mapping[str, str], tuple[str, ...]]]
) -> None:
    for _, names in populations:
        if len(names) < _FEWEST_NODES_OF_A_SUITE:
            continue
        # A node with fewer devices has the cases of a smaller world size: it is incomplete, see _lacking.
        has = {name: {_WORLD_SIZE.sub("", case) for case in present[name][0].times} for name in names}
        counts = Counter(case for cases in has.values() for case in cases)
        usual = {case for case, count in counts.items() if 2 * count > len(names)}
        for name in names:
            run = present[name][0]
            if has[name] and not usual & has[name]:
                usual_cases = f"the {len(usual)} cases of most nodes" if usual else "its cases with most nodes"
                raise ConfigurationError(
                    f"{run.path} shares none of {usual_cases} (it has {min(run.times, default='none')}): journals of "
                    "different suites or scales are mixed; give journals of one command"
                )


def _shared(
    fleet: Fleet, present: Mapping[str, tuple[NodeRun, ...]], members: Sequence[str]
) -> Iterator[tuple[FleetQuantity, list[str]]]:
    """Yield every quantity of a population with its nodes; host-bound quantities by equal hardware."""
    for case in dict.fromkeys(case for name in members for case in present[name][0].times):
        by_host: dict[str, list[str]] = defaultdict(list)
        for name in members:
            if present[name][0].times.get(case):
                by_host[present[name][0].fingerprint if fleet.quantities[case].host_bound else ""].append(name)
        for alike in by_host.values():
            yield fleet.quantities[case], alike


def _judge(
    quantity: FleetQuantity,
    population: int,
    runs: Mapping[str, tuple[NodeRun, ...]],
    rows: Sequence[Expectation],
    groups: Mapping[str, str],
) -> tuple[QuantityJudgement, list[tuple[str, Slow]]]:
    fields = {**quantity.defaults, **quantity.parameters}
    own = [
        row
        for row in rows
        if row.kind == "own"
        and (row.workload, row.platform) == (quantity.workload, quantity.platform)
        and not differences_of(row, fields, defaults=quantity.defaults, ranks_per_node=quantity.ranks_per_node)
    ]
    learned = own[0].spread if own else None
    prior = learned or PRIORS[quantity.kind]
    values = {name: dict(each[0].times[quantity.case]) for name, each in runs.items()}
    again = {
        name: [run.times[quantity.case] for run in each[1:] if quantity.case in run.times]
        for name, each in runs.items()
    }
    slow: list[tuple[str, Slow]] = []
    if groups:
        slow, shifts = _slow_groups(values, groups, prior)

        def within(node: str, devices: Mapping[str, float]) -> dict[str, float]:
            return {name: value - shifts[groups[node]] for name, value in devices.items()}

        values = {node: within(node, devices) for node, devices in values.items()}
        again = {node: [within(node, run) for run in more] for node, more in again.items()}
    outliers, devices, nodes = compare(values, prior=prior, learned=learned is not None, again=again)
    judgement = QuantityJudgement(
        quantity=quantity, population=population, devices=devices, nodes=nodes, slow=outliers, values=values
    )
    return judgement, slow


def _slow_groups(
    values: Mapping[str, Mapping[str, float]], groups: Mapping[str, str], prior: float
) -> tuple[list[tuple[str, Slow]], dict[str, float]]:
    """Return the slow groups, and for each group the distance between its median and the median of all nodes."""
    per_node = {node: median(list(devices.values())) for node, devices in values.items()}
    per_group: dict[str, list[float]] = defaultdict(list)
    for node, value in per_node.items():
        per_group[groups[node]].append(value)
    middle = median(list(per_node.values()))
    medians = {group: median(members) for group, members in per_group.items()}
    shifts = {group: value - middle if len(per_group[group]) > 1 else 0.0 for group, value in medians.items()}
    if len(medians) < FEWEST_GROUPS:
        return [], shifts
    level = level_of(list(medians.values()), prior=prior)
    slow = [
        (group, Slow(member=(group, ""), slower=level.slower(value), deviations=level.deviations(value)))
        for group, value in medians.items()
        if len(per_group[group]) > 1 and level.is_slow(value)
    ]
    return slow, shifts


def _two_modes(judgement: QuantityJudgement) -> Iterator[str]:
    per_node = [median(list(devices.values())) for devices in judgement.values.values()]
    split = two_groups(per_node)
    if split is not None:
        apart, count = split
        yield (
            f"{judgement.quantity.case}: {count} of {len(per_node)} nodes are {100 * apart:.1f} % slower as a group "
            "that no recorded key explains; find the difference between them and compare them apart"
        )


def _alike(present: Mapping[str, tuple[NodeRun, ...]]) -> dict[tuple[str, str], tuple[Expected, int, int]]:
    """Return entries that are below expectation on nearly every node, by case and metric."""
    entries: dict[tuple[str, str], list[Expected]] = defaultdict(list)
    for runs in present.values():
        for entry in runs[0].expected:
            if entry.verdict != "not judged":
                entries[(entry.case, entry.metric.name)].append(entry)
    found = {}
    for key, judged in entries.items():
        below = [entry for entry in judged if entry.verdict == "below"]
        below.sort(key=lambda entry: entry.metric.value or 0)
        if len(judged) >= FEWEST_ALIKE and len(below) >= ALIKE * len(judged):
            found[key] = (below[len(below) // 2], len(below), len(judged))
    return found


def _lacking(
    present: Mapping[str, tuple[NodeRun, ...]], populations: Sequence[tuple[Mapping[str, str], tuple[str, ...]]]
) -> dict[str, str]:
    """Return the devices or cases that a node lacks and most nodes of its platform have."""
    found: dict[str, str] = {}
    by_platform: dict[str, list[str]] = defaultdict(list)
    for key, equal in populations:
        by_platform[key.get("platform", "").partition(" ")[0]] += equal
    for names in by_platform.values():
        counts = Counter(len(present[name][0].devices) for name in names)
        usual_devices = max(counts, key=lambda count: (counts[count], count))
        ports = Counter(port for name in names for port in present[name][0].ports)
        usual_ports = {port for port, count in ports.items() if 2 * count > len(names)}
        cases = Counter(case for name in names for case in present[name][0].times)
        usual = {case for case, count in cases.items() if 2 * count > len(names)} if len(names) > 1 else set()
        for name in names:
            run = present[name][0]
            if len(run.devices) < usual_devices:
                found[name] = f"{len(run.devices)} of {usual_devices} devices"
            elif dark := sorted(usual_ports - set(run.ports)):
                found[name] = f"lacks {len(dark)} of {len(usual_ports)} network ports of most nodes, as {dark[0]}"
            elif lost := sorted(usual - set(run.times)):
                reason = next((run.missing[case] for case in lost if case in run.missing), "not run")
                found[name] = f"{len(lost)} of {len(usual)} cases without a result, as {lost[0]}: {reason}"
            elif failed := [case for case, reason in run.missing.items() if reason.startswith("failed")]:
                found[name] = f"{plural(len(failed), 'case')} failed, as {failed[0]}: {run.missing[failed[0]]}"
    return found


def _standing(
    name: str,
    runs: Sequence[NodeRun],
    *,
    slow: Sequence[tuple[str, Slow]],
    alike: Mapping[tuple[str, str], object],
    judged: bool,
    lacking: str,
) -> NodeStanding:
    run = runs[0]
    if run.absent:
        return NodeStanding(node=name, standing="absent", reason=run.absent)
    entries = [entry for entry in run.expected if (entry.case, entry.metric.name) not in alike]
    below = _in_every_run(runs, [entry for entry in entries if entry.verdict == "below"])
    looks = tuple(entry for entry in entries if entry.verdict == "look")
    is_judged = judged or any(entry.verdict in ("pass", "look", "below") for entry in run.expected)
    applies: dict[Standing, object] = {
        "below": below,
        "slow": slow,
        "incomplete": lacking,
        "not judged": not is_judged,
        "look": looks,
    }
    return NodeStanding(
        node=name,
        standing=next((standing for standing, reason in applies.items() if reason), "pass"),
        slow=tuple(sorted(slow, key=lambda pair: -pair[1].slower)),
        below=below,
        looks=looks,
        reason=lacking,
        facts=run.facts,
    )


def _in_every_run(runs: Sequence[NodeRun], below: Iterable[Expected]) -> tuple[Expected, ...]:
    """Return the entries that are below expectation in all runs of a node that have their case."""
    better = {(entry.case, entry.metric.name) for run in runs[1:] for entry in run.expected if entry.verdict != "below"}
    return tuple(entry for entry in below if (entry.case, entry.metric.name) not in better)
