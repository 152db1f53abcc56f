"""Find slow nodes from rounds of disjoint pairs: all but one of their pairs are slower than the median pair.

Slower means by 3 % and by two robust standard deviations of all pairs, because messages of a busy host scatter by more
than 3 %. A pair is as slow as its slower node, so one slow partner or congestion must not make a node slow. Error rates
by simulation: ``benchmarks/fleet_truth.py``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from perfsuite.fleet.rule import SLOWER_THAN, Slow
from perfsuite.metrics.pairs import SLOW_LINK, beyond_ends, log_times, log_times_again, message_times_s
from perfsuite.record.result import Result
from perfsuite.statistics.robust import MAD_TO_SIGMA, median

DEVIATIONS_OF_PAIRS = 2.0
FEWEST_PARTNERS = 3
"""Fewest partners of a judged node."""

NodePair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A slow link between two devices that are not slow themselves."""

    case: str
    ends: tuple[str, str]
    """Host and device of each."""
    slower: float
    """Relative excess over the usual time of both ends in the first round."""
    again: float
    """The same in the median of the further tries."""


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
