"""What the driver does while ranks are at work: it waits until a deadline, and looks at the devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from perfsuite.platforms.telemetry import Telemetry
from perfsuite.record.step import DeviceLook
from perfsuite.runtime.protocol import TIMING

_BETWEEN_S = 0.4
"""Drivers of devices average power over some tenths of a second: looking more often sees the same."""
_STOPPED_S = 3.0
"""Between two looks at the time the driver waits for half a second at most: it was stopped if more than this passed."""
_STOPS = 3
"""So many are not counted: a driver that is held up again and again, by slow telemetry say, still comes to its end."""


class Deadline:
    """So many seconds from now, without those in which this process did not run: Ctrl-Z and fg fail no case."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked_s = now()
        self._end_s = self._looked_s + limit_s
        self._stops = 0

    def left_s(self) -> float:
        """Seconds until it; to be asked every half second."""
        now_s = self._now()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if passed_s > _STOPPED_S and self._stops < _STOPS:
            self._stops += 1
            self._end_s += passed_s
        return self._end_s - now_s

    def shorten(self, limit_s: float) -> None:
        """To so many seconds from now, if more are left."""
        self._end_s = min(self._end_s, self._now() + limit_s)


class DeviceWatch:
    """Looks of one job at clocks, power and temperature, and what holds them down: no thread, nothing on the ranks."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._now = now
        self._began_s: float | None = None
        self._last_s = 0.0
        self.looks: list[DeviceLook] = []

    def tick(self, phases: Iterable[str]) -> None:
        """Look, unless no rank is timing or it was looked a moment ago."""
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
