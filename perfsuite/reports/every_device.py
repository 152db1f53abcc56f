"""One kernel on every device at once: the median device, the slowest, the spread, and who is out of line."""

from __future__ import annotations

from collections.abc import Iterable

from perfsuite.base.units import format_seconds, plural
from perfsuite.metrics.spec import devices_used
from perfsuite.record.result import Measurement, RankFacts, Result
from perfsuite.statistics.robust import median

_OUT_OF_LINE = 0.02
"""A device this much slower or faster than the median one is worth a look, where the others agree better."""
_DEVIATIONS = 4.0
_OF_NORMAL = 1.4826
"""Standard deviations in a median absolute deviation of normal values."""
_FEWEST = 3
"""Of two devices nobody can say which one is out of line."""


def every_device_lines(results: Iterable[Result]) -> list[str]:
    """A line for every case that ran the same kernel, without communication, on several devices."""
    return [
        f"{result.case}: {_line(result.measurement)}"
        for result in results
        if result.measurement is not None and _is_on_every_device(result, result.measurement)
    ]


def _is_on_every_device(result: Result, measurement: Measurement) -> bool:
    kernel = measurement.aligned and not result.work.collective and not (result.work.tokens or result.work.samples)
    alone = devices_used(measurement) == measurement.world_size > 1
    return kernel and alone and not measurement.smoke


def _line(measurement: Measurement) -> str:
    ranks = measurement.ranks
    middle_s = median([rank.median_s for rank in ranks])
    slowest = max(ranks, key=lambda rank: rank.median_s)
    text = (
        f"{plural(len(ranks), 'device')}, median {format_seconds(middle_s)}, slowest {_name(slowest, measurement)} "
        f"{format_seconds(slowest.median_s)} ({slowest.median_s / middle_s - 1:+.1%}), "
        f"spread {measurement.rank_spread:.1%}"
    )
    odd = [f"{_name(rank, measurement)} ({rank.median_s / middle_s - 1:+.1%})" for rank in outliers(ranks)]
    return f"{text}; out of line: {', '.join(odd)}" if odd else text


def outliers(ranks: Iterable[RankFacts]) -> list[RankFacts]:
    """Ranks whose median is 2 % and four robust standard deviations away from that of all, the farthest first."""
    known = list(ranks)
    if len(known) < _FEWEST:
        return []
    middle_s = median([rank.median_s for rank in known])
    sigma_s = _OF_NORMAL * median([abs(rank.median_s - middle_s) for rank in known])
    allowed_s = max(_OUT_OF_LINE * middle_s, _DEVIATIONS * sigma_s)
    odd = [rank for rank in known if abs(rank.median_s - middle_s) > allowed_s]
    return sorted(odd, key=lambda rank: -abs(rank.median_s - middle_s))


def _name(rank: RankFacts, measurement: Measurement) -> str:
    several = len({other.host for other in measurement.ranks}) > 1
    return f"{rank.host} {rank.device}" if several else rank.device
