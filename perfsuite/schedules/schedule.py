"""A schedule: the checked order of actions on every rank, and its simulator.

Interleaved schedules place stages in a *loop*: stage s is on rank s mod p.  ZBV and DualPipeV place them in a *v*: rank
r has stages r and 2p - 1 - r.  :func:`simulate` makes a timeline of a schedule and durations, without processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.step import Timeline, TimelineEvent

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""``backward`` computes both gradients.  Some schedules split it into ``backward_input``, the gradient for the previous
stage, and a later ``backward_weight``."""

LETTERS: Mapping[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
"""The letters of torch and of the zero-bubble paper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One entry in the order of a rank.

    >>> print(Action(kind="forward", stage=2, micro_batch=5))
    2F5
    """

    kind: Kind
    stage: int  # Stage 0 holds the embedding.
    micro_batch: int
    joined: bool = False
    """Whether the action overlaps with the rank's next action; its output leaves when both have ended."""

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}{'+' if self.joined else ''}"


Order = tuple[Action, ...]  # The actions of one rank, first to last.

Durations = Callable[[Action], float]
"""The seconds of an action; the simulator only adds and compares them, so fractions stay exact."""


@dataclass(kw_only=True)
class Walk:
    """One execution: an action starts when its rank is free and its input has arrived.  An output arrives
    ``communication_s`` after the end of its action (joined: of the next action), and at once on the same rank. Messages
    take no time of the ranks.
    """

    schedule: Schedule
    seconds: Durations
    communication_s: float
    rank_of_stage: tuple[int, ...] = ()
    times: list[list[tuple[float, float]]] = field(default_factory=list)  # Start and end of each action, by rank.
    activations: list[float | None] = field(default_factory=list)
    """At index s x m + b: the time when the input of stage s and micro-batch b left the stage before."""
    gradients: list[float | None] = field(default_factory=list)
    """At index s x m + b: the time when the gradient for stage s and micro-batch b left the stage after."""
    _before: tuple[int | None, ...] = ()  # The stage that sends activations to each stage and gets its gradients.
    _after: tuple[int | None, ...] = ()
    _blocked: dict[tuple[bool, int], int] = field(default_factory=dict)
    """The rank that waits for (is an activation, index)."""
    _ready: list[int] = field(default_factory=list)  # Ranks that can continue.

    def run(self) -> Walk:
        """Fill ``times``; raises InvalidParameter with the action of every blocked rank where none can continue."""
        orders, self.rank_of_stage = self.schedule.orders, self.schedule.rank_of_stage
        stages = len(self.rank_of_stage)
        self._before, self._after = (None, *range(stages - 1)), (*range(1, stages), None)
        cells = stages * self.schedule.num_micro_batches
        self.activations, self.gradients = [None] * cells, [None] * cells
        self.times = [[] for _ in orders]
        self._ready = list(range(len(orders)))
        while self._ready:
            self._go_on(self._ready.pop())
        if self._blocked:
            stuck = {rank: orders[rank][len(self.times[rank])] for rank in self._blocked.values()}
            where = ", ".join(f"rank {rank} at {action}" for rank, action in sorted(stuck.items()))
            raise InvalidParameter(
                f"{self.schedule.name}: the orders never end: {where}; each waits for an action that comes later, "
                "reorder them"
            )
        return self

    def sends(self, action: Action) -> bool:
        """Return whether the output of ``action`` goes to another rank."""
        target = (self._after if action.kind == "forward" else self._before)[action.stage]
        return action.kind != "backward_weight" and self._is_elsewhere(target, action)

    def arrival_s(self, action: Action) -> float | None:
        """Return the arrival of the input of ``action`` from another rank; None without one."""
        forward = action.kind == "forward"
        source = (self._before if forward else self._after)[action.stage]
        if action.kind == "backward_weight" or not self._is_elsewhere(source, action):
            return None
        left = (self.activations if forward else self.gradients)[
            action.stage * self.schedule.num_micro_batches + action.micro_batch
        ]
        return None if left is None else left + self.communication_s

    def _is_elsewhere(self, stage: int | None, action: Action) -> bool:
        return stage is not None and self.rank_of_stage[stage] != self.rank_of_stage[action.stage]

    def _go_on(self, rank: int) -> None:
        """Run the actions of ``rank`` until an input is missing."""
        order, times, seconds = self.schedule.orders[rank], self.times[rank], self.seconds
        width = self.schedule.num_micro_batches
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
        """Send the output of ``action`` to the next stage, and wake the rank that waits for it."""
        forward = action.kind == "forward"
        target = (self._after if forward else self._before)[action.stage]
        if target is None or action.kind == "backward_weight":
            return
        cell = target * self.schedule.num_micro_batches + action.micro_batch
        (self.activations if forward else self.gradients)[cell] = now
        waiting = self._blocked.pop((forward, cell), None)
        if waiting is not None:
            self._ready.append(waiting)


Placement = Literal["loop", "v"]

_BEFORE: dict[Kind, frozenset[Kind]] = {
    "forward": frozenset(),
    "backward": frozenset({"forward"}),
    "backward_input": frozenset({"forward"}),
    "backward_weight": frozenset({"forward", "backward_input"}),
}
"""The kinds that must have run on a stage and micro-batch before each kind."""

_COMPLETE = (frozenset({"forward", "backward"}), frozenset({"forward", "backward_input", "backward_weight"}))


def stages_of(rank: int, *, ranks: int, stages_per_rank: int, placement: Placement) -> tuple[int, ...]:
    """Return the stages on ``rank``, ascending.

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
    """Orders of actions for all ranks; raises InvalidParameter where they are illegal or never end."""

    name: str
    ranks: int  # p: ranks of the pipeline.
    stages_per_rank: int  # v.
    num_micro_batches: int  # m.
    placement: Placement
    orders: tuple[Order, ...]  # One per rank.

    def __post_init__(self) -> None:
        if len(self.orders) != self.ranks:
            raise InvalidParameter(f"{self.name}: {len(self.orders)} orders for {self.ranks} ranks; give one per rank")
        for rank, order in enumerate(self.orders):
            self._check_order(rank, order)
        self.walk(lambda action: 1)

    @property
    def num_stages(self) -> int:
        """Return the stages on all ranks, p x v."""
        return self.ranks * self.stages_per_rank

    @property
    def splits_backwards(self) -> bool:
        """Return whether gradients of inputs and of weights are separate actions."""
        return any(action.kind == "backward_input" for order in self.orders for action in order)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Return the rank of each stage."""
        placed = [0] * self.num_stages
        for rank in range(self.ranks):
            for stage in self.stages_of(rank):
                placed[stage] = rank
        return tuple(placed)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on ``rank``, ascending."""
        return stages_of(rank, ranks=self.ranks, stages_per_rank=self.stages_per_rank, placement=self.placement)

    def walk(self, seconds: Durations, *, communication_s: float = 0) -> Walk:
        """Return an execution with these durations; raises InvalidParameter where the orders never end."""
        return Walk(schedule=self, seconds=seconds, communication_s=communication_s).run()

    def _check_order(self, rank: int, order: Order) -> None:
        """Require that each stage runs each micro-batch forward and then backward, exactly once."""
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


def simulate(schedule: Schedule, seconds: Durations, *, communication_s: float = 0, detail: bool = False) -> Timeline:
    """Return the timeline of a step in which ranks wait only for their inputs.

    ``seconds``: the duration of an action; ``communication_s``: the delay of an output to another rank, which blocks
    neither rank.  With ``detail``, the timeline also has a ``wait`` before an action of an idle rank, and ``send`` and
    ``receive`` without duration.  Integers and fractions stay exact.  Raises InvalidParameter for a negative delay.

    >>> from perfsuite.schedules.catalog import make_schedule
    >>> from perfsuite.schedules.replay import StageTimes
    >>> timeline = simulate(make_schedule("gpipe", ranks=2, num_micro_batches=1), StageTimes.in_proportion([1, 1]))
    >>> [(event.kind, event.start_s, event.end_s) for event in timeline.events if event.rank == 0]
    [('forward', 0, 1), ('backward', 4, 6)]
    """
    if communication_s < 0:
        raise InvalidParameter(f"communication_s={communication_s} is negative; give the seconds a message travels")
    walk = schedule.walk(seconds, communication_s=communication_s)
    events: list[TimelineEvent] = []
    for rank, order in enumerate(schedule.orders):
        free: float = 0
        held: Action | None = None
        for action, (start, end) in zip(order, walk.times[rank], strict=True):
            if detail:
                events.extend(_before(walk, rank, action, free, start))
            events.append(_event(action.kind, rank, action, start, end))
            if detail:
                sent = (held, None if action.joined else action)
                events.extend(
                    _event("send", rank, output, end, end) for output in sent if output and walk.sends(output)
                )
            held = action if action.joined else None
            free = end
    return Timeline(ranks=schedule.ranks, events=tuple(events), source="simulated", schedule=schedule.name)


def _before(walk: Walk, rank: int, action: Action, free: float, start: float) -> Iterator[TimelineEvent]:
    """Yield the wait for ``action`` and the arrival of its input."""
    if start > free:
        yield _event("wait", rank, action, free, start)
    arrived = walk.arrival_s(action)
    if arrived is not None:
        yield _event("receive", rank, action, arrived, arrived)


def _event(
    kind: Kind | Literal["send", "receive", "wait"], rank: int, action: Action, start: float, end: float
) -> TimelineEvent:
    return TimelineEvent(
        kind=kind, rank=rank, stage=action.stage, micro_batch=action.micro_batch, start_s=start, end_s=end
    )


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
    """Return the least joined cost of cutting ``layers`` into ``stages``, and the end of each stage.  Of cuts with
    equal cost, the earliest are returned.
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
