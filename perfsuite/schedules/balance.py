"""Splits layers into stages so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from perfsuite.base.errors import InvalidParameter

Split = tuple[range, ...]
"""Layers of each stage, consecutive, at least one in each."""


def balance(costs: Sequence[float], stages: int, *, embedding: float = 0, head: float = 0) -> Split:
    """The split of consecutive layers that makes the largest stage smallest; among those, the most even one.

    ``costs`` are of the layers, in any unit; ``embedding`` is added to the first stage and ``head`` to the last.
    Exact, by dynamic programming in O(stages x layers^2): first the smallest possible largest stage, then the least sum
    of squares under it, then the earliest cuts.  A head as costly as two layers takes their place:

    >>> balance([1] * 7, 3, head=2)
    (range(0, 3), range(3, 6), range(6, 7))
    >>> split_costs([1] * 7, balance([1] * 7, 3, head=2), head=2)
    (3, 3, 3)

    Raises InvalidParameter for more stages than layers, no stage, or a negative cost.
    """
    check_layers(len(costs), stages)
    if min(*costs, embedding, head) < 0:
        raise InvalidParameter(f"costs {min(*costs, embedding, head)} and up; a cost is at least 0")
    until = list(accumulate(costs, initial=0))
    layers = len(costs)

    def cost_of(first: int, end: int) -> float:
        return until[end] - until[first] + (embedding if first == 0 else 0) + (head if end == layers else 0)

    largest, _ = _best(layers, stages, cost_of, max)
    bound = largest

    def square(first: int, end: int) -> float:
        cost = cost_of(first, end)
        return cost * cost if cost <= bound else float("inf")

    _, ends = _best(layers, stages, square, lambda left, right: left + right)
    return tuple(range(first, end) for first, end in zip((0, *ends[:-1]), ends, strict=True))


def _best(
    layers: int, stages: int, cost_of: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of cutting ``layers`` into ``stages``, and where each stage ends: the earliest such cuts.

    Cuts of equal cost are compared by ``place``, where they stand among those of as many stages: first end first.
    """
    least: dict[int, float] = {end: cost_of(0, end) for end in range(1, layers + 1)}
    place = {end: index for index, end in enumerate(least)}
    before: list[dict[int, int]] = []
    for stage in range(1, stages):
        chosen = {
            end: min((join(least[cut], cost_of(cut, end)), place[cut], cut) for cut in range(stage, end))
            for end in range(stage + 1, layers + 1)
        }
        least = {end: cost for end, (cost, _, _) in chosen.items()}
        cuts = {end: cut for end, (_, _, cut) in chosen.items()}
        place = {end: index for index, end in enumerate(sorted(cuts, key=lambda end: (place[cuts[end]], end)))}
        before.append(cuts)
    ends = [layers]
    for cuts in reversed(before):
        ends.append(cuts[ends[-1]])
    return least[layers], tuple(reversed(ends))


def split_costs(costs: Sequence[float], split: Split, *, embedding: float = 0, head: float = 0) -> tuple[float, ...]:
    """Cost of each stage of ``split``, embedding and head included.

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
            f"{num_stages} stages for num_layers={num_layers}: every stage has at least one layer; "
            f"choose 1 to {num_layers} stages (ranks x stages_per_rank)"
        )
