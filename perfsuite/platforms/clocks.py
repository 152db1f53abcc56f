"""Clocks of devices with their resolution: perf_counter on a CPU, timing events on an accelerator."""

from __future__ import annotations

import statistics
import time
from typing import Any, cast

from perfsuite.platforms.base import Clock
from perfsuite.record.result import ClockFacts

_EVENT_RESOLUTION_S = 0.5e-6  # Resolution by the CUDA runtime's manual, if no steps are visible.


def facts_of(name: str, gaps_s: list[float], fallback_s: float) -> ClockFacts:
    """Return the facts about a clock from pairs of stamps without work between them.

    The resolution is the smallest positive gap, or ``fallback_s``; the cost of two reads is the median gap.

    >>> facts_of("perf_counter", [2e-07, 1e-07, 3e-07], 1e-09)
    ClockFacts(name='perf_counter', resolution_s=1e-07, cost_s=2e-07)
    """
    smallest = min((gap for gap in gaps_s if gap > 0), default=fallback_s)
    return ClockFacts(name=name, resolution_s=smallest, cost_s=statistics.median(gaps_s))


class PerfCounterClock(Clock):
    """``time.perf_counter_ns`` with the interface of a device's clock."""

    def __init__(self) -> None:
        self._facts: ClockFacts | None = None

    def stamp(self) -> object:
        """Return the time in nanoseconds since an arbitrary point."""
        return time.perf_counter_ns()

    def wait(self, stamp: object) -> None:
        """Do nothing: a CPU has passed its stamp."""

    def elapsed_s(self, start: object, end: object) -> float:
        """Return the seconds between two stamps."""
        return (cast(int, end) - cast(int, start)) * 1e-9

    def host_s(self, stamp: object, anchor: object, anchor_s: float) -> float:
        """Return the stamp in seconds: it is the host's clock."""
        return cast(int, stamp) * 1e-9

    def facts(self) -> ClockFacts:
        """Measure 2000 pairs of stamps without work between them."""
        if self._facts is None:
            pairs = [(self.stamp(), self.stamp()) for _ in range(2000)]
            gaps = [self.elapsed_s(start, end) for start, end in pairs]
            self._facts = facts_of("perf_counter", gaps, time.get_clock_info("perf_counter").resolution)
        return self._facts


class EventClock(Clock):
    """Timing events of a device module: recorded in the current stream, read in milliseconds."""

    queues = True

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        self._name = name
        self._facts: ClockFacts | None = None

    def stamp(self) -> object:
        """Return an event in the current stream."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, stamp: object) -> None:
        """Block until the device has reached the event."""
        cast(Any, stamp).synchronize()

    def elapsed_s(self, start: object, end: object) -> float:
        """Return the seconds between two events that the device has passed."""
        return float(cast(Any, start).elapsed_time(end)) * 1e-3

    def facts(self) -> ClockFacts:
        """Measure 200 pairs of events without work between them."""
        if self._facts is None:
            pairs = [(self.stamp(), self.stamp()) for _ in range(200)]
            self._module.synchronize()
            gaps = [self.elapsed_s(start, end) for start, end in pairs]
            self._facts = facts_of(self._name, gaps, _EVENT_RESOLUTION_S)
        return self._facts
