"""Messages between every two ranks, one pair after the other: each link by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Literal

from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics.pairs import Pair, name_of
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.collective_base import Collective, CollectiveStep, Endpoint, Segment, passing
from perfsuite.workloads.pattern import difference, poison

Directions = Literal["one", "both"]
_LATENCY_BELOW_BYTES = 1 << 16
"""Of smaller messages a time is told, of others a rate."""


@dataclass(frozen=True, kw_only=True)
class Pairs(Collective):
    """Every ordered pair of ranks in turn: several messages one after the other, while the other ranks wait.

    Before each pair all ranks meet in an all-reduce of one element, outside of what counts for the pair.
    """

    message_bytes: int
    """Buffer that a rank sends to another."""
    directions: Directions = "one"
    """``both``: the two of a pair send to each other at the same time."""
    messages: int = 8
    """Of a pair, one after the other: what leaving the all-reduce at different times costs is shared out over them."""

    name: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions not in ("one", "both"):
            raise InvalidParameter(f"directions={self.directions!r} is unknown; choose 'one' or 'both'")
        if type(self.messages) is not int or self.messages < 1:
            raise InvalidParameter(f"messages={self.messages!r} is no count; choose a whole number from 1")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The whole round, then what one pair does: times of small messages, rates of others."""
        if self.message_bytes < _LATENCY_BELOW_BYTES:
            return ("latency_us", "pair_us", "slowest_pair_us")
        return ("latency_us", "pair_gb_per_s", "slowest_pair_gb_per_s")

    def work(self, shape: MeshShape) -> Work:
        """One message of a pair: the round has no rate."""
        self.require_ranks(shape.world_size)
        return Work(collective=self.name, message_bytes=float(self.message_bytes), dtype=self.dtype)

    def pairs(self, ranks: int) -> Sequence[Pair]:
        """All in the order in which they take turns; each once where both send."""
        choose = itertools.combinations if self.directions == "both" else itertools.permutations
        return [(first, second) for first, second in choose(range(ranks), 2)]

    def turn(self, dist: ModuleType, end: Endpoint, pair: Pair) -> Callable[[], object] | None:
        """A message of one pair on this rank; None for a rank that has no part in it."""
        if end.rank not in pair:
            return None
        other = pair[1 - pair.index(end.rank)]
        both = self.directions == "both"
        return passing(
            dist,
            end,
            send_to=other if both or end.rank == pair[0] else None,
            receive_from=other if both or end.rank == pair[1] else None,
        )

    def operation(self, dist: ModuleType, end: Endpoint) -> Callable[[], object]:
        """A round, each pair's messages a span."""
        both = self.directions == "both"
        turns = [
            (name_of(pair, self.messages, both=both), self.turn(dist, end, pair)) for pair in self.pairs(end.ranks)
        ]
        here = end.source.new_zeros(1)

        def go_round() -> None:
            for name, message in turns:
                dist.all_reduce(here, group=end.group)
                if message is not None:
                    with end.span(name):
                        for _ in range(self.messages):
                            message()

        return go_round

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """The buffer of the rank that sent last."""
        senders = [pair[1 - pair.index(rank)] for pair in self.pairs(ranks) if rank in pair]
        senders = senders if self.directions == "both" else [pair[0] for pair in self.pairs(ranks) if pair[1] == rank]
        return [Segment(rank=senders[-1], start=0, length=count)]

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless the round left the last sender's buffer, and each pair's message is right."""
        import torch.distributed as dist

        super().check(rank, step)
        assert isinstance(step, CollectiveStep)
        wrong = []
        for pair in self.pairs(rank.world_size):
            poison(step.end.target)
            message = self.turn(dist, step.end, pair)
            if message is None:
                continue
            message()
            if rank.rank == pair[1] or self.directions == "both":
                sender = pair[1 - pair.index(rank.rank)]
                mistake = difference(step.end.target, step.pattern.values(rank=sender))
                wrong += [(sender, mistake)] if mistake else []
        if wrong:  # only now: the others would wait for this rank
            sender, mistake = wrong[0]
            raise WrongResult(
                f"{self} on rank {rank.rank}, element {mistake.index} of the message from rank {sender} "
                f"({mistake.wrong} wrong)",
                expected=mistake.expected,
                got=mistake.got,
            )
