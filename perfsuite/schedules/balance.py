"""Split layers into stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from perfsuite.base.errors import InvalidParameter

Split = tuple[range, ...]  # Consecutive layers of each stage, at least one per stage.


def balance(costs: Sequence[float], stages: int, *, embedding: float = 0, head: float = 0) -> Split:
    """Return the split with the smallest largest stage; among equal ones, the most even split.

    ``costs``: cost of each layer, in any unit; ``embedding`` is added to the first stage and ``head`` to the last.
    Dynamic programming gives an exact result: the smallest largest stage, then the least sum of squares, then the
    earliest cuts.

    A head that costs as much as two layers replaces two layers of the last stage:

    >>> balance([1] * 7, 3, head=2)
    (range(0, 3), range(3, 6), range(6, 7))
    >>> split_costs([1] * 7, balance([1] * 7, 3, head=2), head=2)
    (3, 3, 3)

    Raises InvalidParameter for fewer layers than stages, no stage, or a negative cost.
    """
    check_layers(len(costs), stages)
    if min(*costs, embedding, head) < 0:
        raise InvalidParameter(f"costs {min(*costs, embedding, head)} and up; a cost is at least 0")
    until = list(accumulate(costs, initial=0))
    layers = len(costs)

    def cost_of(first: int, end: int) -> float:
        return until[end] - until[first] + (embedding if first == 0 else 0) + (head if end == layers else 0)

    bound, _ = _best(layers, stages, cost_of, max)

    def square(first: int, end: int) -> float:
        cost = cost_of(first, end)
        return cost * cost if cost <= bound else float("inf")

    _, ends = _best(layers, stages, square, lambda left, right: left + right)
    return tuple(range(first, end) for first, end in zip((0, *ends[:-1]), ends, strict=True))


def _best(
    layers: int, stages: int, cost_of: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """Return the least joined cost of cutting ``layers`` into ``stages``, and the end of each stage.

    Of cuts with equal cost, the earliest are returned.
    """
    least: dict[int, tuple[float, tuple[int, ...]]] = {end: (cost_of(0, end), ()) for end in range(1, layers + 1)}
    for stage in range(1, stages):
        least = {
            end: min((join(least[cut][0], cost_of(cut, end)), (*least[cut][1], cut)) for cut in range(stage, end))
            for end in range(stage + 1, layers + 1)
        }
    cost, cuts = least[layers]
    return cost, (*cuts, layers)


def split_costs(costs: Sequence[float], split: Split, *, embedding: float = 0, head: float = 0) -> tuple[float, ...]:
    """Return the cost of each stage of ``split``, with embedding and head.

    >>> split_costs([1, 1, 4], (range(0, 2), range(2, 3)), embedding=3)
    (5, 4)
    """
    stages = [sum(costs[layer] for layer in layers) for layers in split]
    stages[0] += embedding
    stages[-1] += head
    return tuple(stages)


def check_layers(num_layers: int, num_stages: int) -> None:
    """Raise InvalidParameter unless every stage can have a layer."""
    if not 1 <= num_stages <= num_layers:
        raise InvalidParameter(
            f"{num_stages} stages for num_layers={num_layers}: each stage needs at least one layer; "
            f"choose 1 to {num_layers} stages (ranks x stages_per_rank)"
        )
