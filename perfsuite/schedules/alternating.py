"""Schedules that alternate forwards and backwards after a warm-up, on stages placed in a loop.

All six are one rule.  A rank has a list of forwards and a list of backwards; it runs ``warm_up`` forwards, then a
forward and a backward in turn, then the backwards that are left.  The schedules differ in the two lists and in the
warm-up only; interleaved zero-bubble also defers the weight gradients.

Sources: GPipe, Huang et al. 2018, arXiv:1811.06965; 1F1B and interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473,
section 2.2; looped BFS, Lamy-Poirier 2022, arXiv:2211.05953; zero bubble, Qi et al. 2024, arXiv:2401.10241.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from perfsuite.schedules.schedule import Action, Kind, Order, stages_of


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int) -> Order:
    """``warm_up`` forwards, then forward and backward in turn, then the rest of the backwards."""
    order = list(forwards[:warm_up])
    in_turn = len(forwards) - len(order)
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[in_turn:])


def _actions(kind: Kind, stage: int, micro_batches: Iterable[int]) -> list[Action]:
    return [Action(kind=kind, stage=stage, micro_batch=micro_batch) for micro_batch in micro_batches]


def _one_stage(rank: int, num_micro_batches: int, warm_up: int) -> Order:
    numbers = range(num_micro_batches)
    return alternate(_actions("forward", rank, numbers), _actions("backward", rank, numbers), warm_up=warm_up)


def naive(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Each micro-batch forward and backward through all stages before the next one starts: one rank works at a time."""
    return tuple(_one_stage(rank, num_micro_batches, 0) for rank in range(ranks))


def gpipe(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """All forwards, then all backwards: every rank holds the activations of all micro-batches at once."""
    return tuple(_one_stage(rank, num_micro_batches, num_micro_batches) for rank in range(ranks))


def one_f_one_b(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """As many forwards ahead as there are stages behind, then one forward and one backward: at most p - r in flight.

    GPipe's bubble with 1F1B's memory; PipeDream-flush in the paper.
    """
    return tuple(_one_stage(rank, num_micro_batches, ranks - 1 - rank) for rank in range(ranks))


def micro_batches_per_round(ranks: int, num_micro_batches: int) -> int:
    """How many micro-batches a stage runs before the rank turns to its next stage.

    The paper asks for m to be a multiple of p and takes p; as in torch, any m will do that splits evenly into
    max(1, m // p) rounds.

    >>> micro_batches_per_round(4, 8), micro_batches_per_round(4, 10), micro_batches_per_round(4, 3)
    (4, 5, 3)
    """
    return num_micro_batches // max(1, num_micro_batches // ranks)


def _in_rounds(kind: Kind, stages: Sequence[int], num_micro_batches: int, per_round: int) -> list[Action]:
    """Depth first: each round of micro-batches through all stages of the rank before the next round."""
    return [
        Action(kind=kind, stage=stage, micro_batch=micro_batch)
        for first in range(0, num_micro_batches, per_round)
        for stage in stages
        for micro_batch in range(first, first + per_round)
    ]


def _interleave(
    rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int, backward: Kind, ahead_per_rank: int
) -> Order:
    """The interleaved order of one rank; its warm-up is v - 1 rounds and ``ahead_per_rank`` per rank behind it."""
    stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement="loop")
    per_round = micro_batches_per_round(ranks, num_micro_batches)
    return alternate(
        _in_rounds("forward", stages, num_micro_batches, per_round),
        _in_rounds(backward, stages[::-1], num_micro_batches, per_round),
        warm_up=(stages_per_rank - 1) * per_round + ahead_per_rank * (ranks - 1 - rank),
    )


def interleaved_1f1b(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """1F1B over v stages per rank, micro-batches in rounds of p: the bubble shrinks by v, messages grow by v."""
    counts = {"ranks": ranks, "num_micro_batches": num_micro_batches, "stages_per_rank": stages_per_rank}
    return tuple(_interleave(rank, **counts, backward="backward", ahead_per_rank=2) for rank in range(ranks))


def looped_bfs(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Breadth first: each stage of the rank runs all micro-batches before the next stage; backwards in reverse."""
    orders = []
    for rank in range(ranks):
        stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement="loop")
        forwards = _in_rounds("forward", stages, num_micro_batches, num_micro_batches)
        backwards = [dataclasses.replace(forward, kind="backward") for forward in forwards[::-1]]
        orders.append(alternate(forwards, backwards, warm_up=len(forwards)))
    return tuple(orders)


def interleaved_zero_bubble(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Interleaved 1F1B with split backwards: half the warm-up, and weight gradients that fill the waits (ZB-H1)."""
    counts = {"ranks": ranks, "num_micro_batches": num_micro_batches, "stages_per_rank": stages_per_rank}
    orders = (_interleave(rank, **counts, backward="backward_input", ahead_per_rank=1) for rank in range(ranks))
    return tuple(_defer_weights(order, lag=rank) for rank, order in enumerate(orders))


def _defer_weights(order: Order, *, lag: int) -> Order:
    """Put each weight gradient ``lag`` input gradients after its own, in the same order; what is left at the end.

    With lag r every rank holds as many activations as under 1F1B.
    """
    weights = [
        dataclasses.replace(action, kind="backward_weight") for action in order if action.kind == "backward_input"
    ]
    deferred: list[Action] = []
    inputs = placed = 0
    for action in order:
        deferred.append(action)
        if action.kind == "backward_input":
            inputs += 1
            if inputs > lag:
                deferred.append(weights[placed])
                placed += 1
    return (*deferred, *weights[placed:])
