"""When and how far a yardstick, a fixed kernel timed beside the samples, explains the noise of a case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfsuite.statistics.robust import median

GAIN = 0.25
"""A yardstick is used where it cuts the noise of a kind of cases by at least this share."""
ENOUGH_DOF = 14
"""Degrees of freedom from which on that is believed."""
FEW_GAIN = 0.7
"""The share with fewer of them: of eight runs of a case without any connection one set in 200 shows it by chance."""
LEAST_DOF = 6
"""Degrees of freedom below which no slope on the yardstick is believed."""
STEEPEST = 1.5
"""A yardstick that must be multiplied by more is the wrong one."""


Series = tuple[str, Sequence[float], Sequence[float]]
"""Kind, values and yardsticks of the runs of one case, logarithms."""


def slopes(series: Iterable[Series]) -> dict[str, float]:
    """Slope of value on yardstick by kind, pooled over its cases; kinds where it does not help are left out."""
    points: dict[str, list[tuple[float, float]]] = {}
    dof: dict[str, int] = {}
    for kind, values, yards in series:
        value_centre, yard_centre = median(values), median(yards)
        centred = [(x - yard_centre, y - value_centre) for x, y in zip(yards, values, strict=True)]
        points.setdefault(kind, []).extend(centred)
        dof[kind] = dof.get(kind, 0) + len(values) - 1
    fitted = {
        kind: helpful_slope(pairs, GAIN if dof[kind] >= ENOUGH_DOF else FEW_GAIN)
        for kind, pairs in points.items()
        if dof[kind] >= LEAST_DOF
    }
    return {kind: slope for kind, slope in fitted.items() if slope}


def helpful_slope(points: Sequence[tuple[float, float]], gain: float = GAIN) -> float:
    """Slope of the line through the origin with the least absolute residuals; 0 where it lowers them by less.

    ``points`` are (yardstick, value), both from their medians.  The line is the weighted median of y / x with weights
    abs(x): disturbed runs do not bend it.

    >>> round(helpful_slope([(-0.02, -0.018), (0.01, 0.012), (0.03, 0.027), (-0.01, -0.009), (0.02, 0.5)]), 2)
    0.9
    >>> helpful_slope([(-0.02, 0.018), (0.01, 0.012), (0.03, -0.02), (-0.01, 0.009)])
    0.0
    """
    steep = sorted((y / x, abs(x)) for x, y in points if x)
    half, passed, slope = sum(weight for _, weight in steep) / 2, 0.0, 0.0
    for candidate, weight in steep:
        passed += weight
        if passed >= half:
            slope = candidate
            break
    slope = min(STEEPEST, slope)
    left = median([abs(y - slope * x) for x, y in points])
    before = median([abs(y) for _, y in points])
    return slope if slope > 0 and left <= (1 - gain) * before else 0.0
