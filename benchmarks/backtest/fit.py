"""Least squares on the logarithm of step times: a few constants, Gauss-Newton, with a weak idea of each beforehand.

A constant that a table does not determine stays where it is expected instead of running into a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Constants = Mapping[str, float]
_STEP = 1e-3
_STILL = 1e-4


@dataclass(frozen=True, kw_only=True)
class Free:
    """A constant to be fitted."""

    name: str
    expected: float
    spread: float
    """Standard deviation of its logarithm, or of its logit where it is a share."""
    share: bool = False
    """Between 0 and 1."""

    def inner(self, value: float) -> float:
        """Of any size, 0 where it is expected, 1 a spread away."""
        return (self._line(value) - self._line(self.expected)) / self.spread

    def outer(self, inner: float) -> float:
        """Back."""
        line = self._line(self.expected) + self.spread * inner
        return 1 / (1 + math.exp(-line)) if self.share else math.exp(line)

    def _line(self, value: float) -> float:
        return math.log(value / (1 - value)) if self.share else math.log(value)


def fit(
    free: Sequence[Free],
    predict: Callable[[Constants], Sequence[float]],
    measured: Sequence[float],
    *,
    noise: float = 0.04,
    start: Constants | None = None,
    rounds: int = 10,
) -> dict[str, float]:
    """Return the most likely constants; ``noise`` is the relative standard deviation of a row."""
    place = [constant.inner(start[constant.name]) if start else 0.0 for constant in free]
    rest, cost = _residuals(free, place, predict, measured, noise)
    for _ in range(rounds):
        columns = []
        for index in range(len(free)):
            moved = list(place)
            moved[index] += _STEP
            columns.append(
                [
                    (new - old) / _STEP
                    for new, old in zip(_residuals(free, moved, predict, measured, noise)[0], rest, strict=True)
                ]
            )
        step = _solve(columns, rest)
        scale = 1.0
        while scale > 1 / 64:
            tried = [at + scale * by for at, by in zip(place, step, strict=True)]
            new_rest, new_cost = _residuals(free, tried, predict, measured, noise)
            if new_cost <= cost:
                break
            scale /= 2
        else:
            break
        still = cost - new_cost < _STILL * cost
        place, rest, cost = tried, new_rest, new_cost
        if still:
            break
    return {constant.name: constant.outer(at) for constant, at in zip(free, place, strict=True)}


def _residuals(
    free: Sequence[Free],
    place: Sequence[float],
    predict: Callable[[Constants], Sequence[float]],
    measured: Sequence[float],
    noise: float,
) -> tuple[list[float], float]:
    values = {constant.name: constant.outer(at) for constant, at in zip(free, place, strict=True)}
    rows = [math.log(time / seen) / noise for time, seen in zip(predict(values), measured, strict=True)]
    rest = [*rows, *place]
    return rest, sum(value * value for value in rest)


def _solve(columns: Sequence[Sequence[float]], rest: Sequence[float]) -> list[float]:
    """The step of least squares, by the normal equations of a few unknowns and elimination."""
    size = len(columns)
    matrix = [
        [sum(a * b for a, b in zip(left, right, strict=True)) for right in columns]
        + [-sum(a * b for a, b in zip(left, rest, strict=True))]
        for left in columns
    ]
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(matrix[row][pivot]))
        matrix[pivot], matrix[best] = matrix[best], matrix[pivot]
        for row in range(size):
            if row != pivot:
                share = matrix[row][pivot] / matrix[pivot][pivot]
                matrix[row] = [a - share * b for a, b in zip(matrix[row], matrix[pivot], strict=True)]
    return [matrix[row][size] / matrix[row][row] for row in range(size)]
