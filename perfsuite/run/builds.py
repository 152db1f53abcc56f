"""Builds of a case: how long one may take, and what those that are never timed add to its measurement.

A step of a published job can last 17 s: the limit that ends a hang of a small case would end its warm-up.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from perfsuite.record.result import Measurement, Peaks, Record, Work
from perfsuite.record.workload import Budget, Purpose

_SHARE_OF_PEAK = 0.2
"""A case slower than this share of what its device can do is not waited for longer than the options say."""
_ITERATIONS: Mapping[Purpose, int] = {"time": 20, "exposed": 40, "traffic": 40}
"""Most iterations of a slow step in a build: checks, warm-up, samples, arrivals; pairs of steps; replays."""
_OTHERWISE = 10
_RANKS_OF_A_CORE = 2.0
"""So many may share one within the time that the options give; more of them wait for each other in every message."""
_MOST_TURNS = 4.0
"""Times that the options' time is given at most: a case that hangs is waited for no longer."""


def deadline_s(
    budget: Budget, work: Work, peaks: Peaks, *, devices: int, purpose: Purpose, ranks_per_core: float = 1.0
) -> float:
    """Seconds for one build; the budget's own where it is fixed, or where nothing is known of the device.

    ``ranks_per_core``: of ranks that compute on the host's cores.
    """
    if budget.fixed_timeout:
        return budget.timeout_s
    turns = min(_MOST_TURNS, max(1.0, ranks_per_core / _RANKS_OF_A_CORE))
    compute = peaks.tflops.get(work.dtype)
    memory = peaks.memory_bandwidth if work.memory_path == "device" else peaks.host_link
    at_best_s = max(  # of one iteration, at the peaks; what has none there counts nothing
        max(work.flops.values(), default=0.0) / (compute.value * 1e12 * devices) if compute else 0.0,
        work.bytes_moved / (memory.value * 1e9) if memory else 0.0,
        work.message_bytes / (peaks.link.value * 1e9) if peaks.link else 0.0,
    )
    return turns * budget.timeout_s + _ITERATIONS.get(purpose, _OTHERWISE) * at_best_s / _SHARE_OF_PEAK


@dataclass(kw_only=True)
class UntimedBuilds:
    """What the builds of a case gave that are never timed: memory, FLOPs, losses, traffic, ..."""

    settled: tuple[Record, ...]
    done: list[Measurement] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def added_to(self, timed: Measurement) -> Measurement:
        """The timed measurement with it."""
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
