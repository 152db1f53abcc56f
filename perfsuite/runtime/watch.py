"""Looking at the devices while ranks time a case: how clocks, power and temperature go, and what holds them down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from perfsuite.platforms.telemetry import Telemetry
from perfsuite.runtime.protocol import TIMING
from perfsuite.step_records import DeviceLook

_BETWEEN_S = 0.4
"""Drivers of devices average power over some tenths of a second: looking more often sees the same."""


class DeviceWatch:
    """Looks of one job, by the driver while it waits: no thread, nothing on the ranks."""

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
