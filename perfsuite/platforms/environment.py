"""The hardware key of a machine, and the facts about a run that may change on the same hardware.

The key must be equal to compare two results, and it names the baseline's file. It contains the hardware and its
partition only. A momentary value (MHz, bogomips, free memory, an idle link's speed) would give one machine two keys.

Drivers and libraries belong to the environment, which is recorded with a run and shown if it differs. Tools and the
kernel are read without torch; the ``[environment]`` section of the user's platform file adds the rest. An unreadable
value is ``unknown``, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.masking import is_secret_name, masked, masked_value
from perfsuite.base.text import spans
from perfsuite.base.units import gib
from perfsuite.platforms.base import Family
from perfsuite.platforms.cpu import memory_bytes, read_processor
from perfsuite.platforms.host import Host, active_ports, cpu_quota
from perfsuite.platforms.machine import Machine
from perfsuite.platforms.quirks import installed_version, numbers
from perfsuite.record.codec import to_json

UNKNOWN = "unknown"

_PACKAGES = (
    *("torch", "torch-musa", "deepspeed", "transformers", "flash-attn", "numpy", "pytest", "pytest-benchmark"),
    *("perfsuite", "nvidia-ml-py", "mthreads-ml-py"),
)
_PACKAGE_FAMILIES = ("nvidia-nccl-cu", "nvidia-cudnn-cu", "nvidia-cuda-runtime-cu", "nvidia-cublas-cu")
_VARIABLES = re.compile(
    r"^(NCCL|MCCL|CUDA|MUSA|MUDNN|MUBLAS|CUBLAS|NVIDIA|MTHREADS|TORCH|PYTORCH|OMP|GOMP|KMP|MKL|GLOO|DS|UCX|FI|MALLOC)_"
    r"|^(LD_PRELOAD|DNNL_MAX_CPU_ISA|ATEN_CPU_CAPABILITY)$"
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Conditions of a run; every field may differ between compared runs."""

    hostname: str
    machine_model: str  # Maker and product from the machine's firmware.
    os: str
    kernel: str
    python: str
    container: str  # docker, podman, kubernetes, ...; ``none seen`` without a sign of one.
    cpu: str  # Model, sockets, threads per core, cores for ranks, and the CPU quota if there is one.
    cores: Mapping[str, str]  # Cores for ranks, and the number of their physical cores and memory nodes.
    memory_gib: str  # Main memory within the limit of the cgroup.
    governor: str  # CPU frequency governor.
    tcp: str  # Congestion control of new TCP connections, which carry gloo's messages; bbr scatters their times.
    network: tuple[str, ...]  # Active InfiniBand and RoCE ports with their rate.
    devices: tuple[str, ...]  # Reported name, memory and UUID of every device.
    power_caps: tuple[str, ...]  # Power limit of every accelerator of the host.
    driver: Mapping[str, str]  # The device's driver and toolkit, by name.
    packages: Mapping[str, str]  # Versions of the relevant Python packages, by distribution name.
    variables: Mapping[str, str]  # Environment variables that affect timing.
    notes: tuple[str, ...]  # Facts that explain results of this machine: remarks, then the quirks of its stack.
    worker: Mapping[str, Any] = field(default_factory=dict)  # A rank worker's report about torch and its libraries.
    options: Mapping[str, str] = field(default_factory=dict)  # Options that affect timing: ``{"perf-pin": "numa"}``.
    declared: Mapping[str, Any] = field(default_factory=dict)  # The user's ``[environment]`` section.
    topology: str = ""  # Topology matrix of the vendor's tool; empty if there is none.

    def to_json(self) -> dict[str, Any]:
        """Return plain values of all fields."""
        return {entry.name: to_json(getattr(self, entry.name)) for entry in fields(self)}


def read_environment(
    machine: Machine,
    host: Host | None = None,
    *,
    declared: Mapping[str, Any] | None = None,
    options: Mapping[str, str] | None = None,
    worker: Mapping[str, Any] | None = None,
) -> Environment:
    """Return the environment of a run on ``machine``; ``worker``: a rank worker's report about torch."""
    host = host or machine.family.host
    processor = read_processor(host)
    memory = memory_bytes(host)
    return Environment(
        hostname=host.read("proc/sys/kernel/hostname") or socket.gethostname(),
        machine_model=_machine_model(host),
        os=_operating_system(host),
        kernel=host.read("proc/sys/kernel/osrelease") or platform.release(),
        python=platform.python_version(),
        container=_container(host),
        cpu=f"{processor.model}; sockets: {processor.sockets or UNKNOWN}; threads per core: "
        f"{processor.threads_per_core or UNKNOWN}; cores used: {host.cores()}{_quota(host)}",
        cores=_cores(host),
        memory_gib=f"{gib(memory[1]):.1f}" if memory else UNKNOWN,
        governor=_governor(host),
        tcp=congestion_control(host),
        network=active_ports(host),
        devices=tuple(_device(device.reported_name, device.memory_bytes, device.uuid) for device in machine.devices),
        power_caps=machine.family.power_caps(),
        driver=machine.family.software(),
        packages=_packages(),
        variables={
            name: masked(value)
            for name, value in sorted(host.environ.items())
            if _VARIABLES.search(name) and not is_secret_name(name)
        },
        notes=(*machine.remarks(), *machine.family.quirks(machine.model)),
        worker=masked_value(worker or {}),
        options=options or {},
        declared=masked_value(declared or {}),
        topology=machine.family.topology(),
    )


def congestion_control(host: Host) -> str:
    """Return the congestion control of new TCP connections."""
    return host.read("proc/sys/net/ipv4/tcp_congestion_control") or UNKNOWN


def _machine_model(host: Host) -> str:
    names = [host.read(f"sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(text for text in names if text) or host.read("proc/device-tree/model") or UNKNOWN


def _operating_system(host: Host) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', host.read("etc/os-release") or "", re.MULTILINE)
    return match[1] if match else UNKNOWN


def _container(host: Host) -> str:
    if "KUBERNETES_SERVICE_HOST" in host.environ:
        return "kubernetes"
    if host.read(".dockerenv") is not None:
        return "docker"
    if host.read("run/.containerenv") is not None:
        return "podman"
    if host.environ.get("APPTAINER_CONTAINER") or host.environ.get("SINGULARITY_CONTAINER"):
        return "apptainer"
    match = re.search(r"docker|kubepods|lxc|podman", host.read("proc/1/cgroup") or "")
    return match[0] if match else "none seen"


def _quota(host: Host) -> str:
    quota = cpu_quota(host)
    text = UNKNOWN if quota is None else f"{quota:.3g} cores"
    return "" if quota == math.inf else f"; CPU quota: {text}"


def _cores(host: Host) -> dict[str, str]:
    granted = sorted(host.granted())
    places = [f"sys/devices/system/cpu/cpu{core}" for core in granted]
    physical = {
        tuple(host.read(f"{place}/topology/{name}") for name in ("physical_package_id", "core_id")) for place in places
    }
    nodes = {path.name for place in places for path in host.glob(f"{place}/node[0-9]*")}
    complete = all(None not in core for core in physical)
    return {
        "which": spans(granted),
        "physical": str(len(physical)) if complete else UNKNOWN,
        "memory_nodes": str(len(nodes)) if nodes else UNKNOWN,
    }


def _governor(host: Host) -> str:
    paths = host.glob("sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    return ", ".join(sorted({host.read(path) or "" for path in paths} - {""})) or UNKNOWN


def _device(name: str, memory: int | None, uuid: str) -> str:
    size = f"{gib(memory):.1f} GiB" if memory else "memory unknown"
    return f"{name or 'unnamed device'}, {size}{f', {uuid}' if uuid else ''}"


def _packages() -> dict[str, str]:
    """Return the installed versions by distribution name."""
    from importlib.metadata import distributions

    versions: dict[str, str] = {}
    for distribution in distributions():
        # Only the two headers: parsing all metadata of the packages takes as long as a small case.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        headers = dict(re.findall(r"^(Name|Version): *(\S+)", text.partition("\n\n")[0], re.MULTILINE))
        name = re.sub(r"[-_.]+", "-", headers.get("Name", "")).lower()
        if name in _PACKAGES or name.startswith(_PACKAGE_FAMILIES):
            versions.setdefault(name, headers.get("Version", UNKNOWN))
    return dict(sorted(versions.items()))


OLDEST = (2, 5)  # Oldest supported version of torch.


def installed_torch() -> str:
    """Return the version of the installed torch from its metadata; empty if it is missing."""
    return installed_version("torch")


def require_importable_torch() -> None:
    """Raise ConfigurationError, in one line, if ranks would find no torch of any version."""
    if not installed_torch() and find_spec("torch") is None:
        raise ConfigurationError(
            f"torch is not installed for {sys.executable}, but ranks need it; run pytest by the Python that has it "
            "(a vendor's image has its own), or install it"
        )


def require_torch(family: Family, installed: str) -> None:
    """Raise ConfigurationError with a remedy for an old torch; unknown versions and 2.5's pre-releases pass."""
    parts = numbers(installed)
    if parts and parts[:2] < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigurationError(
            f"torch {installed} is installed, perfsuite needs {oldest} or newer: {family.newer_torch()}"
        )


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Hardware on which results are comparable."""

    key: str  # Text that is readable and valid as a file name: ``cpu-amd-epyc-2c-1a2b3c4d``, ``s4000-8x-5e6f7a8b``.
    parts: Mapping[str, str] = field(hash=False)  # Values by name; the key's last eight digits are their digest.

    def __str__(self) -> str:
        return self.key


def fingerprint(machine: Machine, host: Host | None = None, *, cores: int | None = None, hosts: int = 1) -> Fingerprint:
    """Return the fingerprint of this machine.  ``cores`` are the logical cores for ranks, by default all granted ones;
    a smaller CPU quota of the control group replaces them. ``hosts`` is the number of equal machines of a cluster.
    Raises ConfigurationError if a vendor's tool did not answer: without its values this machine would get another key,
    which has no baseline.
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
    name, count = "", f"{machine.device_count}x"
    if machine.family.name == "cpu":
        name, count = f"{_slug(parts['cpu_model'])}-", f"{parts['cores']}c"
    elif machine.name == machine.family.name:  # no row: the key has to contain the device's name
        name = f"{_slug(machine.model.title)}-"
    return f"{'simulated-' if machine.simulated else ''}{machine.name}-{name}{hosts}{count}-{digest}"


def _slug(name: str) -> str:
    """Return a device's name as part of a file name, without words that every such name has.

    >>> _slug("Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz"), _slug("AMD EPYC 7742 64-Core Processor")
    ('intel-xeon-gold-6330', 'amd-epyc-7742')
    """
    plain = re.sub(r"\((?:r|tm|c)\)|@.*|\bcpu\b|\bprocessor\b|\b\d+-core\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:40].rstrip("-") or UNKNOWN
