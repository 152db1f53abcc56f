"""Join steps that are one change: segmentation finds a drift over many merges as one or several steps of one sign.

A *ramp* goes from one level to another in a straight line; a step is a ramp of one value. Neighbouring steps of one
sign are one change if there is no certain level between them: it lasts for too few values, or a ramp explains the
values as well. A single step is a drift if a ramp explains it far better. A drift extends over the ramps that explain
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite.statistics.change_points import MOST_DOF, SIDE, WITHIN, LevelChange, Levels
from perfsuite.statistics.student import t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Series = NDArray[np.float64]
    Places = NDArray[np.int64]

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
        """Return the inner products of each ramp, less its mean, with the values and with itself.

        From its begin to its end a ramp is 1/m, 2/m, ... 1, and 1 after it. Running sums of the values, which have
        mean 0, give the products.
        """
        import numpy as np

        begins, ends, count = self.begins, self.ends, len(self.values)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        moments = np.concatenate([[0.0], np.cumsum(self.values * np.arange(count))])
        m, after = ends - begins + 1, count - 1 - ends
        rising = moments[ends + 1] - moments[begins] - (begins - 1) * (sums[ends + 1] - sums[begins])
        mean = ((m + 1) / 2 + after) / count
        return rising / m - sums[ends + 1], (m + 1) * (2 * m + 1) / (6 * m) + after - count * mean**2
