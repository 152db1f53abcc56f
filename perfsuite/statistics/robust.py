"""Means and spreads that a single disturbed run changes little, and quantiles of Student's t without scipy."""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections.abc import Sequence

CLIP = 2.5  # Limit in standard deviations from the median to which values are clipped.
SPIKE = 4.0  # Distance in standard deviations from which on a stored run is disturbed; one per case.
MIN_SPIKED = 5  # Least number of runs of which one may be left out.
MAD_TO_SIGMA = 1.4826  # Standard deviation over median absolute deviation of normal values.


def median(values: Sequence[float]) -> float:
    """Return the median; for a dozen values twice as fast as :func:`statistics.median`.

    >>> median([3.0, 1.0, 2.0]), median([4.0, 1.0, 2.0, 3.0])
    (2.0, 2.5)
    """
    return _middle(sorted(values))


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def median_of_most(values: Sequence[float], apart: float) -> float:
    """Return the median; if the halves differ by more than ``apart``, the middle value that is nearer to 0.

    >>> median_of_most([0.0, 0.4, 0.4, 0.01], 0.1), median_of_most([0.0, 0.5, 0.5, 0.25], 0.3)
    (0.01, 0.375)
    """
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return min(low, high, key=abs) if high - low > apart else (low + high) / 2


def variance(values: Sequence[float]) -> float:
    """Return the sample variance of at least two values.

    >>> variance([1.0, 2.0, 3.0])
    1.0
    """
    mean = sum(values) / len(values)
    away = [value - mean for value in values]
    return math.fsum(map(operator.mul, away, away)) / (len(values) - 1)


def rough_sigma(values: Sequence[float]) -> float:
    """Return the standard deviation without the value furthest from the median, times 1.2 to correct for it.

    One disturbed run does not count; a case with two real speeds keeps its spread.

    >>> round(rough_sigma([1.0, 1.0, 1.1, 0.9, 1.0, 5.0]), 4), round(rough_sigma([1.0, 1.0, 1.0, 1.1, 1.1, 1.1]), 4)
    (0.0849, 0.0657)
    """
    ordered = sorted(values)
    if len(ordered) > 2:
        middle = _middle(ordered)
        ordered = ordered[1:] if middle - ordered[0] > ordered[-1] - middle else ordered[:-1]
    return 1.2 * math.sqrt(variance(ordered))


def huber_mean(values: Sequence[float], sigma: float) -> float:
    """Return the mean of the values, each clipped to two ``sigma`` from their median.

    >>> round(huber_mean([0.0, 0.01, -0.01, 0.5], 0.01), 5)
    0.00625
    """
    ordered = sorted(values)
    middle = _middle(ordered)
    low, high = middle - 2 * sigma, middle + 2 * sigma
    if low <= ordered[0] and ordered[-1] <= high:
        return sum(values) / len(values)
    return sum(min(max(value, low), high) for value in values) / len(values)


def expected_maximum(count: int) -> float:
    """Return the expected maximum of ``count`` standard normal numbers.

    Source: Blom, Statistical estimates and transformed beta variables (1958).

    >>> round(expected_maximum(8), 2), round(expected_maximum(2048), 2)
    (1.43, 3.43)
    """
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def without_largest(count: int) -> float:
    """Return how much the mean of ``count`` normal values falls without the largest, in standard deviations.

    >>> round(without_largest(4), 2), round(without_largest(12), 2)
    (0.35, 0.15)
    """
    return expected_maximum(count) / (count - 1)


def clipped_variance(values: Sequence[float], sigma: float) -> float:
    """Return the variance of at least two values, each clipped to CLIP ``sigma`` from their median.

    >>> round(clipped_variance([0.0, 0.01, -0.01, 0.5], 0.01), 7)
    0.0002917
    """
    middle = median(values)
    reach = CLIP * sigma
    return variance([min(max(value, middle - reach), middle + reach) for value in values])


def without_spike(values: Sequence[float], sigma: float) -> list[float]:
    """Return the values without the one furthest from their median if it is more than SPIKE ``sigma`` away.

    >>> without_spike([0.0, 0.01, -0.01, 0.0, 0.5], 0.01)
    [0.0, 0.01, -0.01, 0.0]
    """
    if len(values) < MIN_SPIKED:
        return list(values)
    ordered = sorted(values)
    middle, low, high = _middle(ordered), ordered[0], ordered[-1]
    furthest = low if middle - low > high - middle else high
    if abs(furthest - middle) <= SPIKE * sigma:
        return list(values)
    place = values.index(furthest)
    return [value for index, value in enumerate(values) if index != place]


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
