"""The fastest that a host is seen to multiply or to move, for devices whose peaks nobody publishes: CPUs.

A fixed set of kernels, whatever is measured beside it: products from such as fit into a core's own cache to some that
keep every core busy, and a copy and a triad well beyond the last-level cache.  Each runs in both ways in which ranks
use a host: one kernel on all threads, and one on every core by itself.  The second matters where other programs run: a
kernel of two threads waits for the one that was switched out, and then reaches less than half of what one thread does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

from perfsuite.errors import InvalidParameter
from perfsuite.mesh import MeshShape
from perfsuite.records import Work
from perfsuite.units import MIB, gb_per_s, tflops
from perfsuite.workload import DTYPES, CallableStep, Rank, Step, Workload
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import MemoryCopy, MemoryTriad

MEMORY = "memory"
"""What is probed beside the dtypes."""
_SIDES = (256, 512, 1024)
_LARGE_SIDES = (2048, 4096)
"""Only these keep more than _MANY_CORES busy, and fewer would take too long for them."""
_MANY_CORES = 16
_WINDOW_S = 0.005
_WINDOWS = 7
"""The best of so many windows: the first two of one kernel each, the others of as many as fill them."""
_ENOUGH_S = 0.05
"""No window is begun after this long."""
_BUFFER_BYTES = (64 * MIB, 512 * MIB)
"""Smallest and largest buffer; between them the last-level cache decides."""


@dataclass(frozen=True, kw_only=True)
class PeakProbe(Workload):
    """Records the rate of every kernel of the fixed set under its name; its own time means nothing."""

    quantity: str
    """A short dtype name, or ``memory``."""
    cache_bytes: int = 0
    """Last-level cache, for ``memory``."""

    metrics: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.quantity not in (*DTYPES, MEMORY):
            raise InvalidParameter(f"quantity={self.quantity!r} has no peak; choose {', '.join((*DTYPES, MEMORY))}")

    @property
    def unit(self) -> str:
        """Of what is recorded."""
        if self.quantity == MEMORY:
            return "GB/s"
        return "TOPS" if "int" in self.quantity else "TFLOPS"

    def work(self, shape: MeshShape) -> Work:
        """None that counts."""
        return Work()

    def build(self, rank: Rank) -> CallableStep:
        """One pass over the set."""
        return CallableStep(functools.partial(self._streams if self.quantity == MEMORY else self._products, rank))

    def _products(self, rank: Rank) -> None:
        for side in (*_SIDES, *(_LARGE_SIDES if _cores() > _MANY_CORES else ())):
            for m, k, n in ((side, side, side), (2 * side, side // 2, side)):
                product = Matmul(m=m, k=k, n=n, dtype=self.quantity)
                self._record(rank, product, product, f"{m}x{k}x{n} product")

    def _streams(self, rank: Rank) -> None:
        least, most = _BUFFER_BYTES
        # The three buffers of a triad are then 4 times the cache, from where on a bandwidth counts as the memory's.
        size = min(max(math.ceil(4 / 3 * self.cache_bytes / MIB) * MIB, least), most)
        for kind, name in ((MemoryTriad, "triad"), (MemoryCopy, "copy")):
            share = kind(buffer_bytes=size // _cores() // 4 * 4)
            self._record(rank, kind(buffer_bytes=size), share, f"{name} of {size // MIB} MiB")

    def _record(self, rank: Rank, kernel: Workload, share: Workload, name: str) -> None:
        """Record the rates of ``kernel`` on all threads, and of a ``share`` of it on each core at once."""
        cores = _cores()
        rate = self._rate(kernel, _fastest_s(rank, [kernel]))
        rank.record(f"{name} on {cores} threads", rate, unit=self.unit, reduce="only")
        if cores > 1:
            rate = cores * self._rate(share, _fastest_s(rank, [share] * cores))
            rank.record(f"{cores} x {name} on one thread each", rate, unit=self.unit, reduce="only")

    def _rate(self, kernel: Workload, time_s: float) -> float:
        work = kernel.work(MeshShape.of())
        return gb_per_s(work.bytes_moved, time_s) if work.bytes_moved else tflops(work.flops["exact"], time_s)


def _cores() -> int:
    import torch

    return torch.get_num_threads()


def _fastest_s(rank: Rank, kernels: Sequence[Workload]) -> float:
    """Seconds per kernel: of one on all threads, or of several at once, each on one; the best of the windows."""
    import torch

    with contextlib.ExitStack() as built:
        steps = [kernel.build(rank) for kernel in kernels]
        for step in steps:
            built.callback(step.close)
        each: Callable[..., Iterable[tuple[float, float]]] = map
        if len(steps) > 1:
            built.callback(torch.set_num_threads, _cores())  # a thread sets its own number, but MKL's for all
            each = built.enter_context(ThreadPoolExecutor(len(steps), "", torch.set_num_threads, (1,))).map
        started_s = time.perf_counter()
        times_s = [_window_s(each, steps, 1) for _ in range(2)]
        repeats = max(1, math.ceil(_WINDOW_S / min(times_s)))
        while len(times_s) < _WINDOWS and time.perf_counter() < started_s + _ENOUGH_S:
            times_s.append(_window_s(each, steps, repeats) / repeats)
        return min(times_s)


def _window_s(each: Callable[..., Iterable[tuple[float, float]]], steps: Sequence[Step], repeats: int) -> float:
    """Seconds from the first start to the last end of all steps, each run ``repeats`` times."""
    ready = threading.Barrier(len(steps))

    def window(step: Step) -> tuple[float, float]:
        ready.wait()
        start_s = time.perf_counter()
        for _ in range(repeats):
            step.run()
        return start_s, time.perf_counter()

    stamps = list(each(window, steps))
    return max(end for _, end in stamps) - min(start for start, _ in stamps)
