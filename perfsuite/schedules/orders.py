"""Orders of the actions of every schedule, for one rank.

Schedules on stages placed in a loop alternate forwards and backwards after a warm-up.  All six have one rule: a rank
runs ``warm_up`` forwards, then one forward and one backward in turn, then the other backwards.  They differ in the
order of the forwards and backwards, and in the warm-up.  Interleaved zero-bubble also defers the weight gradients.

Stages placed in a V: rank r has stages r and 2p - 1 - r, so the first rank also has the last stage.  In the code for V,
*a* is the stage of a rank on the way down, and *b* its stage on the way up.

Sources: GPipe, Huang et al. 2018, arXiv:1811.06965; 1F1B and interleaved 1F1B, Narayanan et al. 2021, arXiv:2104.04473,
section 2.2; looped BFS, Lamy-Poirier 2022, arXiv:2211.05953; zero bubble, Qi et al. 2024, arXiv:2401.10241;
ZBV, Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 6; DualPipeV, the folded form of
DualPipe, DeepSeek-V3 technical report, arXiv:2412.19437, section 3.2.1, in the eight steps of its release.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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


def naive(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return an order in which one rank works at a time: each micro-batch ends before the next one starts."""
    return _one_stage(rank, num_micro_batches, 0)


def gpipe(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return all forwards, then all backwards; a rank holds the activations of all micro-batches at once."""
    return _one_stage(rank, num_micro_batches, num_micro_batches)


def one_f_one_b(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return p - 1 - r forwards of rank r, then one forward and one backward in turn: at most p - r in flight.  The
    bubble is as large as in GPipe. The paper calls the schedule PipeDream-flush.
    """
    return _one_stage(rank, num_micro_batches, ranks - 1 - rank)


def _in_rounds(kind: Kind, stages: Sequence[int], num_micro_batches: int, per_round: int) -> list[Action]:
    """Return the actions depth first: each round of micro-batches runs all stages before the next round."""
    return [
        Action(kind=kind, stage=stage, micro_batch=micro_batch)
        for first in range(0, num_micro_batches, per_round)
        for stage in stages
        for micro_batch in range(first, first + per_round)
    ]


def _interleave(
    rank: int, ranks: int, num_micro_batches: int, stages_per_rank: int, *, backward: Kind, ahead_per_rank: int
) -> Order:
    """Return the interleaved order; its warm-up is v - 1 rounds and ``ahead_per_rank`` for each later rank."""
    stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement="loop")
    # The paper uses p and needs a multiple of p micro-batches.  As in torch, m is a multiple of max(1, m // p) here.
    per_round = num_micro_batches // max(1, num_micro_batches // ranks)
    return alternate(
        _in_rounds("forward", stages, num_micro_batches, per_round),
        _in_rounds(backward, stages[::-1], num_micro_batches, per_round),
        warm_up=(stages_per_rank - 1) * per_round + ahead_per_rank * (ranks - 1 - rank),
    )


def interleaved_1f1b(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return 1F1B over v stages per rank in rounds: the bubble is v times smaller, with v times the messages."""
    return _interleave(rank, ranks, num_micro_batches, stages_per_rank, backward="backward", ahead_per_rank=2)


def looped_bfs(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return an order in which a stage runs all micro-batches before the next stage; backwards in reverse."""
    stages = stages_of(rank, ranks=ranks, stages_per_rank=stages_per_rank, placement="loop")
    forwards = _in_rounds("forward", stages, num_micro_batches, num_micro_batches)
    backwards = [dataclasses.replace(forward, kind="backward") for forward in forwards[::-1]]
    return alternate(forwards, backwards, warm_up=len(forwards))


def interleaved_zero_bubble(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return interleaved 1F1B with half the warm-up and weight gradients that fill the waits (ZB-H1)."""
    order = _interleave(rank, ranks, num_micro_batches, stages_per_rank, backward="backward_input", ahead_per_rank=1)
    # Each weight gradient comes r input gradients after its own: all ranks hold as many activations as with 1F1B.
    weights: deque[Action] = deque()
    deferred: list[Action] = []
    for action in order:
        deferred.append(action)
        if action.kind == "backward_input":
            weights.append(dataclasses.replace(action, kind="backward_weight"))
            if len(weights) > rank:
                deferred.append(weights.popleft())
    return (*deferred, *weights)


@dataclass(kw_only=True)
class _Row:
    """The growing order of one rank; each kind of action on a stage runs the micro-batches in turn."""

    actions: list[Action] = field(default_factory=list)
    count: Counter[tuple[Kind, int]] = field(default_factory=Counter)
    """Actions so far by (kind, stage); a whole backward counts as both of its halves."""

    def run(self, kind: Kind, stage: int, *, joined: bool = False) -> None:
        """Append ``kind`` on the next micro-batch of ``stage``."""
        halves: tuple[Kind, ...] = ("backward_input", "backward_weight") if kind == "backward" else (kind,)
        micro_batch = self.count[halves[0], stage]
        for half in halves:
            self.count[half, stage] += 1
        self.actions.append(Action(kind=kind, stage=stage, micro_batch=micro_batch, joined=joined))

    def run_split(self, stage: int) -> None:
        """Append both halves of a backward, one after the other."""
        self.run("backward_input", stage)
        self.run("backward_weight", stage)


def zbv(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return zero bubble on a V: in the steady state no rank waits if F, I and W are equally long.  The order is made
    for at least 2p - 1 micro-batches, which fill the V; micro-batches beyond m are dropped.
    """
    filled = max(2 * ranks - 1, num_micro_batches)
    a, b = rank, 2 * ranks - 1 - rank
    row = _Row()
    # Warm-up: as far ahead on a as a micro-batch takes to come back on b.
    for _ in range(2 * (ranks - rank) - 1):
        row.run("forward", a)
    for _ in range(rank):
        row.run("forward", b)
        row.run("forward", a)
    for _ in range(ranks - rank):
        row.run("forward", b)
        row.run_split(b)
    # Steady: one forward and one whole backward on a, the same on b.
    while row.count["forward", b] < filled:
        if row.count["forward", a] < filled:
            row.run("forward", a)
        row.run_split(a)
        row.run("forward", b)
        row.run_split(b)
    # Cool-down: input gradients first, since other ranks wait for them; weight gradients fill the rest.
    for _ in range(rank):
        row.run("backward_input", a)
        row.run("backward_input", b)
    for _ in range(ranks - rank):
        row.run("backward_input", a)
        row.run("backward_weight", a)
    for stage in (b, a):
        while row.count["backward_weight", stage] < row.count["backward_input", stage]:
            row.run("backward_weight", stage)
    return tuple(action for action in row.actions if action.micro_batch < num_micro_batches)


def dualpipev(rank: int, *, ranks: int, num_micro_batches: int, stages_per_rank: int) -> Order:
    """Return an order that overlaps the forward of one stage with the backward of the other; needs m >= 2p."""
    a, b = rank, 2 * ranks - 1 - rank
    behind = ranks - 1 - rank
    row = _Row()
    for _ in range(2 * behind):  # 1: fill the way down
        row.run("forward", a)
    for _ in range(rank + 1):  # 2: fill both ways
        row.run("forward", a)
        row.run("forward", b)
    for _ in range(behind):  # 3: the first backwards, in halves
        row.run_split(b)
        row.run("forward", b)
    for turn in range(num_micro_batches - 2 * ranks + rank + 1):  # 4: steady, forward and backward overlapped
        # Not joined in the first turn of the last rank: the other ranks would wait for this forward.
        row.run("forward", a, joined=turn > 0 or behind > 0)
        row.run("backward", b)
        row.run("forward", b, joined=True)
        row.run("backward", a)
    for _ in range(behind):  # 5: no forwards left on a
        row.run("backward", b)
        row.run("forward", b, joined=True)
        row.run("backward", a)
    halved: deque[int] = deque()  # stages whose weight gradient is still to run, oldest first
    for turn in range(2 * (rank + 1)):  # 6: backwards alone; the second half of them leaves the weight gradients
        stage = a if turn % 2 else b
        row.run("backward" if turn <= rank else "backward_input", stage)
        if turn > rank:
            halved.append(stage)
    for _ in range(behind):  # 7: drain the way up
        row.run("backward_weight", halved.popleft())
        row.run("backward_input", a)
        halved.append(a)
    while halved:  # 8: the weight gradients that are left
        row.run("backward_weight", halved.popleft())
    return tuple(row.actions)
