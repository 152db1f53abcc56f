"""How many threads a rank gets and which cores it is pinned to."""

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
    """Cores the rank is pinned to; None when the ranks of a host outnumber its cores and share them all."""


def divide_cores(cores: tuple[int, ...], local_rank: int, local_world_size: int) -> Placement:
    """Equal consecutive shares of the cores; with more ranks than cores one thread each and no pinning.

    Pinning more ranks than cores would decide for the scheduler which of them wait for each other.

    >>> divide_cores((0, 1, 2, 3), local_rank=1, local_world_size=2)
    Placement(threads=2, cores=(2, 3))
    >>> divide_cores((0, 1), local_rank=3, local_world_size=4)
    Placement(threads=1, cores=None)
    """
    share = len(cores) // local_world_size
    if share == 0:
        return Placement(threads=1, cores=None)
    mine = cores[local_rank * share : (local_rank + 1) * share]
    return Placement(threads=share, cores=mine)


def usable_cores() -> tuple[int, ...]:
    """Every core that this process may use, whatever a launcher bound it to (mpirun binds a rank to one core)."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return tuple(sorted(os.sched_getaffinity(0)))


def pin(cores: tuple[int, ...]) -> None:
    """Pin every thread of this process: thread pools made for an earlier case keep their own affinity otherwise."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # a thread may have ended since
            os.sched_setaffinity(int(thread), cores)
