"""What one pair of ranks does, of a round over all pairs: the median pair and the slowest."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from perfsuite.metrics.collective import LATENCY_FLOOR_US, link_of
from perfsuite.metrics.spec import MetricSpec, MetricValue
from perfsuite.pairs import message_times_s
from perfsuite.records import Measurement, Peaks, Work
from perfsuite.units import gb_per_s, seconds_to_us

Choose = Callable[[Iterable[float]], float]
_TOLERANCE, _SLOWEST_TOLERANCE = 0.10, 0.25
"""A pair is one part of the round that is timed; the slowest of several scatters as the tail of the samples does."""
_NONE = "the workload sent no messages between pairs"


def _time(choose: Choose) -> Callable[[Work, Measurement, Peaks], MetricValue]:
    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
        times_s = message_times_s(measurement).values()
        return MetricValue(value=seconds_to_us(choose(times_s))) if times_s else MetricValue(value=None, note=_NONE)

    return compute


def _rate(choose: Choose) -> Callable[[Work, Measurement, Peaks], MetricValue]:
    def compute(work: Work, measurement: Measurement, peaks: Peaks) -> MetricValue:
        times_s = [time_s for time_s in message_times_s(measurement).values() if time_s > 0]
        if not times_s or not work.message_bytes:
            return MetricValue(value=None, note=_NONE)
        peak, note = link_of(measurement, peaks)
        return MetricValue(value=gb_per_s(work.message_bytes, choose(times_s)), peak=peak, note=note)

    return compute


METRICS = (
    MetricSpec(
        name="pair_us",
        unit="us",
        better="lower",
        convention="back to back",
        doc="Time of a message from one rank to another, the median pair's; several follow each other.",
        compute=_time(statistics.median),
        tolerance=_TOLERANCE,
        absolute_floor=LATENCY_FLOOR_US,
    ),
    MetricSpec(
        name="slowest_pair_us",
        unit="us",
        better="lower",
        convention="back to back",
        doc="The same of the slowest pair.",
        compute=_time(max),
        tolerance=_SLOWEST_TOLERANCE,
        absolute_floor=LATENCY_FLOOR_US,
    ),
    MetricSpec(
        name="pair_gb_per_s",
        unit="GB/s",
        better="higher",
        convention="per direction",
        doc="Message over its time, the median pair's, 1e9 bytes per second; of both directions the one.",
        compute=_rate(statistics.median),
        tolerance=_TOLERANCE,
    ),
    MetricSpec(
        name="slowest_pair_gb_per_s",
        unit="GB/s",
        better="higher",
        convention="per direction",
        doc="The same of the slowest pair.",
        compute=_rate(max),
        tolerance=_SLOWEST_TOLERANCE,
    ),
)
