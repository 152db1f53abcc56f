"""The largest local batch that fits, and the training step at it.

The driver looks for it: every try is a build and two steps of its own on the ranks of the case.  On an accelerator a
try may run out of memory; its ranks are then replaced, so nothing of it is left on the device: the batch is doubled
until it does not fit, and the gap is bisected.  The largest one is then timed, and made smaller until that fits too.
On a CPU, whose memory is everybody's, a try must keep within a byte budget per rank: what it takes is predicted from
smaller ones, and it is only made when it is predicted to fit.  So is a budget kept on an accelerator whose allocator
knows no limit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter, OutOfMemory
from perfsuite.base.units import gib
from perfsuite.record.result import Measurement, Record
from perfsuite.record.workload import Probe, Rank, Step, Workload
from perfsuite.workloads.training import names
from perfsuite.workloads.training.train_step import TrainStep

if TYPE_CHECKING:
    import torch


_LIMIT = "set_per_process_memory_fraction"
"""By which an accelerator's allocator is told to give no more."""
_NO_LIMIT = "allocator_without_limit"
"""Record of ranks whose allocator knows none."""
_SAME_SLOPE = 0.05
"""Two slopes this close are one straight line, which is followed to its end; before, batches at most double."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one batch was seen to take."""

    peak_bytes: float
    """Most allocated at any moment of a step."""
    activation_bytes: float
    """What the forward of the batch left allocated: grows by the sample."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The end of a search."""

    batch: int
    """The largest that was tried and fits; 0 where 1 does not."""
    tries: int
    predicted_bytes: float | None = None
    """Peak predicted for ``batch`` before it was tried; None where nothing was predicted."""
    limited: bool = False
    """The search ended at the largest batch that it may try, which fits."""


def by_doubling(fits: Callable[[int], bool], most: int) -> Largest:
    """Double until a batch does not fit, then bisect; ``fits`` is asked about 1 to ``most``, each once.

    >>> by_doubling(lambda batch: batch <= 11, most=64)  # 1 2 4 8 16, 12, 10, 11
    Largest(batch=11, tries=8, predicted_bytes=None, limited=False)
    """
    good, bad, tries = 0, 1, 0
    while bad <= most:
        tries += 1
        if not fits(bad):
            break
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        tries += 1
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return Largest(batch=good, tries=tries, limited=good == most)


def by_stepping_down(fits: Callable[[int], bool], most: int) -> int:
    """The largest batch up to ``most``, which nearly fits, that does: 1, 3, 7, ... less, then the gap is bisected.

    0 where 1 does not fit; ``fits`` is asked about each once.

    >>> by_stepping_down(lambda batch: batch <= 11, most=16)  # 16, 15, 13, 9, 11, 12
    11
    """
    good, bad, step = 0, most + 1, 1
    while bad > 1 and not good:
        tried = max(1, bad - step)
        if fits(tried):
            good = tried
        else:
            bad, step = tried, step if tried == most else 2 * step
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


@dataclass(kw_only=True)
class _Seen:
    """Batches tried so far."""

    budget_bytes: float
    usages: dict[int, Usage] = field(default_factory=dict)

    @property
    def good(self) -> int:
        """Largest that fits; 0 when none does."""
        return max((batch for batch, use in self.usages.items() if use.peak_bytes <= self.budget_bytes), default=0)

    @property
    def bad(self) -> int | None:
        """Smallest that does not fit; None while all do."""
        return min((batch for batch, use in self.usages.items() if use.peak_bytes > self.budget_bytes), default=None)

    def slopes(self) -> list[float]:
        """Bytes per sample between neighbours among the batches that fit, never below what a sample's forward keeps.

        At small batches the peak may be the optimizer's and not grow at all.
        """
        tried = [(batch, self.usages[batch]) for batch in sorted(self.usages) if batch <= self.good]
        return [
            max((b.peak_bytes - a.peak_bytes) / (n - m), (b.activation_bytes - a.activation_bytes) / (n - m))
            for (m, a), (n, b) in itertools.pairwise(tried)
        ]


def by_prediction(measure: Callable[[int], Usage], budget_bytes: float, most: int) -> Largest:
    """Try 1 and 2, then only batches whose peak is predicted to stay within the budget, until one more would not.

    The peak is taken to grow by the sample as it did between the last two batches.  What was found was tried: its peak
    was seen to fit.

    >>> line = lambda batch: Usage(peak_bytes=100 + 10.0 * batch, activation_bytes=8.0 * batch)
    >>> by_prediction(line, budget_bytes=455, most=1000)  # 1, 2, 4, then 35 at once: 450 bytes
    Largest(batch=35, tries=4, predicted_bytes=450.0, limited=False)
    """
    seen = _Seen(budget_bytes=budget_bytes, usages={1: measure(1)})
    predicted: float | None = None
    first = seen.usages[1]
    # Nothing says yet what one sample more takes; that is at least what its forward keeps.
    if seen.good and most > 1 and first.peak_bytes + first.activation_bytes <= budget_bytes:
        seen.usages[2] = measure(2)
    while True:
        good, bad, slopes = seen.good, seen.bad, seen.slopes()
        if not slopes or bad == good + 1 or good == most:
            return Largest(
                batch=good,
                tries=len(seen.usages),
                predicted_bytes=predicted if good > 1 else None,
                limited=good == most,
            )
        peak = seen.usages[good].peak_bytes
        straight = len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) <= _SAME_SLOPE * slopes[-1]
        reach = good + int((budget_bytes - peak) / slopes[-1]) if slopes[-1] > 0 else most
        next_one = 2 * good if bad is None else (good + bad) // 2  # towards bad the peak bends upwards
        target = min(reach, most if straight and bad is None else next_one, most)
        if target <= good:
            return Largest(batch=good, tries=len(seen.usages), predicted_bytes=predicted)
        guess = peak + (target - good) * slopes[-1]
        seen.usages[target] = measure(target)
        if seen.good == target:
            predicted = guess


@dataclass(frozen=True, kw_only=True)
class LargestBatch(TrainStep):
    """A training step with as many samples on each rank as fit; ``micro_batch_size`` is what is looked for."""

    memory_budget_bytes: int | None = None
    """What one rank may allocate; needed on a CPU, on an accelerator None is all that the device has."""
    most: int = 1 << 16
    """Largest batch that is tried."""

    fills_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 1:
            raise InvalidParameter(
                f"memory_budget_bytes={self.memory_budget_bytes} holds nothing; give the bytes that a rank may allocate"
            )
        if self.most < 1:
            raise InvalidParameter(f"most={self.most} leaves no batch to try; choose a whole number from 1")
        if self.global_batch_size is not None:
            raise InvalidParameter(
                f"global_batch_size={self.global_batch_size} fixes the local batch, which is looked for; leave it out"
            )
        if self.builds:
            raise InvalidParameter(
                f"builds={tuple(self.builds)} of a largest batch: its memory is looked at anyway, leave them out"
            )

    @property
    def metrics(self) -> tuple[str, ...]:
        """What was looked for, after the step's time; memory comes from the search."""
        first, *others = super().metrics
        memory = (name for name in names.MEMORY if name not in self.absent())
        return (first, "largest_local_batch_samples", *others, *memory)

    # -- on the driver -------------------------------------------------------------------------------------------

    def settle(self, probe: Probe) -> tuple[Workload, tuple[Record, ...]]:
        """Search, and the training step at what was found; raises OutOfMemory where not even one sample fits."""
        tried: dict[int, Mapping[str, Record]] = {}

        def look(batch: int) -> Measurement:
            measurement = probe(self._at(batch), "memory")
            tried[batch] = {record.name: record for record in measurement.records}
            return measurement

        first = look(1)
        if all(rank.device == "cpu" for rank in first.ranks) or _NO_LIMIT in tried[1]:
            largest, observed = self._within_budget(look, first), None
        else:
            observed = by_doubling(lambda batch: batch == 1 or _fits(look, batch), self.most)
            # What is timed has a twin before it, communicators and other pieces of memory than what was observed: near
            # the end of a small memory that decides, and by chance.  So the one that is timed is the result.
            batch = by_stepping_down(lambda batch: _fits(lambda at: probe(self._at(at), "time"), batch), observed.batch)
            if not batch:
                probe(self._at(1), "time")  # and says how much there was
            largest = dataclasses.replace(observed, batch=max(1, batch), limited=batch == self.most)
            if largest.batch not in tried:
                look(largest.batch)
        answers = tried[largest.batch].values()
        return self._at(largest.batch), (*self._records(largest, observed), *answers)

    def _at(self, batch: int) -> LargestBatch:
        return dataclasses.replace(self, micro_batch_size=batch)

    def _within_budget(self, look: Any, first: Measurement) -> Largest:
        budget = self.memory_budget_bytes
        if budget is None:
            raise InvalidParameter(
                "memory_budget_bytes=None on a CPU, whose memory the kernel shares out by killing; give bytes per rank"
            )
        largest = by_prediction(lambda batch: _usage(first if batch == 1 else look(batch)), budget, self.most)
        if not largest.batch:
            peak = _usage(first).peak_bytes
            raise OutOfMemory(
                f"OOM at {gib(peak):.3g} GiB of {gib(budget):.3g} GiB: a local batch of 1 is over the budget of a rank"
            )
        return largest

    def _records(self, largest: Largest, observed: Largest | None) -> tuple[Record, ...]:
        values = {
            "largest_local_batch": (float(largest.batch), "samples"),
            "largest_observed_batch": (float(observed.batch) if observed else None, "samples"),
            "batches_tried": (float(largest.tries), "batches"),
            "search_limit": (float(self.most) if largest.limited else None, "samples"),
            "memory_budget_bytes": (self.memory_budget_bytes, "bytes"),
            "predicted_peak_bytes": (largest.predicted_bytes, "bytes"),
        }
        return tuple(
            Record(name=name, value=float(value), unit=unit, reduce="equal")
            for name, (value, unit) in values.items()
            if value is not None
        )

    # -- on the ranks --------------------------------------------------------------------------------------------

    def build(self, rank: Rank) -> Step:
        """As a training step; on an accelerator with a budget its allocator gives no more than that, if it can."""
        if self.memory_budget_bytes is None or rank.device.type == "cpu":
            return super().build(rank)
        if not knows_limit(rank.device):
            if rank.purpose == "memory":
                rank.record(_NO_LIMIT, 1.0, reduce="equal")
            return super().build(rank)
        limit = MemoryLimit(rank.device, self.memory_budget_bytes)
        try:
            return Limited(super().build(rank), limit)
        except BaseException:
            limit.lift()
            raise

    def check(self, rank: Rank, step: Step) -> None:
        """As a training step."""
        super().check(rank, step.inner if isinstance(step, Limited) else step)


def _usage(measurement: Measurement) -> Usage:
    values = {record.name: record.value for record in measurement.records}
    return Usage(peak_bytes=values["peak_bytes"], activation_bytes=values["activations_bytes"])


def _fits(look: Any, batch: int) -> bool:
    try:
        look(batch)
    except OutOfMemory:
        return False
    return True


def knows_limit(device: torch.device) -> bool:
    """Whether the allocator of an accelerator can be told to give no more than a share of its memory."""
    import torch

    return hasattr(torch.get_device_module(device), _LIMIT)


class MemoryLimit:
    """A cap on what the allocator of an accelerator gives this process, until it is lifted."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        import torch

        self._device = device
        self._module: Any = torch.get_device_module(device)
        assert knows_limit(device), f"the allocator of {device.type} knows no {_LIMIT}"
        _, total = self._module.mem_get_info(device)
        self._module.empty_cache()  # what is cached already would not count
        self._set(min(1.0, limit_bytes / total))

    def _set(self, fraction: float) -> None:
        self._module.set_per_process_memory_fraction(fraction, self._device)

    def lift(self) -> None:
        """Give the whole device back."""
        self._set(1.0)


class Limited(Step):
    """A step under a memory limit, which ends with it."""

    def __init__(self, inner: Step, limit: MemoryLimit) -> None:
        self.inner = inner
        self._limit = limit

    def run(self) -> Any:
        """The step itself."""
        return self.inner.run()

    def refill(self) -> None:
        """The step's own."""
        self.inner.refill()

    def close(self) -> None:
        """Close the step and lift the limit."""
        try:
            self.inner.close()
        finally:
            self._limit.lift()
