"""What small changes add up to: the newest level beside that at a tag, and beside the best that there was."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from perfsuite.history.ratio import Ratio
from perfsuite.history.series import SeriesTable
from perfsuite.statistics.change_points import LEAST_CHANGE, Levels
from perfsuite.statistics.student import t_quantile

LEVEL = 5
"""Sessions whose mean is the level at an end of a history, at a tag and at its best."""
_ALPHA = 0.05
"""Probability that any case of an unchanged history is told to have accumulated something."""
_DOF = 30


@dataclass(frozen=True, kw_only=True)
class Accumulated:
    """What a case's time came to since some session, small changes included; only where that is sure."""

    case: str
    ratio: Ratio
    since: int
    """Index among the ordered sessions of the last session of the level compared with."""
    is_best: bool
    """Compared with the best level that there was; otherwise with that at the tag or revision asked for."""


def accumulated(
    table: SeriesTable, levels: Mapping[str, Levels], cases: Sequence[str], until: int
) -> Iterator[Accumulated]:
    """Where the newest level surely differs from that at session ``until``, or is worse than the best one."""
    for case in cases:
        rows, known = table.rows_of(table.cases.index(case)), levels[case]
        if len(rows) < 2 * LEVEL:
            continue
        means = _moving_means(known.drawn_in)
        error = known.sigma * math.sqrt(2 * known.inflation / LEVEL)
        at = sum(row <= until for row in rows)
        if LEVEL <= at <= len(rows) - LEVEL and (
            ratio := _surely(means[-1] - means[at - LEVEL], error, len(cases), two_sided=True)
        ):
            yield Accumulated(case=case, ratio=ratio, since=rows[at - 1], is_best=False)
        earlier = means[: len(rows) - 2 * LEVEL + 1]
        best = min(range(len(earlier)), key=earlier.__getitem__)
        looks = len(cases) * len(earlier)
        if ratio := _surely(means[-1] - earlier[best], error, looks, two_sided=False):
            yield Accumulated(case=case, ratio=ratio, since=rows[best + LEVEL - 1], is_best=True)


def _moving_means(values: Sequence[float]) -> list[float]:
    """Means of LEVEL neighbours each, the first of the oldest."""
    sums = list(accumulate(values, initial=0.0))
    return [(sums[end] - sums[end - LEVEL]) / LEVEL for end in range(LEVEL, len(sums))]


def _surely(difference: float, error: float, looks: int, *, two_sided: bool) -> Ratio | None:
    """The change, where so many looks at an unchanged history would hardly show one as large."""
    size = abs(difference) if two_sided else difference
    if size < LEAST_CHANGE or size < t_quantile(1 - _ALPHA / (2 * looks), _DOF) * error:
        return None
    half = t_quantile(0.975, _DOF) * error
    return Ratio.of_logs(difference, difference - half, difference + half)
