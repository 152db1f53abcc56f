"""Messages between nodes in rounds of disjoint pairs; all pairs of a round send at once."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from dataclasses import dataclass
from typing import ClassVar, Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.metrics.pairs import SLOW_LINK, Pair, beyond_ends, log_times, name_again
from perfsuite.record.result import Record
from perfsuite.record.workload import Probe, Workload
from perfsuite.workloads.checks import require_counts
from perfsuite.workloads.pairs import Directions, Pairs

AGAIN = 4  # Repeats of a suspected link: of 2,016 healthy links 37 are suspected at first, and 0.2 after the repeats


def tournament(nodes: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which every two nodes meet once: n - 1, or n if n is odd and one node pauses.

    The circle method: one node stays and the others rotate.  The order of nodes is random and seeded, so that a few
    rounds are not all between neighbours.

    >>> [len(pairs) for pairs in tournament(5)], sorted(sum(tournament(4), []))
    ([2, 2, 2, 2, 2], [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    """
    circle = list(range(nodes))
    random.Random(nodes).shuffle(circle)
    circle += [-1] * (nodes % 2)
    rounds = []
    for _ in range(len(circle) - 1):
        pairs = [(circle[place], circle[-1 - place]) for place in range(len(circle) // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], *circle[2:], circle[1]]
    return rounds


@dataclass(frozen=True, kw_only=True)
class PairRounds(Pairs):
    """Rounds of disjoint pairs of nodes: device d of one node and device d of the other send to each other.  All pairs
    of a round send at once.  Before each round all ranks meet in an all-reduce of one element, which does not count for
    the pairs.  Four rounds find a slow node among any number of nodes; ``all`` measures every link.
    """

    directions: Directions = "both"
    rounds: int | Literal["all"] = 4  # Number of partners of each node; ``all``: every other node.
    ranks_per_node: int = 1  # Ranks of a node, which have consecutive numbers.
    again: tuple[int, ...] = ()  # Rounds to repeat, by number from 0; set by :meth:`settle`.

    always: ClassVar[Directions] = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.directions != self.always:
            raise InvalidParameter(f"directions={self.directions!r} is not valid: in a round both send; leave it out")
        if self.rounds != "all" and (type(self.rounds) is not int or self.rounds < 1):
            raise InvalidParameter(f"rounds={self.rounds!r} is not a number of rounds; choose one from 1, or 'all'")
        require_counts(self, "ranks_per_node")

    def schedule(self, ranks: int) -> list[list[Pair]]:
        """Return the pairs of ranks of each round.

        >>> [len(pairs) for pairs in PairRounds(message_bytes=4, ranks_per_node=2).schedule(16)]
        [8, 8, 8, 8]
        """
        here = self.ranks_per_node
        if ranks % here or ranks < 2 * here:
            raise InvalidParameter(
                f"ranks_per_node={here} and {ranks} ranks are not several whole nodes; choose a divisor below {ranks}"
            )
        rounds = tournament(ranks // here)
        chosen = rounds if self.rounds == "all" else rounds[: self.rounds]
        chosen = [chosen[number] for number in self.again] or chosen
        return [
            [(one * here + device, other * here + device) for one, other in pairs for device in range(here)]
            for pairs in chosen
        ]

    def settle(self, probe: Probe) -> tuple[Workload, tuple[Record, ...]]:
        """Repeat the rounds of suspected links four times, and record each link's median against unsuspected pairs."""
        first = probe(self, "time")
        times = log_times(first)
        suspects = {pair for pair, away in beyond_ends(times).items() if away > math.log1p(SLOW_LINK)}
        if not suspects:
            return self, ()
        schedule = self.schedule(len(first.ranks))
        rounds = tuple(number for number, pairs in enumerate(schedule) if suspects & set(pairs))
        looks = [log_times(probe(dataclasses.replace(self, again=rounds), "time")) for _ in range(AGAIN)]
        records = []
        for pair in sorted(suspects):
            aways = []
            for look in looks:
                others = [value for other, value in look.items() if other not in suspects]
                aways.append(look[pair] - statistics.median(others or look.values()))
            time_s = math.exp(statistics.median(times.values()) + statistics.median(aways))
            records.append(Record(name=name_again(pair), value=time_s, unit="s", reduce="max"))
        return self, tuple(records)
