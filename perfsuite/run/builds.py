"""Builds of a case: their deadlines, and the results of untimed builds.

A step of a published job can last 17 s: the limit that ends a hang of a small case would end its warm-up.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from perfsuite.record.result import Measurement, Peaks, Record, Work
from perfsuite.record.workload import Budget, Purpose

_SHARE_OF_PEAK = 0.2  # Least share of the device's peak for which a case gets extra time.
_ITERATIONS: Mapping[Purpose, int] = {"time": 20, "exposed": 40, "traffic": 40}
"""Most iterations of a slow step in a build: checks, warm-up, samples, arrivals; pairs of steps; replays."""
_OTHERWISE = 10
_RANKS_OF_A_CORE = 2.0  # Ranks per core within the normal limit; more of them wait in every message.
_MOST_TURNS = 4.0  # Largest factor on the normal time limit.


def deadline_s(
    budget: Budget, work: Work, peaks: Peaks, *, devices: int, purpose: Purpose, ranks_per_core: float = 1.0
) -> float:
    """Return the deadline of one build in seconds; the budget's own if it is fixed, or if there are no peaks."""
    if budget.fixed_timeout:
        return budget.timeout_s
    turns = min(_MOST_TURNS, max(1.0, ranks_per_core / _RANKS_OF_A_CORE))
    compute = peaks.tflops.get(work.dtype)
    memory = peaks.memory_bandwidth if work.memory_path == "device" else peaks.host_link
    at_best_s = max(  # of one iteration at the peaks; quantities without a peak count 0
        max(work.flops.values(), default=0.0) / (compute.value * 1e12 * devices) if compute else 0.0,
        work.bytes_moved / (memory.value * 1e9) if memory else 0.0,
        work.message_bytes / (peaks.link.value * 1e9) if peaks.link else 0.0,
    )
    return turns * budget.timeout_s + _ITERATIONS.get(purpose, _OTHERWISE) * at_best_s / _SHARE_OF_PEAK


@dataclass(kw_only=True)
class UntimedBuilds:
    """Results of the untimed builds of a case: memory, FLOPs, losses, traffic, ..."""

    settled: tuple[Record, ...]
    done: list[Measurement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def added_to(self, timed: Measurement) -> Measurement:
        """Return the timed measurement with these results."""
        records = {record.name: record for record in timed.records}
        for record in itertools.chain(() if timed.smoke else self.settled, *(build.records for build in self.done)):
            records.setdefault(record.name, record)
        return dataclasses.replace(
            timed,
            records=tuple(records.values()),
            traffic=tuple(entry for build in self.done for entry in build.traffic),
            components=tuple(component for build in self.done for component in build.components),
            failed_builds=self.failed,
        )
