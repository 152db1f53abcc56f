"""The simulated device on a rank: everything but the way to it is what runs on a real one."""

from __future__ import annotations

import json
import os
from types import ModuleType

from perfsuite.platforms.musa import MusaDevice
from simmusa.costs import S4000, VARIABLE
from simmusa.device_module import install


class SimMusaDevice(MusaDevice):
    """Rank side."""

    def _load(self) -> ModuleType:
        install()
        return super()._load()

    def versions(self) -> dict[str, str]:
        """The costs are part of what a result means."""
        costs = S4000.changed(os.environ.get(VARIABLE, "{}"))
        return {**super().versions(), "simulated_costs": json.dumps(costs.as_dict(), sort_keys=True)}
