"""Controls: work of fixed size between the samples, whose time shows how fast the machine is at that moment.

A control never runs the code under test. It reacts to the host in the same way as the step only if it resembles the
step. So its kind follows from the step: computing reacts to a busy core, waiting for messages to the cores of the other
ranks, sleeping to late wake-ups. The gate divides by the control's time (the noise of stored runs falls by up to three
times, perfsuite docs gate) and compares only controls of one kind.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from perfsuite.platforms.base import DeviceCode
from perfsuite.record.step import UNLIKE
from perfsuite.record.workload import Yardstick

_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Work and waits of one process since some moment; differences of two moments can be added."""

    wall_s: float = 0.0
    own_s: float = 0.0  # Seconds in which the step's thread ran or wanted a core, also on a busy host.
    all_s: float = 0.0  # The same, summed over all threads of the process.
    waits: int = 0  # Number of times that the thread of the step went to sleep.
    blocks: int = 0  # Blocks read from and written to disks.

    @classmethod
    def now(cls, *, all_threads: bool) -> Effort:
        """Return the sums since the process began: takes 40 us, and as much again for each of ``all_threads``."""
        usage, disk = resource.getrusage(_THREAD), resource.getrusage(resource.RUSAGE_SELF)
        own_s = _wanted_s(Path("/proc/thread-self/schedstat"))
        tasks = Path("/proc/self/task").glob("*") if all_threads else ()
        has_statistics = own_s > 0
        return cls(
            wall_s=time.perf_counter(),
            own_s=own_s if has_statistics else time.thread_time(),
            all_s=max(own_s, sum(_wanted_s(task / "schedstat") for task in tasks))
            if has_statistics
            else time.process_time(),
            waits=usage.ru_nvcsw,
            blocks=disk.ru_inblock + disk.ru_oublock,
        )

    def since(self, before: Effort) -> Effort:
        """Return the difference to an earlier moment."""
        passed = {name: value - getattr(before, name) for name, value in vars(self).items()}
        return Effort(**{**passed, "all_s": max(0.0, passed["all_s"])})  # an ended thread removes its seconds

    def __add__(self, other: Effort) -> Effort:
        return Effort(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def own_share(self) -> float:
        """Share of the time in which the thread of the step worked; 1 if it never slept."""
        return min(1.0, self.own_s / self.wall_s) if self.waits and self.wall_s > 0 else 1.0

    @property
    def share(self) -> float:
        """Share of the time in which any thread of the process worked."""
        return max(self.own_share, min(1.0, self.all_s / self.wall_s)) if self.wall_s > 0 else 1.0

    @property
    def wait_s(self) -> float:
        """Usual length of one wait of the step's thread; 0 if it never waited."""
        return max(0.0, self.wall_s - self.own_s) / self.waits if self.waits else 0.0


def _wanted_s(file: Path) -> float:
    """Return seconds in which a thread ran or wanted a core; 0 without kernel statistics or after its end."""
    return sum(_scheduled_s(file))


def _scheduled_s(file: Path) -> tuple[float, float]:
    """Return seconds in which a thread ran, and in which it waited for a core."""
    try:
        ran_ns, waited_ns = file.read_text().split()[:2]
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran_ns) / 1e9, int(waited_ns) / 1e9


def waits_for_cores(tasks: Path = Path("/proc/self/task")) -> dict[str, float] | None:
    """Return the seconds in which each thread of this process waited for a core; None without kernel statistics."""
    scheduled = {task.name: _scheduled_s(task / "schedstat") for task in tasks.glob("*")}
    return {name: waited for name, (_, waited) in scheduled.items()} if any(map(sum, scheduled.values())) else None


def longest_wait_s(before: dict[str, float] | None, after: dict[str, float] | None) -> float | None:
    """Return the seconds in which the thread that waited most for a core did so; None if a reading is missing.

    >>> longest_wait_s({"1": 2.0, "2": 1.0}, {"1": 2.5, "3": 0.75})
    0.75
    """
    if before is None or after is None:
        return None
    return max([0.0, *(waited - before.get(name, 0.0) for name, waited in after.items())])


_WORKS, _WAITS = 0.5, 0.9
"""A step works if its share of work is above the first, and waits if it is below the second; between them it does both,
and its control has two parts."""
_WAIT_STEP, _LONGEST_WAIT_S = 4.0, 0.064
_MESSAGE_STEP, _SMALLEST_MESSAGE = 32.0, 1024
"""Lengths of waits and sizes of messages are rounded to powers of these. A late wake-up affects a control of 1 ms ten
times as much as a step that sleeps for 10 ms; and the control must not follow a change of the step's own length."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    """Character of a step, from the rank that works longest; the same on all ranks."""

    declared: Yardstick  # Kind of the workload, for the working part of the step.
    own_share: float = 1.0
    share: float = 1.0
    wait_s: float = 0.0  # See :class:`~perfsuite.runtime.ranks.yardstick.Effort`.
    blocks: float = 0.0  # Disk blocks that an iteration reads or writes.
    message_bytes: float | None = 0.0  # Bytes of a usual message; 0 without messages, None if unknown.
    ranks: int = 1
    queues: bool = False  # Whether the host only queues work to a device, so that its own time has no meaning.

    def parts(self) -> tuple[Yardstick, ...]:
        """Return the kinds of controls that together resemble the step; none if no kind does."""
        works: Yardstick = self.declared if self.declared in ("compute", "memory") else "compute"
        if self.declared == "message":
            works = "memory"
        sends = self.ranks > 1 and self.message_bytes != 0
        if self.queues:
            return (self.declared,) if self.declared != "message" or self.ranks > 1 else ("memory",)
        share = self.own_share if sends and self.message_bytes is not None else self.share
        if share > _WAITS:
            return (works,)
        if (sends and self.message_bytes is None) or self.blocks >= 1:
            return ()
        waits: Yardstick = "message" if sends else "sleep"
        return (works, waits) if share > _WORKS else (waits,)

    def sleep_s(self) -> float:
        """Return the length of the control's sleep in seconds."""
        return min(_LONGEST_WAIT_S, 1e-3 * _rounded(max(self.wait_s, 6e-5) / 1e-3, _WAIT_STEP))

    def size(self, most: int) -> int:
        """Return the bytes of the control's message."""
        sent = max(1.0, min(most, self.message_bytes or most) / _SMALLEST_MESSAGE)
        return int(min(most, _SMALLEST_MESSAGE * _rounded(sent, _MESSAGE_STEP)))


def _rounded(value: float, step: float) -> float:
    return float(step ** round(math.log(value, step)))


@dataclass(frozen=True, kw_only=True)
class ControlWork:
    """A control of one kind; equal kinds do the same work in every session and version."""

    kind: str  # ``compute``, ``memory``, ``message 32 KiB``, ``sleep 16 ms``, two of them with a plus, or UNLIKE.
    parts: tuple[Callable[[], object], ...] = ()
    meets: bool = False  # Whether the ranks have to be aligned before it, because one part is a message between them.

    def time_s(self, once: Callable[[Callable[[], object]], float]) -> float:
        """Return the geometric mean of the parts' times as measured by ``once``; 0 without parts."""
        times_s = [once(part) for part in self.parts]
        return math.exp(math.fsum(map(math.log, times_s)) / len(times_s)) if times_s and min(times_s) > 0 else 0.0


def make_control(doing: Doing, device: torch.device, code: DeviceCode) -> ControlWork:
    """Return the control that resembles a step: each part takes about a millisecond, or one wait of the step."""
    made, names = [], []
    for kind in doing.parts():
        if kind == "sleep":
            made.append(_sleep(doing.sleep_s()))
            names.append(f"sleep {1e3 * doing.sleep_s():g} ms")
        elif kind == "message":
            size = doing.size(code.yardstick_bytes // 4)
            made.append(_message(size, device))
            names.append(f"message {size // 1024} KiB")
        else:
            made.append(_compute(code.yardstick_side, device) if kind == "compute" else _copy(code, device))
            names.append(kind)
    meets = any(name.startswith("message") for name in names)
    return ControlWork(kind="+".join(names) or UNLIKE, parts=tuple(made), meets=meets)


def _sleep(length_s: float) -> Callable[[], object]:
    return lambda: time.sleep(length_s)


def _message(size: int, device: torch.device) -> Callable[[], object]:
    """Return an all-reduce of ones over the group of all ranks, which does not change the group."""
    buffer = torch.ones(size // 4, device=device)

    def message() -> None:
        dist.all_reduce(buffer, dist.ReduceOp.MAX)

    return message


def _compute(side: int, device: torch.device) -> Callable[[], object]:
    a = torch.ones(side, side, device=device) / side
    out = torch.empty_like(a)

    def compute() -> None:
        for _ in range(4):
            torch.mm(a, a, out=out)

    return compute


def _copy(code: DeviceCode, device: torch.device) -> Callable[[], object]:
    source = torch.ones(code.yardstick_bytes // 4, device=device)
    target = torch.empty_like(source)

    def memory() -> None:
        target.copy_(source)

    return memory
