"""Telemetry of the host's CPU: psutil for clock and temperature, the kernel's counters for throttling."""

from __future__ import annotations

import importlib
from typing import Any

from perfsuite.platforms.host import Host
from perfsuite.platforms.telemetry import Reading, Telemetry, attempt

_THROTTLE_COUNTERS = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count"


class CpuTelemetry(Telemetry):
    """One reading for the whole host."""

    def __init__(self, host: Host, library: Any = None) -> None:
        self._host = host
        self._psutil = library or attempt(lambda: importlib.import_module("psutil"))
        self.source = "psutil" if self._psutil else ""
        self._counted = self._count()

    def _count(self) -> int | None:
        """Throttle events since boot; None where the kernel does not count them, as in most virtual machines."""
        counts = [
            self._host.read(str(path.relative_to(self._host.root))) for path in self._host.glob(_THROTTLE_COUNTERS)
        ]
        return sum(int(count) for count in counts if count and count.isdigit()) if counts else None

    def read(self) -> tuple[Reading, ...]:
        """The CPU as device 0, throttled when the counters rose since the reader was made; processes are unknown.

        Whether other processes disturb is for :mod:`perfsuite.platforms.quiet` to say: an idle process does not.
        """
        counted = self._count()
        throttle: tuple[str, ...] | None = None
        if counted is not None and self._counted is not None:
            throttle = ("thermal",) if counted > self._counted else ()
        psutil = self._psutil
        frequency = attempt(psutil.cpu_freq) if psutil else None
        # psutil has no such function where the system has no sensors.
        sensors = (attempt(getattr(psutil, "sensors_temperatures", dict)) if psutil else None) or {}
        degrees = [entry.current for name in ("coretemp", "k10temp", "zenpower") for entry in sensors.get(name, [])]
        return (
            Reading(
                index=0,
                clock_mhz=(frequency.current or None) if frequency else None,
                max_clock_mhz=(frequency.max or None) if frequency else None,
                throttle=throttle,
                temperature_c=max(degrees, default=None),
            ),
        )
