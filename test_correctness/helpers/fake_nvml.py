"""simmusa with NVIDIA's telemetry over a stand-in library, which lists the rank processes that are really there.

``$FAKE_NVML`` is JSON: ``numbers`` added to each process number, as another namespace does; ``strangers`` and
``reasons``, bits of nvmlClocksEventReasons.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perfsuite.platforms.cuda import NvmlTelemetry
from perfsuite.platforms.telemetry import family_of_processes
from simmusa import build
from simmusa.family import SimMusa

FAMILY = "simmusa=test_correctness.helpers.fake_nvml:SimMusaByNvml"
VARIABLE = "FAKE_NVML"


class FakeNvml:
    """The part of pynvml that is read; every device has all the processes."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self._says = {"numbers": 0, "strangers": [], "reasons": 0, **json.loads(os.environ.get(VARIABLE, "{}"))}

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1410

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self._says["reasons"]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        """Those below this process that have loaded the simulated device."""
        library = str(build.library())
        here = [number for number in family_of_processes([os.getpid()]) if _has_mapped(number, library)]
        numbers = [number + self._says["numbers"] for number in here] + self._says["strangers"]
        return [SimpleNamespace(pid=number) for number in numbers]


def _has_mapped(number: int, library: str) -> bool:
    try:
        return library in Path(f"/proc/{number}/maps").read_text()
    except OSError:  # it ended meanwhile
        return False


class SimMusaByNvml(SimMusa):
    """Driver side."""

    def detect(self):
        """As simmusa, each with a UUID."""
        return tuple(dataclasses.replace(device, uuid=f"GPU-{device.index}") for device in super().detect())

    def telemetry(self):
        """By NVML's reader."""
        return NvmlTelemetry.open(self.detect(), FakeNvml())
