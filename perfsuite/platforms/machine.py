"""The machine of this session: its platform, its devices and what they can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perfsuite.platforms.base import DetectedDevice, DeviceModel, Family
from perfsuite.platforms.catalog import Catalog
from perfsuite.platforms.detection import DOCS, describe
from perfsuite.platforms.host import Host
from perfsuite.platforms.quirks import told_architecture
from perfsuite.platforms.registry import families as all_families
from perfsuite.record.result import Peaks


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One platform on this machine: a device model and the devices that are of it."""

    family: Family
    model: DeviceModel
    """The row of the devices; for an unknown device one without peaks, named after the family."""
    devices: tuple[DetectedDevice, ...]
    """Empty when the platform was asked for and is not here."""
    absent: str = ""
    """Why the platform that was asked for is not here: the reason of every skip."""
    unknown: str = ""
    """Why the devices' peaks are not known."""
    unsupported: tuple[str, ...] = ()
    """Devices that are here and that perfsuite cannot drive, where it measures the CPU instead."""

    @property
    def name(self) -> str:
        """Platform name, as in ids."""
        return self.model.name

    @property
    def device_count(self) -> int:
        """Devices of this platform that ranks can have; 1 for a CPU."""
        return len(self.devices)

    @property
    def scale(self) -> Literal["full", "small"]:
        """Scale of the sizes unless the user chooses: as published on an accelerator, small elsewhere."""
        return "small" if self.family.name == "cpu" or self.simulated else "full"

    @property
    def simulated(self) -> bool:
        """Whether results are stamped and kept apart."""
        return self.family.simulated

    def peaks(self) -> Peaks:
        """What metrics take their shares of; ``unknown`` in it says why there are none."""
        return Peaks(unknown=self.unknown) if self.unknown else self.model.peaks

    def natively(self, dtype: str) -> bool:
        """Whether the devices compute in this short dtype natively: by their row, else as the family can tell."""
        if dtype in self.model.tflops or dtype in self.model.native:
            return True
        if self.family.assumption() and (self.model.tflops or self.model.native):
            return False  # the row knows more than an assumption
        return self.family.natively(dtype)

    def why_not_native(self, dtype: str) -> str:
        """The reason of a skip: names the device and the missing feature."""
        return f"no native {dtype} on {describe(self.devices) or self.model.title}: {self.family.why_not_native(dtype)}"

    def remarks(self) -> tuple[str, ...]:
        """What a reader of results must know: unknown peaks, assumptions, architecture and notes of the row."""
        assumed = "" if self.model.tflops or self.model.native or self.absent else self.family.assumption()
        kind = told_architecture(self.model.architecture)
        notes = (self.unknown, assumed, kind, *self.model.notes, *self.unsupported)
        return tuple(remark for remark in notes if remark)

    def __str__(self) -> str:
        simulated = ", simulated" if self.simulated else ""
        return f"{self.name} ({self.absent or describe(self.devices)}{simulated})"


def detect_machine(
    catalog: Catalog,
    override: str | None = None,
    *,
    host: Host | None = None,
    families: Mapping[str, Family] | None = None,
) -> Machine:
    """The accelerator that this host has, else its CPU; or the platform ``override``, present or not.

    ``override`` is a row's name or a family's (``cuda``: whatever device of it is here).  UnknownPlatform lists the
    legal names for anything else.
    """
    known = families if families is not None else all_families(host)
    if override is not None:
        return _asked_for(catalog, override, known)
    for name, family in known.items():
        if name == "cpu" or family.simulated:
            continue
        devices = family.detect()
        if devices:
            return _found(catalog, family, devices)
    unsupported = tuple(filter(None, (family.unsupported() for family in known.values())))
    return dataclasses.replace(_found(catalog, known["cpu"], known["cpu"].detect()), unsupported=unsupported)


def _asked_for(catalog: Catalog, name: str, families: Mapping[str, Family]) -> Machine:
    if name.lower() in families and name.lower() != "cpu":
        family = families[name.lower()]
        devices = family.detect()
        if devices:
            return _found(catalog, family, devices)
        generic = catalog.generic(family.name, "")
        return Machine(family=family, model=generic, devices=(), absent=family.missing(generic))
    model = catalog.find(name, besides=families)
    name, family = model.name, families[model.family]
    machine = _found(catalog, family, family.detect())
    if machine.devices and machine.model.name == name:
        return machine
    if machine.devices and name == "cpu":
        return Machine(family=family, model=model, devices=machine.devices, unknown=_no_peaks(model))
    if machine.devices and not any(device.reported_name for device in machine.devices):
        # Nothing tells what the devices are; the user does.
        return Machine(family=family, model=model, devices=machine.devices, unknown=_no_peaks(model))
    return Machine(family=family, model=model, devices=(), absent=family.missing(model))


def _found(catalog: Catalog, family: Family, devices: tuple[DetectedDevice, ...]) -> Machine:
    """The machine of these devices: their row when they agree on one, else a row without peaks."""
    names = list(dict.fromkeys(device.reported_name for device in devices))
    rows = {name: catalog.recognise(name, family.stands_for or family.name) for name in names}
    agree = len({row.name if row else name for name, row in rows.items()}) == 1
    model = rows[names[0]] if agree else None
    if model is None:
        title = " and ".join(name or f"unnamed {family.name} device" for name in names)
        model = catalog.generic(family.name, title)
        unknown = _why_no_row(model, family, devices) if agree else _why_mixed(family, devices)
    elif slices := sorted({device.partition for device in devices if device.partition}):
        unknown = f"{model.title} is partitioned ({', '.join(slices)}): no peaks are published for a slice"
    else:
        unknown = _no_peaks(model)
    return Machine(family=family, model=model, devices=devices, unknown=unknown)


def _why_mixed(family: Family, devices: tuple[DetectedDevice, ...]) -> str:
    choose = getattr(family, "visible_variable", "the environment")
    return f"devices differ ({describe(devices)}): the peaks of neither are used; choose devices with {choose}"


def _why_no_row(model: DeviceModel, family: Family, devices: tuple[DetectedDevice, ...]) -> str:
    if family.name == "cpu":
        return _no_peaks(model)
    if not devices[0].reported_name:
        return f"{family.why_unnamed()}; repair it, or name the platform with --perf-platform"
    return f"unknown device {devices[0].reported_name!r}: add a row with its peaks ({DOCS})"


def _no_peaks(model: DeviceModel) -> str:
    """Why a row without any peak gives no shares; empty for one that has some."""
    if model.tflops or model.memory_bandwidth or model.link or model.host_link:
        return ""
    if model.family == "cpu":
        return f"no peak is published for a CPU: add a row with measured ones ({DOCS})"
    return f"platform {model.name!r} has no peaks: add them to its row ({DOCS})"


def why_absent(name: str, *, machine: Machine, catalog: Catalog, families: Mapping[str, Family] | None = None) -> str:
    """Why a case for platform ``name`` cannot run in this session; the reason of its skip, empty when it can."""
    if name == machine.name:
        return machine.absent
    known = families if families is not None else all_families(machine.family.host)
    model = catalog.find(name)
    family = known[model.family]
    here = [catalog.recognise(device.reported_name, family.name) for device in family.detect()]
    if name == "cpu" or any(row is not None and row.name == name for row in here):
        return f"this session runs on {machine.name}; choose this platform with --perf-platform={name}"
    return family.missing(model)
