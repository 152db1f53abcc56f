"""Schedules on stages placed in a V: rank r has stages r and 2p - 1 - r, so the first rank also has the last stage.

Below, *a* is the stage of a rank on the way down, and *b* its stage on the way up.

Sources: ZBV, Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 6; DualPipeV, the folded
form of DualPipe, DeepSeek-V3 technical report, arXiv:2412.19437, section 3.2.1, in the eight steps of its release.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from perfsuite.schedules.schedule import Action, Kind, Order


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

    def run_weights_left(self, stage: int) -> None:
        """Append every weight gradient of ``stage`` whose input gradient has run."""
        while self.count["backward_weight", stage] < self.count["backward_input", stage]:
            self.run("backward_weight", stage)


def zbv(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Return zero bubble on a V: in the steady state no rank waits if F, I and W are equally long.

    The order is made for at least 2p - 1 micro-batches, which fill the V; micro-batches beyond m are dropped.
    """
    filled = max(2 * ranks - 1, num_micro_batches)
    return tuple(
        tuple(action for action in _zbv_row(rank, ranks, filled) if action.micro_batch < num_micro_batches)
        for rank in range(ranks)
    )


def _zbv_row(rank: int, ranks: int, num_micro_batches: int) -> Order:
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
    while row.count["forward", b] < num_micro_batches:
        if row.count["forward", a] < num_micro_batches:
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
    row.run_weights_left(b)
    row.run_weights_left(a)
    return tuple(row.actions)


def dualpipev(*, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[Order, ...]:
    """Return orders that overlap the forward of one stage with the backward of the other; needs m >= 2p."""
    return tuple(_dualpipev_row(rank, ranks, num_micro_batches) for rank in range(ranks))


def _dualpipev_row(rank: int, ranks: int, num_micro_batches: int) -> Order:
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
