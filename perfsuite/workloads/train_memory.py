"""The memory of a training step, in a build of its own that is never timed."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsuite.workload import Rank, Step
from perfsuite.workloads.training_step import TrainingStep

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.train_step import TrainStep


class Observed(Step):
    """Builds the training step anew in every iteration: what it allocates is part of what is observed."""

    def __init__(self, workload: TrainStep, rank: Rank) -> None:
        self.workload = workload
        self.rank = rank

    @contextmanager
    def training(self, rank: Rank | None = None) -> Iterator[TrainingStep]:
        """A freshly built step, closed at the end."""
        step = TrainingStep(self.workload, rank or self.rank)
        try:
            yield step
        finally:
            step.close()


class MemoryStep(Observed):
    """Weights, gradients, optimizer, activations, peak and what is left, in bytes on each rank.

    The kinds are the bytes of the tensors themselves, each storage counted once.  Totals come from the device's
    allocator, or from the allocator events of torch's profiler on a CPU, which keeps no statistics.  All totals are
    beyond what was allocated before the build.  The first step makes the optimizer's state, the second is observed.
    """

    def run(self) -> None:
        """Build, two steps, and the records."""
        ledger = ledger_of(self.rank.device)
        kinds: dict[str, int] = {}
        with ledger.observing(), self.training() as step:
            step.run()
            self._observe(step, ledger, kinds)
        kept = kinds["weights"] + kinds["optimizer"] + kinds["held_gradients"]
        totals = ledger.totals(kept)
        final = totals["final"]
        measured = {
            **kinds,
            "activations": totals["after forward"] - totals["before forward"],
            "peak": totals["peak"],
            "final_device": final,
            "untracked": final - kept,
            "final_host": ledger.host_bytes,
            **ledger.beyond(),
        }
        del measured["held_gradients"]
        for name, count in measured.items():
            self.rank.record(f"{name}_bytes", float(count), unit="bytes", reduce="max")

    def _observe(self, step: TrainingStep, ledger: Ledger, kinds: dict[str, int]) -> None:
        trainer, count = step.trainer, step.trainer.plan.accumulation
        ledger.mark("start")
        for micro in range(count):
            batch = next(step.batches)
            with trainer.micro_batch(last=micro == count - 1):
                if micro == 0:
                    ledger.mark("before forward")
                loss = trainer.forward(batch)
                if micro == 0:
                    ledger.mark("after forward")
                trainer.backward(loss)
        seen: set[int] = set()
        tensors = trainer.tensors()
        kinds["weights"] = storage_bytes(tensors["weights"], seen)
        kinds["gradients"] = storage_bytes(tensors["gradients"], seen)
        del tensors, loss, batch
        trainer.step()
        after = trainer.tensors()
        # Buckets keep gradients between steps: then they are part of the final total.
        seen.clear()
        storage_bytes(after["weights"], seen)
        kinds["held_gradients"] = storage_bytes(after["gradients"], seen)
        kinds["optimizer"] = storage_bytes(after["optimizer"], seen)
        del after
        ledger.mark("final")


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind ``tensors`` that are not in ``seen``; adds them to it.

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


def resident_bytes() -> int:
    """Resident set of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Ledger:
    """Totals of allocated bytes at marked moments, beyond what was allocated at the first."""

    host_bytes = 0
    """Resident set at the mark ``final``."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Everything between the base and the last mark happens inside."""
        yield

    def mark(self, name: str) -> None:
        """Now: ``start`` of the step whose peak is taken, ``before forward``, ``after forward``, ``final``."""
        if name == "final":
            self.host_bytes = resident_bytes()

    def totals(self, kept: int | None = None) -> Mapping[str, int]:
        """Bytes at every mark, and at the ``peak`` between ``start`` and ``final``.

        ``kept`` are bytes known to be allocated at ``final``: given them, a ledger may correct what it missed.
        """
        raise AssertionError("a subclass knows its allocator")

    def beyond(self) -> Mapping[str, int]:
        """What an allocator of its own holds beyond what is allocated; nothing on a CPU."""
        return {}


class DeviceLedger(Ledger):
    """The statistics of an accelerator's caching allocator."""

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
        """Read the allocator; the peak starts anew at ``start`` and is read at ``final``."""
        super().mark(name)
        self._totals[name] = self._now() - self._base
        if name == "start":
            self._memory.reset_peak_memory_stats(self._device)
        if name == "final":
            peak = int(self._memory.max_memory_allocated(self._device))
            free, total = self._memory.mem_get_info(self._device)
            self._totals["peak"] = peak - self._base
            self._beyond = {
                "fragmentation": int(self._memory.max_memory_reserved(self._device)) - peak,
                "whole_device": total - free,
            }

    def totals(self, kept: int | None = None) -> Mapping[str, int]:
        """As marked."""
        return self._totals

    def beyond(self) -> Mapping[str, int]:
        """Reserved and never used, and the whole device."""
        return self._beyond


class CpuLedger(Ledger):
    """The allocator events that torch's profiler notes: their running sum is what is allocated."""

    _PREFIX = "perfsuite: "

    def __init__(self) -> None:
        self._profile: Any = None

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Profile allocations from before the build on."""
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as self._profile:
            yield
            gc.collect()  # wrappers refer to themselves; what is still allocated now was freed unseen

    def mark(self, name: str) -> None:
        """Note the moment among the events."""
        import torch

        super().mark(name)
        with torch.profiler.record_function(self._PREFIX + name):
            pass

    def totals(self, kept: int | None = None) -> Mapping[str, int]:
        """Sums of the events up to each mark."""
        # The events with their sizes are public in the exported trace only, as a file of hundreds of megabytes.
        events = list(self._profile.profiler.kineto_results.events())
        marks = {
            event.name().removeprefix(self._PREFIX): event.start_ns()
            for event in events
            if event.name().startswith(self._PREFIX)
        }
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        corrected = _sums(seen_to_end(changes), marks)
        # A strategy that keeps its tensors beyond its end (modules of DeepSpeed's do) leaves nothing to tell apart.
        return corrected if kept is not None and corrected["final"] >= kept else _sums(changes, marks)


def ledger_of(device: torch.device) -> Ledger:
    """What keeps the books of ``device``."""
    return CpuLedger() if device.type == "cpu" else DeviceLedger(device)


def _sums(changes: Sequence[tuple[int, int]], marks: Mapping[str, int]) -> dict[str, int]:
    """Bytes allocated at each mark, and the peak between ``start`` and ``final``."""
    totals, peak, now = dict.fromkeys(marks, 0), 0, 0
    for at, change in changes:
        now += change
        for name, moment in marks.items():
            if at <= moment:
                totals[name] = now
        if marks["start"] <= at <= marks["final"]:
            peak = max(peak, now)
    return {**totals, "peak": max(peak, totals["start"])}


def seen_to_end(changes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(moment, bytes allocated or, below 0, freed) without allocations that nobody saw end.

    The profiler does not see what a thread of gloo's frees, which is whatever a communication happens to hold longer
    than the rank does.  At the end everything has been freed: of each size, the allocations that are left over then are
    dropped, the earliest first.

    >>> seen_to_end([(1, 8), (2, 4), (3, 8), (4, -8), (5, -4)])
    [(2, 4), (3, 8), (4, -8), (5, -4)]
    """
    left: dict[int, int] = Counter()
    for _, change in changes:
        left[abs(change)] += 1 if change > 0 else -1
    kept = []
    for moment, change in changes:
        if change > 0 and left[change] > 0:
            left[change] -= 1
        else:
            kept.append((moment, change))
    return kept
