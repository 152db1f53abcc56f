"""The simulated device on a rank: it differs from a real one only in its clock and its loading."""

from __future__ import annotations

import json
import os
from types import ModuleType

from perfsuite.platforms.accelerator import Accelerator, EventClock
from perfsuite.platforms.base import DeviceCode
from perfsuite.platforms.musa import MusaDevice
from simmusa.costs import S4000, VARIABLE
from simmusa.device_module import install
from simmusa.native import native


class SimClock(EventClock):
    """Timing events as on a real device; the host's time is virtual too."""

    def now_s(self) -> float:
        """Virtual seconds of this process."""
        return int(native().host_ns()) * 1e-9


class SimMusaDevice(MusaDevice):
    """Rank side."""

    # The host computes them, so the products are small. Near simulated memory limits the copy has a device's size.
    yardstick_side = DeviceCode.yardstick_side
    yardstick_bytes = DeviceCode.yardstick_bytes

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get("SIMMUSA_YARDSTICK") == "device":
            self.yardstick_bytes = Accelerator.yardstick_bytes
        self.clock = SimClock(self._module, "simulated musa.Event")

    def _load(self) -> ModuleType:
        install()
        return super()._load()

    def versions(self) -> dict[str, str]:
        """Return the versions with the costs, which determine the results."""
        costs = S4000.changed(os.environ.get(VARIABLE, "{}"))
        return {**super().versions(), "simulated_costs": json.dumps(costs.as_dict(), sort_keys=True)}
