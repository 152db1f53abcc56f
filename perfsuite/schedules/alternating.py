"""Schedules that alternate forwards and backwards after a warm-up, on stages placed in a loop.

All six have one rule: a rank runs ``warm_up`` forwards, then one forward and one backward in turn, then the other
backwards.  They differ in the order of the forwards and backwards, and in the warm-up.  Interleaved zero-bubble also
defers the weight gradients.

Sources: GPipe, Huang et al. 2018, arXiv:1811.06965; 1F1B and interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473,
section 2.2; looped BFS, Lamy-Poirier 2022, arXiv:2211.05953; zero bubble, Qi et al. 2024, arXiv:2401.10241.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from perfsuite.schedules.schedule import Action, Kind, Order, stages_of


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warm_up: int) -> Order:
    """Return ``warm_up`` forwards, then forward and backward in turn, then the other backwards."""
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
    """Return orders in which one rank works at a time: each micro-batch ends before the next one starts."""
    return tuple(_one_stage(rank, num_micro_batches, 0) for rank in range(ranks))


def gpipe(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Return all forwards, then all backwards; a rank holds the activations of all micro-batches at once."""
    return tuple(_one_stage(rank, num_micro_batches, num_micro_batches) for rank in range(ranks))


def one_f_one_b(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Return p - 1 - r forwards of rank r, then one forward and one backward in turn: at most p - r in flight.

    The bubble is as large as in GPipe.  The paper calls the schedule PipeDream-flush.
    """
    return tuple(_one_stage(rank, num_micro_batches, ranks - 1 - rank) for rank in range(ranks))


def micro_batches_per_round(ranks: int, num_micro_batches: int) -> int:
    """Return the number of micro-batches that a stage runs before the rank continues with its next stage.

    The paper uses p and needs a multiple of p micro-batches.  As in torch, m is a multiple of max(1, m // p) here.

    >>> micro_batches_per_round(4, 8), micro_batches_per_round(4, 10), micro_batches_per_round(4, 3)
    (4, 5, 3)
    """
    return num_micro_batches // max(1, num_micro_batches // ranks)


def _in_rounds(kind: Kind, stages: Sequence[int], num_micro_batches: int, per_round: int) -> list[Action]:
    """Return the actions depth first: each round of micro-batches runs all stages before the next round."""
    return [
        Action(kind=kind, stage=stage, micro_batch=micro_batch)
        for first in range(0, num_micro_batches, per_round)
        for stage in stages
        for micro_batch in range(first, first + per_round)
    ]


def _interleave(
    rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int, backward: Kind, ahead_per_rank: int
) -> Order:
    """Return the order of one rank; its warm-up is v - 1 rounds and ``ahead_per_rank`` for each later rank."""
    stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement="loop")
    per_round = micro_batches_per_round(ranks, num_micro_batches)
    return alternate(
        _in_rounds("forward", stages, num_micro_batches, per_round),
        _in_rounds(backward, stages[::-1], num_micro_batches, per_round),
        warm_up=(stages_per_rank - 1) * per_round + ahead_per_rank * (ranks - 1 - rank),
    )


def interleaved_1f1b(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Return 1F1B over v stages per rank in rounds: the bubble is v times smaller, with v times the messages."""
    counts = {"ranks": ranks, "num_micro_batches": num_micro_batches, "stages_per_rank": stages_per_rank}
    return tuple(_interleave(rank, **counts, backward="backward", ahead_per_rank=2) for rank in range(ranks))


def looped_bfs(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Return orders in which a stage runs all micro-batches before the next stage; backwards in reverse."""
    orders = []
    for rank in range(ranks):
        stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement="loop")
        forwards = _in_rounds("forward", stages, num_micro_batches, num_micro_batches)
        backwards = [dataclasses.replace(forward, kind="backward") for forward in forwards[::-1]]
        orders.append(alternate(forwards, backwards, warm_up=len(forwards)))
    return tuple(orders)


def interleaved_zero_bubble(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Return interleaved 1F1B with half the warm-up and weight gradients that fill the waits (ZB-H1)."""
    counts = {"ranks": ranks, "num_micro_batches": num_micro_batches, "stages_per_rank": stages_per_rank}
    orders = (_interleave(rank, **counts, backward="backward_input", ahead_per_rank=1) for rank in range(ranks))
    return tuple(_defer_weights(order, lag=rank) for rank, order in enumerate(orders))


def _defer_weights(order: Order, *, lag: int) -> Order:
    """Return the order with each weight gradient ``lag`` input gradients after its own; the others come last.

    With lag r, every rank holds as many activations as with 1F1B.
    """
    weights = [
        dataclasses.replace(action, kind="backward_weight") for action in order if action.kind == "backward_input"
    ]
    left = iter(weights)
    deferred: list[Action] = []
    inputs = 0
    for action in order:
        deferred.append(action)
        inputs += action.kind == "backward_input"
        if action.kind == "backward_input" and inputs > lag:
            deferred.append(next(left))
    return (*deferred, *left)
