"""Steps that are one change: a drift over many merges is found as several steps of one sign, none of which it has.

Optimal segmentation knows steps alone.  Neighbouring steps of one sign are told as one change where the level between
them is no level of its own: it was surely there for so few values that none could be told, or a straight line from the
level before to the level after explains the values as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.statistics.change_points import MOST_DOF, SIDE, WITHIN, Change, Levels
from perfsuite.statistics.student import t_quantile


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """One change of level, in one step or in several of one sign."""

    steps: tuple[Change, ...]
    """In their order; one of them for a plain step."""
    effect: float
    """Level after the last step minus the level before the first."""
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
    return second.earliest - first.latest <= SIDE or _is_straight(levels, index)


def _is_straight(levels: Levels, index: int) -> bool:
    """Whether a straight line explains the values around both steps as well as they do."""
    bounds = _bounds(levels)
    start, first, second, end = bounds[index : index + 4]
    values = levels.drawn_in[start:end]
    means = [_mean(levels.drawn_in[low:high]) for low, high in itertools.pairwise((start, first, second, end))]
    by_steps = [means[(at >= first) + (at >= second)] for at in range(start, end)]
    room = [share * (second - first) for share in (0.0, 0.5, 1.0)]
    by_line = min(
        _square(values, [_line(at, first - left, second - 1 + right, means) for at in range(start, end)])
        for left, right in itertools.product(room, room)
    )
    return by_line <= _square(values, by_steps) + WITHIN * levels.sigma**2 * levels.inflation


def _line(at: int, begin: float, end: float, means: Sequence[float]) -> float:
    """The level before, the one after, and between them a line."""
    share = min(1.0, max(0.0, (at - begin) / max(1.0, end - begin)))
    return means[0] + share * (means[-1] - means[0])


def _bounds(levels: Levels) -> list[int]:
    return [0, *(change.at for change in levels.changes), len(levels.drawn_in)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _square(values: Sequence[float], told: Sequence[float]) -> float:
    return sum((value - other) ** 2 for value, other in zip(values, told, strict=True))


def _ramp(levels: Levels, group: Sequence[int]) -> Ramp:
    steps = tuple(levels.changes[index] for index in group)
    if len(steps) == 1:
        return Ramp(steps=steps, effect=steps[0].effect, low=steps[0].low, high=steps[0].high)
    bounds = _bounds(levels)
    before = levels.drawn_in[bounds[group[0]] : bounds[group[0] + 1]]
    after = levels.drawn_in[bounds[group[-1] + 1] : bounds[group[-1] + 2]]
    effect = _mean(after) - _mean(before)
    dof = min(MOST_DOF, max(1, len(levels.drawn_in) - len(levels.changes) - 1))
    error = levels.sigma * math.sqrt(levels.inflation * (1 / len(before) + 1 / len(after)))
    half = t_quantile(0.975, dof) * error
    return Ramp(steps=steps, effect=effect, low=effect - half, high=effect + half)
