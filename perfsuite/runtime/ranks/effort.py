"""What a step does with its time, as the host tells: it computes, or waits for messages, timers or disks."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What one process did since some moment; the differences of two moments add up."""

    wall_s: float = 0.0
    own_s: float = 0.0
    """Seconds in which the thread of the step ran or wanted a core: a busy host takes nothing from this share."""
    all_s: float = 0.0
    """The same, summed over all threads of the process."""
    waits: int = 0
    """How often the thread of the step went to sleep."""
    blocks: int = 0
    """Reads and writes of a disk, in blocks."""

    @classmethod
    def now(cls, *, all_threads: bool) -> Effort:
        """The sums since the process began: 40 us, and as much again for each of ``all_threads``."""
        usage, disk = resource.getrusage(_THREAD), resource.getrusage(resource.RUSAGE_SELF)
        own_s = _wanted_s(Path("/proc/thread-self/schedstat"))
        tasks = Path("/proc/self/task").glob("*") if all_threads else ()
        known = own_s > 0
        return cls(
            wall_s=time.perf_counter(),
            own_s=own_s if known else time.thread_time(),
            all_s=max(own_s, sum(_wanted_s(task / "schedstat") for task in tasks)) if known else time.process_time(),
            waits=usage.ru_nvcsw,
            blocks=disk.ru_inblock + disk.ru_oublock,
        )

    def since(self, before: Effort) -> Effort:
        """What was done since an earlier moment."""
        return Effort(
            wall_s=self.wall_s - before.wall_s,
            own_s=self.own_s - before.own_s,
            all_s=max(0.0, self.all_s - before.all_s),  # a thread that ended takes its seconds along
            waits=self.waits - before.waits,
            blocks=self.blocks - before.blocks,
        )

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            wall_s=self.wall_s + other.wall_s,
            own_s=self.own_s + other.own_s,
            all_s=self.all_s + other.all_s,
            waits=self.waits + other.waits,
            blocks=self.blocks + other.blocks,
        )

    @property
    def own_share(self) -> float:
        """Share of the time in which the thread of the step was at work; 1 where it never went to sleep."""
        return min(1.0, self.own_s / self.wall_s) if self.waits and self.wall_s > 0 else 1.0

    @property
    def share(self) -> float:
        """Share of the time in which any thread of the process was at work."""
        return max(self.own_share, min(1.0, self.all_s / self.wall_s)) if self.wall_s > 0 else 1.0

    @property
    def wait_s(self) -> float:
        """Usual length of one wait of the step's thread; 0 where it never waited."""
        return max(0.0, self.wall_s - self.own_s) / self.waits if self.waits else 0.0


def _wanted_s(file: Path) -> float:
    """Seconds in which a thread ran or wanted a core; 0 where the kernel does not tell, or the thread has ended."""
    try:
        ran_ns, wanted_ns = file.read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0
    return (int(ran_ns) + int(wanted_ns)) / 1e9
