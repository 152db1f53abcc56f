"""The cores of a host as Linux describes them below /sys: physical cores, memory nodes, and the node of a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from perfsuite.platforms.host import Host

_CPU = "sys/devices/system/cpu"


@dataclass(frozen=True, kw_only=True)
class Core:
    """A physical core, as far as this process may use it."""

    node: int
    """Memory node (NUMA); 0 where the kernel tells of none."""
    logical: tuple[int, ...]
    """Its hardware threads, by the numbers that the scheduler gives them."""


def read_cores(host: Host, allowed: Iterable[int]) -> tuple[Core, ...]:
    """The physical cores of ``allowed`` logical ones, by node and number; each its own where siblings are not told."""
    left, node = set(allowed), _nodes(host)
    cores = []
    for index in sorted(left):
        if index in left:
            told = parse_list(host.read(f"{_CPU}/cpu{index}/topology/thread_siblings_list") or "")
            siblings = tuple(sorted(left & {index, *told}))
            left -= set(siblings)
            cores.append(Core(node=node.get(index, 0), logical=siblings))
    return tuple(sorted(cores, key=lambda core: (core.node, core.logical)))


def _nodes(host: Host) -> dict[int, int]:
    """Logical core -> memory node."""
    folders = host.glob("sys/devices/system/node/node[0-9]*")
    return {
        index: int(folder.name.removeprefix("node"))
        for folder in folders
        for index in parse_list(host.read(f"{folder.relative_to(host.root)}/cpulist") or "")
    }


def node_of_device(host: Host, address: str) -> int | None:
    """Memory node of the device at a PCI address (``0000:1b:00.0``); None where nothing tells it."""
    text = host.read(f"sys/bus/pci/devices/{address}/numa_node") if address else None
    return int(text) if text is not None and text.isdigit() else None  # -1: the firmware does not say


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers of a list as the kernel writes it; empty when it is none.

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
