"""Where the level of a long series of logarithms changed, by how much, and how surely: steps and slow drifts.

The one search for change points, for whoever looks at more sessions than a baseline keeps.  ``ruptures`` proposes the
places (optimal segmentation by squared error), then every change must stand up against the noise between its
neighbours: optimal segmentation alone finds one in every other series of pure noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.base.errors import ConfigurationError
from perfsuite.statistics.robust import MAD_TO_SIGMA
from perfsuite.statistics.student import t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Series = NDArray[np.float64]

LEAST_CHANGE = 0.008
"""Smaller changes (of the logarithm) are not told: layouts of memory and of code move a time by as much."""
SIDE = 3
"""Values that a level must have."""
LEAST_VALUES = 2 * SIDE
"""Of a shorter series nothing is told."""
ALPHA = 0.001
"""Probability that a series without a change has one, normal noise."""
CLIPPED = 3.0
"""Values further than this many standard deviations from those around them count as that far."""
_PENALTY = 4.0
"""Of a segment, in variances times ln n: lets weak changes through, which the test then refuses."""
_PART = 256
"""Values that are searched at once."""
_AROUND = 7
"""Values whose median a value is clipped to."""
_LEAST_SIGMA = 1e-4
"""Noise of series that are nearly constant; times are stored to five digits."""
MOST_DOF = 200
"""Beyond this Student's t is the normal distribution."""
WITHIN = 6.0
"""A place is possible where the squared error, in variances, is within this of the best place: 2 ln 20."""


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """One change of level."""

    at: int
    """Index of the first value of the new level, where it most likely began."""
    earliest: int
    """The first value of the new level is not before this one, and"""
    latest: int
    """not after this one, 95 %."""
    effect: float
    """New level minus the old one."""
    low: float
    """95 % interval of the effect."""
    high: float


@dataclass(frozen=True, kw_only=True)
class Levels:
    """A series as levels with changes between."""

    changes: tuple[LevelChange, ...]
    drawn_in: tuple[float, ...]
    """The series with its outliers drawn in."""
    sigma: float
    """Standard deviation of one value around its level."""
    inflation: float
    """How many times more the mean of many varies than if each value were independent: 1 where they are."""


def find_changes(values: Sequence[float], *, alpha: float = ALPHA, least: float = LEAST_CHANGE) -> Levels:
    """The changes of level of a series in its order.

    Neighbouring values that resemble each other (a host that drifts from day to day) make the noise of a mean larger;
    single outliers count little.  Raises ConfigurationError where ``ruptures`` is not installed.
    """
    import numpy as np

    series = np.asarray(values, dtype=float)
    # standard deviation by differences of neighbours, which a change of level does not widen
    steps = np.diff(series)
    spread = float(MAD_TO_SIGMA * np.median(np.abs(steps)) / math.sqrt(2)) if len(steps) else 0.0
    sigma = max(_LEAST_SIGMA, spread)
    if len(series) < LEAST_VALUES:
        return Levels(changes=(), drawn_in=tuple(series.tolist()), sigma=sigma, inflation=1.0)
    # outliers are drawn in to CLIPPED sigma from the median of the values around them
    padded = np.pad(series, _AROUND // 2, mode="symmetric")
    around = np.median(np.lib.stride_tricks.sliding_window_view(padded, _AROUND), axis=1)
    drawn_in: Series = np.clip(series, around - CLIPPED * sigma, around + CLIPPED * sigma)
    search = _Search(drawn_in, alpha=alpha, least=least)
    return search.levels(search.confirmed(_proposed(drawn_in, sigma)))


def _proposed(series: Series, sigma: float) -> list[int]:
    """Ends of the segments of the least penalised squared error, the last one the length of the series.

    A long series is taken in parts, because the search takes the square of the length; where parts meet is one more
    place to test.
    """
    try:
        import ruptures
    except ImportError:
        raise ConfigurationError(
            "change points need the package ruptures, which is not installed; pip install 'perfsuite[history]'"
        ) from None
    kernel = ruptures.KernelCPD(kernel="linear", min_size=SIDE)
    penalty = _PENALTY * sigma**2 * math.log(len(series))
    ends: list[int] = []
    parts = -(-len(series) // _PART)
    for part in range(parts):
        start, end = part * len(series) // parts, (part + 1) * len(series) // parts
        ends += [start + int(at) for at in kernel.fit(series[start:end].reshape(-1, 1)).predict(pen=penalty)]
    return ends


class _Search:
    """Test of proposed changes; sums of the series are taken once."""

    def __init__(self, series: Series, *, alpha: float, least: float) -> None:
        import numpy as np

        self.series = series
        self.least = least
        self.sums = np.concatenate([[0.0], np.cumsum(series)])
        self.probability = 1 - alpha / (2 * len(series))

    def mean(self, start: int, end: int) -> float:
        return float(self.sums[end] - self.sums[start]) / (end - start)

    def confirmed(self, ends: list[int]) -> list[int]:
        """The ends of those segments that differ from the next one, the weakest change given up first."""
        while len(ends) > 1:
            ends = self._moved(ends)
            sigma, inflation = self._spread(ends)
            dof = min(MOST_DOF, max(1, len(self.series) - len(ends) - 1))
            needed = t_quantile(self.probability, dof)
            strengths = []
            for index in range(len(ends) - 1):
                effect, error = self._effect(ends, index, sigma, inflation)
                strengths.append(0.0 if abs(effect) < self.least else abs(effect) / error)
            weakest = min(range(len(strengths)), key=strengths.__getitem__)
            if strengths[weakest] >= needed:
                break
            ends = ends[:weakest] + ends[weakest + 1 :]
        return ends

    def levels(self, ends: list[int]) -> Levels:
        """What is told of the segments."""
        sigma, inflation = self._spread(ends)
        half = t_quantile(0.975, min(MOST_DOF, max(1, len(self.series) - len(ends))))
        changes = []
        for index in range(len(ends) - 1):
            effect, error = self._effect(ends, index, sigma, inflation)
            earliest, latest = self._range(ends, index, sigma**2 * inflation)
            changes.append(
                LevelChange(
                    at=ends[index],
                    earliest=earliest,
                    latest=latest,
                    effect=effect,
                    low=effect - half * error,
                    high=effect + half * error,
                )
            )
        return Levels(changes=tuple(changes), drawn_in=tuple(self.series.tolist()), sigma=sigma, inflation=inflation)

    def _bounds(self, ends: list[int], index: int) -> tuple[int, int, int]:
        """Start of the segment before a change, the change, end of the segment after."""
        return (ends[index - 1] if index else 0), ends[index], ends[index + 1]

    def _effect(self, ends: list[int], index: int, sigma: float, inflation: float) -> tuple[float, float]:
        """A change and its standard error."""
        start, at, end = self._bounds(ends, index)
        effect = self.mean(at, end) - self.mean(start, at)
        return effect, sigma * math.sqrt(inflation * (1 / (at - start) + 1 / (end - at)))

    def _spread(self, ends: list[int]) -> tuple[float, float]:
        """Noise around the levels, and how many times more a mean varies because neighbours are alike."""
        import numpy as np

        starts = [0, *ends[:-1]]
        levels = np.repeat(
            [self.mean(start, end) for start, end in zip(starts, ends, strict=True)],
            [end - start for start, end in zip(starts, ends, strict=True)],
        )
        rest = self.series - levels
        square = float(rest @ rest)
        if not square:
            return _LEAST_SIGMA, 1.0
        sigma = math.sqrt(square / max(1, len(rest) - len(ends)))
        alike = min(0.9, max(0.0, float(rest[1:] @ rest[:-1]) / square + len(ends) / len(rest)))
        return max(_LEAST_SIGMA, sigma), (1 + alike) / (1 - alike)

    def _gains(self, start: int, end: int) -> Series:
        """By how much each place of a change, from start + SIDE to end - SIDE, lowers the squared error."""
        import numpy as np

        places = np.arange(start + SIDE, end - SIDE + 1)
        before, after = places - start, end - places
        left = (self.sums[places] - self.sums[start]) / before
        right = (self.sums[end] - self.sums[places]) / after
        gains: Series = before * after / (end - start) * (left - right) ** 2
        return gains

    def _moved(self, ends: list[int]) -> list[int]:
        """The ends, each moved to the best place between its neighbours: one of them may just have gone."""
        moved = list(ends)
        for index in range(len(moved) - 1):
            start, _, end = self._bounds(moved, index)
            moved[index] = start + SIDE + int(self._gains(start, end).argmax())
        return moved

    def _range(self, ends: list[int], index: int, variance: float) -> tuple[int, int]:
        """First and last place where a change may have been."""
        start, at, end = self._bounds(ends, index)
        gains = self._gains(start, end)
        possible = [start + SIDE + int(place) for place in (gains >= gains.max() - WITHIN * variance).nonzero()[0]]
        return min([at, *possible]), max([at, *possible])
