"""The parts of a metric: name, unit, direction, convention, formula, and rules for the gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from perfsuite.base.units import seconds_to_us, significant
from perfsuite.record.own_metrics import Better
from perfsuite.record.result import Measurement, Peak, Peaks, Result, Work

HOST_BOUND = 0.9  # Share of an iteration that the host takes to launch it, from which on the host is the limit.
LAUNCH_BOUND = "launch-bound"  # Beginning of the note of such a rate.


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """The output of a metric's formula for one case."""

    value: float | None  # None if it is unknown; ``note`` has the reason.
    peak: Peak | None = None  # The peak that the share is of; None without one, ``note`` has the reason.
    note: str = ""
    unit: str = ""  # Replaces the unit of the spec: integer operations are TOPS, not TFLOPS.
    convention: str = ""  # Replaces the convention of the spec if it depends on the case.


Compute = Callable[[Work, Measurement, Peaks], MetricValue]


def unknown(note: str) -> MetricValue:
    """Return a missing value with its reason."""
    return MetricValue(value=None, note=note)


@dataclass(frozen=True)
class MetricSpec:
    """One metric of the registry: a row of its family's ``METRICS``."""

    name: str  # Ends in its unit: ``busbw_gb_per_s``.
    unit: str  # As printed: ``GB/s``.
    better: Better  # Which direction is an improvement.
    convention: str  # How it is counted; figures of different conventions are never compared.
    compute: Compute  # The formula, the choice of its peak included.
    doc: str  # One line for a person.
    deterministic: bool = False
    """The same in every run of the same code: one run decides by ``tolerance``, no statistics."""
    tolerance: float | None = None  # Relative change that is too much; None: the gate's own.
    absolute_floor: float = 0.0  # A change smaller than this, in the metric's unit, is never a regression.
    observed: bool = False  # Shown and stored, never judged.
    headline: bool = True  # Has a column in the terminal's table; JSON, JUnit and the summary have every metric.
    interval: tuple[str, str] | None = None
    """Names of the metrics with the ends of its 95 % interval, which is printed with it."""


def launch_bound(measurement: Measurement, rate: Callable[[float], float], unit: str, peak: Peak | None) -> str:
    """Return the note of a launch-bound rate: the host launches iterations no faster than they were timed; else empty.
    ``rate`` converts seconds of an iteration; the note has the kernel's own rate if a graph was captured. A rate above
    the peak is never launch-bound, and a graph above the peak did not capture the kernel.
    """
    launches = [rank.launch_s for rank in measurement.ranks if rank.device != "cpu" and rank.launch_s is not None]
    timed_s, most = measurement.median_s, peak.value if peak else math.inf
    if not launches or statistics.median(launches) <= HOST_BOUND * timed_s or rate(timed_s) > most:
        return ""
    captured_s = next((record.value * 1e-6 for record in measurement.records if record.name == "kernel_us"), 0.0)
    if captured_s > HOST_BOUND * timed_s:
        return ""
    alone = "no graph was captured"
    if captured_s and rate(captured_s) <= most:
        alone = f"the kernel alone, in a captured graph: {significant(rate(captured_s))} {unit}"
    launch_us, timed_us = (significant(seconds_to_us(time_s)) for time_s in (statistics.median(launches), timed_s))
    return f"{LAUNCH_BOUND}: the host takes {launch_us} of {timed_us} us to start it; {alone}"


def recorded(record: str, missing: str, convert: Callable[[float], float] = float) -> Compute:
    """The formula of a number that a rank recorded; ``missing`` says why there may be none."""

    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
        for entry in measurement.records:
            if entry.name == record:
                return MetricValue(value=convert(entry.value))
        return unknown(missing)

    return compute


def devices_used(measurement: Measurement) -> int:
    """Distinct devices behind the ranks: ranks beyond the devices share them, and a peak is per device."""
    return max(1, len({(rank.host, rank.device) for rank in measurement.ranks}))


def on_every_device(result: Result) -> bool:
    """Whether a case ran the same kernel, without communication, on several devices, a rank on each."""
    measurement = result.measurement
    if result.outcome != "measured" or measurement is None or not measurement.aligned or measurement.smoke:
        return False
    communicates = result.work.collective or result.work.tokens or result.work.samples
    return not communicates and devices_used(measurement) == measurement.world_size > 1


Kind = Literal["weak", "strong", "mixed"]

SUPERLINEAR_SLACK = 0.05
"""A speed-up this far above linear is let pass: parts of a split problem fit into caches that the whole does not."""
_SAME = 1e-9


def speed_up(work: float, time_s: float, base_work: float, base_time_s: float) -> float:
    """Throughput over the base's throughput; work in samples or tokens per step, the same for both.

    With equal work it is T_base / T, with work that grows by n it is n x T_base / T.

    >>> round(speed_up(8, 1 / 1.52, 1, 1 / 3.05), 2)
    3.99
    """
    return (work / time_s) / (base_work / base_time_s)


def efficiency(speed_up: float, ranks: int, base_ranks: int) -> float:
    """Speed-up over the factor of ranks; 1 is linear.

    >>> round(efficiency(1.84, 16, 8), 3)
    0.92
    """
    return speed_up / (ranks / base_ranks)


def kind_of(work: float, ranks: int, base_work: float, base_ranks: int) -> Kind:
    """Whether the work stayed the same (strong), grew with the ranks (weak), or neither (mixed).

    >>> kind_of(64, 2, 32, 1), kind_of(32, 2, 32, 1), kind_of(48, 2, 32, 1)
    ('weak', 'strong', 'mixed')
    """
    if abs(work - base_work) <= _SAME * base_work:
        return "strong"
    grown = base_work * ranks / base_ranks
    return "weak" if abs(work - grown) <= _SAME * grown else "mixed"
