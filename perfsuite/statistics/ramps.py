"""Steps that are one change: a drift over many merges is found as a step or several of one sign, none of which it has.

Optimal segmentation knows steps alone.  A *ramp* goes from one level to another in a straight line; a step is the ramp
of one value.  Neighbouring steps of one sign are told as one change where the level between them is no level of its
own: it was surely there for so few values that none could be told, or a ramp explains the values as well.  A single
step that a ramp explains far better is a drift, too.  A drift lies where the ramps lie that explain it.
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

_REACH = 48
"""Values around the first step and around the last one among which a ramp begins and ends."""


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """One change of level, in one step or in several of one sign."""

    steps: tuple[LevelChange, ...]
    """As the search for steps sees it, in their order; a plain step has one, and so have short drifts."""
    is_drift: bool
    """It surely took more than one step."""
    between: tuple[int, int]
    """The first value off the old level is not before the first of these, and the first one of the new level is not
    after the second, 95 %."""
    at_most: tuple[int, int]
    """The same if a step is not one change but several that came together, which looks the same."""
    effect: float
    """New level minus the old one."""
    low: float
    """95 % interval of the effect."""
    high: float


def ramps(levels: Levels) -> list[Ramp]:
    """The changes of a series, those that are one told as one."""
    groups: list[list[int]] = []
    for index in range(len(levels.changes)):
        if groups and _is_one(levels, index - 1):
            groups[-1].append(index)
        else:
            groups.append([index])
    return [_ramp(levels, group) for group in groups]


def _is_one(levels: Levels, index: int) -> bool:
    """Whether a change and the next one are steps of one."""
    first, second = levels.changes[index : index + 2]
    if first.effect * second.effect <= 0:
        return False
    if second.earliest - first.latest <= SIDE:
        return True
    fits = _Fits(levels, (index, index + 1))
    return fits.best >= fits.of_steps - fits.slack


def _ramp(levels: Levels, group: Sequence[int]) -> Ramp:
    """What is told of neighbouring steps that are one change."""
    steps = tuple(levels.changes[index] for index in group)
    first, last = steps[0], steps[-1]
    fits = _Fits(levels, group)
    begin, end = fits.range()
    at_most = min(begin, first.earliest), max(end, last.latest)
    is_drift = len(steps) > 1 or fits.best > fits.of_steps + fits.slack
    between, effect, low, high = (first.earliest, last.latest), first.effect, first.low, first.high
    if is_drift:
        effect, error = fits.effect()
        half = t_quantile(0.975, min(MOST_DOF, max(1, len(levels.drawn_in) - len(levels.changes) - 1))) * error
        between, low, high = at_most, effect - half, effect + half
    return Ramp(steps=steps, is_drift=is_drift, between=between, at_most=at_most, effect=effect, low=low, high=high)


class _Fits:
    """How well ramps explain the values around neighbouring steps.

    A gain is by how much an explanation lowers the squared error of one level for all of them.
    """

    def __init__(self, levels: Levels, group: Sequence[int]) -> None:
        import numpy as np

        places = [0, *(change.at for change in levels.changes), len(levels.drawn_in)]
        self.start, *steps, end = places[group[0] : group[-1] + 3]
        values = np.asarray(levels.drawn_in[self.start : end])
        self.values = values - values.mean()
        self.variance = levels.sigma**2 * levels.inflation
        self.slack = WITHIN * self.variance
        """Of two explanations whose gains differ by less neither is better."""
        parts = np.split(self.values, [step - self.start for step in steps])
        self.of_steps = float(sum(part.sum() ** 2 / len(part) for part in parts))
        self.begins, self.ends = self._places(steps[0] - self.start, steps[-1] - self.start)
        products, self.squares = self._products()
        self.gains = products**2 / self.squares
        self.effects = products / self.squares
        self.best = float(self.gains.max())
        """The gain of the best ramp."""

    def range(self) -> tuple[int, int]:
        """First begin and last end of the ramps that explain the values as well as the best one."""
        possible = self.gains >= self.best - self.slack
        return self.start + int(self.begins[possible].min()), self.start + int(self.ends[possible].max())

    def effect(self) -> tuple[float, float]:
        """That of the best ramp, and its standard error."""
        best = int(self.gains.argmax())
        return float(self.effects[best]), math.sqrt(self.variance / float(self.squares[best]))

    def _places(self, first: int, last: int) -> tuple[Places, Places]:
        """First values off the old level and on the new one, of all ramps near the steps with SIDE values aside."""
        import numpy as np

        inner = np.arange(SIDE, len(self.values) - SIDE + 1)
        begins, ends = np.meshgrid(inner[abs(inner - first) <= _REACH], inner[abs(inner - last) <= _REACH])
        in_order = begins <= ends
        return begins[in_order], ends[in_order]

    def _products(self) -> tuple[Series, Series]:
        """Of each ramp, from 0 to 1 less its mean, the inner product with the values and with itself.

        From its begin to its end a ramp is 1/m, 2/m, ... 1, and 1 after it; closed sums of it, and running ones of the
        values, which have mean 0.
        """
        import numpy as np

        begins, ends, count = self.begins, self.ends, len(self.values)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        moments = np.concatenate([[0.0], np.cumsum(self.values * np.arange(count))])
        m, after = ends - begins + 1, count - 1 - ends
        rising = moments[ends + 1] - moments[begins] - (begins - 1) * (sums[ends + 1] - sums[begins])
        mean = ((m + 1) / 2 + after) / count
        return rising / m - sums[ends + 1], (m + 1) * (2 * m + 1) / (6 * m) + after - count * mean**2
