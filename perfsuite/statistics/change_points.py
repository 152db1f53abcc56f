"""Find changes of level in a long series of logarithms, with place, size and confidence: steps and slow drifts.

``ruptures`` proposes the places by optimal segmentation of the squared error. Alone it finds a change in every other
series of pure noise, so each change must then be significant against the noise between its neighbours.

Segmentation finds a drift over many merges as one or several steps of one sign, so steps that are one change are
joined. A *ramp* goes from one level to another in a straight line; a step is a ramp of one value. Neighbouring steps of
one sign are one change if there is no certain level between them: it lasts for too few values, or a ramp explains the
values as well. A single step is a drift if a ramp explains it far better. A drift extends over the ramps that explain
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.base.errors import ConfigurationError
from perfsuite.statistics.robust import MAD_TO_SIGMA, t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Series = NDArray[np.float64]
    Places = NDArray[np.int64]

LEAST_CHANGE = 0.008  # Smallest reported change of the logarithm; memory layout can cause as much.
SIDE = 3  # Least values of a level.
LEAST_VALUES = 2 * SIDE  # Least values of a series in which changes are reported.
ALPHA = 0.001  # Probability of a false change in a series of normal noise.
CLIPPED = 3.0  # Limit in standard deviations from the values around it, to which a value is clipped.
_PENALTY = 4.0  # Penalty of a segment, in variances times ln n: weak changes pass, and the test then rejects them.
_PART = 256  # Values that are searched together.
_AROUND = 7  # Values of the median to which a value is clipped.
_LEAST_SIGMA = 1e-4  # Noise of nearly constant series; times are stored with five digits.
MOST_DOF = 200  # Degrees of freedom from which on Student's t equals the normal distribution.
WITHIN = 6.0  # A place is possible if its squared error, in variances, is within this of the best place: 2 ln 20.


@dataclass(frozen=True, kw_only=True)
class LevelChange:
    """One change of level."""

    at: int  # Index of the first value of the new level, at its most likely place.
    earliest: int  # Earliest index of that value, and
    latest: int  # latest index, with 95 % probability.
    effect: float  # New level minus the old one.
    low: float  # 95 % interval of the effect.
    high: float


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Levels of a series and the changes between them."""

    changes: tuple[LevelChange, ...]
    clipped: tuple[float, ...]  # The series with clipped outliers.
    sigma: float  # Standard deviation of one value around its level.
    inflation: float  # Variance of the mean of many values over that of independent values; 1 if they are independent.


def find_changes(values: Sequence[float]) -> Levels:
    """Return the changes of level of a series in its order.  Similar neighbours (a host that drifts from day to day)
    increase the noise of a mean; single outliers count little. Raises ConfigurationError if ``ruptures`` is not
    installed.
    """
    import numpy as np

    series = np.asarray(values, dtype=float)
    # standard deviation from differences of neighbours, which a change of level does not increase
    steps = np.diff(series)
    spread = float(MAD_TO_SIGMA * np.median(np.abs(steps)) / math.sqrt(2)) if len(steps) else 0.0
    sigma = max(_LEAST_SIGMA, spread)
    if len(series) < LEAST_VALUES:
        return Levels(changes=(), clipped=tuple(series.tolist()), sigma=sigma, inflation=1.0)
    # clip outliers to CLIPPED sigma from the median of the values around them
    padded = np.pad(series, _AROUND // 2, mode="symmetric")
    around = np.median(np.lib.stride_tricks.sliding_window_view(padded, _AROUND), axis=1)
    clipped: Series = np.clip(series, around - CLIPPED * sigma, around + CLIPPED * sigma)
    search = _Search(clipped)
    return search.levels(search.confirmed(_proposed(clipped, sigma)))


def _proposed(series: Series, sigma: float) -> list[int]:
    """Return the ends of the segments with the least penalised squared error, the last one the length of the series.
    The search takes the square of the length, so a long series is searched in parts. Their borders are further places
    to test.
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
    """Tests proposed changes; sums of the series are computed once."""

    def __init__(self, series: Series) -> None:
        import numpy as np

        self.series = series
        self.sums = np.concatenate([[0.0], np.cumsum(series)])
        self.probability = 1 - ALPHA / (2 * len(series))

    def mean(self, start: int, end: int) -> float:
        return float(self.sums[end] - self.sums[start]) / (end - start)

    def confirmed(self, ends: list[int]) -> list[int]:
        """Return the ends of the segments that differ from the next one; the weakest change is dropped first."""
        while len(ends) > 1:
            ends = list(ends)
            # Each moves to the best place between its neighbours, one of which may have been dropped.
            for index in range(len(ends) - 1):
                start, _, end = self._bounds(ends, index)
                ends[index] = start + SIDE + int(self._gains(start, end).argmax())
            sigma, inflation = self._spread(ends)
            dof = min(MOST_DOF, max(1, len(self.series) - len(ends) - 1))
            needed = t_quantile(self.probability, dof)
            strengths = []
            for index in range(len(ends) - 1):
                effect, error = self._effect(ends, index, sigma, inflation)
                strengths.append(0.0 if abs(effect) < LEAST_CHANGE else abs(effect) / error)
            weakest = min(range(len(strengths)), key=strengths.__getitem__)
            if strengths[weakest] >= needed:
                break
            del ends[weakest]
        return ends

    def levels(self, ends: list[int]) -> Levels:
        """Return the levels and changes of the segments."""
        sigma, inflation = self._spread(ends)
        half = t_quantile(0.975, min(MOST_DOF, max(1, len(self.series) - len(ends))))
        changes = []
        for index in range(len(ends) - 1):
            effect, error = self._effect(ends, index, sigma, inflation)
            earliest, latest = self._range(ends, index, sigma**2 * inflation)
            low, high = effect - half * error, effect + half * error
            changes.append(
                LevelChange(at=ends[index], earliest=earliest, latest=latest, effect=effect, low=low, high=high)
            )
        return Levels(changes=tuple(changes), clipped=tuple(self.series.tolist()), sigma=sigma, inflation=inflation)

    def _bounds(self, ends: list[int], index: int) -> tuple[int, int, int]:
        """Return the start of the segment before a change, the change, and the end of the segment after it."""
        return (ends[index - 1] if index else 0), ends[index], ends[index + 1]

    def _effect(self, ends: list[int], index: int, sigma: float, inflation: float) -> tuple[float, float]:
        """Return a change and its standard error."""
        start, at, end = self._bounds(ends, index)
        effect = self.mean(at, end) - self.mean(start, at)
        return effect, sigma * math.sqrt(inflation * (1 / (at - start) + 1 / (end - at)))

    def _spread(self, ends: list[int]) -> tuple[float, float]:
        """Return the noise around the levels, and the inflation of a mean's variance by similar neighbours."""
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
        """Return how much each place of a change, from start + SIDE to end - SIDE, lowers the squared error."""
        import numpy as np

        places = np.arange(start + SIDE, end - SIDE + 1)
        before, after = places - start, end - places
        left = (self.sums[places] - self.sums[start]) / before
        right = (self.sums[end] - self.sums[places]) / after
        gains: Series = before * after / (end - start) * (left - right) ** 2
        return gains

    def _range(self, ends: list[int], index: int, variance: float) -> tuple[int, int]:
        """Return the first and the last possible place of a change."""
        start, at, end = self._bounds(ends, index)
        gains = self._gains(start, end)
        possible = [start + SIDE + int(place) for place in (gains >= gains.max() - WITHIN * variance).nonzero()[0]]
        return min([at, *possible]), max([at, *possible])


_REACH = 48  # Values around the first and the last step among which a ramp begins and ends.


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """One change of level, in one step or in several of one sign."""

    steps: tuple[LevelChange, ...]  # Its steps in their order; a plain step and a short drift have one.
    is_drift: bool  # Whether it certainly took more than one step.
    between: tuple[int, int]  # 95 % range: first value off the old level, first on the new one.
    at_most: tuple[int, int]  # The same if a single step is in truth several changes in a row, which looks the same.
    effect: float  # New level minus the old one.
    low: float  # 95 % interval of the effect.
    high: float


def ramps(levels: Levels) -> list[Ramp]:
    """Return the changes of a series; neighbouring steps of one change are joined."""
    groups: list[list[int]] = []
    for index in range(len(levels.changes)):
        if groups and _is_one(levels, index - 1):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_ramp(levels, group) for group in groups]


def _is_one(levels: Levels, index: int) -> bool:
    """Return whether a change and the next one are steps of one change."""
    first, second = levels.changes[index : index + 2]
    if first.effect * second.effect <= 0:
        return False
    if second.earliest - first.latest <= SIDE:
        return True
    fits = _Fits(levels, (index, index + 1))
    return fits.best >= fits.of_steps - fits.slack


def _ramp(levels: Levels, group: Sequence[int]) -> Ramp:
    steps = tuple(levels.changes[index] for index in group)
    first, last = steps[0], steps[-1]
    fits = _Fits(levels, group)
    begin, end = fits.range()
    at_most = min(begin, first.earliest), max(end, last.latest)
    is_drift = len(steps) > 1 or fits.best > fits.of_steps + fits.slack
    between, effect, low, high = (first.earliest, last.latest), first.effect, first.low, first.high
    if is_drift:
        effect, error = fits.effect()
        half = t_quantile(0.975, min(MOST_DOF, max(1, len(levels.clipped) - len(levels.changes) - 1))) * error
        between, low, high = at_most, effect - half, effect + half
    return Ramp(steps=steps, is_drift=is_drift, between=between, at_most=at_most, effect=effect, low=low, high=high)


class _Fits:
    """Ramps fitted around neighbouring steps; a gain is the reduction of the squared error against one level."""

    def __init__(self, levels: Levels, group: Sequence[int]) -> None:
        import numpy as np

        places = [0, *(change.at for change in levels.changes), len(levels.clipped)]
        self.start, *steps, end = places[group[0] : group[-1] + 3]
        values = np.asarray(levels.clipped[self.start : end])
        self.values = values - values.mean()
        self.variance = levels.sigma**2 * levels.inflation
        self.slack = WITHIN * self.variance  # Two explanations are equally good if their gains differ by less.
        parts = np.split(self.values, [step - self.start for step in steps])
        self.of_steps = float(sum(part.sum() ** 2 / len(part) for part in parts))
        self.begins, self.ends = self._places(steps[0] - self.start, steps[-1] - self.start)
        products, self.squares = self._products()
        self.gains = products**2 / self.squares
        self.effects = products / self.squares
        self.best = float(self.gains.max())  # Gain of the best ramp.

    def range(self) -> tuple[int, int]:
        """Return the first begin and the last end of the ramps that are as good as the best one."""
        possible = self.gains >= self.best - self.slack
        return self.start + int(self.begins[possible].min()), self.start + int(self.ends[possible].max())

    def effect(self) -> tuple[float, float]:
        """Return the effect of the best ramp, and its standard error."""
        best = int(self.gains.argmax())
        return float(self.effects[best]), math.sqrt(self.variance / float(self.squares[best]))

    def _places(self, first: int, last: int) -> tuple[Places, Places]:
        """Return the first values off the old and on the new level, of all ramps near the steps."""
        import numpy as np

        inner = np.arange(SIDE, len(self.values) - SIDE + 1)
        begins, ends = np.meshgrid(inner[abs(inner - first) <= _REACH], inner[abs(inner - last) <= _REACH])
        in_order = begins <= ends
        return begins[in_order], ends[in_order]

    def _products(self) -> tuple[Series, Series]:
        """Return the inner products of each ramp, less its mean, with the values and with itself.  From its begin to
        its end a ramp is 1/m, 2/m, ... 1, and 1 after it. Running sums of the values, which have mean 0, give the
        products.
        """
        import numpy as np

        begins, ends, count = self.begins, self.ends, len(self.values)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        moments = np.concatenate([[0.0], np.cumsum(self.values * np.arange(count))])
        m, after = ends - begins + 1, count - 1 - ends
        rising = moments[ends + 1] - moments[begins] - (begins - 1) * (sums[ends + 1] - sums[begins])
        mean = ((m + 1) / 2 + after) / count
        return rising / m - sums[ends + 1], (m + 1) * (2 * m + 1) / (6 * m) + after - count * mean**2
