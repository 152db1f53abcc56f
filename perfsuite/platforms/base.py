"""Interface of a device family: detection without torch on the driver, device code with torch on the ranks.

A family is one file (cpu, cuda, musa) with one subclass of each; its devices are rows of platforms.toml. Another
package adds a family by the entry point group ``perfsuite.families`` (perfsuite docs add-a-platform).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from perfsuite.base.errors import ConfigurationError, UnsupportedCase
from perfsuite.base.units import MIB
from perfsuite.platforms.host import Host
from perfsuite.platforms.quirks import numbers
from perfsuite.platforms.telemetry import Reading, Telemetry, Unread
from perfsuite.record.result import ClockFacts, Peak, Peaks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """One row of platforms.toml: a device model, its family and its maker's figures."""

    name: str  # Platform name, used in ids: s4000, h200, cpu.
    title: str  # Name for people: MTT S4000.
    family: str  # cpu, cuda or musa.
    names: tuple[str, ...] = ()  # Complete names that the device reports; they have priority over every ``match``.
    match: tuple[str, ...] = ()  # Substrings of the reported name; the longest match over all rows wins.
    exclude: tuple[str, ...] = ()  # Substrings of reported names of another variant with its own peaks.
    native: tuple[str, ...] = ()
    """Short names of native dtypes without a published peak; dtypes of ``tflops`` are native anyway."""
    notes: tuple[str, ...] = ()  # Facts that explain results of this device; recorded in the environment of every run.
    architecture: str = ""
    """Vendor's number (mp_22), if only a row can give it: some quirks depend on it; empty: unknown."""
    tflops: Mapping[str, Peak] = field(default_factory=dict)  # Dense peaks by short dtype name.
    memory: Peak | None = None  # GiB per device.
    memory_bandwidth: Peak | None = None  # GB/s, reads plus writes.
    link: Peak | None = None  # GB/s per direction between devices of one node.
    host_link: Peak | None = None  # GB/s per direction between host and device.
    network: Peak | None = None
    """GB/s per direction of a node's whole network in the vendor's own system. None if its network differs."""
    devices_per_node: Peak | None = None
    """Devices in a node of the vendor's own system, a whole number. None if the number differs."""

    @property
    def peaks(self) -> Peaks:
        """Peaks of which metrics are shares."""
        return Peaks(
            tflops=self.tflops, memory_bandwidth=self.memory_bandwidth, link=self.link, host_link=self.host_link
        )


@dataclass(frozen=True, kw_only=True)
class MachineModel:
    """Hosts with devices of one model, described by a report or a user."""

    name: str  # ``oneflow-4x8-v100``.
    title: str  # Name for people.
    platform: str  # Name of the devices' row.
    inside: str  # Link between the devices of a node, with its source; its rate is the row's ``link``.
    nodes: Peak  # Hosts, a whole number.
    devices_per_node: Peak  # A whole number.
    network: Peak | None = None  # GB/s per direction of a whole node; None for a single node.

    @property
    def devices(self) -> int:
        """Devices of all nodes together."""
        return int(self.nodes.value * self.devices_per_node.value)

    def row(self, model: DeviceModel) -> DeviceModel:
        """Return the devices' row with this machine's nodes and network in place of the maker's."""
        return dataclasses.replace(model, devices_per_node=self.devices_per_node, network=self.network)

    def describe(self, world_size: int = 1) -> str:
        """Return name, nodes, network and its source in one line; more devices than it has need more such nodes."""
        text = f"{self.name}: {self.nodes.value:g} x {self.devices_per_node.value:g} {self.platform}"
        if self.network is not None:
            text += f", {self.network.value:g} GB/s between nodes ({self.network.source})"
        more = f"; {world_size} devices are more than its {self.devices}: more such nodes"
        return text + (more if world_size > self.devices else "")


@dataclass(frozen=True, kw_only=True)
class DetectedDevice:
    """A device of this host, found without torch."""

    index: int
    reported_name: str  # Name from the driver; for a CPU the model name; empty if only a device node exists.
    uuid: str = ""
    memory_bytes: int | None = None
    link: str = ""  # Best speed of the host link, ``pcie5x16``, from device and slot; never the present speed.
    partition: str = ""  # Slice of a device, such as ``MIG 1g.18gb``; empty for a whole device.
    capability: str = ""  # Vendor's version of the instruction set (9.0), if a tool shows it.


class Family(ABC):
    """Driver side of a device family. Never imports torch."""

    name: ClassVar[str]
    backend: ClassVar[str]  # c10d backend: gloo, nccl, mccl.
    other_backends: ClassVar[tuple[str, ...]] = ()  # Backends that its ranks can use on request.
    fp32_tolerance: ClassVar[float] = 0.0
    """Relative error between two kernels of one fp32 step: CUDA's fp32 attention multiplies in three parts of TF32
    (CUTLASS, OpMultiplyAddFastF32); 0 if only the order of sums differs."""
    start_method: ClassVar[Literal["fork", "exec"]] = "fork"
    """Start of rank processes: forks of preloaded parents, or new interpreters if a fork breaks the driver."""
    shareable: ClassVar[bool] = False
    """Whether ranks may always share devices (cpu); other families need --perf-oversubscribe."""
    preloads: ClassVar[bool] = False
    """Whether a case's modules may be imported before the fork: an import may open a device, which breaks forks."""
    simulated: ClassVar[bool] = False
    """Results are marked and never compared with real ones; such a family is only used by name, never detected."""
    communication_settings: ClassVar[Mapping[str, Mapping[str, str | Mapping[str, str]]]] = {}
    """Settings of the backend's library: common word -> its variables here. A value that depends on the library's
    version is a mapping: the first version that reads a value -> that value."""
    rank_variables: ClassVar[Mapping[str, str]] = {}
    """Variables of its ranks that the user has not set: those of the vendor's own benchmark scripts."""
    sharing_variables: ClassVar[Mapping[str, str]] = {}
    """Variables of ranks that share devices, for the backend's library."""
    least_library_version: ClassVar[str] = ""
    """Version of the backend's library that report 004's checklist requires; empty without a requirement."""
    stands_for: ClassVar[str] = ""
    """Family that a simulated one imitates: its rows name the devices, so cases have the same ids."""
    device_code: ClassVar[str]  # Place of the rank side: ``package.module:Class``, a DeviceCode made without arguments.
    attention: ClassVar[str] = ""
    """Place of its attention kernels by blocks: ``package.module:function``, which returns them by name, the best
    first; empty: blocks are computed by plain matrix products."""

    def __init__(self, host: Host) -> None:
        self.host = host

    @abstractmethod
    def detect(self) -> tuple[DetectedDevice, ...]:
        """Return the devices of this family on this host, from device nodes and vendor tools."""

    @abstractmethod
    def missing(self, model: DeviceModel) -> str:
        """Return why a case for ``model`` cannot run here, with a remedy: the reason of a skip, one line."""

    @abstractmethod
    def natively(self, dtype: str) -> bool:
        """Return whether the devices here compute matrix products in this short dtype natively."""

    def why_not_native(self, dtype: str) -> str:
        """Return the reason when :meth:`natively` is False, with the missing feature."""
        return f"{self.name} has no native {dtype}"

    def require_backend(self, asked: str | None) -> None:
        """Raise ConfigurationError unless the ranks of this family can use the backend ``asked``; None: their own."""
        names = (self.backend, *self.other_backends)
        if asked is not None and asked not in names:
            raise ConfigurationError(
                f"--perf-backend: {asked!r} is not a backend of {self.name} devices; choose {' or '.join(names)}"
            )

    def communication_setting(self, word: str, *, backend: str, version: str) -> dict[str, str]:
        """Return variables that make ``version`` of the backend's library use the setting ``word``.  Raises
        UnsupportedCase if the library, or this version of it, does not have the setting.
        """
        if word not in self.communication_settings:
            has = ", ".join(("default", *self.communication_settings))
            raise UnsupportedCase(f"the communication library of {self.name} has no setting {word}; it has {has}")
        if backend != self.backend:
            raise UnsupportedCase(f"setting {word} is for {self.backend}, but these ranks use {backend}")
        setting, chosen = self.communication_settings[word], {}
        for name, value in setting.items():
            by_version = {"": value} if isinstance(value, str) else value
            versions = [since for since in by_version if not since or numbers(since) <= numbers(version)]
            if not versions or (len(by_version) > 1 and not numbers(version)):
                least = next(filter(None, by_version))
                raise UnsupportedCase(
                    f"setting {word} depends on the version of {backend}, which is {version or 'unknown'} here; "
                    f"{name} has {by_version[least]!r} from {least} on"
                )
            chosen[name] = by_version[max(versions, key=numbers)]
        return chosen

    def assumption(self) -> str:
        """Return the assumption of :meth:`natively` if the devices do not show their dtypes; empty without one."""
        return ""

    def unsupported(self) -> str:
        """Return the device of this family that is here but that perfsuite cannot use; empty for none."""
        return ""

    def why_unnamed(self) -> str:
        """Return why a device here has no name, with the vendor's tool that should show it."""
        return f"it is unknown which {self.name} device this is"

    def newer_torch(self) -> str:
        """Return the remedy for a torch that is too old."""
        return "install a newer one, or use an environment that has it"

    def quirks(self, model: DeviceModel) -> tuple[str, ...]:
        """Return one line per difference of the installed stack from torch's manual, for every run's environment."""
        return ()

    def links(self) -> str:
        """Return the kinds of links between devices (``NV18``, ``PIX SYS``); empty for one device or if unknown."""
        return ""

    def topology(self) -> str:
        """Return the topology matrix of the vendor's tool; empty if there is none."""
        return ""

    def software(self) -> Mapping[str, str]:
        """Return driver and toolkit versions by name, read without torch."""
        return {}

    def power_caps(self) -> tuple[str, ...]:
        """Return the power limit of each device, e.g. ``700.00 W``; empty if unreadable."""
        return ()

    def telemetry(self) -> Telemetry:
        """Return a reader of clocks, throttling, power, temperature and processes; unreadable values are None."""
        return Unread(count=len(self.detect()))


class Clock(ABC):
    """Reads a device's time. ``stamp`` is asynchronous on an accelerator; ``elapsed_s`` needs ``wait`` first."""

    queues: ClassVar[bool] = False
    """Whether stamps and work are queued for the device, which may then wait for work after the first stamp."""

    @abstractmethod
    def stamp(self) -> object:
        """Return a point in the device's stream of work, or the present time on a CPU."""

    @abstractmethod
    def wait(self, stamp: object) -> None:
        """Block until the device has passed ``stamp``."""

    @abstractmethod
    def elapsed_s(self, start: object, end: object) -> float:
        """Return the device's seconds between two stamps that it has passed."""

    def host_s(self, stamp: object, anchor: object, anchor_s: float) -> float:
        """Return ``stamp`` on the host's ``perf_counter``, on which ``anchor`` is ``anchor_s``; both have passed."""
        return anchor_s - self.elapsed_s(stamp, anchor)

    def now_s(self) -> float:
        """Return the host's time in seconds from an arbitrary point; virtual if the device's is."""
        return time.perf_counter()

    @abstractmethod
    def facts(self) -> ClockFacts:
        """Return name, resolution and cost, measured at the first call."""


def measured_facts(clock: Clock, name: str, pairs: int, fallback_s: float) -> ClockFacts:
    """Measure a clock by pairs of stamps without work between them.

    The resolution is the smallest positive gap, or ``fallback_s``; the cost of two reads is the median gap.
    """
    stamps = [(clock.stamp(), clock.stamp()) for _ in range(pairs)]
    clock.wait(stamps[-1][1])
    gaps_s = [clock.elapsed_s(start, end) for start, end in stamps]
    smallest = min((gap for gap in gaps_s if gap > 0), default=fallback_s)
    return ClockFacts(name=name, resolution_s=smallest, cost_s=statistics.median(gaps_s))


class DeviceCode(ABC):
    """Rank side of a device family; imports torch."""

    family: ClassVar[str]
    binds_groups: ClassVar[bool] = False
    """Whether a process group is bound to its rank's device, so that a barrier does not guess it. torch makes the
    groups of a mesh by splitting the communicator of a bound group, which the backend has to support."""
    yardstick_side: ClassVar[int] = 192
    """Rows and columns of the yardstick's four products, which take about a millisecond of one CPU core."""
    yardstick_bytes: ClassVar[int] = 4 * MIB  # Bytes that the yardstick copies: more than a core's own caches.
    instrument_variables: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Variables that slow the device's libraries: by name a pattern of such values, and the feature they turn on."""
    clock: Clock

    @abstractmethod
    def open(self, index: int) -> torch.device:
        """Select device ``index`` for this process and return it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of this process on its device."""

    @abstractmethod
    def set_tf32(self, allowed: bool) -> None:
        """Allow or forbid TF32 in fp32 matrix products and convolutions; no effect without TF32."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether ``error`` is this device's out-of-memory error."""

    @abstractmethod
    def peak_memory_bytes(self) -> int | None:
        """Return the most bytes allocated since the last reset; None without allocator statistics."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak."""

    @abstractmethod
    def memory_bytes(self) -> tuple[int, int] | None:
        """Return (free, total) bytes of the device; None if unknown."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Return the size of the last-level cache, for flushing it."""

    def utilisation_percent(self) -> float | None:
        """Return the recent share of time in which the device ran a kernel; None without a library for it."""
        return None

    def uuid(self) -> str:
        """Return the driver's identifier of the current device; empty if unknown."""
        return ""

    def reading(self) -> Reading | None:
        """Return clocks, throttling, power cap and temperature of the current device; None without a library."""
        return None

    def require_sharing(self) -> None:  # noqa: B027  an optional hook, not a forgotten abstract method
        """Raise UnsupportedCase if the family's own backend cannot serve several ranks on one device."""

    def pci_address(self, index: int) -> str | None:
        """Return the address of device ``index`` as ``0000:1b:00.0``; empty if unknown, None if it is on no bus."""
        return None

    def release(self) -> None:  # noqa: B027  an optional hook, not a forgotten abstract method
        """Return cached memory to the device between cases."""

    def settings(self) -> dict[str, str]:
        """Return settings of the device's runtime that a program may change, such as the current stream, as text."""
        return {}

    def versions(self) -> dict[str, str]:
        """Return versions of torch, its device stack and the collective library, for the environment of a run."""
        return {}
