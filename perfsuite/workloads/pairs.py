"""Messages between every two ranks, one pair after the other, so that each link is measured alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Literal, get_args

from perfsuite.base.errors import WrongResult
from perfsuite.metrics.pairs import Pair, name_of
from perfsuite.record.workload import Rank, Step
from perfsuite.workloads.checks import difference, poison, require_choices, require_counts
from perfsuite.workloads.collective_base import Collective, CollectiveStep, Endpoint, Segment, passing

Directions = Literal["one", "both"]
_LATENCY_BELOW_BYTES = 1 << 16  # Messages below this size have a time, others a rate


@dataclass(frozen=True, kw_only=True)
class Pairs(Collective):
    """Every ordered pair of ranks in turn: several messages in a row, while the other ranks wait.  Before each pair all
    ranks meet in an all-reduce of one element, which does not count for the pair.
    """

    directions: Directions = "one"  # ``both``: the two ranks of a pair send to each other at the same time.
    messages: int = 8
    """Messages of a pair in a row; their mean hides the different times at which ranks leave the all-reduce."""

    name: ClassVar[str] = "pairs"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choices(self, directions=get_args(Directions))
        require_counts(self, "messages")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Time of the whole round, and of the pairs: times of small messages, rates of others."""
        if self.message_bytes < _LATENCY_BELOW_BYTES:
            return ("latency_us", "pair_us", "slowest_pair_us")
        return ("latency_us", "pair_gb_per_s", "slowest_pair_gb_per_s")

    def schedule(self, ranks: int) -> list[list[Pair]]:
        """Return the rounds of pairs that send at once: here one pair each, and each pair once if both ranks send."""
        choose = itertools.combinations if self.directions == "both" else itertools.permutations
        return [[(first, second)] for first, second in choose(range(ranks), 2)]

    def pairs(self, ranks: int) -> Sequence[Pair]:
        """Return all pairs, round by round."""
        return list(itertools.chain(*self.schedule(ranks)))

    def turn(self, dist: ModuleType, end: Endpoint, pair: Pair) -> Callable[[], object] | None:
        """Return a message of one pair on this rank; None for a rank outside the pair."""
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
        """Return all rounds, with a span for this rank's pair in each."""
        both, rounds = self.directions == "both", []
        for pairs in self.schedule(end.ranks):
            turns = ((name_of(pair, self.messages, both=both), self.turn(dist, end, pair)) for pair in pairs)
            rounds.append([(name, message) for name, message in turns if message is not None])
        here = end.source.new_zeros(1)

        def go_rounds() -> None:
            for turns in rounds:
                dist.all_reduce(here, group=end.group)
                for name, message in turns:
                    with end.span(name):
                        for _ in range(self.messages):
                            message()

        return go_rounds

    def expected(self, count: int, ranks: int, rank: int) -> Sequence[Segment]:
        """Return the buffer of the rank that sent last."""
        senders = [pair[1 - pair.index(rank)] for pair in self.pairs(ranks) if rank in pair]
        senders = senders if self.directions == "both" else [pair[0] for pair in self.pairs(ranks) if pair[1] == rank]
        return [(senders[-1], 0, count)]

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
        if wrong:  # not earlier: the other ranks would wait for this one
            sender, (index, expected, got, count) = wrong[0]
            text = f"{self} on rank {rank.rank}, element {index} of the message from rank {sender} ({count} wrong)"
            raise WrongResult(text, expected=expected, got=got)
