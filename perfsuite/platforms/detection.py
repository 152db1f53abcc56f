"""Device families, built in or from installed packages, and the driver code that all accelerators share.

A package adds a family by an entry point of the group ``perfsuite.families``: its name is the family's, its object is
the Family class. Every process of the interpreter sees entry points, so a rank worker finds the device code by the
family's name. A family that is not installed, such as a test's simulated device, is named in the environment, which
every rank has: ``PERFSUITE_FAMILIES=name=module:Class``, several separated by commas.

Accelerators share the search for device nodes, the choice of visible devices and the reasons of absence.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import matrix_rows
from perfsuite.base.units import plural
from perfsuite.platforms.base import DetectedDevice, DeviceCode, DeviceModel, Family
from perfsuite.platforms.host import Host

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "perfsuite.families"
VARIABLE = "PERFSUITE_FAMILIES"

_BUILT_IN: Mapping[str, str] = {
    "musa": "perfsuite.platforms.musa:Musa",
    "cuda": "perfsuite.platforms.cuda:Cuda",
    "cpu": "perfsuite.platforms.cpu:Cpu",
}
"""In the order of detection; cpu is the last."""

_TABLE_ONLY: Mapping[str, str] = {
    "rocm": "perfsuite.platforms.detection:Rocm",
    "ascend": "perfsuite.platforms.detection:Ascend",
}
"""Families whose rows only serve comparisons and projections; an installed package may add the family itself."""

SHIPPED = (*_BUILT_IN, *_TABLE_ONLY)  # Names of the families of perfsuite itself.


def family_names() -> tuple[str, ...]:
    """Return the names of all families; reads the metadata of every installed package, which takes milliseconds."""
    return _all_names(_entry_points())


def _all_names(installed: Iterable[str]) -> tuple[str, ...]:
    accelerators = tuple(_BUILT_IN)[:-1]
    return tuple(dict.fromkeys((*accelerators, *installed, *_TABLE_ONLY, "cpu")))


def _entry_points() -> Mapping[str, EntryPoint]:
    from importlib.metadata import EntryPoint, entry_points  # takes 20 ms; most commands do not need it

    named = [entry.strip() for entry in os.environ.get(VARIABLE, "").split(",") if entry.strip()]
    if wrong := [entry for entry in named if not re.fullmatch(r"\w+\s*=\s*[\w.]+:\w+", entry)]:
        raise ConfigurationError(f"{VARIABLE}: {wrong[0]!r} is not name=module:Class; write one, or unset it")
    split = (re.split(r"\s*=\s*", entry) for entry in named)
    own = [EntryPoint(name=name, value=value, group=GROUP) for name, value in split]
    return {point.name: point for point in (*entry_points(group=GROUP), *own)}


def family_class(name: str) -> type[Family]:
    """Return the Family class of this name; raise ConfigurationError if it is missing or cannot be imported."""
    return _class(name, {} if name in _BUILT_IN else _entry_points())


def _class(name: str, installed: Mapping[str, EntryPoint]) -> type[Family]:
    if name in _BUILT_IN:
        family = import_object(_BUILT_IN[name])
    elif point := installed.get(name):
        try:
            family = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(
                f"family {name!r} ({point.value}) cannot be imported: {error}; repair or uninstall its package"
            ) from error
    elif name in _TABLE_ONLY:
        family = import_object(_TABLE_ONLY[name])
    else:
        raise ConfigurationError(f"family {name!r} is not installed; choose from {', '.join(_all_names(installed))}")
    if not (isinstance(family, type) and issubclass(family, Family)) or family.name != name:
        raise ConfigurationError(
            f"family {name!r} is {family!r:.80}; its entry point must name a subclass of Family with name = {name!r}"
        )
    return family


def families(host: Host | None = None) -> Mapping[str, Family]:
    """Return every family by name, in the order of detection."""
    host, installed = host or Host(), _entry_points()
    return {name: _class(name, installed)(host) for name in _all_names(installed)}


def device_code(family: str) -> DeviceCode:
    """Return the rank side of a family (imports torch); raise ConfigurationError or DeviceUnusable without one."""
    code = import_object(family_class(family).device_code)()
    assert isinstance(code, DeviceCode), f"{family_class(family).device_code} is not a DeviceCode"
    return code


def import_object(path: str) -> Any:
    """Return the object of ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


DOCS = "perfsuite docs add-a-platform"


class AcceleratorFamily(Family):
    """A family with nodes below /dev for its devices, which a tool of the vendor describes."""

    nodes: ClassVar[tuple[str, ...]]  # Patterns below the root; without a match no tool is started.
    visible_variable: ClassVar[str]  # Environment variable by which a user chooses devices.
    tool_name: ClassVar[str]  # The vendor's tool.
    tool_query: ClassVar[tuple[str, ...]]  # Arguments of the tool for a description of the devices.
    guide: ClassVar[str] = DOCS  # Page that leads to a first result on these devices.

    def detect(self) -> tuple[DetectedDevice, ...]:
        """Return the devices that a rank would see, with torch's numbers; searched once."""
        return self._visible

    @abstractmethod
    def list_devices(self) -> tuple[DetectedDevice, ...]:
        """Return every device of the host, hidden ones included; only called if a node exists."""

    # Every collected case needs the devices: they are searched once and do not change in a session.

    @functools.cached_property
    def _all(self) -> tuple[DetectedDevice, ...]:
        return self.list_devices() if any(self.host.glob(pattern) for pattern in self.nodes) else ()

    @functools.cached_property
    def _visible(self) -> tuple[DetectedDevice, ...]:
        return visible(self._all, self.host.environ.get(self.visible_variable))

    def missing(self, model: DeviceModel) -> str:
        """Return which device is missing, the searched node and a remedy."""
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
        """Return True for fp32, bf16 and fp16 if no tool shows the architecture of a device without a row."""
        return dtype in ("fp32", "bf16", "fp16")

    def why_unnamed(self) -> str:
        """Return the tool's error message."""
        problem = self.host.tool(self.tool_name, *self.tool_query).problem
        return f"{self.tool_name} does not show which device this is{f' ({problem})' if problem else ''}"

    def links(self) -> str:
        """Return the kinds of links between the visible devices in the tool's topology matrix."""
        devices = self.detect()
        index_of = {device.uuid: device.index for device in self._all if device.uuid}
        indices = [index_of.get(device.uuid, device.index) for device in devices]
        return link_kinds(self.topology(), indices) if len(devices) > 1 else ""

    def topology(self) -> str:
        """Return the vendor tool's ``topo -m`` without its underlining."""
        text = self.host.tool(self.tool_name, "topo", "-m").text if self.detect() else ""
        return re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip()


def unnamed(count: int) -> tuple[DetectedDevice, ...]:
    """Return ``count`` devices that only have nodes."""
    return tuple(DetectedDevice(index=index, reported_name="") for index in range(count))


def visible(devices: Sequence[DetectedDevice], setting: str | None) -> tuple[DetectedDevice, ...]:
    """Return the devices that a variable like CUDA_VISIBLE_DEVICES selects, in its order and renumbered from 0.
    Entries are indices or beginnings of UUIDs; the first invalid entry hides itself and all after it (CUDA programming
    guide, environment variables). ``None`` (unset) selects all.
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
    """Return the devices in words.

    >>> describe([DetectedDevice(index=0, reported_name="MTT S80"), DetectedDevice(index=1, reported_name="MTT S80")])
    '2 x MTT S80'
    """
    counts = Counter(f"{device.reported_name or 'unnamed device'} {device.partition}".strip() for device in devices)
    return " and ".join(f"{count} x {name}" for name, count in counts.items())


def too_few_devices(ranks: int, count: int) -> str:
    """Return the requirements of ``ranks`` ranks on hosts with ``count`` devices, which are fewer."""
    hosts = -(-ranks // count)
    launcher = f"torchrun --nnodes={hosts} --nproc-per-node={ranks // hosts} -m pytest ..."
    several = f"{hosts} such hosts ({launcher}), or " if ranks % hosts == 0 and hosts > 1 else ""
    return (
        f"{ranks} ranks on a host with {plural(count, 'device')}; use {several}--perf-oversubscribe, which lets ranks "
        "share them"
    )


def link_kinds(matrix: str, indices: Sequence[int]) -> str:
    r"""Return the sorted kinds of links between these devices in a ``topo -m`` matrix; empty if unreadable.

    >>> link_kinds("      GPU0  GPU1  NIC0\nGPU0   X    NV18  PIX\nGPU1  NV18   X    SYS", [0, 1])
    'NV18'
    """
    rows = matrix_rows(matrix)
    chosen = [rows.get(f"GPU{index}", []) for index in indices]
    return " ".join(sorted({row[index] for row in chosen for index in indices if index < len(row)} - {"X"}))


def number(text: str) -> float | None:
    """Return the number at the start of a tool's field, or None.

    >>> number("49152MiB"), number("[N/A]")
    (49152.0, None)
    """
    number = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    return float(number[1]) if number else None


class TableOnly(Family):
    """A family whose devices perfsuite can neither find nor use; a package may add a family of the same name."""

    backend = ""
    device_code = ""
    nodes: ClassVar[str]  # Pattern of the device's nodes below the root.

    def unsupported(self) -> str:
        """Return that such a device is here, and that the CPU is measured."""
        found = self.host.glob(self.nodes)
        node = f"/{found[0].relative_to(self.host.root)}" if found else ""
        return f"{node} is here, but perfsuite has no code for family {self.name}: the CPU is measured" if found else ""

    def detect(self) -> tuple[DetectedDevice, ...]:
        """Return no devices."""
        return ()

    def missing(self, model: DeviceModel) -> str:
        """Return that perfsuite has no code for the family, with a remedy."""
        return (
            f"{model.title} is a row of the table only: perfsuite has no code for family {self.name}; "
            f"install a package that brings it ({DOCS})"
        )

    def natively(self, dtype: str) -> bool:
        """Return False: only the row counts."""
        return False


class Rocm(TableOnly):
    """AMD Instinct."""

    name = "rocm"
    nodes = "dev/kfd"


class Ascend(TableOnly):
    """Huawei Ascend."""

    name = "ascend"
    nodes = "dev/davinci[0-9]*"
