"""Moore Threads devices: found by /dev/mtgpu*, described by mthreads-gmi, used through torch.musa.

quirks.toml lists the differences of torch_musa from torch's manual, by version and architecture, with the code here
that handles each. A test compares the names in this file with those of every version.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from perfsuite.base.errors import DeviceUnusable, UnsupportedCase
from perfsuite.base.units import MIB
from perfsuite.platforms.accelerator import Accelerator, Attended, AttentionBlock, AttentionKernel
from perfsuite.platforms.base import DetectedDevice, DeviceModel
from perfsuite.platforms.detection import AcceleratorFamily, number, unnamed
from perfsuite.platforms.quirks import architecture_number, package_version, quirks
from perfsuite.platforms.telemetry import HandleTelemetry, Reading, Telemetry, attempt

if TYPE_CHECKING:
    import torch


_OVERLAP_VARIABLES = ("TORCH_MUSA_FSDP2_OVERLAP_LEVEL", "TORCH_MUSA_FSDP2_DISABLE_OVERLAP")
"""The newer variable first: it has priority."""


class Musa(AcceleratorFamily):
    """Driver side."""

    name = "musa"
    backend = "mccl"
    start_method = "exec"
    # The numbers select a ring and the simple protocol; the vendor's launch scripts set all three.
    communication_settings = MappingProxyType(
        {
            "ring": {"MCCL_ALGOS": "1"},
            "simple": {"MCCL_PROTOS": "2"},
            "large-buffers": {"MCCL_BUFFSIZE": "20971520"},
            "no-infiniband": {"MCCL_IB_DISABLE": "1"},
            "gpu-direct": {"MCCL_NET_GDR_LEVEL": "2"},  # the level of public scripts for these devices
            "outer-interfaces": {"MCCL_SOCKET_IFNAME": "^lo,docker,veth,virbr"},
        }
    )
    # The driver ends a kernel that exceeds its own limit; FlagPerf's S4000 cases set an hour, in ms.
    rank_variables = MappingProxyType({"MUSA_KERNEL_TIMEOUT": "3600000"})
    device_code = "perfsuite.platforms.musa:MusaDevice"
    attention = "perfsuite.platforms.musa:kernels"
    nodes = ("dev/mtgpu*",)
    visible_variable = "MUSA_VISIBLE_DEVICES"
    tool_name = "mthreads-gmi"
    tool_query = ("-q",)
    guide = "perfsuite docs musa"

    def list_devices(self) -> tuple[DetectedDevice, ...]:
        """Return devices of ``mthreads-gmi -q``, else of its table, else one unnamed device per node."""
        blocks = re.split(r"^\s*GPU\s?(\d+)\b", self.host.tool(self.tool_name, "-q").text, flags=re.MULTILINE)
        named = tuple(
            self._device(int(index), block)
            for index, block in zip(blocks[1::2], blocks[2::2], strict=True)
            if _field(block, "Product Name")
        )
        nodes = [path for path in self.host.glob(self.nodes[0]) if path.name[-1:].isdigit()]
        return named or tuple(self._table()) or unnamed(len(nodes))

    def _device(self, index: int, block: str) -> DetectedDevice:
        address = re.search(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]", block)
        memory = number(_field(block, "Total"))
        return DetectedDevice(
            index=index,
            reported_name=_field(block, "Product Name"),
            uuid=_field(block, "GPU UUID"),
            memory_bytes=None if memory is None else int(memory) * MIB,
            link=self._link(address[0]) if address else "",
        )

    def _table(self) -> Iterator[DetectedDevice]:
        """Yield devices of rows ``0  MTT S80  |00000000:04:00.0  |0%  2MiB(16384MiB)`` of mthreads-gmi."""
        row = r"^(\d+)\s+(\S.*?)\s*\|([0-9a-fA-F:.]+)\s*\|[^(\n]*\((\d+)MiB\)"
        for match in re.finditer(row, self.host.tool(self.tool_name).text, re.MULTILINE):
            yield DetectedDevice(
                index=int(match[1]), reported_name=match[2], memory_bytes=int(match[4]) * MIB, link=self._link(match[3])
            )

    def _link(self, address: str) -> str:
        """Return the best PCIe generation and width, from sysfs: the tool prints the present width."""
        domain, _, rest = address.lower().partition(":")
        device = f"sys/bus/pci/devices/{domain[-4:]}:{rest}"
        speed = number(self.host.read(f"{device}/max_link_speed") or "")
        width = number(self.host.read(f"{device}/max_link_width") or "")
        generation = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(speed or 0.0)
        return f"pcie{generation}x{width:g}" if generation and width else ""

    def why_not_native(self, dtype: str) -> str:
        """Return a hint at the device's row."""
        return f"{dtype} is not among the dtypes assumed native here; add it to the device's row (native = [...])"

    def assumption(self) -> str:
        """Return the assumption: no tool shows the architecture."""
        return "architecture unknown: fp32, bf16 and fp16 are assumed native" if self.detect() else ""

    def software(self) -> Mapping[str, str]:
        """Return the driver, and the packages of ``musa_version_query``: musa_toolkits, mccl, mublas and others."""
        text = self.host.tool(self.tool_name).text + self.host.tool(self.tool_name, "-q").text
        driver = re.search(r"Driver Version\s*:\s*(\S+)", text)
        listed = re.findall(r'^(\w+):\s*\{\s*"version":\s*"([^"]+)"', self.host.tool("musa_version_query").text, re.M)
        return {"driver": driver[1] if driver else "unknown", **dict(listed)}

    def newer_torch(self) -> str:
        """Return which of the vendor's releases have it: torch and torch_musa belong together."""
        installed = package_version(self.name)
        return (
            f"torch_musa 2.1.0, 2.1.1 and 2.5.0 come with torch 2.5.0, 2.7.0 and 2.7.1 with torch 2.7.1"
            f"{f', this is torch_musa {installed}' if installed else ''}; use the image "
            "registry.mthreads.com/mcconline/musa-pytorch-release-public in such a release, "
            f"never PyPI's torch ({self.guide})"
        )

    def quirks(self, model: DeviceModel) -> tuple[str, ...]:
        """Return the quirks of the installed torch_musa on the row's architecture; unknown ones may have any."""
        version = package_version(self.name)
        found = quirks(self.name, version=version, architecture=architecture_number(model.architecture))
        heading = f"quirks of torch_musa {version or '(version unknown: any of these)'}, perfsuite docs musa:"
        return (heading, *map(str, found))

    def telemetry(self) -> Telemetry:
        """Return a reader by pymtml if it is installed."""
        return MtmlTelemetry.open(self.detect()) or super().telemetry()


def _field(block: str, key: str) -> str:
    match = re.search(rf"^\s*{re.escape(key)}\s*:\s*(.*?)\s*$", block, re.MULTILINE)
    return match[1] if match else ""


class MusaDevice(Accelerator):
    """Rank side."""

    family = "musa"
    instrument_variables = MappingProxyType(
        {
            "MUSA_LAUNCH_BLOCKING": ("[1-9]", "blocking launches"),
            "PYTORCH_NO_MUSA_MEMORY_CACHING": (r"[^\0]", "allocator without a cache"),
            "MCCL_DEBUG": ("(?i)(info|trace|abort)$", "debug log of MCCL"),
            "TORCH_MCCL_BLOCKING_WAIT": ("(?i)[1ty]", "blocking waits of MCCL"),
        }
    )

    def _load(self) -> ModuleType:
        import torch

        if not hasattr(torch, "musa"):
            try:
                importlib.import_module("torch_musa")  # registers torch.musa; not every version autoloads
            except ImportError as error:
                raise DeviceUnusable(
                    f"torch_musa cannot be imported ({error}); run inside the vendor's image or install its wheels"
                ) from error
        return super()._load()

    def set_tf32(self, allowed: bool) -> None:
        """Set the one switch for matrix products and convolutions."""
        import torch

        mudnn = getattr(torch.backends, "mudnn", None)
        if mudnn is None:
            raise UnsupportedCase("torch.backends.mudnn is missing: TF32 cannot be set; repair torch_musa")
        mudnn.allow_tf32 = allowed

    def utilisation_percent(self) -> float | None:
        """Return pymtml's value: torch_musa has none."""
        reading = self.reading()
        return reading.utilisation_percent if reading is not None else None

    def reading(self) -> Reading | None:
        """Return pymtml's reading; None if the visible devices have other numbers there."""
        if Musa.visible_variable in os.environ:
            return None
        device = DetectedDevice(index=int(self._module.current_device()), reported_name="")
        telemetry = MtmlTelemetry.open((device,))
        return telemetry.read()[0] if telemetry else None

    def versions(self) -> dict[str, str]:
        """Return torch_musa's version, the architecture (mp_22 for S4000) and switches that affect timing."""
        import torch

        versions = {**super().versions(), "torch_musa": "unknown", "architecture": "unknown"}
        with contextlib.suppress(Exception):  # missing in a simulated device
            versions["torch_musa"] = str(importlib.import_module("torch_musa").__version__)
        with contextlib.suppress(Exception):  # a driver without an answer: RuntimeError, AssertionError
            major, minor = cast(Any, self._module).get_device_capability()
            versions["architecture"] = f"mp_{major}{minor}"
        versions["kernel_timeout_ms"] = os.environ.get("MUSA_KERNEL_TIMEOUT", "unset")
        versions["tf32"] = str(getattr(getattr(torch.backends, "mudnn", None), "allow_tf32", "unknown"))
        mccl = getattr(self._module, "mccl", None)
        if mccl is not None:
            with contextlib.suppress(Exception):  # builds without MCCL raise in more than one way
                versions["mccl"] = ".".join(map(str, mccl.version()))
        return {**versions, **self._quirks(versions["torch_musa"], versions["architecture"])}

    def _quirks(self, version: str, architecture: str) -> dict[str, str]:
        """Return the names of this rank's quirks, and whether FSDP2 overlaps its communication."""
        number = architecture_number(architecture)
        names = [quirk.name for quirk in quirks("musa", version=version, architecture=number)]
        chosen = next((f"{name}={os.environ[name]}" for name in _OVERLAP_VARIABLES if name in os.environ), "")
        overlap = "unknown" if number is None else "off" if "fsdp2-does-not-overlap" in names else "on"
        return {
            "fsdp2_overlap": f"by {chosen}, else {overlap}" if chosen else f"{overlap} by default",
            "quirks": ", ".join(names) or "none known",
        }


class MtmlTelemetry(HandleTelemetry):
    """Clock, power and temperature by pymtml (package mthreads-ml-py from 2.2.10 on), by its ``mtml*`` calls only.  It
    has no calls for throttling and processes. The package's layer with NVML's names invents missing values: an empty
    process list, limits of 0.
    """

    source = "pymtml"
    shut_down = "mtmlLibraryShutDown"

    def _open(self, devices: Sequence[DetectedDevice]) -> list[Any]:
        mtml = self._library
        mtml.mtmlLibraryInit()
        return [
            mtml.mtmlLibraryInitDeviceByUuid(one.uuid) if one.uuid else mtml.mtmlLibraryInitDeviceByIndex(one.index)
            for one in devices
        ]

    def _reading(self, index: int, handle: Any) -> Reading:
        mtml = self._library
        power_w = attempt(lambda: float(mtml.mtmlDeviceGetPowerUsage(handle)) / 1e3)
        gpu = attempt(lambda: mtml.mtmlDeviceInitGpu(handle))
        if gpu is None:
            return Reading(index=index, power_w=power_w)
        try:
            return Reading(
                index=index,
                clock_mhz=attempt(lambda: float(mtml.mtmlGpuGetClock(gpu))),
                max_clock_mhz=attempt(lambda: float(mtml.mtmlGpuGetMaxClock(gpu))),
                utilisation_percent=attempt(lambda: float(mtml.mtmlGpuGetUtilization(gpu))),
                power_w=power_w,
                temperature_c=attempt(lambda: float(mtml.mtmlGpuGetTemperature(gpu))),
            )
        finally:
            attempt(lambda: mtml.mtmlDeviceFreeGpu(gpu))


class MusaFlash(AttentionKernel):
    """``aten::_scaled_dot_product_attention_flash_musa``; its only scale is 1 / sqrt(E)."""

    grouped = True

    def takes(self, block: AttentionBlock) -> bool:
        """Return whether this torch has the operator; muDNN itself refuses unsupported blocks."""
        import torch

        return hasattr(torch.ops.aten, "_scaled_dot_product_attention_flash_musa")

    def forward(self, block: AttentionBlock) -> Attended:
        """Return the attention; its rest is the mask of the unused dropout."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_attention_flash_musa
        tensors = (tensor.contiguous() for tensor in (block.query, block.key, block.value))
        out, log_sum, dropout_mask = kernel(*tensors, None, 0.0, block.causal)
        return Attended(out=out, log_sum=log_sum, rest=(dropout_mask,))

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients in the dtype of the query; some versions of the kernel add one of the mask."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_attention_flash_musa_backward
        tensors = gradient, block.query, block.key, block.value, whole.out, whole.log_sum
        d_query, d_key, d_value, *_ = kernel(*(tensor.contiguous() for tensor in tensors), *whole.rest, block.causal)
        return d_query, d_key, d_value


def kernels() -> Mapping[str, AttentionKernel]:
    """Return the only kernel."""
    return {"flash": MusaFlash()}
