"""CPUs: described by /proc/cpuinfo, /sys and cgroups, used through torch's CPU tensors, timed by perf_counter."""

from __future__ import annotations

import functools
import importlib
import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from perfsuite.base.units import KIB, MIB
from perfsuite.platforms.accelerator import Attended, AttentionBlock, AttentionKernel
from perfsuite.platforms.base import Clock, DetectedDevice, DeviceCode, DeviceModel, Family, measured_facts
from perfsuite.platforms.host import Host, memory_limit
from perfsuite.platforms.telemetry import Reading, Telemetry, attempt
from perfsuite.record.result import ClockFacts

if TYPE_CHECKING:
    import torch


_FEATURES: Mapping[str, tuple[str, ...]] = {
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "asimddp"),
}
"""Flags of /proc/cpuinfo (x86 first, then Arm); any of them means native dot products in the dtype."""
_VECTOR_FLAGS = ("avx", "avx2", "fma", "avx512f", "amx_tile", "asimd", "sve", "sve2")
_IDENTITY = (
    *("vendor_id", "cpu family", "model", "stepping"),  # x86
    *("CPU implementer", "CPU variant", "CPU part", "CPU revision"),  # Arm
)
_ALWAYS = ("fp32", "fp64")
_UNKNOWN_CACHE_BYTES = 64 * MIB


@dataclass(frozen=True, kw_only=True)
class Processor:
    """Facts of /proc/cpuinfo about the processor itself; no momentary values such as MHz or bogomips."""

    model: str  # Model name; on Arm only implementer and part.
    identity: str  # vendor, family, model and stepping: distinguish processors with one name from a hypervisor.
    features: tuple[str, ...]  # Sorted flags that select the instructions of torch's kernels.
    threads_per_core: int | None
    sockets: int | None

    def natively(self, dtype: str) -> bool:
        """Return whether it has instructions for dot products in this short dtype."""
        return dtype in _ALWAYS or any(flag in self.features for flag in _FEATURES.get(dtype, ()))


def read_processor(host: Host) -> Processor:
    """Return the processor of the host; ``unknown`` replaces missing values."""
    text = host.read("proc/cpuinfo") or ""
    fields: dict[str, str] = dict(re.findall(r"^([^:\n]+?)\s*:[ \t]*(.*?)[ \t]*$", text.split("\n\n")[0], re.MULTILINE))
    model = fields.get("model name", "")
    if not model and "CPU part" in fields:
        model = f"Arm {fields.get('CPU implementer', '?')} {fields['CPU part']}"
    if not model and host.root == host.root.parent:
        model = platform.processor()  # not Linux
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    relevant = {*_VECTOR_FLAGS, *(flag for group in _FEATURES.values() for flag in group)}
    siblings, cores = fields.get("siblings", ""), fields.get("cpu cores", "")
    sockets = set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.MULTILINE))
    return Processor(
        model=" ".join(model.split()) or "unknown",
        identity=" ".join(fields[key] for key in _IDENTITY if key in fields) or "unknown",
        features=tuple(sorted(flags & relevant)),
        threads_per_core=int(siblings) // int(cores) if siblings.isdigit() and cores.isdigit() and int(cores) else None,
        sockets=len(sockets) or None,
    )


def memory_bytes(host: Host) -> tuple[int, int] | None:
    """Return (available, total) bytes of main memory, within the cgroup's limit; None if /proc has no values."""
    fields = dict(re.findall(r"^(\w+):\s*(\d+) kB", host.read("proc/meminfo") or "", re.MULTILINE))
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        return None
    total, available = int(fields["MemTotal"]) * KIB, int(fields["MemAvailable"]) * KIB
    limited = memory_limit(host)
    return (available, total) if limited is None else (min(available, limited[0]), min(total, limited[1]))


class Cpu(Family):
    """Driver side."""

    name = "cpu"
    backend = "gloo"
    start_method = "fork"
    shareable = True
    preloads = True
    # Each named interface is a device with two threads; collectives use them in turn.
    communication_settings = MappingProxyType({"two-channels": {"GLOO_SOCKET_IFNAME": "lo,lo"}})
    device_code = "perfsuite.platforms.cpu:CpuDevice"
    attention = "perfsuite.platforms.cpu:kernels"

    @functools.cached_property
    def processor(self) -> Processor:
        """The processor, read once: every collected case needs it."""
        return read_processor(self.host)

    def detect(self) -> tuple[DetectedDevice, ...]:
        """Return one device for any number of sockets and cores."""
        memory, name = memory_bytes(self.host), self.processor.model
        return (DetectedDevice(index=0, reported_name=name, memory_bytes=memory[1] if memory else None),)

    def missing(self, model: DeviceModel) -> str:
        """Return the reason for a user's row of another CPU model."""
        return f"{model.title} not found: this machine has {self.processor.model}; run on one that has it"

    def natively(self, dtype: str) -> bool:
        """Return whether the flags of /proc/cpuinfo include the dtype."""
        return self.processor.natively(dtype)

    def why_not_native(self, dtype: str) -> str:
        """Return the flags of which one is needed."""
        if dtype in _FEATURES:
            return f"{dtype} needs one of the CPU flags {', '.join(_FEATURES[dtype])}"
        return f"no CPU has instructions for {dtype}"

    def telemetry(self) -> Telemetry:
        """Return a reader by psutil, if installed, and by the kernel's throttle counters."""
        return CpuTelemetry(self.host)


class PerfCounterClock(Clock):
    """``time.perf_counter_ns`` with the interface of a device's clock."""

    def stamp(self) -> object:
        """Return the time in nanoseconds since an arbitrary point."""
        return time.perf_counter_ns()

    def wait(self, stamp: object) -> None:
        """Do nothing: a CPU has passed its stamp."""

    def elapsed_s(self, start: object, end: object) -> float:
        """Return the seconds between two stamps."""
        return (cast(int, end) - cast(int, start)) / 1e9

    def host_s(self, stamp: object, anchor: object, anchor_s: float) -> float:
        """Return the stamp in seconds: it is the host's clock."""
        return cast(int, stamp) / 1e9

    def facts(self) -> ClockFacts:
        """Measure 2000 pairs of stamps without work between them."""
        return self._facts

    @functools.cached_property
    def _facts(self) -> ClockFacts:
        return measured_facts(self, "perf_counter", 2000, time.get_clock_info("perf_counter").resolution)


class CpuDevice(DeviceCode):
    """Rank side."""

    family = "cpu"

    def __init__(self, host: Host | None = None) -> None:
        self._host = host or Host()
        self.clock = PerfCounterClock()

    def open(self, index: int) -> torch.device:
        """Return ``cpu``; all ranks share it."""
        import torch

        return torch.device("cpu")

    def synchronize(self) -> None:
        """Do nothing: operations are done when they return."""

    def set_tf32(self, allowed: bool) -> None:
        """Do nothing: there is no TF32."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Recognise Python's MemoryError, and the plain RuntimeError of torch's CPU allocator."""
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
        )

    def peak_memory_bytes(self) -> int | None:
        """Return None: torch has no statistics of its CPU allocator."""
        return None

    def reset_peak_memory(self) -> None:
        """Do nothing."""

    def memory_bytes(self) -> tuple[int, int] | None:
        """Return (available, total) of main memory within the cgroup's limit."""
        return memory_bytes(self._host)

    def cache_bytes(self) -> int:
        """Return the size of the highest level of cache of core 0."""
        return self._cache_bytes

    @functools.cached_property
    def _cache_bytes(self) -> int:
        best = (0, 0)
        for index in self._host.glob("sys/devices/system/cpu/cpu0/cache/index[0-9]*"):
            level, size = self._host.read(index / "level") or "", self._host.read(index / "size") or ""
            if level.isdigit() and (match := re.fullmatch(r"(\d+)([KM])", size)):
                best = max(best, (int(level), int(match[1]) * (KIB if match[2] == "K" else MIB)))
        return best[1] or _UNKNOWN_CACHE_BYTES

    def versions(self) -> dict[str, str]:
        """Return torch's version, the instructions of its kernels, and its threads."""
        import torch

        return {
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        }


_THROTTLE_COUNTERS = "sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count"


class CpuTelemetry(Telemetry):
    """One reading for the whole host."""

    def __init__(self, host: Host, library: Any = None) -> None:
        self._host = host
        self._psutil = library or attempt(lambda: importlib.import_module("psutil"))
        self.source = "psutil" if self._psutil else ""
        self._counted = self._count()

    def _count(self) -> int | None:
        """Return throttle events since boot; None if the kernel does not count them, as in most virtual machines."""
        counts = [self._host.read(path) for path in self._host.glob(_THROTTLE_COUNTERS)]
        return sum(int(count) for count in counts if count and count.isdigit()) if counts else None

    def read(self) -> tuple[Reading, ...]:
        """Return the CPU as device 0, throttled if counters rose since the reader was made; processes are unknown."""
        counted, before = self._count(), self._counted
        throttle: tuple[str, ...] | None = None
        if counted is not None and before is not None:
            throttle = ("thermal",) * (counted > before)
        psutil = self._psutil
        frequency = attempt(psutil.cpu_freq) if psutil else None
        # psutil has no such function where the system has no sensors.
        sensors = (attempt(getattr(psutil, "sensors_temperatures", dict)) if psutil else None) or {}
        degrees = [entry.current for name in ("coretemp", "k10temp", "zenpower") for entry in sensors.get(name, [])]
        return (
            Reading(
                index=0,
                clock_mhz=(frequency.current or None) if frequency else None,
                max_clock_mhz=(frequency.max or None) if frequency else None,
                throttle=throttle,
                temperature_c=max(degrees, default=None),
            ),
        )


class CpuFlash(AttentionKernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu``."""

    def takes(self, block: AttentionBlock) -> bool:
        """Return whether the block has floating-point numbers."""
        return block.query.is_floating_point()

    def forward(self, block: AttentionBlock) -> Attended:
        """Return the attention in the dtype of the query."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = kernel(block.query, block.key, block.value, 0.0, block.causal)
        return Attended(out=out, log_sum=log_sum)

    def backward(
        self, gradient: torch.Tensor, block: AttentionBlock, whole: Attended
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients in the dtype of the query."""
        import torch

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = gradient, block.query, block.key, block.value, whole.out, whole.log_sum
        d_query, d_key, d_value = kernel(*tensors, 0.0, block.causal)
        return d_query, d_key, d_value


def kernels() -> Mapping[str, AttentionKernel]:
    """Return the only kernel."""
    return {"flash": CpuFlash()}
