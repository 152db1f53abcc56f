"""Peaks of a host for devices without published peaks (CPUs): the fastest observed product, copy and triad.

The set of kernels is fixed: products from a size that fits a core's own cache to one that keeps every core busy, and a
copy and a triad well beyond the last-level cache.  Each runs in the two ways in which ranks use a host: one kernel on
all threads, and one single-threaded kernel on every core.  The second matters if other programs run: a kernel of two
threads waits for the thread that was switched out, and then reaches less than half of the rate of one thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import MIB, gb_per_s, tflops
from perfsuite.record.result import Work
from perfsuite.record.workload import DTYPES, CallableStep, Rank, Workload
from perfsuite.workloads.matmul import Matmul

MEMORY = "memory"  # Quantity in addition to the dtypes
_SIDES = (256, 512, 1024)
_LARGE_SIDES = (2048, 4096)  # Only these keep more than _MANY_CORES busy; they would take too long on fewer cores
_MANY_CORES = 16
_WINDOW_S = 0.001  # Shorter than a scheduler's time slice, so that some windows are undisturbed on a busy machine too
_WINDOWS = 12
"""Number of windows, of which the best counts; the first two run one kernel each, the others fill the window."""
_ENOUGH_S = 0.03  # Start no further window of a kernel after this long
_LONGEST_S = 0.5  # Start no further kernel after this long; on a busy machine the larger ones are left out
_AGAIN = 2  # Number of the best kernels that are timed again
_LONGER_S = 0.15  # ... for this long, because a few milliseconds may miss the rate that a case reaches in a second
_BUFFER_BYTES = (64 * MIB, 512 * MIB)
"""Smallest and largest buffer; between them the size follows from the last-level cache."""


@dataclass(frozen=True, kw_only=True)
class PeakProbe(Workload):
    """Records the rate of every kernel of the fixed set under its name; the time of the case itself has no meaning."""

    quantity: str  # A short dtype name, or ``memory``.
    cache_bytes: int = 0  # Size of the last-level cache, for ``memory``.

    metrics: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.quantity not in (*DTYPES, MEMORY):
            raise InvalidParameter(f"quantity={self.quantity!r} has no peak; choose {', '.join((*DTYPES, MEMORY))}")

    @property
    def unit(self) -> str:
        """Unit of the recorded rates."""
        if self.quantity == MEMORY:
            return "GB/s"
        return "TOPS" if "int" in self.quantity else "TFLOPS"

    def work(self, shape: MeshShape) -> Work:
        """Return no operations."""
        return Work()

    def build(self, rank: Rank) -> CallableStep:
        """Return one pass over the set."""
        return CallableStep(functools.partial(self._streams if self.quantity == MEMORY else self._products, rank))

    def _products(self, rank: Rank) -> None:
        cores, started_s = _cores(), time.perf_counter()
        rates: dict[tuple[Matmul, int], float] = {}
        for product in _matmuls(self.quantity, cores):
            if time.perf_counter() > started_s + _LONGEST_S:
                break
            with _built(product, rank, cores) as runs:
                for copies in {1, cores}:
                    rates[product, copies] = _rate(product, runs[:copies], _ENOUGH_S)
        for product, copies in sorted(rates, key=rates.__getitem__)[-_AGAIN:]:
            with _built(product, rank, copies) as runs:
                again = _rate(product, runs, _LONGER_S)
            rates[product, copies] = max(rates[product, copies], again)
        for (product, copies), rate in rates.items():
            name = f"{product.m}x{product.k}x{product.n} product"
            full = f"{name} on {cores} threads" if copies == 1 else f"{copies} x {name} on one thread each"
            self._record(rank, full, rate)

    def _streams(self, rank: Rank) -> None:
        import torch

        least, most = _BUFFER_BYTES
        # The three buffers of a triad are at least 4 times the cache, so the bandwidth is the memory's.
        size = min(max(math.ceil(4 / 3 * self.cache_bytes / MIB) * MIB, least), most)
        cores = _cores()
        buffers = [torch.ones(size // 4) for _ in range(3)]
        parts = [[part.chunk(cores)[core] for part in buffers] for core in range(cores)]
        kernels: tuple[tuple[str, Callable[..., object], int], ...] = (
            ("triad", lambda b, c, target: torch.add(b, c, alpha=3, out=target), 3 * size),
            ("copy", lambda b, c, target: target.copy_(b), 2 * size),
        )
        for name, kernel, moved in kernels:
            whole = gb_per_s(moved, _fastest_s([functools.partial(kernel, *buffers)]))
            self._record(rank, f"{name} of {size // MIB} MiB on {cores} threads", whole)
            if cores > 1:
                rate = gb_per_s(moved, _fastest_s([functools.partial(kernel, *part) for part in parts]))
                self._record(rank, f"{name} of {size // MIB} MiB on {cores} x one thread", rate)

    def _record(self, rank: Rank, name: str, rate: float) -> None:
        rank.record(name, rate, unit=self.unit, reduce="only")


def _matmuls(dtype: str, cores: int) -> Iterator[Matmul]:
    """Yield cubes and flat products, the smallest first."""
    for side in (*_SIDES, *(_LARGE_SIDES if cores > _MANY_CORES else ())):
        for m, k, n in ((side, side, side), (2 * side, side // 2, side)):
            yield Matmul(m=m, k=k, n=n, dtype=dtype)


@contextlib.contextmanager
def _built(product: Matmul, rank: Rank, copies: int) -> Iterator[list[Callable[[], None]]]:
    steps = [product.build(rank) for _ in range(copies)]
    yield [step.run for step in steps]
    for step in steps:
        step.close()


def _rate(product: Matmul, runs: Sequence[Callable[[], Any]], enough_s: float) -> float:
    operations = product.work(MeshShape.of()).flops["exact"]
    return tflops(len(runs) * operations, _fastest_s(runs, enough_s))


def _cores() -> int:
    import torch

    return torch.get_num_threads()


def _fastest_s(runs: Sequence[Callable[[], Any]], enough_s: float = _ENOUGH_S) -> float:
    """Return the seconds of a kernel on all threads, or of several at once on one thread each, in the best window."""
    import torch

    with contextlib.ExitStack() as after:
        run_all: Callable[..., Iterable[tuple[float, float]]] = map
        if len(runs) > 1:
            after.callback(torch.set_num_threads, _cores())  # a thread sets its own number, but MKL's for all
            run_all = after.enter_context(ThreadPoolExecutor(len(runs), "", torch.set_num_threads, (1,))).map
        started_s = time.perf_counter()
        times_s = [_window_s(run_all, runs, 1) for _ in range(2)]
        repeats = max(1, math.ceil(_WINDOW_S / min(times_s)))
        most = _WINDOWS if enough_s <= _ENOUGH_S else math.inf
        while len(times_s) < most and time.perf_counter() < started_s + enough_s:
            times_s.append(_window_s(run_all, runs, repeats) / repeats)
        return min(times_s)


def _window_s(
    run_all: Callable[..., Iterable[tuple[float, float]]], runs: Sequence[Callable[[], Any]], repeats: int
) -> float:
    """Return the seconds from the first start to the last end of all kernels, each run ``repeats`` times."""
    ready = threading.Barrier(len(runs))

    def window(run: Callable[[], Any]) -> tuple[float, float]:
        ready.wait()
        start_s = time.perf_counter()
        for _ in range(repeats):
            run()
        return start_s, time.perf_counter()

    stamps = list(run_all(window, runs))
    return max(end for _, end in stamps) - min(start for start, _ in stamps)
