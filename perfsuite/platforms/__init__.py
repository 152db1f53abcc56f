"""Hardware: device families, the table of device models, fingerprint, environment, telemetry.

On the driver no module here imports torch; :func:`device_code` does, on a rank.
"""

from __future__ import annotations

from perfsuite.platforms.base import Clock, DetectedDevice, DeviceCode, DeviceModel, Family, MachineModel
from perfsuite.platforms.catalog import Catalog, load_catalog
from perfsuite.platforms.detection import device_code, families
from perfsuite.platforms.environment import Environment, Fingerprint, fingerprint, read_environment
from perfsuite.platforms.host import Host
from perfsuite.platforms.machine import Machine, detect_machine, why_absent

__all__ = [
    "Catalog", "Clock", "DetectedDevice", "DeviceCode", "DeviceModel", "Environment", "Family", "Fingerprint", "Host",
    "Machine", "MachineModel", "detect_machine", "device_code", "families", "fingerprint", "load_catalog",
    "read_environment", "why_absent",
]  # fmt: skip
