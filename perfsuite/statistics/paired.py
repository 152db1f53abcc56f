"""Differences of pairs of runs: robust mean and interval, smallest detectable change, and number of pairs needed.

Noise of runs has heavy tails and spikes. Outliers are clipped (:func:`~perfsuite.statistics.robust.huber_mean`). The
error belongs to the Winsorised mean of Tukey and McLaughlin (Sankhya A 25, 1963): ``s_w / sqrt(n) x n / h`` with h - 1
degrees of freedom for h unclipped values. ``python benchmarks/ab_coverage.py`` shows how often the intervals contain
the truth.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.statistics.robust import MIN_SPIKED, huber_mean, median, rough_sigma, t_quantile, variance

MIN_PAIRS = 3  # Least pairs that show their noise.
POWER = 0.95  # Probability of finding the smallest change.
LIKELY = 0.8  # Probability that the printed number of pairs decides.
_DRAWS = 1000  # Replays of a comparison that give a probability; 0.95 has an error of 0.007.
_POOL = 5000  # Differences from which replays are drawn.
_REPLAYED = (3, 4, 5, 6, 8, 12, 24)  # Numbers of pairs of the replays; other errors scale with their root.
_TAILS, _SPIKE_RATE, _SPIKE = 4, 0.1, 9.0
"""Noise of the replays: degrees of freedom of Student's t, share of runs with a spike, and mean spike in standard
deviations. This is a bad host: on a better one smaller changes are found than printed."""


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Mean of differences with its error."""

    mean: float
    error: float  # Its standard error.
    dof: int  # Degrees of freedom of the error.
    pairs: int

    def reach(self, alpha: float = 0.05) -> float:
        """Return half the width of the interval that misses the truth with probability ``alpha``."""
        return t_quantile(1 - alpha / 2, self.dof) * self.error

    @property
    def spread(self) -> float:
        """Standard deviation of one pair."""
        return self.error * math.sqrt(self.pairs)


def paired_mean(differences: Sequence[float]) -> Paired:
    """Return the robust mean of at least three differences.

    >>> found = paired_mean([0.10, 0.11, 0.09, 0.10, 0.10, 0.90])
    >>> round(found.mean, 3), round(found.error, 4), found.dof
    (0.103, 0.0046, 4)
    """
    count = len(differences)
    assert count >= MIN_PAIRS, f"{count} differences"
    sigma = rough_sigma(differences) if count >= MIN_SPIKED else math.sqrt(variance(differences))
    middle = median(differences)
    clipped = [min(max(value, middle - 2 * sigma), middle + 2 * sigma) for value in differences]
    kept = max(2, sum(near == value for near, value in zip(clipped, differences, strict=True)))
    error = math.sqrt(variance(clipped) * count) / kept
    return Paired(mean=huber_mean(differences, sigma), error=error, dof=kept - 1, pairs=count)


def smallest_found(paired: Paired, tolerance: float, alpha: float = 0.05) -> float:
    """Return the smallest difference that another comparison like this one finds with probability POWER.  Found: its
    interval excludes 0 and its mean exceeds ``tolerance``. The noise is estimated from these pairs alone, and three
    pairs may underestimate it.
    """
    needed = []
    for here, there in _replays(paired.pairs):
        scale = paired.error / here.error if here.error else 0.0
        needed.append(max(tolerance, there.reach(alpha) * scale) - there.mean * scale)
    return _quantile(needed, POWER)


def pairs_needed(paired: Paired, change: float, most: int, alpha: float = 0.05) -> int | None:
    """Return about how many pairs detect a difference of ``change`` with probability LIKELY; None: above ``most``."""
    typical = _quantile([here.spread for here, _ in _replays(paired.pairs)], 0.5)

    def is_enough(count: int) -> bool:
        return _widest(count, alpha) * paired.spread <= change * typical * math.sqrt(count)

    low, high = MIN_PAIRS, most
    if not is_enough(most):
        return None
    while low < high:
        count = (low + high) // 2
        low, high = (low, count) if is_enough(count) else (count + 1, high)
    return high


@functools.lru_cache(maxsize=1024)
def _widest(pairs: int, alpha: float) -> float:
    """Return the LIKELY quantile of the distance from truth to far end of an interval, times the root of the pairs."""
    far = [(there.reach(alpha) + abs(there.mean)) * math.sqrt(there.pairs) for _, there in _replays(pairs)]
    return _quantile(far, LIKELY)


@functools.cache
def _replays(pairs: int) -> tuple[tuple[Paired, Paired], ...]:
    """Return two comparisons of equal code on one noisy host, of this number of pairs or somewhat fewer."""
    count = max(count for count in _REPLAYED if count <= pairs)
    if count < pairs:
        return _replays(count)
    draw, pool = random.Random(pairs), _noise()

    def comparison() -> Paired:
        return paired_mean(draw.choices(pool, k=pairs))

    return tuple((comparison(), comparison()) for _ in range(_DRAWS))


@functools.lru_cache(maxsize=1)
def _noise() -> tuple[float, ...]:
    """Return differences of two runs of equal code."""
    draw = random.Random(1)

    def run() -> float:
        spike = draw.expovariate(1 / _SPIKE) if draw.random() < _SPIKE_RATE else 0.0
        return draw.gauss(0, 1) / math.sqrt(draw.gammavariate(_TAILS / 2, 2) / _TAILS) + spike

    return tuple(run() - run() for _ in range(_POOL))


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]
