"""What the driver sides of all accelerator families share: device nodes, visible devices, reasons of absence."""

from __future__ import annotations

import dataclasses
import functools
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from perfsuite.base.text import matrix_rows
from perfsuite.base.units import plural
from perfsuite.platforms.base import DetectedDevice, DeviceModel, Family

DOCS = "perfsuite docs add-a-platform"


class AcceleratorFamily(Family):
    """A family whose devices show as nodes below /dev and are described by a tool of their vendor."""

    nodes: ClassVar[tuple[str, ...]]
    """Patterns below the root; none of them there means no device, and no tool is asked."""
    visible_variable: ClassVar[str]
    """Environment variable by which a user chooses among the devices."""
    tool_name: ClassVar[str]
    """The vendor's tool."""
    tool_query: ClassVar[tuple[str, ...]]
    """Arguments with which the tool describes the devices."""
    guide: ClassVar[str] = DOCS
    """The page that takes a user to a first result on these devices."""

    def detect(self) -> tuple[DetectedDevice, ...]:
        """The devices that a rank would see, numbered as torch numbers them; looked for once."""
        return self._visible

    @abstractmethod
    def list_devices(self) -> tuple[DetectedDevice, ...]:
        """Every device of the host, whatever the environment hides; only called where a node exists."""

    # Asked for every case that is collected, so looked for once: devices do not come and go in a session.

    @functools.cached_property
    def _all(self) -> tuple[DetectedDevice, ...]:
        return self.list_devices() if any(self.host.glob(pattern) for pattern in self.nodes) else ()

    @functools.cached_property
    def _visible(self) -> tuple[DetectedDevice, ...]:
        return visible(self._all, self.host.environ.get(self.visible_variable))

    def missing(self, model: DeviceModel) -> str:
        """Which device is missing, what was looked for and what to do."""
        if not self._all:
            node = f"/{self.nodes[0]}".replace("[0-9]", "")
            return (
                f"{model.title} not found: no {node} here; run inside the vendor's image on a machine "
                f"that has one, or see {self.guide}"
            )
        if not self.detect():
            shown = self.host.environ.get(self.visible_variable, "")
            return (
                f"{model.title} not found: {self.visible_variable}={shown!r} hides {describe(self._all)}; "
                f"unset it or name a device"
            )
        return f"{model.title} not found: this machine has {describe(self.detect())}; run on one that has it"

    def natively(self, dtype: str) -> bool:
        """fp32, bf16 and fp16 where no tool tells the architecture of a device without a row."""
        return dtype in ("fp32", "bf16", "fp16")

    def why_unnamed(self) -> str:
        """What the tool complained about."""
        problem = self.host.tool(self.tool_name, *self.tool_query).problem
        return f"{self.tool_name} does not tell which device this is{f' ({problem})' if problem else ''}"

    def links(self) -> str:
        """Kinds of links between the visible devices in the tool's topology matrix."""
        devices = self.detect()
        index_of = {device.uuid: device.index for device in self._all if device.uuid}
        indices = [index_of.get(device.uuid, device.index) for device in devices]
        return link_kinds(self.topology(), indices) if len(devices) > 1 else ""

    def topology(self) -> str:
        """The vendor tool's ``topo -m`` without its underlining."""
        text = self.host.tool(self.tool_name, "topo", "-m").text if self.detect() else ""
        return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()


def unnamed(count: int) -> tuple[DetectedDevice, ...]:
    """Return ``count`` devices of which only their nodes tell."""
    return tuple(DetectedDevice(index=index, reported_name="") for index in range(count))


def visible(devices: Sequence[DetectedDevice], setting: str | None) -> tuple[DetectedDevice, ...]:
    """The devices that a variable like CUDA_VISIBLE_DEVICES leaves, in its order and renumbered from 0.

    Entries are indices or beginnings of UUIDs; the first entry that is neither hides itself and all that follow, as
    the CUDA programming guide (environment variables) says.  ``None`` (unset) leaves all.
    """
    if setting is None:
        return tuple(devices)
    chosen: list[DetectedDevice] = []
    for entry in (word.strip() for word in setting.split(",")):
        named = [device for device in devices if _names(entry, device)]
        if not named or named[0] in chosen:
            break
        chosen.append(named[0])
    return tuple(dataclasses.replace(device, index=index) for index, device in enumerate(chosen))


def _names(entry: str, device: DetectedDevice) -> bool:
    if entry.isdigit():
        return device.index == int(entry)
    return entry != "" and device.uuid.lower().startswith(entry.lower())


def describe(devices: Sequence[DetectedDevice]) -> str:
    """Devices in words.

    >>> describe([DetectedDevice(index=0, reported_name="MTT S80"), DetectedDevice(index=1, reported_name="MTT S80")])
    '2 x MTT S80'
    """
    counts = Counter(f"{device.reported_name or 'unnamed device'} {device.partition}".strip() for device in devices)
    return " and ".join(f"{count} x {name}" for name, count in counts.items())


def too_few_devices(ranks: int, count: int) -> str:
    """Return what it takes to run so many ranks where one host has ``count`` devices, which are fewer."""
    hosts = -(-ranks // count)
    launcher = f"torchrun --nnodes={hosts} --nproc-per-node={ranks // hosts} -m pytest ..."
    several = f"{hosts} such hosts ({launcher}), or " if ranks % hosts == 0 and hosts > 1 else ""
    return (
        f"{ranks} ranks on a host with {plural(count, 'device')}; it takes {several}--perf-oversubscribe, which "
        "lets ranks share them"
    )


def link_kinds(matrix: str, indices: Sequence[int]) -> str:
    r"""Kinds of links between these devices in a ``topo -m`` matrix, sorted; empty when unreadable.

    >>> link_kinds("      GPU0  GPU1  NIC0\nGPU0   X    NV18  PIX\nGPU1  NV18   X    SYS", [0, 1])
    'NV18'
    """
    rows = matrix_rows(matrix)
    chosen = [rows.get(f"GPU{index}", []) for index in indices]
    return " ".join(sorted({row[index] for row in chosen for index in indices if index < len(row)} - {"X"}))


def number(text: str) -> float | None:
    """The number a tool's field begins with, or None.

    >>> number("49152MiB"), number("[N/A]")
    (49152.0, None)
    """
    number = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    return float(number[1]) if number else None


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
