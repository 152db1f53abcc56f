"""The largest local batch that fits in memory, and the training step with it.

The driver searches: every try is a build and two steps on the ranks of the case.  On an accelerator a try may run out
of memory; its ranks are then replaced, so that the device is empty again.  The batch is doubled until it does not fit,
and the gap is bisected.  The largest one is then timed, and reduced until that fits too.  On a CPU, whose memory all
programs share, a try must stay within a byte budget per rank: its memory is predicted from smaller tries, and it runs
only if it is predicted to fit.  Accelerators whose allocator has no limit keep a budget in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter, OutOfMemory
from perfsuite.base.units import gib
from perfsuite.record.result import Measurement, Record
from perfsuite.record.workload import Probe, Rank, Step, Workload
from perfsuite.workloads.training.case import MEMORY
from perfsuite.workloads.training.train_step import TrainStep

if TYPE_CHECKING:
    import torch


_LIMIT = "set_per_process_memory_fraction"  # Function of torch's device module that limits its allocator
_NO_LIMIT = "allocator_without_limit"  # Record of ranks whose allocator has no limit
_SAME_SLOPE = 0.05
"""Relative difference of slopes that counts as one straight line, which is followed to its end; else batches double."""


Usage = tuple[float, float]
"""Bytes of one batch: the peak of a step, and the memory that its forward keeps; that grows by the sample."""


@dataclass(frozen=True, kw_only=True)
class Largest:
    """Result of a search."""

    batch: int  # Largest batch that was tried and fits; 0 if 1 does not fit
    tries: int
    predicted_bytes: float | None = None  # Peak predicted for ``batch`` before its try; None without a prediction
    limited: bool = False  # Whether the search ended at its limit, which fits


def by_doubling(fits: Callable[[int], bool], most: int) -> Largest:
    """Double the batch until it does not fit, then bisect; ``fits`` is called for 1 to ``most``, at most once each.

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
    """Return the largest batch that fits, at or little below ``most``: try 1, 3, 7, ... less, then bisect.

    0 if 1 does not fit; ``fits`` is called at most once per batch.

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


def by_prediction(measure: Callable[[int], Usage], budget_bytes: float, most: int) -> Largest:
    """Try 1 and 2, then only batches whose predicted peak is within the budget, until one more sample would exceed it.

    The peak is assumed to grow by the sample as between the last two batches.  The result was tried and fits.

    >>> by_prediction(lambda batch: (100 + 10.0 * batch, 8.0 * batch), budget_bytes=455, most=1000)
    Largest(batch=35, tries=4, predicted_bytes=450.0, limited=False)

    These were 1, 2, 4, and then 35 at once: 450 bytes.
    """
    usages: dict[int, Usage] = {1: measure(1)}
    predicted: float | None = None
    # The growth per sample is unknown yet; it is at least the memory that its forward keeps.
    if most > 1 and sum(usages[1]) <= budget_bytes:
        usages[2] = measure(2)
    while True:
        good = max((batch for batch, (peak, _) in usages.items() if peak <= budget_bytes), default=0)
        bad = min((batch for batch, (peak, _) in usages.items() if peak > budget_bytes), default=None)
        tried = sorted(batch for batch in usages if batch <= good)
        # Bytes per sample, at least those that its forward keeps: at small batches the optimizer may decide the peak.
        slopes = [
            max((after - before) / (n - m) for before, after in zip(usages[m], usages[n], strict=True))
            for m, n in itertools.pairwise(tried)
        ]
        if not slopes or bad == good + 1 or good == most:
            found = predicted if good > 1 else None
            return Largest(batch=good, tries=len(usages), predicted_bytes=found, limited=good == most)
        peak = usages[good][0]
        straight = len(slopes) > 1 and abs(slopes[-1] - slopes[-2]) <= _SAME_SLOPE * slopes[-1]
        reach = good + int((budget_bytes - peak) / slopes[-1]) if slopes[-1] > 0 else most
        next_one = 2 * good if bad is None else (good + bad) // 2  # the peak may bend upwards before bad
        target = min(reach, most if straight and bad is None else next_one, most)
        if target <= good:
            return Largest(batch=good, tries=len(usages), predicted_bytes=predicted)
        usages[target] = measure(target)
        if usages[target][0] <= budget_bytes:
            predicted = peak + (target - good) * slopes[-1]


@dataclass(frozen=True, kw_only=True)
class LargestBatch(TrainStep):
    """A training step with as many samples on each rank as fit; ``micro_batch_size`` is the result of the search."""

    memory_budget_bytes: int | None = None
    """Bytes that one rank may allocate; required on a CPU; None on an accelerator: all memory of the device."""
    most: int = 1 << 16  # Largest batch to try.

    fills_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_budget_bytes is not None and self.memory_budget_bytes < 1:
            raise InvalidParameter(
                f"memory_budget_bytes={self.memory_budget_bytes} is below 1; give the bytes that a rank may allocate"
            )
        if self.most < 1:
            raise InvalidParameter(f"most={self.most} is below 1; choose a whole number from 1")
        if self.global_batch_size is not None:
            raise InvalidParameter(
                f"global_batch_size={self.global_batch_size} sets the local batch, which is searched; leave it out"
            )
        if self.builds:
            raise InvalidParameter(
                f"builds={list(self.builds)} of a largest batch are not supported, its memory is always recorded; "
                "leave them out"
            )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the step with the largest batch; memory comes from the search."""
        first, *others = super().metrics
        memory = (name for name in MEMORY if name not in self.absent())
        return (first, "largest_local_batch_samples", *others, *memory)

    # -- on the driver -------------------------------------------------------------------------------------------

    def settle(self, probe: Probe) -> tuple[Workload, tuple[Record, ...]]:
        """Return the step with the largest batch, and records of the search; raises OutOfMemory if 1 does not fit."""
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
            # The timed step also needs memory for its twin and communicators. Near the limit of a small memory that
            # decides, so the batch that was timed is the result.
            batch = by_stepping_down(lambda batch: _fits(lambda at: probe(self._at(at), "time"), batch), observed.batch)
            if not batch:
                probe(self._at(1), "time")  # raises OutOfMemory with the figures
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
                "memory_budget_bytes=None on a CPU could use all memory of the host; give the bytes per rank"
            )
        largest = by_prediction(lambda batch: _usage(first if batch == 1 else look(batch)), budget, self.most)
        if not largest.batch:
            peak, _ = _usage(first)
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
        """Build a training step; on an accelerator the budget limits its allocator if possible."""
        if self.memory_budget_bytes is None or rank.device.type == "cpu":
            return super().build(rank)
        import torch

        if hasattr(torch.get_device_module(rank.device), _LIMIT):
            return Limited(rank.device, self.memory_budget_bytes, functools.partial(super().build, rank))
        if rank.purpose == "memory":
            rank.record(_NO_LIMIT, 1.0, reduce="equal")
        return super().build(rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Check as a training step."""
        super().check(rank, step.inner if isinstance(step, Limited) else step)


def _usage(measurement: Measurement) -> Usage:
    values = {record.name: record.value for record in measurement.records}
    return values["peak_bytes"], values["activations_bytes"]


def _fits(look: Any, batch: int) -> bool:
    try:
        look(batch)
    except OutOfMemory:
        return False
    return True


class Limited(Step):
    """A step under a limit of the accelerator's allocator in this process, which ends with the step."""

    def __init__(self, device: torch.device, limit_bytes: int, build: Callable[[], Step]) -> None:
        import torch

        module: Any = torch.get_device_module(device)
        limit = module.set_per_process_memory_fraction
        self._set: Callable[[float], None] = lambda share: limit(share, device)
        module.empty_cache()  # cached memory would not count
        self._set(min(1.0, limit_bytes / module.mem_get_info(device)[1]))
        try:
            self.inner = build()
        except BaseException:
            self._set(1.0)
            raise

    def run(self) -> Any:
        """Run the step."""
        return self.inner.run()

    def refill(self) -> None:
        """Refill the step."""
        self.inner.refill()

    def close(self) -> None:
        """Close the step and lift the limit."""
        try:
            self.inner.close()
        finally:
            self._set(1.0)
