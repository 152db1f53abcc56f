"""simmusa with NVIDIA's telemetry over a stand-in library, which gives the readings of simmusa's own telemetry."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from perfsuite.platforms.cuda import _REASONS, NvmlTelemetry
from perfsuite.platforms.telemetry import Telemetry
from simmusa.family import SimMusa

FAMILY = "simmusa=test_correctness.helpers.fake_nvml:SimMusaByNvml"


class FakeNvml:
    """The part of pynvml that is read; a handle is the number of a device."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1410

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return sum(bit for bit, name in _REASONS if name in (self._telemetry.read()[handle].throttle or ()))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=number) for number in self._telemetry.read()[handle].processes or ()]


class SimMusaByNvml(SimMusa):
    """Driver side."""

    def detect(self):
        """As simmusa, each with a UUID."""
        return tuple(dataclasses.replace(device, uuid=f"GPU-{device.index}") for device in super().detect())

    def telemetry(self):
        return NvmlTelemetry.open(self.detect(), FakeNvml(super().telemetry()))
