"""Messages between every two ranks: how their times stand in a record, and which pairs are slower than their like.

Each pair's messages are a span of the step, named after the two ranks and the number of messages, so that journals hold
the whole matrix.  Pairs are compared with those over the same kind of link alone.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from perfsuite.base.units import gb_per_s, seconds_to_us
from perfsuite.metrics.collective import LATENCY_FLOOR_US, link_of
from perfsuite.metrics.spec import MetricSpec, MetricValue, unknown
from perfsuite.record.result import Measurement, Peaks, Work

Pair = tuple[int, int]  # The rank that sends and the rank that receives.

_NAME = re.compile(r"rank (\d+) (to|and) (\d+), (\d+) messages")
_RULES = ((12, 0.05, 2.0), (3, 0.25, 3.0))
"""Of so many like pairs those are out of line that take longer than all others by a gap of this share of the usual time
and of so many times the distance between the fastest and the slowest of the others."""


def name_of(pair: Pair, messages: int, *, both: bool) -> str:
    """Name of the span of a pair's messages: one after the other, or at the same time in both directions.

    >>> name_of((0, 3), 8, both=False)
    'rank 0 to 3, 8 messages'
    """
    return f"rank {pair[0]} {'and' if both else 'to'} {pair[1]}, {messages} messages"


def message_times_s(measurement: Measurement) -> dict[Pair, float]:
    """Seconds of a message by pair, the median of the slower of its ranks; empty where no span is of a pair.  Two that
    send to each other at the same time are two pairs of one time.
    """
    times_s: dict[Pair, float] = {}
    for span in measurement.spans:
        if named := _NAME.fullmatch(span.name):
            source, way, target, messages = named.groups()
            time_s = span.slowest_s / int(messages)
            times_s[int(source), int(target)] = time_s
            if way == "and":
                times_s[int(target), int(source)] = time_s
    return times_s


SLOW_LINK = 0.05  # Share of time beyond the usual one of both its ends from which on a link is suspected.
_PARTNERS = 3  # Partners from which on the usual time of a rank is known.
_AGAIN = re.compile(r"rank (\d+) and (\d+) again")


def log_times(measurement: Measurement) -> dict[Pair, float]:
    """Log seconds of a message by pair, each pair once, the lower rank first; of those that have a time."""
    times_s = message_times_s(measurement).items()
    return {pair: math.log(time_s) for pair, time_s in times_s if pair[0] < pair[1] and time_s > 0}


def name_again(pair: Pair) -> str:
    """Name of the record of a suspected pair's time, tried again."""
    return f"rank {pair[0]} and {pair[1]} again"


def log_times_again(measurement: Measurement) -> dict[Pair, float]:
    """Log seconds of the suspected pairs that were tried again, by pair."""
    found = ((_AGAIN.fullmatch(record.name), record.value) for record in measurement.records)
    return {(int(match[1]), int(match[2])): math.log(value) for match, value in found if match and value > 0}


def beyond_ends(times: Mapping[Pair, float], logs: Mapping[Pair, float] | None = None) -> dict[Pair, float]:
    """By how much pairs take longer than both their ends usually do, as logarithms; empty for few partners.

    ``times`` define the usual time; ``logs`` are the pairs to examine, by default the same.  A slow rank is slow
    with all its partners, a slow link with one.

    >>> times = {(0, 1): 0.0, (0, 2): 0.0, (0, 3): 0.3, (1, 2): 0.0, (1, 3): 0.0, (2, 3): 0.0}
    >>> {pair: away for pair, away in beyond_ends(times).items() if away > 0}
    {(0, 3): 0.3}
    """
    partners: dict[int, list[float]] = {}
    for pair, value in times.items():
        for rank in pair:
            partners.setdefault(rank, []).append(value)
    if not times or min(map(len, partners.values())) < _PARTNERS:
        return {}
    middle = statistics.median(times.values())
    usual = {rank: max(statistics.median(values), middle) for rank, values in partners.items()}
    return {pair: value - max(usual[rank] for rank in pair) for pair, value in (logs or times).items()}


@dataclass(frozen=True, kw_only=True)
class SlowPair:
    """A pair that takes longer than those over links like its own."""

    pair: Pair
    link: str  # Kind of its link.
    time_s: float
    usual_s: float  # Median of those that are not.

    @property
    def factor(self) -> float:
        """How many times longer."""
        return self.time_s / self.usual_s


def slow_pairs(times_s: Mapping[Pair, float], links: Mapping[Pair, str]) -> list[SlowPair]:
    """Pairs out of line among those over the same kind of link, the slowest first.

    They are the slower ones beyond a gap, at most half: one slow device is in half of the pairs of four.

    >>> times = {(0, 1): 1.0, (1, 0): 1.0, (0, 2): 1.01, (2, 0): 2.5, (1, 2): 1.0, (2, 1): 0.99}
    >>> [(slow.pair, slow.factor) for slow in slow_pairs(times, {})]
    [((2, 0), 2.5)]
    """
    groups: dict[str, list[Pair]] = {}
    for pair in sorted(times_s, key=times_s.__getitem__):
        groups.setdefault(links.get(pair, ""), []).append(pair)
    slow = []
    for link, members in groups.items():
        first = _gap([times_s[pair] for pair in members])
        usual_s = statistics.median(times_s[pair] for pair in members[:first])
        slow += [SlowPair(pair=pair, link=link, time_s=times_s[pair], usual_s=usual_s) for pair in members[first:]]
    return sorted(slow, key=lambda one: (-one.factor, one.pair))


def _gap(sorted_s: Sequence[float]) -> int:
    """Where, in the slower half of sorted times, those out of line begin; their number where none is."""
    count = len(sorted_s)
    _, share, distances = next((rule for rule in _RULES if count >= rule[0]), (0, math.inf, math.inf))
    for first in range((count + 1) // 2, count):
        others = sorted_s[:first]
        needed_s = max(share * statistics.median(others), distances * (others[-1] - others[0]))
        if sorted_s[first] - others[-1] > needed_s:
            return first
    return count


Choose = Callable[[Iterable[float]], float]
_TOLERANCE, _SLOWEST_TOLERANCE = 0.10, 0.25
"""A pair is one part of the round that is timed; the slowest of several scatters as the tail of the samples does."""
_NONE = "the workload sent no messages between pairs"


def _time(work: Work, measurement: Measurement, peaks: Peaks, *, choose: Choose) -> MetricValue:
    times_s = message_times_s(measurement).values()
    return MetricValue(value=seconds_to_us(choose(times_s))) if times_s else unknown(_NONE)


def _rate(work: Work, measurement: Measurement, peaks: Peaks, *, choose: Choose) -> MetricValue:
    times_s = [time_s for time_s in message_times_s(measurement).values() if time_s > 0]
    if not times_s or not work.message_bytes:
        return unknown(_NONE)
    peak, note = link_of(measurement, peaks)
    return MetricValue(value=gb_per_s(work.message_bytes, choose(times_s)), peak=peak, note=note)


METRICS = (
    MetricSpec("pair_us", "us", "lower", "back to back", partial(_time, choose=statistics.median),
               tolerance=_TOLERANCE, absolute_floor=LATENCY_FLOOR_US,
               doc="Time of a message from one rank to another, the median pair's; several follow each other."),
    MetricSpec("slowest_pair_us", "us", "lower", "back to back", partial(_time, choose=max),
               tolerance=_SLOWEST_TOLERANCE, absolute_floor=LATENCY_FLOOR_US,
               doc="The same of the slowest pair."),
    MetricSpec("pair_gb_per_s", "GB/s", "higher", "per direction", partial(_rate, choose=statistics.median),
               tolerance=_TOLERANCE,
               doc="Message over its time, the median pair's, 1e9 bytes per second; of both directions the one."),
    MetricSpec("slowest_pair_gb_per_s", "GB/s", "higher", "per direction", partial(_rate, choose=max),
               tolerance=_SLOWEST_TOLERANCE,
               doc="The same of the slowest pair."),
)  # fmt: skip
