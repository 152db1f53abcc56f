"""Measured peaks of a CPU, for which no vendor figures exist: probes at the start and at the end of a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from perfsuite.base.errors import PerfsuiteError, UnsupportedCase
from perfsuite.record.result import Measurement, Peak, Peaks, Work
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.workloads.peak_probe import MEMORY, PeakProbe

UNWANTED = "PERFSUITE_NO_PEAKS"  # Switches the probes off in arms, whose runs must not depend on them.
_BUDGET = Budget(smoke=True, timeout_s=60.0)


class MeasuredPeaks:
    """Best results of a fixed set of kernels on the CPU that runs the cases.

    Data sheets do not cover a part of a rented machine, and its speed depends on other users. So the same kernels run
    for any choice of cases, in their own process: when a case first needs the peak, and after the last case. The higher
    figure counts for all cases. It makes no result impossible.
    """

    def __init__(self, run: Callable[[Job], Measurement]) -> None:
        """``run`` runs a job of one rank."""
        self._run = run
        self._probes: dict[str, PeakProbe] = {}
        self._best: dict[str, Peak] = {}
        self._problems: dict[str, str] = {}

    def need(self, peaks: Peaks, work: Work, measurement: Measurement) -> bool:
        """Measure the peaks that a case needs and ``peaks`` lacks; return False if none was measured now."""
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
        """Measure all needed peaks once more; return False if there are none."""
        for probe in self._probes.values():
            self._measure(probe)
        return bool(self._probes)

    def know(self, peaks: Peaks) -> None:
        """Add the measured peaks of an earlier part of the same run."""
        for quantity, peak in {**peaks.tflops, MEMORY: peaks.memory_bandwidth}.items():
            if peak is not None and peak.kind == "measured":
                self._take(quantity, peak)

    def complete(self, peaks: Peaks) -> Peaks:
        """Return ``peaks`` with the measured ones in its gaps, or with the reason why there are none."""
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
        self._best[quantity] = max(self._best.get(quantity, peak), peak, key=lambda one: one.value)
