"""Where a rank runs: as many threads as its share of the cores it is allowed, and pinned to them only on request.

A plain program under torchrun is not pinned, and pinned it measures something else: gloo's own threads would share the
core of the rank whose messages they move.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Threads and cores of one rank."""

    threads: int
    """Intra-op threads."""
    cores: tuple[int, ...] | None
    """Cores the rank is pinned to; None when it is not."""


def allowed_cores() -> tuple[int, ...]:
    """Cores that this process may use, as whoever started it left them."""
    return tuple(sorted(os.sched_getaffinity(0)))


def divide_cores(cores: tuple[int, ...], share: int, shares: int, *, pin: bool = False) -> Placement:
    """Equal consecutive shares of ``cores``, which ``shares`` ranks may use; one thread each when they are more.

    Pinning more ranks than cores would decide for the scheduler which of them wait for each other: they are not pinned.

    >>> divide_cores((0, 1, 2, 3), share=1, shares=2)
    Placement(threads=2, cores=None)
    >>> divide_cores((0, 1, 2, 3), share=1, shares=2, pin=True)
    Placement(threads=2, cores=(2, 3))
    >>> divide_cores((0, 1), share=3, shares=4, pin=True)
    Placement(threads=1, cores=None)
    """
    width = len(cores) // shares
    if width == 0:
        return Placement(threads=1, cores=None)
    return Placement(threads=width, cores=cores[share * width : (share + 1) * width] if pin else None)


def pin(cores: tuple[int, ...]) -> None:
    """Pin every thread of this process: thread pools made for an earlier case keep their own affinity otherwise."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread may have ended since
            os.sched_setaffinity(int(thread), cores)
