"""What a device family must offer: detection without torch on the driver, device code with torch on the ranks.

A family is one file (cpu, cuda, musa) with one subclass of each; the devices of a family are rows of platforms.toml.
A package of somebody else's adds one by the entry point group ``perfsuite.families`` (perfsuite docs add-a-platform).
"""

from __future__ import annotations

import dataclasses
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
    """One row of platforms.toml: a device model, its family and what its maker says it can do."""

    name: str
    """Platform name, used in ids: s4000, h200, cpu."""
    title: str
    """What a person calls it: MTT S4000."""
    family: str
    """cpu, cuda or musa."""
    names: tuple[str, ...] = ()
    """Names that the device reports, in full: they come before every ``match``."""
    match: tuple[str, ...] = ()
    """Substrings of the name the device reports; the longest match over all rows wins."""
    exclude: tuple[str, ...] = ()
    """Substrings of reported names that are another variant of the device, with peaks of its own."""
    native: tuple[str, ...] = ()
    """Short dtype names computed natively for which no peak is published; dtypes of ``tflops`` are native anyway."""
    notes: tuple[str, ...] = ()
    """What one must know to read a result of this device; recorded in the environment of every run."""
    architecture: str = ""
    """As the vendor counts it (mp_22), where only a row can tell: some quirks hang on it; empty: unknown."""
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
    network: Peak | None = None
    """GB/s per direction of a whole node's network, in the maker's own system; None where none is customary."""
    devices_per_node: Peak | None = None
    """Devices in one node of that system, a whole number; None where none is customary."""

    @property
    def peaks(self) -> Peaks:
        """What metrics take their shares of."""
        return Peaks(
            tflops=self.tflops, memory_bandwidth=self.memory_bandwidth, link=self.link, host_link=self.host_link
        )


@dataclass(frozen=True, kw_only=True)
class MachineModel:
    """Hosts with devices of one model, as a report or a user describes them."""

    name: str
    """``oneflow-4x8-v100``."""
    title: str
    """What a person calls it."""
    platform: str
    """Name of the devices' row."""
    inside: str
    """What links the devices of a node, and where that stands; its rate is the row's ``link``."""
    nodes: Peak
    """Hosts, a whole number."""
    devices_per_node: Peak
    """A whole number."""
    network: Peak | None = None
    """GB/s per direction of a whole node; None for a single node."""

    @property
    def devices(self) -> int:
        """Of all nodes together."""
        return int(self.nodes.value * self.devices_per_node.value)

    def row(self, model: DeviceModel) -> DeviceModel:
        """Return the devices' row with this machine's nodes and network in place of the maker's."""
        return dataclasses.replace(model, devices_per_node=self.devices_per_node, network=self.network)

    def describe(self, world_size: int = 1) -> str:
        """Return name, nodes, network and its source in one line.

        A world of more devices than the machine has is said to be one of more such nodes.
        """
        text = f"{self.name}: {self.nodes.value:g} x {self.devices_per_node.value:g} {self.platform}"
        if self.network is not None:
            text += f", {self.network.value:g} GB/s between nodes ({self.network.source})"
        more = f"; {world_size} devices are more than its {self.devices}: more such nodes"
        return text + (more if world_size > self.devices else "")


@dataclass(frozen=True, kw_only=True)
class DetectedDevice:
    """A device that this host has, found without torch."""

    index: int
    reported_name: str
    """As the driver reports it; for a CPU the model name; empty where only a device node tells that there is one."""
    uuid: str = ""
    memory_bytes: int | None = None
    link: str = ""
    """Host link at its best, ``pcie5x16``: what device and slot can do, never the speed of the moment."""
    partition: str = ""
    """The slice of a device that this is, such as ``MIG 1g.18gb``; empty for a whole device."""
    capability: str = ""
    """Version of the instruction set as the vendor counts it (9.0), where a tool tells."""


class Family(ABC):
    """Driver side of a device family.  Never imports torch."""

    name: ClassVar[str]
    backend: ClassVar[str]
    """c10d backend: gloo, nccl, mccl."""
    other_backends: ClassVar[tuple[str, ...]] = ()
    """What its ranks can communicate by where it is asked for."""
    fp32_tolerance: ClassVar[float] = 0.0
    """Relative error between two kernels of one fp32 step: CUDA's fp32 attention multiplies in three parts of TF32
    (CUTLASS, OpMultiplyAddFastF32); 0 where sums in another order are all that differs."""
    start_method: ClassVar[Literal["fork", "exec"]] = "fork"
    """How rank processes start: forks of preloaded parents, or a new interpreter where a fork poisons the driver."""
    shareable: ClassVar[bool] = False
    """Whether more ranks than devices are always allowed (cpu); elsewhere only with --perf-oversubscribe."""
    preloads: ClassVar[bool] = False
    """Whether a case's modules may be imported before the fork: an import may open a device, which no fork survives."""
    simulated: ClassVar[bool] = False
    """Results are stamped and never meet real ones; such a family is never detected, only asked for by name."""
    communication_settings: ClassVar[Mapping[str, Mapping[str, str | Mapping[str, str]]]] = {}
    """What the backend's library can be told: a word that several libraries share -> its variables here.  A value that
    depends on the library's version is a mapping: the first version that reads a value -> that value."""
    rank_variables: ClassVar[Mapping[str, str]] = {}
    """Environment of its ranks where the user set no other: what the vendor's own scripts set for benchmarks."""
    sharing_variables: ClassVar[Mapping[str, str]] = {}
    """The same for ranks that share devices: what the backend's library needs for several on one."""
    least_library_version: ClassVar[str] = ""
    """Version of the backend's library that report 004's checklist asks for; empty where it names none of this one."""
    stands_for: ClassVar[str] = ""
    """The family whose devices a simulated one imitates: their rows name its devices, so its cases have their ids."""
    device_code: ClassVar[str]
    """Where the rank side is: ``package.module:Class``, a DeviceCode made without arguments."""
    attention: ClassVar[str] = ""
    """Where its kernels of attention by blocks are: ``package.module:function``, which returns them by name, the best
    first; empty: attention by blocks is computed by plain products there."""

    def __init__(self, host: Host) -> None:
        self.host = host

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

    def require_backend(self, asked: str | None) -> None:
        """Raise ConfigurationError unless the ranks of this family can communicate by ``asked``; None: their own."""
        known = (self.backend, *self.other_backends)
        if asked is not None and asked not in known:
            raise ConfigurationError(
                f"--perf-backend: {asked!r} is no backend of {self.name} devices; choose {' or '.join(known)}"
            )

    def communication_setting(self, word: str, *, backend: str, version: str) -> dict[str, str]:
        """Variables that make ``version`` of the backend's library use the setting ``word``.

        Raises UnsupportedCase where the library, or this version of it, does not have the setting.
        """
        if word not in self.communication_settings:
            has = ", ".join(("default", *self.communication_settings))
            raise UnsupportedCase(f"the communication library of {self.name} has no setting {word}; it has {has}")
        if backend != self.backend:
            raise UnsupportedCase(f"setting {word} is read by {self.backend}, and these ranks communicate by {backend}")
        setting, chosen = self.communication_settings[word], {}
        for name, value in setting.items():
            by_version = {"": value} if isinstance(value, str) else value
            known = [since for since in by_version if not since or numbers(since) <= numbers(version)]
            if not known or (len(by_version) > 1 and not numbers(version)):
                least = next(filter(None, by_version))
                raise UnsupportedCase(
                    f"setting {word} depends on the version of {backend}, which is {version or 'unknown'} here; "
                    f"{name} has {by_version[least]!r} from {least} on"
                )
            chosen[name] = by_version[max(known, key=numbers)]
        return chosen

    def assumption(self) -> str:
        """What :meth:`natively` assumes where the devices do not tell; empty when it knows."""
        return ""

    def unsupported(self) -> str:
        """Which device of this family is here that perfsuite cannot drive; empty for none."""
        return ""

    def why_unnamed(self) -> str:
        """Why a device that is here has no name, which vendor's tool should have told it."""
        return f"nothing tells which {self.name} device this is"

    def newer_torch(self) -> str:
        """What to do where the installed torch is too old."""
        return "install a newer one, or use an environment that has it"

    def quirks(self, model: DeviceModel) -> tuple[str, ...]:
        """Where the stack installed here differs from torch's manual on this device, and what perfsuite does about it.

        One line each, recorded in the environment of every run.
        """
        return ()

    def links(self) -> str:
        """How the devices are linked, as kinds of links (``NV18``, ``PIX SYS``); empty for one device or unknown."""
        return ""

    def topology(self) -> str:
        """The topology matrix of the vendor's tool, as printed; empty where there is none."""
        return ""

    def software(self) -> Mapping[str, str]:
        """Driver and toolkit versions by name, as read without torch."""
        return {}

    def power_caps(self) -> tuple[str, ...]:
        """Power limit of each device, e.g. ``700.00 W``; empty where it cannot be read."""
        return ()

    def telemetry(self) -> Telemetry:
        """A reader of clocks, throttling, power, temperature and other processes; says None where it cannot read."""
        return Unread(count=len(self.detect()))


class Clock(ABC):
    """Reads a device's time.  ``stamp`` is asynchronous on an accelerator; ``elapsed_s`` needs ``wait`` first."""

    queues: ClassVar[bool] = False
    """Whether stamps and work are queued for the device: then it may wait for the work behind the first stamp."""

    @abstractmethod
    def stamp(self) -> object:
        """A point in the device's stream of work, or now on a CPU."""

    @abstractmethod
    def wait(self, stamp: object) -> None:
        """Block until the device has passed ``stamp``."""

    @abstractmethod
    def elapsed_s(self, start: object, end: object) -> float:
        """Seconds on the device between two stamps that it has passed."""

    def host_s(self, stamp: object, anchor: object, anchor_s: float) -> float:
        """``stamp`` on the host's ``perf_counter``, by which ``anchor`` was at ``anchor_s``; both have been passed."""
        return anchor_s - self.elapsed_s(stamp, anchor)

    def now_s(self) -> float:
        """The host's own time, seconds from an arbitrary point; virtual where the device's is."""
        return time.perf_counter()

    @abstractmethod
    def facts(self) -> ClockFacts:
        """Name, resolution and cost, measured when first asked."""


class DeviceCode(ABC):
    """Rank side of a device family; imports torch when made."""

    family: ClassVar[str]
    binds_groups: ClassVar[bool] = False
    """Whether a process group is bound to its rank's device, so that a barrier does not guess it.  torch makes the
    groups of a mesh from a bound one by splitting its communicator, which the backend has to support."""
    yardstick_side: ClassVar[int] = 192
    """Rows and columns of the yardstick's four products: together about a millisecond of one CPU core."""
    yardstick_bytes: ClassVar[int] = 4 * MIB
    """What the yardstick copies: more than a core's own caches."""
    instrument_variables: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Variables that slow the device's libraries: by name a pattern of such values and what they turn on."""
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

    def utilisation_percent(self) -> float | None:
        """Share of its last moments in which the device ran any kernel; None where no library tells."""
        return None

    def uuid(self) -> str:
        """Identifier of the current device as its driver names it; empty where nothing tells."""
        return ""

    def reading(self) -> Reading | None:
        """Clocks, throttling, power cap and temperature of the current device now; None where no library tells."""
        return None

    def require_sharing(self) -> None:  # noqa: B027  an optional hook, not a forgotten abstract method
        """Raise UnsupportedCase where the family's own backend cannot serve several ranks on one device."""

    def pci_address(self, index: int) -> str | None:
        """Where device ``index`` is, as ``0000:1b:00.0``; empty where nothing tells, None where it is on no bus."""
        return None

    def release(self) -> None:  # noqa: B027  an optional hook, not a forgotten abstract method
        """Return cached memory to the device between cases."""

    def settings(self) -> dict[str, str]:
        """Settings of the device's runtime that a program may change, such as the current stream; compared as text."""
        return {}

    def versions(self) -> dict[str, str]:
        """Versions of torch, its device stack and the collective library, for the environment of a run."""
        return {}
