"""Identify the host of a run; two hosts may have equal hardware."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.text import escaped
from perfsuite.base.units import plural
from perfsuite.baselines.runs import RunSummary

UUID = re.compile(r"\b(?:GPU|MIG|UUID)[-:]\S+|\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b")
"""A device's UUID in the text that describes the device."""
NAMED_HOSTS = 3  # Most hosts to list in a line; the others are counted.


@dataclass(frozen=True, kw_only=True)
class HostIdentity:
    """Host name, boot and device UUIDs of a run, empty where they are unknown."""

    name: str = ""
    boot: str = ""
    uuids: frozenset[str] = frozenset()

    def is_other_than(self, other: HostIdentity) -> bool:
        """Return whether two runs are certainly of different hosts.

        Containers of one host have different names and its boot; a reboot keeps the name and the devices.
        """
        if self.boot and self.boot == other.boot:
            return False
        if self.uuids and other.uuids:
            return not self.uuids & other.uuids
        return bool(self.name and other.name) and self.name != other.name


def host_of(environment: Mapping[str, Any], boot: str = "") -> HostIdentity:
    """Return the identity of the host that an environment describes."""
    texts, name = environment.get("devices"), environment.get("hostname")
    found = (UUID.search(str(text)) for text in (texts if isinstance(texts, (list, tuple)) else ()))
    uuids = frozenset(match[0] for match in found if match)
    return HostIdentity(name=name if isinstance(name, str) else "", boot=boot, uuids=uuids)


def host_numbers(identities: Iterable[HostIdentity]) -> dict[HostIdentity, int]:
    """Return the number of the host of each identity; hosts are numbered in the order of their first identity."""
    hosts: list[list[HostIdentity]] = []
    number: dict[HostIdentity, int] = {}
    for identity in identities:
        if identity not in number:
            alike = (at for at, host in enumerate(hosts) if not any(map(identity.is_other_than, host)))
            number[identity] = next(alike, len(hosts))
            hosts += [[]] if number[identity] == len(hosts) else []
            hosts[number[identity]].append(identity)
    return number


def by_host(runs: Iterable[RunSummary]) -> list[list[RunSummary]]:
    """Return the runs of each host, the host of the first run first."""
    identified = [(host_of(run.environment, run.boot), run) for run in runs]
    number = host_numbers(identity for identity, _ in identified)
    hosts: list[list[RunSummary]] = [[] for _ in range(max(number.values(), default=-1) + 1)]
    for identity, run in identified:
        hosts[number[identity]].append(run)
    return hosts


def host_note(runs: Iterable[RunSummary]) -> str:
    """Return a sentence about the hosts of these runs; empty if they are, or may be, of one host."""
    hosts = by_host(runs)
    if len(hosts) < 2:
        return ""
    names = named([(host_of(host[0].environment).name, len(host)) for host in hosts])
    return (
        f"its runs are of several hosts of equal hardware: {names}; differences between hosts count as noise "
        "(--perf-baselines=DIR keeps the runs of a host apart)"
    )


def named(hosts: Sequence[tuple[str, int]], noun: str = "run") -> str:
    """Return host names with their counts: ``a (5 runs), b (3 runs)``.

    >>> named([("a", 5), ("b", 1), ("", 2), ("d", 2)])
    'a (5 runs), b (1 run), an unnamed host (2 runs) and 1 other host'
    """
    names = [f"{escaped(name) or 'an unnamed host'} ({plural(count, noun)})" for name, count in hosts[:NAMED_HOSTS]]
    more = f" and {plural(len(hosts) - NAMED_HOSTS, 'other host')}" if len(hosts) > NAMED_HOSTS else ""
    return ", ".join(names) + more
