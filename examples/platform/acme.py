"""Acme accelerators: found by /dev/acme*, named by acme-smi, driven through torch_acme."""

import importlib
import re

from perfsuite.base.errors import UnsupportedCase
from perfsuite.platforms.accelerator import Accelerator
from perfsuite.platforms.base import DetectedDevice
from perfsuite.platforms.detection import AcceleratorFamily

ROW = re.compile(r"(\d+): (.+), (\d+) MiB, (\S+)")  # 0: Acme A1, 32768 MiB, ACME-0a1b


class Acme(AcceleratorFamily):
    name = "acme"
    backend = "accl"
    start_method = "exec"  # "fork" where importing torch does not touch the driver
    device_code = "acme:AcmeDevice"
    nodes = ("dev/acme[0-9]*",)
    visible_variable = "ACME_VISIBLE_DEVICES"
    tool_name = "acme-smi"
    tool_query = ("list",)

    def list_devices(self):
        lines = self.host.tool(self.tool_name, *self.tool_query).text.splitlines()
        return tuple(
            DetectedDevice(index=int(row[1]), reported_name=row[2], memory_bytes=int(row[3]) << 20, uuid=row[4])
            for row in map(ROW.fullmatch, lines)
            if row
        )

    def natively(self, dtype):
        return dtype in ("fp32", "bf16", "fp16")


class AcmeDevice(Accelerator):
    family = "acme"

    def _load(self):
        try:
            importlib.import_module("torch_acme")  # registers torch.acme and accl
        except ImportError as error:
            raise UnsupportedCase(f"torch_acme cannot be imported ({error}); install it") from None
        return super()._load()

    def set_tf32(self, allowed):
        pass  # Acme has no TF32

    def versions(self):
        return {**super().versions(), "torch_acme": importlib.import_module("torch_acme").__version__}
