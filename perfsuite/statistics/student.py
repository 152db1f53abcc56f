"""Quantiles of Student's t distribution, so that the gate needs no scipy."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence


def t_cdf(t: float, dof: int) -> float:
    """Return P(T <= t) for Student's t with ``dof`` degrees of freedom.

    The finite series in the angle atan(t / sqrt(dof)) is exact. Source: Abramowitz and Stegun, 26.7.3 and 26.7.4.

    >>> round(t_cdf(2.228139, 10), 6), t_cdf(0.0, 7)
    (0.975, 0.5)
    """
    assert dof >= 1, f"{dof} degrees of freedom"
    angle = math.atan2(t, math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = dof % 2
    term = cosine if odd else 1.0
    total = term if dof > 1 else 0.0
    for index in range(3 if odd else 2, dof - 1, 2):
        term *= cosine * cosine * (index - 1) / index
        total += term
    two_sided = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + two_sided / 2


@functools.lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: int) -> float:
    """Return t with P(T <= t) = ``probability``, by bisection to 1e-12 relative; 0 < probability < 1.

    >>> round(t_quantile(0.975, 10), 6), round(t_quantile(0.005, 3), 6)
    (2.228139, -5.840909)
    """
    assert 0 < probability < 1, f"probability {probability}"
    if probability < 0.5:
        return -t_quantile(1 - probability, dof)
    low, high = 0.0, 1.0
    while t_cdf(high, dof) < probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * (1 + high):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, dof) < probability else (low, middle)
    return (low + high) / 2


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of at least two ratios, and its 95 % interval from the mean of their logarithms.

    >>> [round(value, 3) for value in ratio_interval([1.0, 1.1, 0.9, 1.05])]
    [1.01, 0.881, 1.158]
    """
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
