"""A rank, or its device, that is the slowest in nearly every case."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfsuite.record.result import Measurement, RankFacts, Result

FEWEST_CASES = 5
CHANCE = 1e-3
"""Probability with which equal ranks give one of them so many slowest places."""
_LEAST_SHARE = 0.8
_LEAST_EXCESS = 0.02


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank or device that is the slowest in nearly every case."""

    name: str
    """``device host cuda:3``, or ``rank 3`` where ranks share devices."""
    count: int
    of: int
    """Cases with this rank."""
    excess: float
    """Median over its slowest places of its time over that of the other ranks, less 1."""
    worst_case: str
    """Where the excess is largest."""
    cases: tuple[str, ...]


def slowest_everywhere(results: Iterable[Result]) -> list[SlowRank]:
    """Return ranks that are slowest in at least four of five cases of the same ranks, more often than by chance."""
    places: dict[tuple[str, ...], list[tuple[str, str, float]]] = defaultdict(list)
    for result in results:
        measurement = result.measurement if result.outcome == "measured" and result.world_size > 1 else None
        if measurement is not None and len(measurement.ranks) > 1:
            ranks = sorted(measurement.ranks, key=lambda rank: rank.rank)
            names = _names(ranks)
            slowest, excess = _slowest(ranks, measurement)
            places[names].append((names[slowest], result.case, excess))
    found = (_told(names, members) for names, members in places.items())
    return [slow for slow in found if slow is not None]


def _names(ranks: Sequence[RankFacts]) -> tuple[str, ...]:
    if len({(rank.host, rank.device) for rank in ranks}) < len(ranks):
        return tuple(f"rank {place} of {len(ranks)}" for place in range(len(ranks)))
    several = len({rank.host for rank in ranks}) > 1
    return tuple(f"device {f'{rank.host} ' if several else ''}{rank.device}" for rank in ranks)


def _slowest(ranks: Sequence[RankFacts], measurement: Measurement) -> tuple[int, float]:
    """Return the slowest rank and its excess; of ranks that wait for each other, the one that comes last."""
    arrival = measurement.arrival
    if arrival is not None and arrival.late_rank < len(ranks) and measurement.median_s > 0:
        return arrival.late_rank, arrival.lag_s / measurement.median_s
    times = [rank.median_s for rank in ranks]
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
