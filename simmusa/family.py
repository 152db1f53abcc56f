"""The simulated device as a family of perfsuite: asked for by name, stamped, never mixed with a real one.

``PERFSUITE_FAMILIES=simmusa=simmusa.family:SimMusa pytest test_perf --perf-platform=simmusa`` runs the s4000 cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from perfsuite.base.errors import UnsupportedCase
from perfsuite.platforms.base import DetectedDevice, DeviceModel, Family
from perfsuite.platforms.musa import Musa
from perfsuite.platforms.telemetry import Reading, Telemetry
from simmusa import build
from simmusa.costs import S4000, VARIABLE

if TYPE_CHECKING:
    from perfsuite.platforms.host import Host

_TITLE = "MTT S4000"


class Undisturbed(Telemetry):
    """Virtual devices are never throttled and belong to one run."""

    source = "simmusa"

    def __init__(self, count: int) -> None:
        self._count = count

    def read(self) -> tuple[Reading, ...]:
        """Nothing happened to any of them."""
        return tuple(Reading(index=index, throttle=(), processes=()) for index in range(self._count))


class HeldDown(Undisturbed):
    """Devices whose clocks are held down, as those of real ones under load are by their power cap."""

    def __init__(self, count: int, reasons: tuple[str, ...]) -> None:
        super().__init__(count)
        self._reasons = reasons

    def read(self) -> tuple[Reading, ...]:
        """The same for every device."""
        return tuple(replace(reading, throttle=self._reasons) for reading in super().read())


class SimMusa(Family):
    """Driver side: as many devices as ``$SIMMUSA_DEVICES`` says, none where they cannot be built."""

    name = "simmusa"
    stands_for = "musa"
    backend = "mccl"
    start_method = "exec"
    simulated = True
    communication_settings = Musa.communication_settings
    rank_variables = Musa.rank_variables
    device_code = "simmusa.device_code:SimMusaDevice"

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._why_not: str | None = None

    def detect(self) -> tuple[DetectedDevice, ...]:
        """The devices; builds them, which takes a minute or two the first time."""
        if self._why_not is None:
            try:
                build.ensure_built()
                self._why_not = ""
            except UnsupportedCase as reason:
                self._why_not = str(reason)
        if self._why_not:
            return ()
        count = int(self.host.environ.get("SIMMUSA_DEVICES", "8"))
        costs = S4000.changed(self.host.environ.get(VARIABLE, "{}")).held(count, self.host)
        return tuple(
            DetectedDevice(index=index, reported_name=_TITLE, memory_bytes=costs.memory_bytes, link="simulated")
            for index in range(count)
        )

    def missing(self, model: DeviceModel) -> str:
        """Return why it could not be built."""
        return self._why_not or f"{model.title} not found: simmusa simulates {_TITLE} alone"

    def natively(self, dtype: str) -> bool:
        """Return False: only the row counts."""
        return False

    def links(self) -> str:
        """Return the same link for all devices."""
        return "simulated"

    def telemetry(self) -> Telemetry:
        """Return undisturbed devices, or devices throttled by ``$SIMMUSA_THROTTLE`` (``power cap``, ``thermal``)."""
        reasons = tuple(filter(None, self.host.environ.get("SIMMUSA_THROTTLE", "").split(",")))
        count = len(self.detect())
        return HeldDown(count, reasons) if reasons else Undisturbed(count)

    def software(self) -> Mapping[str, str]:
        """Which simulation this is."""
        return {"simmusa": build.key()}
