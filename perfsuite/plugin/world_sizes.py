"""Numbers of ranks that sweeps follow: those asked for, else what a launch or this host has room for."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

MOST_RANKS = 256
"""Of the largest published run."""


@dataclass(frozen=True, kw_only=True)
class LaunchSizes:
    """What a run asks for or has room for."""

    asked: tuple[int, ...] = ()
    """By --perf-world-sizes."""
    capacity: int = 0
    """Ranks of the launch, else devices of the host where ranks do not share them; 0: no limit is known."""

    def instead_of(self, counts: tuple[int, ...], largest: int) -> tuple[int, ...]:
        """World sizes of a test that names ``counts`` and takes more from ``largest`` on, the largest it names at all.

        >>> LaunchSizes(capacity=24).instead_of((2, 4, 8), 8), LaunchSizes(asked=(1, 16)).instead_of((2, 4, 8), 8)
        ((2, 4, 8, 16, 24), (16,))
        """
        if self.asked:
            # Fewer than the test names are too few for what it measures; those that it leaves to others stay there.
            least = min(counts, default=largest + 1)
            return tuple(count for count in self.asked if count >= least)
        return counts + doubled(largest, self.capacity)


ANY_HOST = LaunchSizes()
"""Nothing asked for, no room known."""


def doubled(beyond: int, capacity: int) -> tuple[int, ...]:
    """World sizes above ``beyond`` for so many ranks: doubled, and all that there are; at most MOST_RANKS.

    >>> doubled(8, 24), doubled(8, 8), doubled(8, 300)
    ((16, 24), (), (16, 32, 64, 128, 256))
    """
    capacity = min(capacity, MOST_RANKS)
    steps = itertools.takewhile(lambda count: count < capacity, (beyond * 2**power for power in itertools.count(1)))
    return (*steps, capacity) if capacity > beyond else ()
