"""Families that perfsuite has no device code for: their rows are there to compare with and to project with."""

from __future__ import annotations

from typing import ClassVar

from perfsuite.platforms.base import DetectedDevice, DeviceModel, Family
from perfsuite.platforms.detection import DOCS


class TableOnly(Family):
    """Nothing here finds or drives such a device; a package that can is a family of the same name."""

    backend = ""
    device_code = ""
    nodes: ClassVar[str]
    """Pattern of the device's nodes below the root."""

    def unsupported(self) -> str:
        """That such a device is here, and what is measured in its place."""
        found = self.host.glob(self.nodes)
        node = f"/{found[0].relative_to(self.host.root)}" if found else ""
        return f"{node} is here, but perfsuite has no code for family {self.name}: the CPU is measured" if found else ""

    def detect(self) -> tuple[DetectedDevice, ...]:
        """None, whatever the machine has."""
        return ()

    def missing(self, model: DeviceModel) -> str:
        """That no machine would do, and what would."""
        return (
            f"{model.title} is a row of the table only: perfsuite has no code for family {self.name}; "
            f"install a package that brings it ({DOCS})"
        )

    def natively(self, dtype: str) -> bool:
        """By the row alone."""
        return False


class Rocm(TableOnly):
    """AMD Instinct."""

    name = "rocm"
    nodes = "dev/kfd"


class Ascend(TableOnly):
    """Huawei Ascend."""

    name = "ascend"
    nodes = "dev/davinci[0-9]*"
