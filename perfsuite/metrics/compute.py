"""Arithmetic rates: operations of the work model over the measured time.

Operations are counted by the workload (a matrix product m x k by k x n is exactly 2mkn: one multiplication and one
addition for each of mkn products), never read from a profiler.  Peaks are dense and per device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from itertools import accumulate

from perfsuite.base.units import format_seconds, seconds_to_us, tflops
from perfsuite.metrics.spec import MetricSpec, MetricValue, devices_used, launch_bound, recorded, unknown
from perfsuite.record.result import Measurement, Peak, Peaks, Work

_INTEGER = ("int8", "uint8", "int32", "int64")


def _peak(work: Work, peaks: Peaks, devices: int) -> tuple[Peak | None, str]:
    peak = peaks.tflops.get(work.dtype)
    if peak is None:
        return None, peaks.unknown or f"no {work.dtype or 'dtype'} peak in the platform's row"
    if devices == 1:
        return peak, ""
    return dataclasses.replace(peak, value=peak.value * devices, source=f"{devices} x {peak.source}"), ""


def _rate(work: Work, measurement: Measurement, peaks: Peaks, *, per_device: bool) -> MetricValue:
    devices = devices_used(measurement)
    share, peak_devices = (devices, 1) if per_device else (1, devices)
    convention = "exact" if "exact" in work.flops else next(iter(work.flops), "")
    operations = work.flops.get(convention, 0.0)
    if not operations:
        return unknown("the work model counts no operations")
    unit = "TOPS" if work.dtype in _INTEGER else "TFLOPS"
    peak, note = _peak(work, peaks, peak_devices)
    bound = ""
    if not work.training and not work.collective:
        bound = launch_bound(measurement, lambda time_s: tflops(operations / share, time_s), unit, peak)
    return MetricValue(
        value=tflops(operations / share, measurement.median_s),
        peak=None if bound else peak,
        note=bound or note,
        unit=unit,
        convention=convention,
    )


def _launch(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    launches_s = [rank.launch_s for rank in measurement.ranks if rank.launch_s is not None]
    if not launches_s:
        return unknown("written before the host's time was measured")
    return MetricValue(value=seconds_to_us(max(launches_s)))


_NO_GRAPH = "no kernel was captured: a CPU, and a device whose torch has no graphs, shows kernel and launch together"
_kernel = recorded("kernel_us", _NO_GRAPH)


def _launch_cost(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    kernel = _kernel(work, measurement, peaks)
    if kernel.value is None:
        return kernel
    return MetricValue(value=max(0.0, seconds_to_us(measurement.median_s) - kernel.value))


MINUTE_S = 60.0
_FEWEST_SAMPLES = 6


def _last_minute(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    times_s = measurement.times_s
    if len(times_s) < _FEWEST_SAMPLES:
        return unknown(f"it takes {_FEWEST_SAMPLES} samples to compare the end of a run with its beginning")
    window_s = min(MINUTE_S, sum(times_s) * measurement.iterations / 3)
    first_s, last_s = (_mean_of(ends, window_s / measurement.iterations) for ends in (times_s, times_s[::-1]))
    note = "" if window_s == MINUTE_S else f"of {format_seconds(window_s)} instead of a minute"
    return MetricValue(value=100 * first_s / last_s, note=note)


def _mean_of(times_s: Sequence[float], window_s: float) -> float:
    """Mean of the samples up to the one with which they last as long as the window, at least one."""
    least_s = (1 - 1e-9) * window_s
    count = next((count for count, whole in enumerate(accumulate(times_s), 1) if whole >= least_s), len(times_s))
    return math.fsum(times_s[:count]) / count


METRICS = (
    MetricSpec("tflops", "TFLOPS", "higher", "exact", functools.partial(_rate, per_device=False),
               doc="Operations per second of all devices together, 1e12 per second."),
    MetricSpec("tflops_per_device", "TFLOPS", "higher", "exact", functools.partial(_rate, per_device=True),
               doc="Operations per second of one device, 1e12 per second; ranks that share a device count together."),
    MetricSpec("launch_us", "us", "lower", "median", _launch, observed=True,
               doc="Median time that the host takes to start one iteration, the slowest rank's."),
    MetricSpec("kernel_us", "us", "lower", "median", _kernel, observed=True,
               doc="Time of one kernel on the device, among a hundred in a captured graph."),
    MetricSpec("launch_cost_us", "us", "lower", "median", _launch_cost, observed=True,
               doc="Extra time of a kernel that the host launches by itself, over one in a captured graph."),
    MetricSpec("last_minute_percent", "percent", "higher", "mean", _last_minute, observed=True,
               doc="Rate of the last minute divided by the rate of the first. A run below 3 minutes has thirds."),
)  # fmt: skip
