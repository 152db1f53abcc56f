"""The hardware key of a machine: it must be equal to compare two results, and it names the baseline's file.

It contains the hardware and its partition only. A momentary value (MHz, bogomips, free memory, an idle link's speed)
would give one machine two keys. Drivers and libraries belong to the environment.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from perfsuite.base.errors import ConfigurationError
from perfsuite.platforms.cgroups import cpu_quota
from perfsuite.platforms.cpu import read_processor
from perfsuite.platforms.host import Host
from perfsuite.platforms.machine import Machine

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Hardware on which results are comparable."""

    key: str  # Text that is readable and valid as a file name: ``cpu-amd-epyc-2c-1a2b3c4d``, ``s4000-8x-5e6f7a8b``.
    parts: Mapping[str, str] = field(hash=False)  # Values by name; the key's last eight digits are their digest.

    def __str__(self) -> str:
        return self.key

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Return one line per different part: ``accelerators: 8 x MTT S4000, other has 4 x MTT S4000``."""
        names = dict.fromkeys([*self.parts, *other.parts])
        pairs = [(name, self.parts.get(name, "none"), other.parts.get(name, "none")) for name in names]
        return tuple(f"{name}: {own}, other has {foreign}" for name, own, foreign in pairs if own != foreign)


def fingerprint(machine: Machine, host: Host | None = None, *, cores: int | None = None, hosts: int = 1) -> Fingerprint:
    """Return the fingerprint of this machine.

    ``cores`` are the logical cores for ranks, by default all granted ones; a smaller CPU quota of the control group
    replaces them. ``hosts`` is the number of equal machines of a cluster. Raises ConfigurationError if a vendor's tool
    did not answer: without its values this machine would get another key, which has no baseline.
    """
    host = host or machine.family.host
    processor = read_processor(host)
    cores = cores if cores is not None else host.cores()
    quota = cpu_quota(host)
    parts = {"hosts": str(hosts)}
    if machine.family.name != "cpu":
        parts.update(_accelerator_parts(machine))
        if silent := host.hung():
            raise ConfigurationError(
                f"{silent}, so the hardware is unknown and no stored run can be compared; check that the driver "
                "answers (for NVIDIA: start nvidia-persistenced), then run again"
            )
    parts.update(
        cpu_model=processor.model,
        cpu_identity=processor.identity,
        cpu_features=" ".join(processor.features) or UNKNOWN,
        cpu_threads_per_core=str(processor.threads_per_core or UNKNOWN),
        cores=f"{quota:.3g}" if quota is not None and quota < cores else str(cores),
        cpu_quota=UNKNOWN if quota is None else "none" if quota == math.inf else f"{quota:.3g}",
    )
    if machine.simulated:
        parts["simulated"] = "yes"
    return Fingerprint(key=_key(machine, parts), parts=parts)


def _accelerator_parts(machine: Machine) -> dict[str, str]:
    names = sorted({device.reported_name or machine.model.title for device in machine.devices})
    return {
        "accelerators": f"{machine.device_count} x {' and '.join(names) or machine.model.title}",
        "partition": " ".join(sorted({device.partition for device in machine.devices})) or "none",
        "host_link": " ".join(sorted({device.link or UNKNOWN for device in machine.devices})) or UNKNOWN,
        "links": machine.family.links() or ("none" if machine.device_count < 2 else UNKNOWN),
    }


def _key(machine: Machine, parts: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(parts), sort_keys=True).encode()).hexdigest()[:8]
    hosts = "" if parts["hosts"] == "1" else f"{parts['hosts']}h-"
    if machine.family.name == "cpu":
        head = f"{machine.name}-{_slug(parts['cpu_model'])}-{hosts}{parts['cores']}c"
    elif machine.name == machine.family.name:  # no row: the key has to contain the device's name
        head = f"{machine.name}-{_slug(machine.model.title)}-{hosts}{machine.device_count}x"
    else:
        head = f"{machine.name}-{hosts}{machine.device_count}x"
    return f"{'simulated-' if machine.simulated else ''}{head}-{digest}"


def _slug(name: str) -> str:
    """Return a device's name as part of a file name, without words that every such name has.

    >>> _slug("Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz"), _slug("AMD EPYC 7742 64-Core Processor")
    ('intel-xeon-gold-6330', 'amd-epyc-7742')
    """
    plain = re.sub(r"\((?:r|tm|c)\)|@.*|\bcpu\b|\bprocessor\b|\b\d+-core\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:40].rstrip("-") or UNKNOWN
