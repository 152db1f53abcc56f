"""Goes through the orders of all ranks as the ranks would, and notices when they wait for each other for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfsuite.base.errors import InvalidParameter
from perfsuite.schedules.action import Action, Durations, Order


@dataclass(kw_only=True)
class Walk:
    """One execution: an action starts when its rank is free and its input has arrived; :meth:`run` fills the times.

    Sending and receiving cost the ranks nothing: an output travels ``communication_s`` after its action has ended (a
    joined action: after the next one has), and not at all between two stages of one rank.
    """

    name: str
    """Of the schedule, for errors."""
    orders: tuple[Order, ...]
    """By rank."""
    rank_of_stage: tuple[int, ...]
    num_micro_batches: int
    seconds: Durations
    communication_s: float = 0
    times: list[list[tuple[float, float]]] = field(default_factory=list)
    """By rank: start and end of each action of its order."""
    activations: list[float | None] = field(default_factory=list)
    """When the input of stage s and micro-batch b left the stage before, at s x m + b."""
    gradients: list[float | None] = field(default_factory=list)
    """When the output gradient of stage s and micro-batch b left the stage after, at s x m + b."""
    _before: tuple[int | None, ...] = ()
    """The stage before each stage: activations come from it, gradients go to it."""
    _after: tuple[int | None, ...] = ()
    _blocked: dict[tuple[bool, int], int] = field(default_factory=dict)
    """(activation rather than gradient, cell) that a rank waits for -> the rank."""
    _ready: list[int] = field(default_factory=list)
    """Ranks that can go on."""

    def run(self) -> Walk:
        """Walk to the end; InvalidParameter names where every rank stands when none can go on."""
        stages = len(self.rank_of_stage)
        self._before, self._after = (None, *range(stages - 1)), (*range(1, stages), None)
        cells = stages * self.num_micro_batches
        self.activations, self.gradients = [None] * cells, [None] * cells
        self.times = [[] for _ in self.orders]
        self._ready = list(range(len(self.orders)))
        while self._ready:
            self._go_on(self._ready.pop())
        if self._blocked:
            stuck = {rank: self.orders[rank][len(self.times[rank])] for rank in self._blocked.values()}
            where = ", ".join(f"rank {rank} at {action}" for rank, action in sorted(stuck.items()))
            raise InvalidParameter(
                f"{self.name}: the orders never end: {where}; each waits for an action that comes later, reorder them"
            )
        return self

    def sends(self, action: Action) -> bool:
        """Whether what ``action`` makes goes to another rank."""
        target = (self._after if action.kind == "forward" else self._before)[action.stage]
        return action.kind != "backward_weight" and self._is_elsewhere(target, action)

    def arrival_s(self, action: Action) -> float | None:
        """When the input of ``action`` arrived; None where it comes from no other rank, or has not left yet."""
        forward = action.kind == "forward"
        source = (self._before if forward else self._after)[action.stage]
        if action.kind == "backward_weight" or not self._is_elsewhere(source, action):
            return None
        left = (self.activations if forward else self.gradients)[
            action.stage * self.num_micro_batches + action.micro_batch
        ]
        return None if left is None else left + self.communication_s

    def _is_elsewhere(self, stage: int | None, action: Action) -> bool:
        return stage is not None and self.rank_of_stage[stage] != self.rank_of_stage[action.stage]

    def _go_on(self, rank: int) -> None:
        """Run the actions of ``rank`` until one lacks its input."""
        order, times, seconds, width = self.orders[rank], self.times[rank], self.seconds, self.num_micro_batches
        free: float = times[-1][1] if times else 0
        for index in range(len(times), len(order)):
            action = order[index]
            forward = action.kind == "forward"
            start = free
            source = (self._before if forward else self._after)[action.stage]
            if source is not None and action.kind != "backward_weight":
                cell = action.stage * width + action.micro_batch
                arrived = (self.activations if forward else self.gradients)[cell]
                if arrived is None:
                    self._blocked[forward, cell] = rank
                    return
                if self.rank_of_stage[source] != rank:
                    arrived = arrived + self.communication_s
                if arrived > free:
                    start = arrived
            free = start + seconds(action)
            times.append((start, free))
            if index and order[index - 1].joined:
                self._hand_over(order[index - 1], free)
            if not action.joined:
                self._hand_over(action, free)

    def _hand_over(self, action: Action, now: float) -> None:
        """Send what ``action`` made to the stage that needs it, and wake the rank that waits for it."""
        forward = action.kind == "forward"
        target = (self._after if forward else self._before)[action.stage]
        if target is None or action.kind == "backward_weight":
            return
        cell = target * self.num_micro_batches + action.micro_batch
        (self.activations if forward else self.gradients)[cell] = now
        waiting = self._blocked.pop((forward, cell), None)
        if waiting is not None:
            self._ready.append(waiting)
