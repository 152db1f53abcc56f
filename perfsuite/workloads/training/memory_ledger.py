"""Allocated bytes and their peak, recorded for the memory build."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


PEAKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"peak": ("start", "final"), "peak in flight": ("start in flight", "final in flight")}
)
"""Peaks between two marks: of the step, and of forwards and backwards only."""
_ALLOCATION = "[memory]"  # Name of the profiler's events of an allocation and its end
_STARTS = frozenset(start for start, _ in PEAKS.values())


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Return the bytes of the storages of ``tensors`` that are not in ``seen``, and add them to it.

    >>> import torch
    >>> buffer = torch.zeros(8)
    >>> storage_bytes([buffer[:4], buffer[4:]], set())
    32
    """
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def parts_against_peak(at_once: int, peak: int) -> dict[str, int]:
    """Return ``parts_at_once``, and how far it exceeds this rank's peak; a value above 0 is an error on any rank.

    >>> parts_against_peak(at_once=12, peak=10)
    {'parts_at_once': 12, 'parts_beyond_peak': 2}
    """
    return {"parts_at_once": at_once, "parts_beyond_peak": at_once - peak}


class Ledger:
    """Allocated bytes at marked moments, less those at the first mark."""

    host_bytes = 0  # Resident set of this process at the mark ``final``

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Return a context around everything between the first and the last mark."""
        yield

    def mark(self, name: str) -> None:
        """Mark this moment: an end of one of :data:`PEAKS`, in order, or ``before forward``, ``after forward``."""
        if name == "final":
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.host_bytes = pages * os.sysconf("SC_PAGE_SIZE")

    def totals(self) -> Mapping[str, int]:
        """Return the bytes at every mark, and the :data:`PEAKS` whose ends were marked."""
        raise AssertionError("a subclass reads its allocator")

    def beyond(self) -> Mapping[str, int]:
        """Return bytes that the allocator holds in addition; empty on a CPU."""
        return {}


class DeviceLedger(Ledger):
    """Statistics of an accelerator's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._memory: Any = torch.get_device_module(device)
        self._totals: dict[str, int] = {}
        self._beyond: dict[str, int] = {}
        self._base = self._now()

    def _now(self) -> int:
        self._memory.synchronize(self._device)
        return int(self._memory.memory_allocated(self._device))

    def mark(self, name: str) -> None:
        """Read the allocator; the peak is reset at a start and read at its end."""
        super().mark(name)
        self._totals[name] = self._now() - self._base
        if name in _STARTS:
            self._memory.reset_peak_memory_stats(self._device)
        peak = int(self._memory.max_memory_allocated(self._device))
        self._totals |= {total: peak - self._base for total, (_, end) in PEAKS.items() if end == name}
        if name == "final":
            free, total = self._memory.mem_get_info(self._device)
            self._beyond = {
                "fragmentation": int(self._memory.max_memory_reserved(self._device)) - peak,
                "whole_device": total - free,
            }

    def totals(self) -> Mapping[str, int]:
        """Return the bytes at the marks."""
        return self._totals

    def beyond(self) -> Mapping[str, int]:
        """Return the reserved but unused bytes, and the bytes in use on the whole device."""
        return self._beyond


class CpuLedger(Ledger):
    """Allocator events of torch's profiler in this thread; their running sum is the allocated memory.  A collective
    frees its buffers at its end (:mod:`perfsuite.runtime.ranks.settled`), so that gloo's threads do not decide when.
    Memory that such a thread allocates for itself does not count.
    """

    _PREFIX = "perfsuite: "

    def __init__(self) -> None:
        self._profile: Any = None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Return a context that profiles allocations, entered before the build."""
        import torch

        from perfsuite.runtime.ranks.settled import Settled

        activities = [torch.profiler.ProfilerActivity.CPU]
        gc.collect()
        gc.disable()  # wrappers are in reference cycles, which are collected at chance moments
        try:
            settled: Any = Settled
            with torch.profiler.profile(activities=activities, profile_memory=True) as self._profile, settled():
                yield
        finally:
            gc.enable()

    def mark(self, name: str) -> None:
        """Mark the moment among the events."""
        import torch

        super().mark(name)
        if name in _STARTS:
            gc.collect()
        with torch.profiler.record_function(self._PREFIX + name):
            pass

    def totals(self) -> Mapping[str, int]:
        """Return the sums of the events up to each mark."""
        from perfsuite.runtime.ranks.settled import COLLECTIVE

        marks: dict[str, Any] = {}
        collectives, changes = [], []
        # Only the tree of events has addresses; the public interface has sizes, in a file of hundreds of megabytes.
        for event in _walk(self._profile.profiler.kineto_results.experimental_event_tree()):
            name = event.name
            if name == _ALLOCATION:
                changes.append(event)
            elif name == COLLECTIVE:
                collectives.append(event)
            elif name.startswith(self._PREFIX):
                marks[name.removeprefix(self._PREFIX)] = event
        thread = marks["start"].start_tid
        return running_sums(
            within_collectives(
                [
                    MemoryChange(
                        at_ns=event.start_time_ns,
                        address=event.extra_fields.ptr,
                        size_bytes=event.extra_fields.alloc_size,
                    )
                    for event in sorted(changes, key=operator.attrgetter("start_time_ns"))
                    if event.start_tid == thread
                ],
                sorted((event.start_time_ns, event.end_time_ns) for event in collectives if event.start_tid == thread),
            ),
            {name: event.start_time_ns for name, event in marks.items()},
        )


def ledger_of(device: torch.device) -> Ledger:
    """Return a new ledger of ``device``."""
    return CpuLedger() if device.type == "cpu" else DeviceLedger(device)


@dataclass(frozen=True, kw_only=True)
class MemoryChange:
    """One allocation, or the end of one."""

    at_ns: int
    address: int
    size_bytes: int  # Below 0 for the end of an allocation


def running_sums(changes: Iterable[MemoryChange], marks: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes allocated at each mark, and the :data:`PEAKS` between marks.

    ``changes`` are in the order of time.  The end of an earlier allocation is ignored, and a new allocation at an
    address
    ends the previous one there, even without an event.

    >>> history = [(1, 0xA, 8), (2, 0xB, 4), (3, 0xB, -4), (4, 0xC, -9), (5, 0xA, 6)]
    >>> running_sums(
    ...     [MemoryChange(at_ns=at, address=address, size_bytes=size) for at, address, size in history],
    ...     {"start": 1, "final": 6},
    ... )
    {'start': 8, 'final': 6, 'peak': 12}
    """
    totals, now = dict.fromkeys(marks, 0), 0
    ends = {peak: (marks[start], marks[end]) for peak, (start, end) in PEAKS.items() if start in marks}
    peaks = dict.fromkeys(ends, 0)
    held: dict[int, int] = {}
    for change in changes:
        now -= held.pop(change.address, 0)
        if change.size_bytes > 0:
            held[change.address] = change.size_bytes
            now += change.size_bytes
        for name, moment in marks.items():
            if change.at_ns <= moment:
                totals[name] = now
        for name, (start, end) in ends.items():
            if start <= change.at_ns <= end:
                peaks[name] = max(peaks[name], now)
    return {**totals, **{name: max(peak, totals[PEAKS[name][0]]) for name, peak in peaks.items()}}


def within_collectives(changes: Iterable[MemoryChange], collectives: Iterable[tuple[int, int]]) -> list[MemoryChange]:
    """Return ``changes`` in the order of time; allocations of a collective end with the collective.

    ``collectives`` are (start, end), in order, and do not overlap.  The real end of such an allocation is often not
    recorded: a thread of the backend may free it last.

    >>> history = [(1, 0xA, 8), (2, 0xB, 4), (5, 0xA, -8), (6, 0xB, 2)]
    >>> seen = [MemoryChange(at_ns=at, address=address, size_bytes=size) for at, address, size in history]
    >>> running_sums(within_collectives(seen, [(2, 4)]), {"start": 3, "final": 6, "later": 4})
    {'start': 12, 'final': 2, 'later': 8, 'peak': 12}
    """
    adjusted: list[MemoryChange] = []
    waiting, scratch = deque(collectives), itertools.count(-1, -1)
    for change in changes:
        while waiting and waiting[0][1] < change.at_ns:
            waiting.popleft()
        if not waiting or change.at_ns < waiting[0][0] or change.size_bytes < 0:
            adjusted.append(change)
            continue
        # A made-up address, because the real one may be used again meanwhile. Its previous allocation has ended.
        own = dataclasses.replace(change, address=next(scratch))
        ended = dataclasses.replace(change, size_bytes=-change.size_bytes)
        adjusted += [ended, own, dataclasses.replace(own, at_ns=waiting[0][1], size_bytes=-change.size_bytes)]
    return sorted(adjusted, key=lambda change: change.at_ns)


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)
