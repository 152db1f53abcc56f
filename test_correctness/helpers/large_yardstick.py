"""simmusa whose yardstick copies as many bytes as that of a real accelerator."""

from __future__ import annotations

from perfsuite.platforms.accelerator import Accelerator
from simmusa.device_code import SimMusaDevice
from simmusa.family import SimMusa

FAMILY = "simmusa=test_correctness.helpers.large_yardstick:SimMusaLarge"


class LargeYardstick(SimMusaDevice):
    """Rank side."""

    yardstick_bytes = Accelerator.yardstick_bytes
    yardstick_side = Accelerator.yardstick_side


class SimMusaLarge(SimMusa):
    """Driver side."""

    device_code = "test_correctness.helpers.large_yardstick:LargeYardstick"
