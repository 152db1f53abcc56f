"""Cores of a rank: as many threads as its share of the allowed cores, and pinning to them only on request.

A plain program under torchrun is not pinned, and pinning changes the measurement: gloo's threads would share the core
of the rank whose messages they move.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsuite.base.errors import CaseError, UnsupportedCase
from perfsuite.platforms.base import DeviceCode
from perfsuite.platforms.host import Host, active_ports, boot_of
from perfsuite.record.codec import to_json
from perfsuite.record.step import Identity

_CPU = "sys/devices/system/cpu"


@dataclass(frozen=True, kw_only=True)
class PhysicalCore:
    """A physical core, as far as this process may use it."""

    node: int  # Memory node (NUMA); 0 if the kernel lists none.
    logical: tuple[int, ...]  # Its hardware threads, by the kernel's numbers.


def read_cores(host: Host, allowed: Iterable[int]) -> tuple[PhysicalCore, ...]:
    """Return the physical cores of ``allowed`` logical ones, by node and number; single ones without sibling lists."""
    left, node = set(allowed), _nodes(host)
    cores = []
    for index in sorted(left):
        if index in left:
            listed = parse_list(host.read(f"{_CPU}/cpu{index}/topology/thread_siblings_list") or "")
            siblings = tuple(sorted(left & {index, *listed}))
            left -= set(siblings)
            cores.append(PhysicalCore(node=node.get(index, 0), logical=siblings))
    return tuple(sorted(cores, key=lambda core: (core.node, core.logical)))


def _nodes(host: Host) -> dict[int, int]:
    folders = host.glob("sys/devices/system/node/node[0-9]*")
    return {
        index: int(folder.name.removeprefix("node"))
        for folder in folders
        for index in parse_list(host.read(f"{folder.relative_to(host.root)}/cpulist") or "")
    }


def node_of_device(host: Host, address: str) -> int | None:
    """Return the memory node of the device at a PCI address (``0000:1b:00.0``); None if unknown."""
    text = host.read(f"sys/bus/pci/devices/{address}/numa_node") if address else None
    return int(text) if text is not None and text.isdigit() else None  # the firmware may give -1


def identity(host: Host, code: DeviceCode, index: int | None, *, first: bool) -> dict[str, Any]:
    """Return throttle reasons and :class:`Identity` of a rank for its report; ``first``: with the host's ports."""
    reading = code.reading()
    found = Identity(
        boot=boot_of(host),
        uuid=code.uuid(),
        pci_address=(code.pci_address(index) or "") if index is not None else "",
        power_cap_w=reading.power_cap_w if reading is not None else None,
        clock_mhz=reading.clock_mhz if reading is not None else None,
        max_clock_mhz=reading.max_clock_mhz if reading is not None else None,
        temperature_c=reading.temperature_c if reading is not None else None,
        ports=active_ports(host) if first else (),
    )
    return {"throttle": reading.throttle if reading is not None else None, "identity": to_json(found)}


def parse_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list in the kernel's form; empty for other text.

    >>> parse_list("0-2,8")
    (0, 1, 2, 8)
    """
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            return ()
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Threads and cores of one rank."""

    threads: int  # Intra-op threads.
    cores: tuple[int, ...] | None  # Logical cores to which the rank is pinned; None if it is not.


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def divide_cores(cores: tuple[int, ...], share: int, shares: int, *, pin: bool = False) -> Placement:
    """Return one of ``shares`` equal consecutive shares of ``cores``; one thread each if there are more ranks.

    More ranks than cores are not pinned: pinning would decide which of them wait for each other.

    >>> divide_cores((0, 1, 2, 3), share=1, shares=2)
    Placement(threads=2, cores=None)
    >>> divide_cores((0, 1, 2, 3), share=1, shares=2, pin=True)
    Placement(threads=2, cores=(2, 3))
    >>> divide_cores((0, 1), share=3, shares=4, pin=True)
    Placement(threads=1, cores=None)
    """
    width = len(cores) // shares
    if width == 0:
        return Placement(threads=1, cores=None)
    return Placement(threads=width, cores=cores[share * width : (share + 1) * width] if pin else None)


def place_by_node(cores: Sequence[PhysicalCore], nodes: Sequence[int | None], share: int) -> Placement:
    """Return the rank's share of the whole physical cores of its device's memory node.

    ``nodes``: by share, the node of each rank's device; with None the ranks go over the nodes in order. All ranks have
    as many threads as the smallest share has logical cores. If a node has more ranks than cores, each may use all its
    cores with one thread.

    >>> near = [PhysicalCore(node=0, logical=(0, 4)), PhysicalCore(node=0, logical=(1, 5))]
    >>> cores = [*near, PhysicalCore(node=1, logical=(2, 6))]
    >>> [place_by_node(cores, nodes=[0, 1], share=share) for share in range(2)]  # doctest: +NORMALIZE_WHITESPACE
    [Placement(threads=2, cores=(0, 1, 4, 5)),
     Placement(threads=2, cores=(2, 6))]
    """
    of_node: dict[int, list[PhysicalCore]] = {}
    for core in cores:
        of_node.setdefault(core.node, []).append(core)
    order = sorted(of_node)
    homes = [node if node in of_node else order[index * len(order) // len(nodes)] for index, node in enumerate(nodes)]
    shares = [_share(of_node[home], homes[:index].count(home), homes.count(home)) for index, home in enumerate(homes)]
    own = shares[share]
    if own is None:
        return Placement(threads=1, cores=_logical(of_node[homes[share]]))
    return Placement(threads=min(len(_logical(part or ())) or 1 for part in shares), cores=_logical(own))


def _share(cores: Sequence[PhysicalCore], share: int, shares: int) -> Sequence[PhysicalCore] | None:
    """Return the physical cores of one of several ranks of a node; None if there are fewer cores than ranks."""
    width = len(cores) // shares
    return cores[share * width : (share + 1) * width] if width else None


def _logical(cores: Sequence[PhysicalCore]) -> tuple[int, ...]:
    return tuple(sorted(index for core in cores for index in core.logical))


def nodes_of_devices(
    host: Host, cores: Sequence[PhysicalCore], addresses: Mapping[int, str | None]
) -> list[int | None]:
    """Return the memory node of each rank's device; None if its devices belong to no node.

    ``addresses``: by rank, the PCI address of its device, empty if unknown, None if it has none. Raises UnsupportedCase
    if the host has several nodes and that of a device is unknown, because a guess could be a slow placement.
    """
    here = {core.node for core in cores}
    if len(here) == 1 or None in addresses.values():
        return [None] * len(addresses)
    nodes = [node_of_device(host, address or "") for address in addresses.values()]
    if None in nodes:
        unknown = list(addresses)[nodes.index(None)]
        raise UnsupportedCase(
            f"it is unknown which of the {len(here)} memory nodes has the device of rank {unknown} (torch before 2.8 "
            "and some virtual machines do not show it); run without --perf-pin=numa"
        )
    return list(nodes)


def pin(cores: Sequence[int]) -> None:
    """Pin every thread of this process, also those of earlier cases; raise CaseError if the kernel refuses."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with contextlib.suppress(ProcessLookupError):  # a thread has ended meanwhile
                os.sched_setaffinity(int(thread), cores)
        except OSError as error:
            raise CaseError(
                f"the kernel refuses to pin this rank to cores {', '.join(map(str, cores))} ({error.strerror}); "
                "run without --perf-pin"
            ) from error


def of_threads() -> set[tuple[str, str]]:
    """Return the nice values and cores of all native threads, without duplicates: OpenMP's threads may have others."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            nice = (task / "stat").read_text().rpartition(")")[2].split()[16]
            cores = re.search(r"^Cpus_allowed:.*", (task / "status").read_text(), re.MULTILINE)
            found.add((nice, cores[0] if cores else ""))
    return found


def _of_status(*names: str) -> tuple[str, ...]:
    """Return lines of the kernel's status file of this process, by their first words."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return tuple(line for line in lines if line.startswith(names))


def status() -> tuple[str, ...]:
    """Return the umask, the blocked and ignored signals, the process group and the session."""
    return _of_status("Umask:", "SigBlk:", "SigIgn:", "NSpgid:", "NSsid:")


def attributes() -> tuple[Any, ...]:
    """Return attributes of the process in the kernel, and the files that are its standard streams."""
    attributes = [Path("/proc/self", name).read_text() for name in ("timerslack_ns", "oom_score_adj", "cgroup")]
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    return (*_of_status("THP_enabled", "NoNewPrivs", "Seccomp", "Mems_allowed_list:"), *attributes, *streams)


def input_and_memory() -> tuple[int, str]:
    """Return the I/O priority and the NUMA policy of the process."""
    number = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
    priority = ctypes.CDLL(None).syscall(number, 1, 0) if number else 0
    try:
        with Path("/proc/self/numa_maps").open("rb", buffering=0) as maps:  # a longer read makes the kernel count pages
            return priority, maps.read(200).split()[1].decode()
    except (OSError, IndexError):  # a kernel without NUMA
        return priority, ""


def openblas_threads() -> list[int] | None:
    """Return the number of threads of every loaded OpenBLAS, such as NumPy's; None without one."""
    paths = sorted(set(re.findall(r"/\S*openblas\S*\.so\S*", Path("/proc/self/maps").read_text(errors="replace"))))
    names = [f"{head}openblas_get_num_threads{tail}" for head in ("scipy_", "") for tail in ("64_", "")]
    found = []
    for path in paths:
        with contextlib.suppress(OSError):  # the file was replaced since; it must not be loaded anew
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            found += [getattr(library, name)() for name in names if hasattr(library, name)]
    return found or None
