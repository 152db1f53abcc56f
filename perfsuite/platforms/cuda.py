"""NVIDIA devices: found by /dev/nvidia*, described by nvidia-smi or /proc/driver/nvidia, used through torch.cuda."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from perfsuite.base.errors import DeviceUnusable, UnsupportedCase
from perfsuite.base.units import MIB
from perfsuite.platforms.accelerator import Accelerator, Attended, AttentionBlock, AttentionKernel
from perfsuite.platforms.base import DetectedDevice
from perfsuite.platforms.detection import AcceleratorFamily, number, unnamed
from perfsuite.platforms.host import ToolAnswer
from perfsuite.platforms.quirks import numbers
from perfsuite.platforms.telemetry import HandleTelemetry, Reading, Telemetry, attempt

if TYPE_CHECKING:
    import torch


_SINCE: Mapping[str, float] = {"fp64": 0, "fp32": 0, "fp16": 7.0, "int8": 7.5, "bf16": 8.0, "tf32": 8.0, "fp8": 8.9}
"""Compute capability from which matrix units support a dtype (CUDA C++ programming guide, arithmetic instructions)."""
_FIELDS = ("index", "name", "uuid", "memory.total", "driver_version")
_LINK = ("pcie.link.gen.max", "pcie.link.width.max")
_DETAILS = ("index", "power.limit", *_LINK, "ecc.mode.current", "mig.mode.current", "compute_cap")
"""Newer fields come last: an older nvidia-smi refuses a query with an unknown name."""


class Cuda(AcceleratorFamily):
    """Driver side."""

    name = "cuda"
    backend = "nccl"
    fp32_tolerance = 5e-5
    other_backends = ("gloo",)
    start_method = "fork"
    communication_settings = MappingProxyType(
        {
            "ring": {"NCCL_ALGO": "Ring"},
            # From 2.24 on a collective without the named algorithm fails (NCCL's env.rst), and broadcast has no tree.
            "tree": {"NCCL_ALGO": {"": "Tree", "2.24": "allreduce:tree"}},
            "simple": {"NCCL_PROTO": "Simple"},
            "large-buffers": {"NCCL_BUFFSIZE": "20971520"},
            "no-peers": {"NCCL_P2P_DISABLE": "1"},
            "no-infiniband": {"NCCL_IB_DISABLE": "1"},
            "gpu-direct": {"NCCL_NET_GDR_LEVEL": "SYS"},
            "outer-interfaces": {"NCCL_SOCKET_IFNAME": "^lo,docker,veth,virbr"},
        }
    )
    least_library_version = "2.18"
    sharing_variables = MappingProxyType({"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    device_code = "perfsuite.platforms.cuda:CudaDevice"
    attention = "perfsuite.platforms.cuda:kernels"
    nodes = ("dev/nvidia[0-9]*", "dev/dxg", "proc/driver/nvidia/gpus/*")
    visible_variable = "CUDA_VISIBLE_DEVICES"
    tool_name = "nvidia-smi"
    tool_query = (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")

    def detect(self) -> tuple[DetectedDevice, ...]:
        """Return the devices that a rank would see; in MIG mode one slice, because CUDA shows a process only one."""
        devices = super().detect()
        return devices[:1] if devices and devices[0].partition else devices

    def list_devices(self) -> tuple[DetectedDevice, ...]:
        """Return devices of nvidia-smi, else of the driver's files in /proc, else one unnamed device per node."""
        details = {row["index"]: row for row in self._details()}
        devices = [self._device(row, details.get(row["index"], {})) for row in self._query(*_FIELDS)]
        nodes = self.host.glob(self.nodes[0]) or self.host.glob(self.nodes[1])
        return tuple(devices) or self._from_proc() or unnamed(len(nodes))

    def _device(self, row: Mapping[str, str], details: Mapping[str, str]) -> DetectedDevice:
        memory = number(row["memory.total"])
        generation, width = details.get("pcie.link.gen.max"), details.get("pcie.link.width.max")
        sliced = details.get("mig.mode.current") == "Enabled"
        partition, uuid = self._slice(row["uuid"]) if sliced else ("", row["uuid"])
        return DetectedDevice(
            index=int(row["index"]),
            reported_name=row["name"],
            uuid=uuid,
            memory_bytes=None if memory is None or partition else int(memory) * MIB,
            link=f"pcie{generation}x{width}" if generation and width else "",
            partition=partition,
            capability=details.get("compute_cap", "") if number(details.get("compute_cap", "")) else "",
        )

    def _ask(self, *fields: str) -> ToolAnswer:
        return self.host.tool(self.tool_name, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")

    def _query(self, *fields: str) -> list[dict[str, str]]:
        """Return nvidia-smi's rows for these fields; none if it fails. ``[N/A]`` and similar become empty."""
        lines = self._ask(*fields).text.splitlines()
        rows = [[re.sub(r"^\[.*\]$", "", cell.strip()) for cell in line.split(", ")] for line in lines]
        return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]

    def _details(self) -> list[dict[str, str]]:
        """Return rows with as many of the details as this nvidia-smi supports."""
        count = len(_DETAILS)
        while count > 2 and "not a valid field" in self._ask(*_DETAILS[:count]).problem:
            count -= 1
        return self._query(*_DETAILS[:count])

    def _slice(self, uuid: str) -> tuple[str, str]:
        """Return profile and UUID of the MIG slice for a rank: the one that the user chose, else the first."""
        current, slices = "", []
        for line in self.host.tool(self.tool_name, "-L").text.splitlines():
            if device := re.match(r"GPU \d+: .*\(UUID: (\S+)\)", line):
                current = device[1]
            elif current == uuid and (entry := re.match(r"\s+(MIG \S+)\s+Device\s+\d+: \(UUID: (\S+)\)", line)):
                slices.append((entry[1], entry[2]))
        wanted = self.host.environ.get(self.visible_variable, "").split(",")[0]
        asked = [entry for entry in slices if wanted.startswith("MIG-") and entry[1].startswith(wanted)]
        return (asked or slices or [("MIG without slices", uuid)])[0]

    def _from_proc(self) -> tuple[DetectedDevice, ...]:
        devices = []
        for index, path in enumerate(self.host.glob("proc/driver/nvidia/gpus/*/information")):
            fields = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", self.host.read(path) or "", re.MULTILINE))
            name, uuid = fields.get("Model", ""), fields.get("GPU UUID", "").strip("?")
            devices.append(DetectedDevice(index=index, reported_name=name, uuid=uuid))
        return tuple(devices)

    @functools.cached_property
    def _capability(self) -> float | None:
        """Lowest compute capability of the visible devices; None if no tool shows it."""
        return min((float(device.capability) for device in self.detect() if device.capability), default=None)

    def natively(self, dtype: str) -> bool:
        """Return whether the compute capability supports the dtype; if unknown: fp32, bf16 and fp16."""
        if self._capability is None:
            return super().natively(dtype)
        return self._capability >= _SINCE.get(dtype, float("inf"))

    def why_not_native(self, dtype: str) -> str:
        """Return the compute capability of the device and the one that is needed."""
        if self._capability is not None and dtype in _SINCE:
            return f"{dtype} needs compute capability {_SINCE[dtype]:g}, this device has {self._capability:g}"
        return f"{dtype} is not among the dtypes assumed native here; add it to the device's row (native = [...])"

    def assumption(self) -> str:
        """Return an assumption if nvidia-smi does not show the compute capability."""
        if not self.detect() or self._capability is not None:
            return ""
        return "compute capability unknown: fp32, bf16 and fp16 are assumed native"

    def software(self) -> Mapping[str, str]:
        """Return the driver's version, and the mode of error correction, which takes bandwidth of GDDR memory."""
        rows = self._query(*_FIELDS)
        version = rows[0]["driver_version"] if rows else self.host.read("sys/module/nvidia/version")
        modes = sorted({mode for row in self._details() if (mode := row.get("ecc.mode.current"))})
        return {"driver": version or "unknown", **({"ecc": " and ".join(modes)} if modes else {})}

    def power_caps(self) -> tuple[str, ...]:
        """Return the enforced power limit of every device of the host."""
        return tuple(f"{row['power.limit']} W" if row["power.limit"] else "unknown" for row in self._details())

    def telemetry(self) -> Telemetry:
        """Return a reader by pynvml if it is installed."""
        return NvmlTelemetry.open(self.detect()) or super().telemetry()


class CudaDevice(Accelerator):
    """Rank side."""

    family = "cuda"
    binds_groups = True
    instrument_variables = MappingProxyType(
        {
            "CUDA_LAUNCH_BLOCKING": ("[1-9]", "blocking launches"),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": (r"[^\0]", "allocator without a cache"),
            "NCCL_DEBUG": ("(?i)(info|trace|abort)$", "debug log of NCCL"),
            "TORCH_NCCL_BLOCKING_WAIT": ("(?i)[1ty]", "blocking waits of NCCL"),
            "TORCH_NCCL_DESYNC_DEBUG": ("(?i)[1ty]", "debug mode of NCCL groups"),
            "TORCH_NCCL_NAN_CHECK": ("(?i)[1ty]", "check of NCCL operations for NaN"),
            "NCCL_PROFILER_PLUGIN": (r"(?!none)[^\0]", "profiler plugin of NCCL"),
            "TORCH_NCCL_ENABLE_TIMING": ("(?i)[1ty]", "timing of each NCCL operation"),
            "CUDNN_LOGINFO_DBG": ("[1-9]", "log of cuDNN"),
            "CUDNN_LOGLEVEL_DBG": ("[2-9]", "log of cuDNN"),
            "CUBLAS_LOGINFO_DBG": ("[1-9]", "log of cuBLAS"),
            "CUBLASLT_LOG_LEVEL": ("[1-9]", "log of cuBLASLt"),
            "CUDA_INJECTION64_PATH": (r"[^\0]", "injected profiler"),
        }
    )

    open_remedies = MappingProxyType(
        {
            "busy or unavailable": "another process holds it; end it, or allow several (nvidia-smi -c DEFAULT)",
            "Error 802|system not yet initialized": "start nvidia-fabricmanager in the driver's version",
            "Error 803|unsupported display driver": "install one version of the driver's module and library, or "
            "restart the host",
            **Accelerator.open_remedies,
        }
    )

    def open(self, index: int) -> torch.device:
        """Open the device; raise DeviceUnusable too if this torch has no kernels for it."""
        import torch

        device = super().open(index)
        built = attempt(lambda: [*self._module.get_arch_list()]) or []
        capability = attempt(lambda: tuple(self._module.get_device_capability(index)))
        codes = [code for entry in built if (code := re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", entry))]
        if not codes or capability is None:
            return device
        for kind, *version in (code.groups() for code in codes):
            major, minor = map(int, version)
            # The driver translates PTX for any newer device; machine code needs the same major version.
            if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
                return device
        major, minor = capability
        raise DeviceUnusable(
            f"torch {torch.__version__} has no kernels for compute capability {major}.{minor}, only for "
            f"{', '.join(built)}; install a torch built for this device"
        )

    def _load(self) -> ModuleType:
        # nvidia-smi's numbers: CUDA orders devices by speed, which would mix up different devices of a workstation.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        return super()._load()

    def set_tf32(self, allowed: bool) -> None:
        """Set both of torch's switches, for matrix products and convolutions."""
        import torch

        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed

    def pci_address(self, index: int) -> str | None:
        """Return the address from properties of torch 2.8 and newer."""
        properties = self._module.get_device_properties(index)
        if not hasattr(properties, "pci_bus_id"):
            return ""
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"

    def require_sharing(self) -> None:
        """Require NCCL 2.30 for NCCL_MULTI_RANK_GPU_ENABLE; older ones fail with "Duplicate GPU"."""
        nccl = self.versions().get("nccl", "")
        if nccl and numbers(nccl) < (2, 30):
            raise UnsupportedCase(
                f"NCCL {nccl} refuses several ranks on one device, which needs NCCL 2.30 or newer; "
                "use --perf-backend=gloo, or start one rank per device"
            )

    def utilisation_percent(self) -> float | None:
        """Return torch.cuda's value from NVML, whose Python package may be missing."""
        return attempt(lambda: float(self._module.utilization()))

    def uuid(self) -> str:
        """Return torch's UUID with NVML's prefix."""
        uuid = attempt(lambda: self._module.get_device_properties(self._module.current_device()).uuid)
        return f"GPU-{uuid}" if uuid else ""

    def reading(self) -> Reading | None:
        """Return pynvml's reading of the device with torch's UUID."""
        telemetry = NvmlTelemetry.open((DetectedDevice(index=0, reported_name="", uuid=self.uuid()),))
        return telemetry.read()[0] if telemetry else None

    def versions(self) -> dict[str, str]:
        """Return CUDA, cuDNN and NCCL of torch, and the TF32 switch."""
        import torch

        cudnn: Any = torch.backends.cudnn
        nccl: Any = torch.cuda.nccl
        versions = {
            **super().versions(),
            "cuda": str(torch.version.cuda or "unknown"),
            "cudnn": str(cudnn.version() or "unknown"),
            "tf32": attempt(lambda: str(torch.backends.cuda.matmul.allow_tf32)) or "unknown",
        }
        with contextlib.suppress(Exception):  # builds without NCCL raise in more than one way
            versions["nccl"] = ".".join(map(str, nccl.version()))
        return versions


_REASONS = (
    (0x0000000000000004, "power cap"),
    (0x0000000000000008, "hardware"),
    (0x0000000000000010, "sync boost"),
    (0x0000000000000020, "thermal"),
    (0x0000000000000040, "hardware thermal"),
    (0x0000000000000080, "hardware power brake"),
)
"""Bits of nvmlClocksEventReasons (nvml.h); idle, application clocks and display clocks are not disturbances."""


class NvmlTelemetry(HandleTelemetry):
    """Reads each device by its UUID with pynvml (nvidia-ml-py): NVML orders by bus, CUDA perhaps by speed."""

    source = "pynvml"
    shut_down = "nvmlShutdown"

    def _open(self, devices: Sequence[DetectedDevice]) -> list[Any]:
        self._library.nvmlInit()
        return [self._library.nvmlDeviceGetHandleByUUID(device.uuid) for device in devices]

    def _reading(self, index: int, handle: Any) -> Reading:
        nvml = self._library
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # since driver 535
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        bits = attempt(lambda: int(reasons(handle)))
        processes = attempt(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return Reading(
            index=index,
            clock_mhz=attempt(lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
            max_clock_mhz=attempt(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
            throttle=None if bits is None else tuple(name for bit, name in _REASONS if bits & bit),
            utilisation_percent=attempt(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            power_w=attempt(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
            power_cap_w=attempt(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
            temperature_c=attempt(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
            processes=None if processes is None else tuple(int(process.pid) for process in processes),
        )


_FEATURE_STEP = 8  # Heads need a multiple of this many features: unlike torch, this call does not pad.


class _Fused(AttentionKernel):
    """``aten::_scaled_dot_product_<name>_attention``; its rest is the random state of the unused dropout."""

    def __init__(self, name: str) -> None:
        self._name = name

    def takes(self, block: AttentionBlock) -> bool:
        """Return whether torch would choose this kernel: by dtype, shapes and the device's generation."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, f"{self._name.upper()}_ATTENTION")
        with sdpa_kernel(backend):
            try:
                chosen = torch._fused_sdp_choice(block.query, block.key, block.value, is_causal=block.causal)
            except RuntimeError:
                return False
        return block.query.shape[-1] % _FEATURE_STEP == 0 and chosen == int(backend.value)

    def forward(self, block: AttentionBlock) -> Attended:
        """Return the attention; cuDNN's logarithms of sums have a fourth dimension of size 1."""
        import torch

        kernel = getattr(torch.ops.aten, f"_scaled_dot_product_{self._name}_attention")
        more = (None, True) if self._name == "cudnn" else ()  # no bias, and the sums are wanted
        out, log_sum, *outputs = kernel(block.query, block.key, block.value, *more, 0.0, block.causal)
        return Attended(out=out, log_sum=log_sum.view(out.shape[:-1]), rest=(outputs[4], outputs[5]))

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients in the dtype of the query."""
        import torch

        kernel = getattr(torch.ops.aten, f"_scaled_dot_product_{self._name}_attention_backward")
        tensors = gradient, block.query, block.key, block.value, whole.out
        lengths = None, None, block.query.shape[2], block.key.shape[2]  # one length for all samples
        if self._name == "cudnn":  # without a bias
            sums = whole.log_sum.unsqueeze(-1)
            d_query, d_key, d_value = kernel(*tensors, sums, *whole.rest, None, *lengths, 0.0, block.causal)
        else:
            d_query, d_key, d_value = kernel(*tensors, whole.log_sum, *lengths, 0.0, block.causal, *whole.rest)
        return d_query, d_key, d_value


def kernels() -> Mapping[str, AttentionKernel]:
    """Return the kernels, flash first, as torch prefers it."""
    return {name: _Fused(name) for name in ("flash", "cudnn")}
