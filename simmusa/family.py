"""The simulated device as a family of perfsuite: asked for by name, stamped, never mixed with a real one.

``PERFSUITE_FAMILIES=simmusa=simmusa.family:SimMusa pytest test_perf --perf-platform=simmusa`` runs the s4000 cases.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from pathlib import Path
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
_STRANGER = 1 << 30  # First number of the processes of other programs, above all numbers of Linux.


class SimTelemetry(Telemetry):
    """Readings as the environment says; without it no device is throttled, and only this run uses it."""

    source = "simmusa"

    def __init__(self, count: int, environ: Mapping[str, str]) -> None:
        self._count = count
        self._environ = environ

    def read(self) -> tuple[Reading, ...]:
        """Return the same throttling for every device, and the processes on each."""
        throttle = tuple(filter(None, self._environ.get("SIMMUSA_THROTTLE", "").split(",")))
        return tuple(
            Reading(index=index, throttle=throttle, processes=self._processes(index)) for index in range(self._count)
        )

    def _processes(self, device: int) -> tuple[int, ...]:
        """Return the processes of $SIMMUSA_SHARED by the numbers of their namespace, then the strangers."""
        folder = self._environ.get("SIMMUSA_SHARED")
        files = sorted(Path(folder).glob(f"{device}.*")) if folder else []
        added, strangers = (int(self._environ.get(f"SIMMUSA_{name}", 0)) for name in ("NAMESPACE", "STRANGERS"))
        here = [int(file.suffix[1:]) + added for file in files if _is_locked(file)]
        return (*here, *range(_STRANGER, _STRANGER + strangers))


def _is_locked(file: Path) -> bool:
    """Return whether a process holds this file: it lives and uses the device."""
    with file.open("rb") as opened:
        try:
            fcntl.lockf(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


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
        """Return readings as the environment says (perfsuite docs simmusa)."""
        return SimTelemetry(len(self.detect()), self.host.environ)

    def software(self) -> Mapping[str, str]:
        """Which simulation this is."""
        return {"simmusa": build.key()}
