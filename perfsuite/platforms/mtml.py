"""Telemetry of Moore Threads devices by pymtml (package mthreads-ml-py from 2.2.10 on), by its ``mtml*`` calls only.

Its layer with NVML's names invents answers where the library has none: an empty process list, limits of 0.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

from perfsuite.platforms.base import DetectedDevice
from perfsuite.platforms.telemetry import Reading, Telemetry, attempt


class MtmlTelemetry(Telemetry):
    """Clock, power and temperature; throttling and processes have no call, so they stay unknown."""

    source = "pymtml"

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = handles

    @classmethod
    def open(cls, devices: Sequence[DetectedDevice], library: Any = None) -> MtmlTelemetry | None:
        """A reader of these devices; None without the library, its driver or a device."""
        try:
            library = library or importlib.import_module("pymtml")
            library.mtmlLibraryInit()
            handles = [
                library.mtmlLibraryInitDeviceByUuid(device.uuid)
                if device.uuid
                else library.mtmlLibraryInitDeviceByIndex(device.index)
                for device in devices
            ]
            return cls(library, handles)
        except Exception:  # missing library, missing libmtml.so, driver not loaded: one class each
            return None

    def read(self) -> tuple[Reading, ...]:
        """One reading per device; ``own`` is not needed, processes are unknown."""
        return tuple(self._reading(index, handle) for index, handle in enumerate(self._handles))

    def _reading(self, index: int, handle: Any) -> Reading:
        mtml = self._library
        power_w = attempt(lambda: float(mtml.mtmlDeviceGetPowerUsage(handle)) / 1e3)
        gpu = attempt(lambda: mtml.mtmlDeviceInitGpu(handle))
        if gpu is None:
            return Reading(index=index, power_w=power_w)
        try:
            return Reading(
                index=index,
                clock_mhz=attempt(lambda: float(mtml.mtmlGpuGetClock(gpu))),
                max_clock_mhz=attempt(lambda: float(mtml.mtmlGpuGetMaxClock(gpu))),
                utilisation_percent=attempt(lambda: float(mtml.mtmlGpuGetUtilization(gpu))),
                power_w=power_w,
                temperature_c=attempt(lambda: float(mtml.mtmlGpuGetTemperature(gpu))),
            )
        finally:
            attempt(lambda: mtml.mtmlDeviceFreeGpu(gpu))

    def close(self) -> None:
        """``mtmlLibraryShutDown``."""
        with contextlib.suppress(Exception):
            self._library.mtmlLibraryShutDown()
