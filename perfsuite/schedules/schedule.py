"""A schedule: the order of actions on every rank, checked when it is made.

Stages are placed on ranks either in a *loop* (stage s on rank s mod p), as the interleaved schedules need it, or in a
*v* (down the ranks and back up again: rank r has stages r and 2p - 1 - r), as ZBV and DualPipeV do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.schedules.action import Durations, Kind, Order
from perfsuite.schedules.walk import Walk

Placement = Literal["loop", "v"]

_BEFORE: dict[Kind, frozenset[Kind]] = {
    "forward": frozenset(),
    "backward": frozenset({"forward"}),
    "backward_input": frozenset({"forward"}),
    "backward_weight": frozenset({"forward", "backward_input"}),
}
"""What must have run on a stage and micro-batch, and nothing else, before each kind."""

_COMPLETE = (frozenset({"forward", "backward"}), frozenset({"forward", "backward_input", "backward_weight"}))


def stages_of(rank: int, *, ranks: int, stages_per_rank: int, placement: Placement) -> tuple[int, ...]:
    """The stages on ``rank``, ascending.

    >>> stages_of(1, ranks=4, stages_per_rank=2, placement="loop")
    (1, 5)
    >>> stages_of(1, ranks=4, stages_per_rank=2, placement="v")
    (1, 6)
    """
    if placement == "loop":
        return tuple(rank + ranks * index for index in range(stages_per_rank))
    return tuple(ranks * index + (ranks - 1 - rank if index % 2 else rank) for index in range(stages_per_rank))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Orders of actions for all ranks; InvalidParameter when they are no pipeline that can run to its end."""

    name: str
    ranks: int
    """p, along the pipeline."""
    stages_per_rank: int
    """v."""
    num_micro_batches: int
    """m."""
    placement: Placement
    orders: tuple[Order, ...]
    """By rank."""

    def __post_init__(self) -> None:
        if len(self.orders) != self.ranks:
            raise InvalidParameter(f"{self.name}: {len(self.orders)} orders for {self.ranks} ranks; give one per rank")
        for rank, order in enumerate(self.orders):
            self._check_order(rank, order)
        self.walk(lambda action: 1)

    @property
    def num_stages(self) -> int:
        """Stages on all ranks, p x v."""
        return self.ranks * self.stages_per_rank

    @property
    def splits_backwards(self) -> bool:
        """Whether some backward is two actions: the gradient of the input, and that of the weights."""
        return any(action.kind == "backward_input" for order in self.orders for action in order)

    @property
    def num_actions(self) -> int:
        """Actions on all ranks."""
        return sum(len(order) for order in self.orders)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        placed = [0] * self.num_stages
        for rank in range(self.ranks):
            for stage in self.stages_of(rank):
                placed[stage] = rank
        return tuple(placed)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on ``rank``, ascending."""
        return stages_of(rank, ranks=self.ranks, stages_per_rank=self.stages_per_rank, placement=self.placement)

    def walk(self, seconds: Durations, *, communication_s: float = 0) -> Walk:
        """One execution with these durations; InvalidParameter when the orders never end."""
        return Walk(
            name=self.name,
            orders=self.orders,
            rank_of_stage=self.rank_of_stage,
            num_micro_batches=self.num_micro_batches,
            seconds=seconds,
            communication_s=communication_s,
        ).run()

    def _check_order(self, rank: int, order: Order) -> None:
        """Every stage of the rank runs every micro-batch forward and backward exactly once, in that order."""
        stages = self.stages_of(rank)
        done: dict[tuple[int, int], frozenset[Kind]] = {
            (stage, micro_batch): frozenset() for stage in stages for micro_batch in range(self.num_micro_batches)
        }
        for action in order:
            cell = action.stage, action.micro_batch
            if cell not in done:
                raise InvalidParameter(
                    f"{self.name}: {action} on rank {rank}, which has stages {', '.join(map(str, stages))} and "
                    f"micro-batches 0 to {self.num_micro_batches - 1}"
                )
            if done[cell] != _BEFORE[action.kind]:
                ran = ", ".join(sorted(done[cell])) or "nothing"
                raise InvalidParameter(
                    f"{self.name}: {action} on rank {rank} comes after {ran} of that stage and micro-batch; "
                    f"{action.kind} runs once, after {', '.join(sorted(_BEFORE[action.kind])) or 'nothing'}"
                )
            done[cell] = done[cell] | {action.kind}
        for (stage, micro_batch), ran_kinds in done.items():
            if ran_kinds not in _COMPLETE:
                ran = ", ".join(sorted(ran_kinds)) or "nothing"
                raise InvalidParameter(
                    f"{self.name}: stage {stage} on rank {rank} runs only {ran} of micro-batch {micro_batch}; "
                    "add its forward and backward"
                )
        if order and order[-1].joined:
            raise InvalidParameter(f"{self.name}: {order[-1]} is joined with no next action on rank {rank}; unjoin it")
