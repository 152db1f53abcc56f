"""What a device family must offer: detection without torch on the driver, device code with torch on the ranks.

A family is one file (cpu, cuda, musa) with one subclass of each; the devices of a family are rows of platforms.toml.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from perfsuite.records import ClockFacts, Peak

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """One row of platforms.toml: a device model, its family and what its maker says it can do."""

    name: str
    """Platform name, used in ids: s4000, h200, cpu."""
    title: str
    """What a person calls it: MTT S4000."""
    family: str
    """cpu, cuda or musa."""
    match: tuple[str, ...] = ()
    """Substrings of the name the device reports; the longest match over all rows wins."""
    tflops: Mapping[str, Peak] = field(default_factory=dict)
    """Dense peaks by short dtype name."""
    memory: Peak | None = None
    """GiB per device."""
    memory_bandwidth: Peak | None = None
    """GB/s, reads plus writes."""
    link: Peak | None = None
    """GB/s per direction between devices of one node."""
    host_link: Peak | None = None
    """GB/s per direction between host and device."""


@dataclass(frozen=True, kw_only=True)
class DetectedDevice:
    """A device that this host has, found without torch."""

    index: int
    reported_name: str
    """As the driver reports it; for a CPU the model name."""
    uuid: str = ""
    memory_bytes: int | None = None


class Family(ABC):
    """Driver side of a device family.  Never imports torch."""

    name: ClassVar[str]
    backend: ClassVar[str]
    """c10d backend: gloo, nccl, mccl."""
    start_method: ClassVar[Literal["fork", "exec"]] = "fork"
    """How rank processes start: fork of a preloaded parent, or a new interpreter where a fork poisons the driver."""
    shareable: ClassVar[bool] = False
    """Whether more ranks than devices are always allowed (cpu); elsewhere only with --perf-oversubscribe."""

    @abstractmethod
    def detect(self) -> tuple[DetectedDevice, ...]:
        """Devices of this family on this host, from device nodes and vendor tools; empty where there are none."""

    @abstractmethod
    def missing(self, model: DeviceModel) -> str:
        """Why a case for ``model`` cannot run here and what to do: the reason of a skip, one line."""

    @abstractmethod
    def natively(self, dtype: str) -> bool:
        """Whether the devices found here compute in this short dtype natively (matrix products)."""

    def why_not_native(self, dtype: str) -> str:
        """The reason printed when :meth:`natively` says no; names the missing feature."""
        return f"{self.name} has no native {dtype}"


class Clock(ABC):
    """Reads a device's time.  ``stamp`` is asynchronous on an accelerator; ``elapsed_s`` needs ``wait`` first."""

    @abstractmethod
    def stamp(self) -> object:
        """A point in the device's stream of work, or now on a CPU."""

    @abstractmethod
    def wait(self, stamp: object) -> None:
        """Block until the device has passed ``stamp``."""

    @abstractmethod
    def elapsed_s(self, start: object, end: object) -> float:
        """Seconds on the device between two stamps that it has passed."""

    @abstractmethod
    def facts(self) -> ClockFacts:
        """Name, resolution and cost, measured when first asked."""


class DeviceCode(ABC):
    """Rank side of a device family; imports torch when made."""

    family: ClassVar[str]
    clock: Clock

    @abstractmethod
    def open(self, index: int) -> torch.device:
        """Make device ``index`` this process's own and return it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of this process on its device."""

    @abstractmethod
    def set_tf32(self, allowed: bool) -> None:
        """Allow or forbid TF32 in fp32 matrix products and convolutions; a no-op where there is no such thing."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` is this device's out-of-memory error."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Most bytes allocated since the last reset; None without allocator statistics."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak."""

    @abstractmethod
    def memory_bytes(self) -> tuple[int, int] | None:
        """(free, total) bytes of the device; None where it cannot be told."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Size of the last-level cache, for flushing it."""

    def release(self) -> None:
        """Return cached memory to the device between cases."""
