"""The driver's deadline for the ranks, and its readings of the devices while the ranks sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from perfsuite.platforms.telemetry import Telemetry
from perfsuite.record.step import DeviceLook
from perfsuite.runtime.protocol import TIMING

_BETWEEN_S = 0.4  # Seconds between two readings: device drivers average power over some tenths of a second.
_STOPPED_S = 3.0  # A longer gap between two looks (0.5 s at most) means that the process was stopped.
_STOPS = 3  # Gaps that extend a deadline. With slow telemetry gaps repeat, and the deadline must still come.


class Deadline:
    """A time limit that excludes the time in which this process was stopped: Ctrl-Z and fg do not fail a case."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked_s = now()
        self._end_s = self._looked_s + limit_s
        self._stops = 0

    def left_s(self) -> float:
        """Return the seconds that are left. The caller asks at least every half second."""
        now_s = self._now()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if passed_s > _STOPPED_S and self._stops < _STOPS:
            self._stops += 1
            self._end_s += passed_s
        return self._end_s - now_s

    def shorten(self, limit_s: float) -> None:
        """Set the time left to at most ``limit_s``."""
        self._end_s = min(self._end_s, self._now() + limit_s)


class DeviceWatch:
    """Reads clocks, power, temperature and throttle reasons of the devices for one job, without a thread."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._now = now
        self._began_s: float | None = None
        self._last_s = 0.0
        self.looks: list[DeviceLook] = []

    def tick(self, phases: Iterable[str]) -> None:
        """Read the devices, unless no rank is timing or the last reading is too recent."""
        if TIMING not in phases:
            return
        now_s = self._now()
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._last_s < _BETWEEN_S:
            return
        self._last_s = now_s
        self.looks += [
            DeviceLook(
                device=reading.index,
                at_s=now_s - self._began_s,
                clock_mhz=reading.clock_mhz,
                power_w=reading.power_w,
                temperature_c=reading.temperature_c,
                throttle=reading.throttle,
            )
            for reading in self._telemetry.read()
        ]
