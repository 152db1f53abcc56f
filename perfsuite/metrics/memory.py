"""Memory: bandwidth as STREAM counts it (bytes the program reads plus bytes it writes), and the peak allocated.

A CPU may move more than is counted: a store without a non-temporal hint first reads the line it overwrites
(write-allocate), so a copy of S moves 3S on the bus and 2S are counted.  Source: McCalpin's STREAM, which also asks for
arrays of at least four times the last-level cache; below that the figure is not the memory's and gets no peak.
"""

from __future__ import annotations

from perfsuite.base.units import format_bytes, gb_per_s, gib
from perfsuite.metrics.spec import MetricSpec, MetricValue, devices_used, launch_bound, recorded, unknown
from perfsuite.record.result import Measurement, Peak, Peaks, Work

CACHE_FACTOR = 4  # Memory touched per size of the last-level cache from which on a figure counts as the memory's own.


def cache_note(footprint_bytes: float, cache_bytes: int) -> str:
    """Why a bandwidth is not that of the memory; empty when it is, or when either size is unknown.

    >>> cache_note(2 * 2**20, 32 * 2**20)
    'cache-resident: touches 2MiB, the last-level cache is 32MiB'
    >>> cache_note(64 * 2**20, 32 * 2**20)
    'partly cache-resident: touches 64MiB, under 4 x the last-level cache of 32MiB'
    >>> cache_note(512 * 2**20, 32 * 2**20)
    ''
    """
    if not footprint_bytes or not cache_bytes or footprint_bytes >= CACHE_FACTOR * cache_bytes:
        return ""
    touched, cache = format_bytes(int(footprint_bytes)), format_bytes(cache_bytes)
    if footprint_bytes <= cache_bytes:
        return f"cache-resident: touches {touched}, the last-level cache is {cache}"
    return f"partly cache-resident: touches {touched}, under {CACHE_FACTOR} x the last-level cache of {cache}"


def residence(work: Work, measurement: Measurement) -> str:
    """:func:`cache_note` of a case: ranks that share a device share its cache; empty for a copy over the host link."""
    if work.memory_path != "device":
        return ""
    cache_bytes = max((rank.cache_bytes for rank in measurement.ranks), default=0)
    return cache_note(work.footprint_bytes * measurement.world_size / devices_used(measurement), cache_bytes)


def _peak(work: Work, measurement: Measurement, peaks: Peaks) -> tuple[Peak | None, str]:
    if note := residence(work, measurement):
        return None, note
    peak, what = peaks.host_link, "host link"
    if work.memory_path == "device":
        peak, what = peaks.memory_bandwidth, "memory bandwidth"
    return peak, "" if peak else peaks.unknown or f"no {what} in the platform's row"


def _bandwidth(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    if not work.bytes_moved:
        return unknown("the work model moves no bytes")
    moved = work.bytes_moved * (measurement.world_size / devices_used(measurement))
    peak, note = _peak(work, measurement, peaks)
    bound = ""
    if work.memory_path == "device":  # a copy of pageable memory lasts as long as the host's call
        bound = launch_bound(measurement, lambda time_s: gb_per_s(moved, time_s), "GB/s", peak)
    return MetricValue(
        value=gb_per_s(moved, measurement.median_s),
        peak=None if bound else peak,
        note="; ".join(filter(None, (bound, note))),
    )


def _peak_memory(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
    if measurement.peak_memory_bytes is None:
        return unknown("the device has no allocator statistics")
    return MetricValue(value=gib(measurement.peak_memory_bytes))


METRICS = (
    MetricSpec("capacity_gib", "GiB", "higher", "allocated", recorded("capacity_gib", "the workload took no memory"),
               deterministic=True, tolerance=0.02,
               doc="Device memory that one process could have in blocks of one size, 2**30 bytes."),
    MetricSpec("gb_per_s", "GB/s", "higher", "STREAM", _bandwidth,
               doc="Bytes read plus bytes written per second of one device (or over its host link, one direction), "
                   "1e9 per s."),
    MetricSpec("peak_memory_gib", "GiB", "lower", "allocator", _peak_memory, deterministic=True, tolerance=0.01,
               doc="Most device memory that any rank had allocated since the build, 2**30 bytes."),
)  # fmt: skip
