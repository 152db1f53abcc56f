"""Rules that find slow members of a fleet, and slow nodes in rounds of disjoint pairs.

A member is slow if it is 3 % and six robust standard deviations slower than the median. The spread is 1.4826 times the
median absolute deviation of log times, shrunk towards a prior: few members say little about their spread.

A node is slow if all but one of its pairs are slower than the median pair, by 3 % and by two robust standard deviations
of all pairs. Messages of a busy host scatter by more than 3 %. A pair is as slow as its slower node, so one slow
partner or congestion must not make a node slow.

Error rates by simulation: ``benchmarks/fleet_truth.py``, docs acceptance-evidence.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfsuite.metrics.pairs import SLOW_LINK, beyond_ends, log_times, log_times_again, message_times_s
from perfsuite.record.result import Result
from perfsuite.statistics.robust import MAD_TO_SIGMA, median

SLOWER_THAN = 0.03  # Smallest relative slowdown that is reported, for any spread.
DEVIATIONS = 6.0
"""Robust standard deviations. The tails of healthy devices are unknown; with t5 tails four of them report one node in
14."""
AGAIN = 0.9  # Share of both limits that a second look must reach; the second look was not selected for being slow.
PRIOR_WEIGHT = 8.0  # Weight of the prior spread in independent members.
NODE_VARIANCE = 0.3  # Share of the healthy variance that devices of a node have in common (assumed).
_OF_MEDIAN = math.pi / 2  # Ratio of the variance of a median to the variance of a mean, for normal values.
DETECTED_AT = 7.0
"""Spreads from which a slow member is reported in about 80 % (six, and its own position among the healthy)."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Centre and spread of a population in one quantity, in logarithms of seconds."""

    middle: float
    spread: float
    count: int

    @property
    def smallest(self) -> float:
        """Return the smallest relative slowdown that is reported in about 80 %.

        >>> round(Position(middle=0.0, spread=0.01, count=100).smallest, 3)
        0.073
        """
        return max(SLOWER_THAN, math.exp(DETECTED_AT * self.spread) - 1)

    def slower(self, value: float) -> float:
        """Return the relative slowdown against the middle: 0.05 means 5 % longer."""
        return math.exp(value - self.middle) - 1

    def deviations(self, value: float) -> float:
        """Return the distance of a value above the middle, in spreads."""
        return (value - self.middle) / self.spread

    def is_slow(self, value: float, share: float = 1.0) -> bool:
        """Return whether a value exceeds ``share`` of both limits."""
        away = value - self.middle
        return away > share * math.log1p(SLOWER_THAN) and away > share * DEVIATIONS * self.spread


def level_of(values: Sequence[float], *, prior: float, independent: float | None = None) -> Position:
    """Return the position of at least one value; ``independent`` is the equivalent number of independent members.

    >>> healthy = level_of([0.0, 0.01, -0.01, 0.005, -0.005, 0.2], prior=0.01)
    >>> round(healthy.middle, 4), round(healthy.spread, 4), healthy.is_slow(0.2), healthy.is_slow(0.04)
    (0.0025, 0.0105, True, False)
    """
    middle = median(values)
    spread = MAD_TO_SIGMA * median([abs(value - middle) for value in values])
    count = len(values) if independent is None else independent
    shrunk = math.sqrt((PRIOR_WEIGHT * prior**2 + count * spread**2) / (PRIOR_WEIGHT + count))
    return Position(middle=middle, spread=shrunk, count=len(values))


def node_prior(prior: float, devices: int) -> float:
    """Return the prior spread of the median device of nodes with so many devices each.

    >>> round(node_prior(0.01, 8), 4), node_prior(0.01, 1)
    (0.0066, 0.01)
    """
    if devices <= 1:
        return prior
    return prior * math.sqrt(NODE_VARIANCE + (1 - NODE_VARIANCE) * _OF_MEDIAN / devices)


APART = 0.01  # Smallest relative distance between two groups of nodes that is reported.
FEWEST_DEVICES, FEWEST_NODES, FEWEST_NODES_WITH_PRIOR, FEWEST_GROUPS = 4, 8, 4, 4
"""Fewest members to judge devices, nodes, nodes with an own row's spread, and groups."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A slow member in one quantity."""

    member: tuple[str, str]  # Node and device; the device is empty for the node as a whole.
    slower: float  # Relative to the median of its population.
    deviations: float


def compare(
    values: Mapping[str, Mapping[str, float]],
    *,
    prior: float,
    learned: bool = False,
    again: Mapping[str, Sequence[Mapping[str, float]]] | None = None,
) -> tuple[tuple[Slow, ...], Position | None, Position | None]:
    """Judge the log times of a quantity by node and device; a node's own value has an empty device.

    Return the slow members, and the positions of devices and of nodes; None with too few, or for whole nodes.

    ``learned``: the prior is of this site's own row. ``again``: values of further runs by node; a member is slow only
    if it is slow in all of them. A device is not repeated if its whole node is equally slow.
    """
    later = again or {}
    each = [value for devices in values.values() for name, value in devices.items() if name]
    per_node = {node: median(list(devices.values())) for node, devices in values.items() if devices}
    largest = max((len(devices) for devices in values.values()), default=1)
    alike = 2 if largest > 1 else 1
    devices = nodes = None
    if len(each) >= FEWEST_DEVICES:
        devices = level_of(each, prior=prior, independent=len(each) / alike)
    fewest = FEWEST_NODES_WITH_PRIOR if learned else FEWEST_NODES
    if len(per_node) >= fewest and (largest > 1 or devices is None):
        own_prior = node_prior(prior, largest)
        nodes = level_of([*per_node.values()], prior=own_prior, independent=len(per_node) / alike)
    slow = []
    for node, own in values.items():
        whole = 0.0
        if nodes is not None and node in per_node and nodes.is_slow(per_node[node]):
            runs = [median(list(run.values())) for run in later.get(node, ()) if run]
            if all(nodes.is_slow(value, AGAIN) for value in runs):
                whole = nodes.slower(per_node[node])
                slow.append(Slow(member=(node, ""), slower=whole, deviations=nodes.deviations(per_node[node])))
        for name, value in own.items():
            if not name or devices is None or not devices.is_slow(value):
                continue
            runs = [run[name] for run in later.get(node, ()) if name in run]
            beyond = devices.slower(value)
            if all(devices.is_slow(run, AGAIN) for run in runs) and not (whole and beyond < whole + SLOWER_THAN):
                slow.append(Slow(member=(node, name), slower=beyond, deviations=devices.deviations(value)))
    return tuple(slow), devices, nodes


def two_groups(values: Sequence[float]) -> tuple[float, int] | None:
    """Return the distance of two groups of node medians and the size of the slower one; None for one group.

    The best split by the variance between the groups counts from 64 nodes on, with Ashman's D above 4, more than 1 %
    distance, and 5 % and three nodes on each side (Ashman, Bird and Zepf 1994, Astronomical Journal 108).

    >>> two_groups([0.0, 0.001, 0.002, 0.003] * 16) is None
    True
    >>> apart, count = two_groups([0.0, 0.001, 0.002, 0.003] * 16 + [0.05, 0.051] * 8)
    >>> round(apart, 3), count
    (0.049, 16)
    """
    ordered, count = sorted(values), len(values)
    if count < 64:
        return None
    sums, squares = [0.0], [0.0]
    for value in ordered:
        away = value - ordered[0]
        sums.append(sums[-1] + away)
        squares.append(squares[-1] + away * away)

    def moments(first: int, last: int) -> tuple[float, float]:
        mean = (sums[last] - sums[first]) / (last - first)
        return mean, max((squares[last] - squares[first]) / (last - first) - mean * mean, 0.0)

    least = max(3, math.ceil(0.05 * count))
    best = max(
        range(least, count - least + 1),
        key=lambda cut: cut * (count - cut) * (moments(0, cut)[0] - moments(cut, count)[0]) ** 2,
    )
    (low, below), (high, above) = moments(0, best), moments(best, count)
    apart = high - low
    within = math.sqrt(below + above)
    is_split = apart * math.sqrt(2) > 4 * within and apart > APART
    return (apart, count - best) if is_split else None


DEVIATIONS_OF_PAIRS = 2.0
FEWEST_PARTNERS = 3  # Fewest partners of a judged node.

NodePair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A slow link between two devices that are not slow themselves."""

    case: str
    ends: tuple[str, str]  # Host and device of each.
    slower: float  # Relative excess over the usual time of both ends in the first round.
    again: float  # The same in the median of the further tries.


def slow_links(result: Result) -> list[SlowLink]:
    """Return the suspected links of the rounds of pairs that were equally slow in further tries."""
    assert result.measurement is not None
    measurement = result.measurement
    times, ranks = log_times(measurement), {rank.rank: rank for rank in measurement.ranks}
    tried, at_first = log_times_again(measurement), beyond_ends(times)
    if not tried or not at_first:
        return []
    again = beyond_ends(times, tried)
    middle = median(list(times.values()))
    spread = MAD_TO_SIGMA * median([abs(value - middle) for value in times.values()])
    least = max(math.log1p(SLOW_LINK), DEVIATIONS_OF_PAIRS * spread)
    found = []
    for (one, other), away in again.items():
        if away > least:
            first, second = (f"{ranks[rank].host} {ranks[rank].device}" for rank in (one, other))
            slower = math.exp(at_first[one, other]) - 1
            found.append(SlowLink(case=result.case, ends=(first, second), slower=slower, again=math.exp(away) - 1))
    return sorted(found, key=lambda link: -link.again)


def node_pairs(result: Result) -> dict[NodePair, float]:
    """Return the log seconds of a message by pair of hosts: the median over the devices of the pair."""
    assert result.measurement is not None
    host_of = {rank.rank: rank.host for rank in result.measurement.ranks}
    found: dict[NodePair, list[float]] = defaultdict(list)
    for (one, other), time_s in message_times_s(result.measurement).items():
        first, second = sorted((host_of[one], host_of[other]))
        if first != second and time_s > 0:
            found[first, second].append(math.log(time_s))
    return {pair: median(values) for pair, values in found.items()}


def slow_in_pairs(times: Mapping[NodePair, float]) -> list[Slow]:
    """Return the nodes of which all pairs but one are slow.

    >>> times = {("a", "b"): 0.2, ("a", "c"): 0.2, ("a", "d"): 0.2, ("b", "c"): 0.0, ("b", "d"): 0.0, ("c", "d"): 0.01}
    >>> [(slow.member, round(slow.slower, 2)) for slow in slow_in_pairs({**times, ("b", "e"): 0.0, ("c", "e"): 0.0})]
    [(('a', ''), 0.22)]
    """
    if not times:
        return []
    middle = median(list(times.values()))
    spread = MAD_TO_SIGMA * median([abs(value - middle) for value in times.values()]) or 1e-3
    by_node: dict[str, list[float]] = defaultdict(list)
    for pair, value in times.items():
        for node in pair:
            by_node[node].append(value - middle)
    slow = []
    for node, away in by_node.items():
        second = sorted(away)[1] if len(away) >= FEWEST_PARTNERS else 0.0
        if second > max(math.log1p(SLOWER_THAN), DEVIATIONS_OF_PAIRS * spread):
            usual = median(away)
            slow.append(Slow(member=(node, ""), slower=math.exp(usual) - 1, deviations=usual / spread))
    return sorted(slow, key=lambda one: -one.slower)
