"""A rank, or the device behind it, that is the slowest in nearly every case: what a single case cannot tell."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from perfsuite.record.result import Result
from perfsuite.record.step import Lateness

FEWEST_CASES = 5
CHANCE = 1e-3
"""Probability with which equal ranks give one of them so many slowest places."""
_LEAST_SHARE = 0.8
_LEAST_EXCESS = 0.02


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """Who is slowest everywhere."""

    name: str
    """``device host cuda:3``, or ``rank 3`` where ranks share devices."""
    count: int
    of: int
    """Cases that it took part in."""
    excess: float
    """Median over its slowest places of its time over that of the other ranks, less 1."""
    worst_case: str
    """Where the excess is largest."""
    cases: tuple[str, ...]


def slowest_everywhere(results: Iterable[Result]) -> list[SlowRank]:
    """Who is slowest in at least four of five cases of the same ranks, more often than chance would have it."""
    places: dict[tuple[str, ...], list[tuple[str, str, float]]] = defaultdict(list)
    for result in results:
        late = result.lateness if result.outcome == "measured" and result.world_size > 1 else None
        if late is not None and len(late.ranks) > 1:
            names = _names(late)
            slowest, excess = _slowest(late, result)
            places[names].append((names[slowest], result.case, excess))
    told = (_told(names, members) for names, members in places.items())
    return [slow for slow in told if slow is not None]


def _names(late: Lateness) -> tuple[str, ...]:
    """What the ranks are called, in rank order."""
    if len({(host, device) for host, device, _ in late.ranks}) < len(late.ranks):
        return tuple(f"rank {rank} of {len(late.ranks)}" for rank in range(len(late.ranks)))
    several = len({host for host, _, _ in late.ranks}) > 1
    return tuple(f"device {f'{host} ' if several else ''}{device}" for host, device, _ in late.ranks)


def _slowest(late: Lateness, result: Result) -> tuple[int, float]:
    """Place of the slowest rank and how much longer it takes: of ranks that wait for each other, who comes last."""
    if late.arrival is not None and late.arrival[0] < len(late.ranks) and result.median_s > 0:
        return late.arrival[0], late.arrival[1] / result.median_s
    times = [median_s for _, _, median_s in late.ranks]
    slowest = max(range(len(times)), key=times.__getitem__)
    others = statistics.median(time for place, time in enumerate(times) if place != slowest)
    return slowest, times[slowest] / others - 1 if others > 0 else 0.0


def _told(names: tuple[str, ...], members: list[tuple[str, str, float]]) -> SlowRank | None:
    counts: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, case, excess in members:
        counts[name].append((excess, case))
    name, own = max(counts.items(), key=lambda item: len(item[1]))
    excess = statistics.median(excess for excess, _ in own)
    often = len(own) >= FEWEST_CASES and len(own) >= _LEAST_SHARE * len(members)
    if not often or excess < _LEAST_EXCESS or _at_least(len(own), len(members), 1 / len(names)) > CHANCE:
        return None
    return SlowRank(
        name=name,
        count=len(own),
        of=len(members),
        excess=excess,
        worst_case=max(own)[1],
        cases=tuple(case for _, case in own),
    )


def _at_least(count: int, of: int, chance: float) -> float:
    """Probability of ``count`` or more successes.

    >>> round(_at_least(5, 5, 0.5), 5)
    0.03125
    """
    return math.fsum(math.comb(of, hit) * chance**hit * (1 - chance) ** (of - hit) for hit in range(count, of + 1))
