"""Peaks that nobody publishes: those of a CPU, as probes at the start and at the end of a run found them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from perfsuite.base.errors import PerfsuiteError, UnsupportedCase
from perfsuite.record.result import Measurement, Peak, Peaks, Work
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.workloads.peak_probe import MEMORY, PeakProbe

UNWANTED = "PERFSUITE_NO_PEAKS"
"""Variable with which a run measures no peaks: an arm of a comparison, whose runs keep nothing that moves with them."""
_BUDGET = Budget(smoke=True, timeout_s=60.0)


class MeasuredPeaks:
    """The best that a fixed set of kernels was seen to reach on the CPU that runs the cases.

    No data sheet says what a part of a rented machine can do, and what it does changes with what others do on it.  So
    the same kernels run whatever cases were chosen, in a process of their own, when a case first needs the peak and
    again after the last one; the higher figure counts for all cases.  It makes no result impossible.
    """

    def __init__(self, run: Callable[[Job], Measurement]) -> None:
        """``run`` runs a job of one rank."""
        self._run = run
        self._probes: dict[str, PeakProbe] = {}
        self._best: dict[str, Peak] = {}
        self._problems: dict[str, str] = {}

    def need(self, peaks: Peaks, work: Work, measurement: Measurement) -> bool:
        """Measure what a case needs and ``peaks`` does not have; False when that was done before, or is unwanted."""
        wanted = []
        if UNWANTED in os.environ:
            return False
        if work.flops and work.dtype not in peaks.tflops:
            wanted.append(PeakProbe(quantity=work.dtype))
        if work.memory_path == "device" and peaks.memory_bandwidth is None:
            cache_bytes = max(rank.cache_bytes for rank in measurement.ranks)
            wanted.append(PeakProbe(quantity=MEMORY, cache_bytes=cache_bytes))
        new = [probe for probe in wanted if probe.quantity not in self._probes]
        for probe in new:
            self._probes[probe.quantity] = probe
            self._measure(probe)
        return bool(new)

    def measure_again(self) -> bool:
        """Measure everything that was needed once more; False when nothing was."""
        for probe in self._probes.values():
            self._measure(probe)
        return bool(self._probes)

    def know(self, peaks: Peaks) -> None:
        """Take in what an earlier part of the same run measured."""
        for quantity, peak in {**peaks.tflops, MEMORY: peaks.memory_bandwidth}.items():
            if peak is not None and peak.kind == "measured":
                self._take(quantity, peak)

    def complete(self, peaks: Peaks) -> Peaks:
        """``peaks`` with the measured ones where it has none, or with the reason why there are none."""
        measured = {quantity: peak for quantity, peak in self._best.items() if quantity != MEMORY}
        return dataclasses.replace(
            peaks,
            tflops={**measured, **peaks.tflops},
            memory_bandwidth=peaks.memory_bandwidth or self._best.get(MEMORY),
            unknown="; ".join(self._problems.values()) or peaks.unknown,
        )

    def _measure(self, probe: PeakProbe) -> None:
        try:
            measured = self._run(Job(workload=probe, world_size=1, budget=_BUDGET, fresh=True))
            if measured.instruments:
                raise UnsupportedCase(f"its rank was instrumented: {', '.join(measured.instruments)}")
        except PerfsuiteError as error:
            if probe.quantity not in self._best:
                reason = str(error).partition("\n")[0]
                self._problems[probe.quantity] = f"the CPU's {probe.quantity} peak could not be measured: {reason}"
            return
        for record in measured.records:
            source = f"measured here, best of probes at start and end: {record.name}"
            self._take(probe.quantity, Peak(value=record.value, unit=record.unit, source=source, kind="measured"))

    def _take(self, quantity: str, peak: Peak) -> None:
        self._problems.pop(quantity, None)
        self._best[quantity] = max(self._best.get(quantity, peak), peak, key=lambda known: known.value)
