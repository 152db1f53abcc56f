"""Memory of a training step, in an untimed build: allocated bytes and their peak."""

from __future__ import annotations

import gc
import itertools
import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from perfsuite.platforms.accelerator import EventClock
from perfsuite.platforms.base import Clock
from perfsuite.platforms.cpu import PerfCounterClock
from perfsuite.record.workload import Rank, Step
from perfsuite.runtime.ranks.settled import COLLECTIVE, Settled
from perfsuite.workloads.training.case import TrainCase
from perfsuite.workloads.training.on_rank import TrainingStep

PEAKS: Mapping[str, tuple[str, str]] = {
    "peak": ("start", "final"),
    "peak in flight": ("start in flight", "final in flight"),
}
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


class Ledger:
    """Allocated bytes at marked moments, less those at the first mark."""

    host_bytes = 0  # Resident set of this process at the mark ``final``
    beyond: Mapping[str, int] = {}
    """Bytes reserved but unused, and in use on the whole device, at the mark ``final``; empty on a CPU."""

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


class _DeviceLedger(Ledger):
    """Statistics of an accelerator's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = torch.get_device_module(device)
        self._totals: dict[str, int] = {}
        self._base = self._now()

    def _now(self) -> int:
        self._memory.synchronize(self._device)
        return int(self._memory.memory_allocated(self._device))

    def mark(self, name: str) -> None:
        super().mark(name)
        self._totals[name] = self._now() - self._base
        if name in _STARTS:
            self._memory.reset_peak_memory_stats(self._device)
        peak = int(self._memory.max_memory_allocated(self._device))
        self._totals |= {total: peak - self._base for total, (_, end) in PEAKS.items() if end == name}
        if name == "final":
            free, total = self._memory.mem_get_info(self._device)
            self.beyond = {
                "fragmentation": int(self._memory.max_memory_reserved(self._device)) - peak,
                "whole_device": total - free,
            }

    def totals(self) -> Mapping[str, int]:
        return self._totals


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
        activities = [torch.profiler.ProfilerActivity.CPU]
        gc.collect()
        gc.disable()  # wrappers are in reference cycles, which are collected at chance moments
        try:
            with torch.profiler.profile(activities=activities, profile_memory=True) as self._profile, Settled():
                yield
        finally:
            gc.enable()

    def mark(self, name: str) -> None:
        """Mark the moment among the events."""
        super().mark(name)
        if name in _STARTS:
            gc.collect()
        with torch.profiler.record_function(self._PREFIX + name):
            pass

    def totals(self) -> Mapping[str, int]:
        """Return the sums of the events up to each mark."""
        marks: dict[str, Any] = {}
        collectives, changes = [], []
        # Only the tree of events has addresses; the public interface has sizes, in a file of hundreds of megabytes.
        waiting = list(self._profile.profiler.kineto_results.experimental_event_tree())
        while waiting:
            event = waiting.pop()
            waiting.extend(event.children)
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
                    (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
                    for event in sorted(changes, key=operator.attrgetter("start_time_ns"))
                    if event.start_tid == thread
                ],
                sorted((event.start_time_ns, event.end_time_ns) for event in collectives if event.start_tid == thread),
            ),
            {name: event.start_time_ns for name, event in marks.items()},
        )


MemoryChange = tuple[int, int, int]
"""An allocation, or the end of one: time in nanoseconds, address, and bytes, which are below 0 for an end."""


def running_sums(changes: Iterable[MemoryChange], marks: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes allocated at each mark, and the :data:`PEAKS` between marks.

    ``changes`` are in the order of time.  The end of an earlier allocation is ignored, and a new allocation at an
    address ends the previous one there, even without an event.

    >>> history = [(1, 0xA, 8), (2, 0xB, 4), (3, 0xB, -4), (4, 0xC, -9), (5, 0xA, 6)]
    >>> running_sums(history, {"start": 1, "final": 6})
    {'start': 8, 'final': 6, 'peak': 12}
    """
    totals, now = dict.fromkeys(marks, 0), 0
    ends = {peak: (marks[start], marks[end]) for peak, (start, end) in PEAKS.items() if start in marks}
    peaks = dict.fromkeys(ends, 0)
    held: dict[int, int] = {}
    for at_ns, address, size in changes:
        now -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            now += size
        for name, moment in marks.items():
            if at_ns <= moment:
                totals[name] = now
        for name, (start, end) in ends.items():
            if start <= at_ns <= end:
                peaks[name] = max(peaks[name], now)
    return {**totals, **{name: max(peak, totals[PEAKS[name][0]]) for name, peak in peaks.items()}}


def within_collectives(changes: Iterable[MemoryChange], collectives: Iterable[tuple[int, int]]) -> list[MemoryChange]:
    """Return ``changes`` in the order of time; allocations of a collective end with the collective.

    ``collectives`` are (start, end), in order, and do not overlap.  The real end of such an allocation is often not
    recorded: a thread of the backend may free it last.

    >>> history = [(1, 0xA, 8), (2, 0xB, 4), (5, 0xA, -8), (6, 0xB, 2)]
    >>> running_sums(within_collectives(history, [(2, 4)]), {"start": 3, "final": 6, "later": 4})
    {'start': 12, 'final': 2, 'later': 8, 'peak': 12}
    """
    adjusted: list[MemoryChange] = []
    waiting, scratch = deque(collectives), itertools.count(-1, -1)
    for at_ns, address, size in changes:
        while waiting and waiting[0][1] < at_ns:
            waiting.popleft()
        if not waiting or at_ns < waiting[0][0] or size < 0:
            adjusted.append((at_ns, address, size))
            continue
        # A made-up address, because the real one may be used again meanwhile. Its previous allocation has ended.
        own = next(scratch)
        adjusted += [(at_ns, address, -size), (at_ns, own, size), (waiting[0][1], own, -size)]
    return sorted(adjusted, key=operator.itemgetter(0))


class Observed(Step):
    """Base of the untimed builds: builds the training step in every iteration, so that its allocations are observed."""

    def __init__(self, workload: TrainCase, rank: Rank) -> None:
        self.workload = workload
        self.rank = rank

    @property
    def clock(self) -> Clock:
        """Clock of events in the device's current stream, or the host's clock on a CPU."""
        if self.rank.device.type == "cpu":
            return PerfCounterClock()
        return EventClock(torch.get_device_module(self.rank.device), self.rank.device.type)

    def training(self, rank: Rank | None = None) -> closing[TrainingStep]:
        """Return a context with a newly built step, closed at the end."""
        return closing(TrainingStep(self.workload, rank or self.rank))


class MemoryStep(Observed):
    """Bytes of weights, gradients, optimizer, activations, peak and the rest on each rank.  The kinds are the bytes of
    the tensors themselves, each storage counted once. Totals come from the device's allocator; on a CPU, which has no
    such statistics, from the allocator events of torch's profiler. Memory from before the build does not count. The
    first step creates the optimizer's state, the second is observed.
    """

    def run(self) -> None:
        """Build, run two steps, for stages also forwards and backwards only, and record the bytes."""
        measured = self._measured()
        if self.workload.staged:
            place = self.rank.shape.coordinates(self.rank.rank)["pp"]
            for kind in ("peak_activations", "peak"):
                self._record(f"{kind}_bytes_rank{place}", measured[kind])
        for kind, count in measured.items():
            self._record(f"{kind}_bytes", count)

    def _record(self, name: str, count: int) -> None:
        self.rank.record(name, float(count), unit="bytes", reduce="max")

    def _measured(self) -> dict[str, int]:
        device = self.rank.device
        ledger = CpuLedger() if device.type == "cpu" else _DeviceLedger(device)
        kinds: dict[str, int] = {}
        with ledger.observing(), self.training() as step:
            step.run()
            self._observe(step, ledger, kinds)
            if self.workload.staged:  # The peak of forwards and backwards beyond their start with zeroed gradients
                step.trainer.forward_and_backward(step.batches)
                step.trainer.optimizer.zero_grad(set_to_none=False)
                ledger.mark("start in flight")
                step.trainer.forward_and_backward(step.batches)
                ledger.mark("final in flight")
        totals = ledger.totals()
        final = totals["final"]
        held, at_once = kinds.pop("held_gradients"), kinds.pop("at_once")
        activations = {}
        if "after forward" in totals:
            activations["activations"] = totals["after forward"] - totals["before forward"]
            at_once = max(at_once, kinds.pop("before_forward") + activations["activations"])
        if self.workload.staged:
            activations["peak_activations"] = totals["peak in flight"] - totals["start in flight"]
        return {
            **kinds,
            **activations,
            "peak": totals["peak"],
            "final_device": final,
            "untracked": final - sum(kinds[kind] for kind in ("weights", "optimizer", "encoders", "ema")) - held,
            "final_host": ledger.host_bytes,
            **ledger.beyond,
            "parts_at_once": at_once,
            "parts_beyond_peak": at_once - totals["peak"],  # above 0 it is an error on any rank
        }

    def _observe(self, step: TrainingStep, ledger: Ledger, kinds: dict[str, int]) -> None:
        trainer = step.trainer

        @contextmanager
        def first_forward() -> Iterator[None]:
            kinds["before_forward"] = self._on_device(step.tensors())
            ledger.mark("before forward")
            yield
            ledger.mark("after forward")

        ledger.mark("start")
        trainer.forward_and_backward(step.batches, first_forward)
        seen: set[int] = set()
        tensors = step.tensors()
        kinds["weights"] = storage_bytes(tensors["weights"], seen)
        kinds["gradients"] = storage_bytes(tensors["gradients"], seen)
        kinds["at_once"] = self._on_device(tensors)
        del tensors
        step.end()
        after = step.tensors()
        # Buckets keep gradients between steps, so they count in the final total.
        seen.clear()
        storage_bytes(after["weights"], seen)
        kinds["held_gradients"] = storage_bytes(after["gradients"], seen)
        kinds["optimizer"] = storage_bytes(after["optimizer"], seen)
        kinds["encoders"] = storage_bytes(after["encoders"], seen)
        kinds["ema"] = self._on_device({"ema": after["ema"]})
        kinds["at_once"] = max(kinds["at_once"], self._on_device(after))
        del after
        ledger.mark("final")

    def _on_device(self, tensors: Mapping[str, list[torch.Tensor]]) -> int:
        """Return the bytes of all kinds on the device; offloaded tensors do not count."""
        device = self.rank.device.type
        everything = (tensor for kind in tensors.values() for tensor in kind)
        return storage_bytes((tensor for tensor in everything if tensor.device.type == device), set())
