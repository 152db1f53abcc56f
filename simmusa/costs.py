"""Costs of the simulated device, from which every time follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.units import GIB
from perfsuite.platforms.cpu import memory_bytes
from perfsuite.platforms.host import Host

VARIABLE = "SIMMUSA_COSTS"
"""Environment: JSON of the fields that differ from an S4000's, for whole runs of the suite."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Rates of 0 are infinitely fast; by default nothing takes time."""

    launch_ns: int = 0
    """Host time of every launch: kernels, copies, communication."""
    kernel_ns: int = 0
    """Device time of every kernel and copy, in addition to its work."""
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rate of matrix products and convolutions by short dtype name; fp32 becomes tf32 if that is allowed."""
    bytes_per_s: float = 0.0
    """Rate of device memory: a kernel reads arguments and writes results; arguments changed in place count twice."""
    host_bytes_per_s: float = 0.0
    """Rate of the link between host and device."""
    alpha_ns: int = 0
    """Fixed time of every communication."""
    link_bytes_per_s: float = 0.0
    """Rate of every communication: its message size, as in nccl-tests, is divided by this."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Factor by operation: ``aten::mm``, ``mccl::allreduce``, ``simmusa::copy``; ``mccl::link 1 to 2`` for messages
    from rank 1 of a group to its rank 2, ``device 3`` for the kernels of device 3."""
    jitter: float = 0.0
    """Every duration is multiplied by 1 + jitter x uniform(-1, 1), by ``seed`` and the number of the draw."""
    seed: int = 0
    burst_ns: int = 0
    """Time for which a device computes at its boost clock; 0: without end."""
    sustained: float = 1.0
    """Factor of its kernels after that, under the power cap, until it has idled as long."""
    memory_bytes: int = 48 << 30
    """Memory of each device; larger allocations fail. :meth:`held` limits it by the host's memory."""
    context_bytes: int = 0
    """Memory of each device that is taken before any allocation."""
    communicator_bytes: int = 0
    """Memory of each communicator: of a group, and of two ranks that exchange single messages."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """By operation, as in ``slow``: the launch, from 1, that breaks its device for the rest of the process."""

    def kernel_time_ns(self, *, flops: float = 0.0, dtype: str = "fp32", moved_bytes: float = 0.0) -> int:
        """Return a kernel's time in ns: the longer of its arithmetic and its traffic.

        >>> Costs(flops_per_s={"bf16": 100e12}, bytes_per_s=1e12).kernel_time_ns(flops=2e11, dtype="bf16")
        2000000
        """
        rate = self.flops_per_s.get(dtype, 0.0)
        arithmetic = flops / rate if rate else 0.0
        traffic = moved_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return self.kernel_ns + round(1e9 * max(arithmetic, traffic))

    def communication_time_ns(self, message_bytes: float) -> int:
        """Return a communication's time in ns after all ranks have arrived: alpha + bytes / bandwidth.

        >>> Costs(alpha_ns=20_000, link_bytes_per_s=100e9).communication_time_ns(1e6)
        30000
        """
        return self.alpha_ns + round(1e9 * message_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0)

    def changed(self, written: str) -> Costs:
        """Return these costs with the fields of ``written``, a JSON object; raise ConfigurationError for other text."""
        try:
            changes = json.loads(written)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{VARIABLE}: {written!r} is not JSON ({error}); write an object") from None
        names = {field.name for field in fields(self)}
        if not isinstance(changes, dict) or not set(changes) <= names:
            raise ConfigurationError(
                f"{VARIABLE}: {written!r} is not an object of costs; its keys are {', '.join(sorted(names))}"
            )
        return replace(self, **changes)

    def held(self, devices: int, host: Host) -> Costs:
        """Return these costs with at most an equal share of half of the host's memory for each of ``devices``.

        Tensors of a simulated device are in the host's memory: a case that fills its device would fill the host.
        Raises ConfigurationError if the share is smaller than the context.
        """
        memory = memory_bytes(host)
        if memory is None:
            return self
        share = memory[1] // 2 // devices
        if share >= self.memory_bytes:
            return self
        if share <= self.context_bytes:
            raise ConfigurationError(
                f"half of this host's {memory[1] / GIB:.1f} GiB is {share / GIB:.2f} for each of {devices} simulated "
                f"devices, whose context takes {self.context_bytes / GIB:.2f}; set SIMMUSA_DEVICES to fewer"
            )
        return replace(self, memory_bytes=share)

    def as_dict(self) -> dict[str, object]:
        """Return plain values by name."""
        return asdict(self)


S4000 = Costs(
    launch_ns=4_000,
    kernel_ns=2_000,
    flops_per_s={"fp64": 0.4e12, "fp32": 20e12, "tf32": 40e12, "bf16": 80e12, "fp16": 80e12, "int8": 160e12},
    bytes_per_s=600e9,
    host_bytes_per_s=50e9,
    alpha_ns=20_000,
    link_bytes_per_s=80e9,
    context_bytes=512 << 20,
    communicator_bytes=64 << 20,
)
"""Round numbers below the published peaks of an MTT S4000: invented, like all times from them."""
