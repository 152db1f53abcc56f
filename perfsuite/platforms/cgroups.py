"""Limits of the process's own control group: CPU quota and memory, and how often the kernel enforced them.

A group is limited by itself and by every group above it, so the tightest limit counts. Two files of /proc lead to the
group's files. ``cgroup`` has its path in each hierarchy (version 1 has one per controller, version 2 one for all).
``mountinfo`` has the mount of a hierarchy, and which of its groups is the root there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from perfsuite.platforms.host import Host

_SEARCHED = 5000  # Limit of the groups that are searched for the process if its path does not lead to its group.
_PERIOD_US = "100000"  # The kernel's default.
_QUOTA_V1 = "cpu.cfs_quota_us"
_THROTTLED_SHARE = 0.01  # Share of the quota's periods; below it throttling is not reported.


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process's own group of a controller, and those above it."""

    folders: tuple[str, ...]  # Folders below the host's root, the own group first.
    hidden: bool  # Whether the folder of the process's group is not found, so that its limits are unknown.


@dataclass(frozen=True, kw_only=True)
class Throttling:
    """The kernel's counts of one group since it was made."""

    periods: int  # Periods of the quota in which a process of the group ran.
    throttled: int  # Periods that ended with an exhausted quota.
    held_s: float  # Seconds for which its processes were stopped, summed over the cores.


def own_groups(host: Host, controller: str) -> Groups:
    """Find the groups of this process for ``controller``: ``cpu`` or ``memory``."""
    folders: list[str] = []
    hidden = False
    mounts = list(_mounts(host, controller))
    for version, path in _paths(host, controller):
        found = [chain for mount in mounts if mount[0] == version for chain in _chain(host, path, *mount[1:])]
        folders += found
        hidden |= not found and path != "/"
    return Groups(folders=tuple(dict.fromkeys(folders)), hidden=hidden)


def cpu_quota(host: Host) -> float | None:
    """Return the own group's quota in cores: infinity without a limit, None if unknown."""
    groups = own_groups(host, "cpu")
    quotas, unread = [], groups.hidden
    for folder in groups.folders:
        version_2 = (host.read(f"{folder}/cpu.max") or "").split()
        version_1 = [host.read(f"{folder}/{name}") or "" for name in (_QUOTA_V1, "cpu.cfs_period_us")]
        quota, period = [*(version_2 or version_1), _PERIOD_US][:2]
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
        unread |= any(
            host.has(f"{folder}/{name}") and host.read(f"{folder}/{name}") is None for name in ("cpu.max", _QUOTA_V1)
        )
    return min(quotas) if quotas else None if unread else math.inf


def memory_limit(host: Host) -> tuple[int, int] | None:
    """Return (available, limit) in bytes of the own group, reclaimable file pages included; None without a limit."""
    limits = []
    for folder in own_groups(host, "memory").folders:
        cached = re.search(r"^(?:total_)?inactive_file (\d+)$", host.read(f"{folder}/memory.stat") or "", re.MULTILINE)
        for limit_name, used_name in _MEMORY_FILES:
            limit, used = (host.read(f"{folder}/{name}") or "" for name in (limit_name, used_name))
            if limit.isdigit():
                held = int(used) - min(int(used), int(cached[1]) if cached else 0) if used.isdigit() else 0
                limits.append((max(0, int(limit) - held), int(limit)))
    return (min(limits)[0], min(limit for _, limit in limits)) if limits else None


_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.high", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class OomKills:
    """Processes that the kernel's OOM killer ended, since the group and the host began."""

    group: int = 0  # Kills in the own control group and those below it; 0 if not counted.
    host: int = 0  # Kills on the whole host, of other users too.

    def since(self, earlier: OomKills) -> str:
        """Return the kills after ``earlier`` in words; empty if there are none.

        >>> OomKills(group=1, host=3).since(OomKills(host=2))
        "the kernel's OOM killer ended 1 process of this control group"
        >>> OomKills(host=2).since(OomKills(host=2))
        ''
        """
        for count, where in ((self.group - earlier.group, "control group"), (self.host - earlier.host, "host")):
            if count > 0:
                return f"the kernel's OOM killer ended {count} process{'' if count == 1 else 'es'} of this {where}"
        return ""


def read_oom_kills(host: Host, memory: Groups) -> OomKills:
    """Return the kernel's counts from ``memory.events``, ``memory.oom_control`` and ``/proc/vmstat``."""
    own = next(iter(memory.folders), "")
    files = [f"{own}/memory.events", f"{own}/memory.oom_control"] if own else []
    group, whole = ([_oom_kills(host.read(file)) for file in names] for names in (files, ["proc/vmstat"]))
    return OomKills(group=max(group, default=0), host=max(whole))


def _oom_kills(text: str | None) -> int:
    found = re.search(r"^oom_kill (\d+)$", text or "", re.MULTILINE)
    return int(found[1]) if found else 0


def read_throttling(host: Host) -> Mapping[str, Throttling]:
    """Return the kernel's counts of the own group and of those above it, by folder."""
    counts = {}
    for folder in own_groups(host, "cpu").folders:
        text = host.read(f"{folder}/cpu.stat") or ""
        found = {name: int(count) for name, count in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}
        if "nr_throttled" in found:
            counts[folder] = Throttling(
                periods=found.get("nr_periods", 0),
                throttled=found["nr_throttled"],
                held_s=found.get("throttled_usec", 0) * 1e-6 + found.get("throttled_time", 0) * 1e-9,
            )
    return counts


def throttled(before: Mapping[str, Throttling], after: Mapping[str, Throttling]) -> Throttling | None:
    """Return the counts between two readings of the most throttled group; None if throttling was negligible."""
    passed = [
        Throttling(
            periods=now.periods - then.periods,
            throttled=now.throttled - then.throttled,
            held_s=now.held_s - then.held_s,
        )
        for folder, now in after.items()
        if (then := before.get(folder)) is not None
    ]
    worst = max(passed, key=lambda one: (one.held_s, one.throttled), default=None)
    return worst if worst is not None and worst.throttled > _THROTTLED_SHARE * worst.periods else None


def throttled_share(before: Mapping[str, Throttling], after: Mapping[str, Throttling]) -> float | None:
    """Return the share of the quota's periods between two readings in which the run was throttled; None if unknown."""
    if not any(now.periods > before[folder].periods for folder, now in after.items() if folder in before):
        return None
    worst = throttled(before, after)
    return worst.throttled / worst.periods if worst is not None and worst.periods else 0.0


def _paths(host: Host, controller: str) -> Iterator[tuple[int, str]]:
    """Yield version and path of the hierarchies that may have the controller; one in version 1 is not in version 2."""
    text = host.read("proc/self/cgroup")
    if text is None:
        yield from ((1, "/"), (2, "/"))
        return
    lines = [line.split(":", 2) for line in text.splitlines() if line.count(":") > 1]
    version_1 = [(1, path) for _, names, path in lines if controller in names.split(",")]
    yield from version_1 or ((2, path) for number, names, path in lines if (number, names) == ("0", ""))


def _mounts(host: Host, controller: str) -> Iterator[tuple[int, str, str]]:
    """Yield version, root and place of every mount of a hierarchy that has the controller."""
    text = host.read("proc/self/mountinfo")
    if text is None:
        yield 2, "/", "sys/fs/cgroup"
        yield 1, "/", f"sys/fs/cgroup/{controller}"
        return
    for line in text.splitlines():
        fields, _, kind = line.partition(" - ")
        root, place = (_unescaped(field) for field in (fields.split() + [""] * 5)[3:5])
        system, *options = [*kind.split(), ""]
        if system == "cgroup2":
            yield 2, root, place.strip("/")
        elif system == "cgroup" and controller in options[-2].split(","):
            yield 1, root, place.strip("/")


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _chain(host: Host, path: str, root: str, place: str) -> list[str]:
    """Return the mounted folders of a group and those above it, the own one first; empty if unknown."""
    inside = PurePosixPath(path.removesuffix(" (deleted)"))
    below = inside.relative_to(root) if inside.is_relative_to(root) else None
    if below is not None and ".." not in below.parts:
        return _upwards(host, place, below)
    found = _searched(host, place)  # a path of another namespace, or the process was moved
    if found is not None:
        return _upwards(host, place, found)
    if ".." in inside.parts or not _above(root):
        return []
    return _upwards(host, place, PurePosixPath() if root.startswith("/..") else inside.relative_to("/"))


def _above(root: str) -> bool:
    """Return whether a mount shows the namespace's own group or one above it (``/../..``), and not a sibling."""
    return root.strip("/.") == "" or ".." not in PurePosixPath(root).parts


def _upwards(host: Host, place: str, below: PurePosixPath) -> list[str]:
    steps = [f"{place}/{step}" for step in (below, *below.parents) if str(step) != "."]
    return [folder for folder in (*steps, place) if host.has(folder)]


def _searched(host: Host, place: str) -> PurePosixPath | None:
    """Return the group below a mount that lists this process; None if none does."""
    own = (host.read("proc/self/stat") or "").split(" ")[0]
    with contextlib.suppress(OSError):  # a group that was removed meanwhile
        for file in itertools.islice((host.root / place).glob("**/cgroup.procs"), _SEARCHED):
            listed = host.read(str(file.relative_to(host.root))) or ""
            if own and own in listed.split():
                return PurePosixPath(file.parent.relative_to(host.root / place))
    return None
