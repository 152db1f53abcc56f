"""Exposed communication a second way, where the device tells when its kernels ran: what of it no other kernel covers.

Where the first way (:class:`.train_builds.ExposedStep`) asks what would be gained without communication, this one asks
when the device did nothing but communicate.  A communication kernel that waits for a late rank counts here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_STEPS = 3
"""Steps under the profiler."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One thing that the device did."""

    name: str
    start_ns: int
    end_ns: int
    stream: int = 0

    def communicates(self, backend: str) -> bool:
        """Libraries of collectives have their name in those of their kernels."""
        return backend.lower() in self.name.lower()


def uncovered_share(kernels: Sequence[Kernel], backend: str) -> float | None:
    """Share of the time from the first kernel's start to the last one's end in which only communication ran.

    None where no kernel communicates: then nothing is known, not that nothing is exposed.

    >>> ran = [("gemm", 0, 60), ("lib_DevKernel_AllReduce", 40, 80), ("adam", 80, 100)]
    >>> uncovered_share([Kernel(name=name, start_ns=start, end_ns=end) for name, start, end in ran], "lib")
    0.2
    """
    communication = union((kernel.start_ns, kernel.end_ns) for kernel in kernels if kernel.communicates(backend))
    if not communication:
        return None
    everything = union((kernel.start_ns, kernel.end_ns) for kernel in kernels)
    computation = union((kernel.start_ns, kernel.end_ns) for kernel in kernels if not kernel.communicates(backend))
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    return (length(everything) - length(computation)) / whole


def steps_agree(kernels: Sequence[Kernel]) -> bool:
    """Whether each stream ran the same kernels in the same order in every step.

    CUPTI of CUDA 12.6u2 to 13.0 drops kernels at the start of a session without a word (pytorch/pytorch#192021).

    >>> ran = [Kernel(name=name, start_ns=at, end_ns=at + 1) for at, name in enumerate(["gemm", "adam"] * _STEPS)]
    >>> steps_agree(ran), steps_agree(ran[1:])
    (True, False)
    """
    streams: dict[int, list[str]] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        streams.setdefault(kernel.stream, []).append(kernel.name)
    return all(names == names[: len(names) // _STEPS] * _STEPS for names in streams.values())


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same points in intervals that do not touch, in order.

    >>> union([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[tuple[int, int]]) -> int:
    """Sum of the lengths of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def record_kernels(run: Callable[[], None], wait: Callable[[], None]) -> list[Kernel]:
    """What the device did in a few steps, up to ``wait``, by torch's profiler; empty where it sees no device."""
    import torch

    profiler: Any = torch.profiler  # what is used of these two has no types
    autograd: Any = torch.autograd
    with profiler.profile(activities=list(profiler.supported_activities())) as profile:
        for _ in range(_STEPS):
            run()
        wait()
    return kernels_of(profile.profiler.kineto_results.events(), autograd.DeviceType.CPU)


def kernels_of(events: Iterable[Any], cpu: object) -> list[Kernel]:
    """The kernels among the profiler's events: not what ran on the host, nor ranges that somebody marked."""
    return [
        Kernel(
            name=event.name(),
            start_ns=event.start_ns(),
            end_ns=event.start_ns() + event.duration_ns(),
            stream=event.device_resource_id(),
        )
        for event in events
        if event.device_type() != cpu and not _is_mark(event)
    ]


def _is_mark(event: Any) -> bool:
    # The profiler draws a range of the host's, such as nccl:all_reduce, over the kernels that were started in it.
    marked = getattr(event, "is_user_annotation", None)
    return bool(marked is not None and marked()) or ":" in event.name().replace("::", "")
