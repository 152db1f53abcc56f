"""Telemetry of NVIDIA devices by pynvml (package nvidia-ml-py)."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

from perfsuite.platforms.base import DetectedDevice
from perfsuite.platforms.telemetry import Reading, Telemetry, attempt

_REASONS = (
    (0x0000000000000004, "power cap"),
    (0x0000000000000008, "hardware"),
    (0x0000000000000010, "sync boost"),
    (0x0000000000000020, "thermal"),
    (0x0000000000000040, "hardware thermal"),
    (0x0000000000000080, "hardware power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h); idle, application clocks and display clocks are not disturbances."""


class NvmlTelemetry(Telemetry):
    """Reads each device by its UUID: NVML numbers by bus, CUDA perhaps by speed."""

    source = "pynvml"

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = handles

    @classmethod
    def open(cls, devices: Sequence[DetectedDevice], library: Any = None) -> NvmlTelemetry | None:
        """A reader of these devices; None without the library, its driver or a device's UUID."""
        try:
            library = library or importlib.import_module("pynvml")
            library.nvmlInit()
            return cls(library, [library.nvmlDeviceGetHandleByUUID(device.uuid) for device in devices])
        except Exception:  # the library's errors share no useful base across its versions
            return None

    def read(self) -> tuple[Reading, ...]:
        """One reading per device."""
        return tuple(self._reading(index, handle) for index, handle in enumerate(self._handles))

    def _reading(self, index: int, handle: Any) -> Reading:
        nvml = self._library
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # its name since driver 535
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = attempt(lambda: int(reasons(handle)))
        processes = attempt(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return Reading(
            index=index,
            clock_mhz=attempt(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            max_clock_mhz=attempt(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
            throttle=None if bits is None else tuple(name for bit, name in _REASONS if bits & bit),
            utilisation_percent=attempt(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            power_w=attempt(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            power_cap_w=attempt(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
            temperature_c=attempt(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            processes=None if processes is None else tuple(int(process.pid) for process in processes),
        )

    def close(self) -> None:
        """``nvmlShutdown``."""
        with contextlib.suppress(Exception):
            self._library.nvmlShutdown()
