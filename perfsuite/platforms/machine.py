"""The machine of this session: its platform, its devices and their peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perfsuite.platforms.base import DetectedDevice, DeviceModel, Family
from perfsuite.platforms.catalog import Catalog
from perfsuite.platforms.detection import DOCS, describe
from perfsuite.platforms.detection import families as all_families
from perfsuite.platforms.host import Host
from perfsuite.platforms.quirks import architecture_note
from perfsuite.record.result import Peaks


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One platform on this machine: a device model and its devices."""

    family: Family
    model: DeviceModel  # Row of the devices; for an unknown device one without peaks, named after the family.
    devices: tuple[DetectedDevice, ...]  # Empty if the chosen platform is not here.
    absent: str = ""  # Why the chosen platform is not here: the reason of every skip.
    unknown: str = ""  # Why the devices' peaks are unknown.
    unsupported: tuple[str, ...] = ()  # Devices here that perfsuite cannot use, so that it measures the CPU.

    @property
    def name(self) -> str:
        """Platform name, as in ids."""
        return self.model.name

    @property
    def device_count(self) -> int:
        """Devices of this platform for ranks; 1 for a CPU."""
        return len(self.devices)

    @property
    def scale(self) -> Literal["full", "small"]:
        """Default scale of the sizes: as published on an accelerator, small elsewhere."""
        return "small" if self.family.name == "cpu" or self.simulated else "full"

    @property
    def simulated(self) -> bool:
        """Whether results are marked as simulated and kept apart."""
        return self.family.simulated

    def peaks(self) -> Peaks:
        """Return the peaks of which metrics are shares; ``unknown`` in it is the reason if there are none."""
        return Peaks(unknown=self.unknown) if self.unknown else self.model.peaks

    def natively(self, dtype: str) -> bool:
        """Return whether the devices compute in this short dtype natively, by their row, else by the family."""
        if dtype in self.model.tflops or dtype in self.model.native:
            return True
        if self.family.assumption() and (self.model.tflops or self.model.native):
            return False  # the row has priority over an assumption
        return self.family.natively(dtype)

    def why_not_native(self, dtype: str) -> str:
        """Return the reason of a skip, with the device and the missing feature."""
        return f"no native {dtype} on {describe(self.devices) or self.model.title}: {self.family.why_not_native(dtype)}"

    def remarks(self) -> tuple[str, ...]:
        """Return facts that explain results: unknown peaks, assumptions, architecture and notes of the row."""
        assumed = "" if self.model.tflops or self.model.native or self.absent else self.family.assumption()
        kind = architecture_note(self.model.architecture)
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
    """Return the accelerator of this host, else its CPU; or the platform ``override``, present or not.  ``override`` is
    the name of a row, or of a family (``cuda``: any of its devices here). Raises UnknownPlatform with the valid names
    for other text.
    """
    by_name = families if families is not None else all_families(host)
    if override is not None:
        return _chosen(catalog, override, by_name)
    for name, family in by_name.items():
        if name != "cpu" and not family.simulated and (devices := family.detect()):
            return _found(catalog, family, devices)
    unsupported = tuple(filter(None, (family.unsupported() for family in by_name.values())))
    return dataclasses.replace(_found(catalog, by_name["cpu"], by_name["cpu"].detect()), unsupported=unsupported)


def _chosen(catalog: Catalog, name: str, families: Mapping[str, Family]) -> Machine:
    if name.lower() in families and name.lower() != "cpu":
        family = families[name.lower()]
        if devices := family.detect():
            return _found(catalog, family, devices)
        generic = catalog.generic(family.name, "")
        return Machine(family=family, model=generic, devices=(), absent=family.missing(generic))
    model = catalog.find(name, besides=families)
    name, family = model.name, families[model.family]
    machine = _found(catalog, family, family.detect())
    if machine.devices and machine.model.name == name:
        return machine
    if machine.devices and (name == "cpu" or not any(device.reported_name for device in machine.devices)):
        # The user names devices without a name.
        return Machine(family=family, model=model, devices=machine.devices, unknown=_no_peaks(model))
    return Machine(family=family, model=model, devices=(), absent=family.missing(model))


def _found(catalog: Catalog, family: Family, devices: tuple[DetectedDevice, ...]) -> Machine:
    """Return the machine of these devices, with their common row, else with one without peaks."""
    names = list(dict.fromkeys(device.reported_name for device in devices))
    rows = {name: catalog.recognise(name, family.stands_for or family.name) for name in names}
    agree = len({row.name if row else name for name, row in rows.items()}) == 1
    model = rows[names[0]] if agree else None
    if model is None:
        title = " and ".join(name or f"unnamed {family.name} device" for name in names)
        model = catalog.generic(family.name, title)
        unknown = _why_no_row(model, family, devices, agree=agree)
    elif slices := sorted({device.partition for device in devices if device.partition}):
        unknown = f"{model.title} is partitioned ({', '.join(slices)}): no peaks are published for a slice"
    else:
        unknown = _no_peaks(model)
    return Machine(family=family, model=model, devices=devices, unknown=unknown)


def _why_no_row(model: DeviceModel, family: Family, devices: tuple[DetectedDevice, ...], *, agree: bool) -> str:
    if not agree:
        choose = getattr(family, "visible_variable", "the environment")
        return f"devices differ ({describe(devices)}): no peaks are used; choose devices with {choose}"
    if family.name == "cpu":
        return _no_peaks(model)
    if not devices[0].reported_name:
        return f"{family.why_unnamed()}; repair it, or name the platform with --perf-platform"
    return f"unknown device {devices[0].reported_name!r}: add a row with its peaks ({DOCS})"


def _no_peaks(model: DeviceModel) -> str:
    """Return why a row without peaks gives no shares; empty for a row with peaks."""
    if model.tflops or model.memory_bandwidth or model.link or model.host_link:
        return ""
    if model.family == "cpu":
        return f"no peak is published for a CPU: add a row with measured ones ({DOCS})"
    return f"platform {model.name!r} has no peaks: add them to its row ({DOCS})"


def why_absent(name: str, *, machine: Machine, catalog: Catalog, families: Mapping[str, Family] | None = None) -> str:
    """Return why a case for platform ``name`` cannot run in this session: its skip reason, empty if it can run."""
    if name == machine.name:
        return machine.absent
    by_name = families if families is not None else all_families(machine.family.host)
    model = catalog.find(name)
    family = by_name[model.family]
    here = [catalog.recognise(device.reported_name, family.name) for device in family.detect()]
    if name == "cpu" or any(row is not None and row.name == name for row in here):
        return f"this session runs on {machine.name}; choose this platform with --perf-platform={name}"
    return family.missing(model)
