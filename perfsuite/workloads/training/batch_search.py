"""Looking for the largest batch that fits, with as few tries as it takes; no torch and no clock here.

Where running out of memory does no harm, the batch is doubled until it does not fit and the gap is bisected.  Where it
does harm (a CPU's memory is everybody's, and the kernel kills), what a batch takes is predicted from smaller ones and
only a batch that is predicted to fit is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

_SAME_SLOPE = 0.05
"""Two slopes this close are one straight line, which is followed to its end; before, batches at most double."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one batch was seen to take."""

    peak_bytes: float
    """Most allocated at any moment of a step."""
    activation_bytes: float
    """What the forward of the batch left allocated: grows by the sample."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The end of a search."""

    batch: int
    """The largest that was tried and fits; 0 where 1 does not."""
    tries: int
    predicted_bytes: float | None = None
    """Peak predicted for ``batch`` before it was tried; None where nothing was predicted."""
    limited: bool = False
    """The search ended at the largest batch that it may try, which fits."""


def by_doubling(fits: Callable[[int], bool], most: int) -> Largest:
    """Double until a batch does not fit, then bisect; ``fits`` is asked about 1 to ``most``, each once.

    >>> by_doubling(lambda batch: batch <= 11, most=64)  # 1 2 4 8 16, 12, 10, 11
    Largest(batch=11, tries=8, predicted_bytes=None, limited=False)
    """
    good, bad, tries = 0, 1, 0
    while bad <= most:
        tries += 1
        if not fits(bad):
            break
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        tries += 1
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return Largest(batch=good, tries=tries, limited=good == most)


def by_stepping_down(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch up to ``most``, which nearly fits, that does: 1, 3, 7, ... less, then the gap is bisected.

    0 where 1 does not fit; ``fits`` is asked about each once.

    >>> by_stepping_down(lambda batch: batch <= 11, most=16)  # 16, 15, 13, 9, 11, 12
    11
    """
    good, bad, step = 0, most + 1, 1
    while bad > 1 and not good:
        tried = max(1, bad - step)
        if fits(tried):
            good = tried
        else:
            bad, step = tried, step if tried == most else 2 * step
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


@dataclass(kw_only=True)
class _Seen:
    """Batches tried so far."""

    budget_bytes: float
    usages: dict[int, Usage] = field(default_factory=dict)

    @property
    def good(self) -> int:
        """Largest that fits; 0 when none does."""
        return max((batch for batch, use in self.usages.items() if use.peak_bytes <= self.budget_bytes), default=0)

    @property
    def bad(self) -> int | None:
        """Smallest that does not fit; None while all do."""
        return min((batch for batch, use in self.usages.items() if use.peak_bytes > self.budget_bytes), default=None)

    def slopes(self) -> list[float]:
        """Bytes per sample between neighbours among the batches that fit, never below what a sample's forward keeps.

        At small batches the peak may be the optimizer's and not grow at all.
        """
        tried = [(batch, self.usages[batch]) for batch in sorted(self.usages) if batch <= self.good]
        return [
            max((b.peak_bytes - a.peak_bytes) / (n - m), (b.activation_bytes - a.activation_bytes) / (n - m))
            for (m, a), (n, b) in itertools.pairwise(tried)
        ]


def by_prediction(measure: Callable[[int], Usage], budget_bytes: float, most: int) -> Largest:
    """Try 1 and 2, then only batches whose peak is predicted to stay within the budget, until one more would not.

    The peak is taken to grow by the sample as it did between the last two batches.  What was found was tried: its peak
    was seen to fit.

    >>> line = lambda batch: Usage(peak_bytes=100 + 10.0 * batch, activation_bytes=8.0 * batch)
    >>> by_prediction(line, budget_bytes=455, most=1000)  # 1, 2, 4, then 35 at once: 450 bytes
    Largest(batch=35, tries=4, predicted_bytes=450.0, limited=False)
    """
    seen = _Seen(budget_bytes=budget_bytes, usages={1: measure(1)})
    predicted: float | None = None
    first = seen.usages[1]
    # Nothing says yet what one sample more takes; that is at least what its forward keeps.
    if seen.good and most > 1 and first.peak_bytes + first.activation_bytes <= budget_bytes:
        seen.usages[2] = measure(2)
    while True:
        good, bad, slopes = seen.good, seen.bad, seen.slopes()
        if not slopes or bad == good + 1 or good == most:
            return Largest(
                batch=good,
                tries=len(seen.usages),
                predicted_bytes=predicted if good > 1 else None,
                limited=good == most,
            )
        peak = seen.usages[good].peak_bytes
        straight = len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) <= _SAME_SLOPE * slopes[-1]
        reach = good + int((budget_bytes - peak) / slopes[-1]) if slopes[-1] > 0 else most
        next_one = 2 * good if bad is None else (good + bad) // 2  # towards bad the peak bends upwards
        target = min(reach, most if straight and bad is None else next_one, most)
        if target <= good:
            return Largest(batch=good, tries=len(seen.usages), predicted_bytes=predicted)
        guess = peak + (target - good) * slopes[-1]
        seen.usages[target] = measure(target)
        if seen.good == target:
            predicted = guess
