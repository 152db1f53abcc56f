"""The host for detection: files below a root, vendors' tools, the environment, and limits of the own control group.

All code that reads the machine uses a Host, so that a test can describe one with a directory and a function.

A control group is limited by itself and by every group above it, so the tightest limit counts. Two files of /proc lead
to the group's files. ``cgroup`` has its path in each hierarchy (version 1 has one per controller, version 2 one for
all). ``mountinfo`` has the mount of a hierarchy, and which of its groups is the root there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

TOOL_TIMEOUT_S = 60.0
"""A vendor's tool without an answer after this time has a driver that hangs. Without its persistence daemon the driver
of eight devices is loaded for every query, which can take half of this time."""
_PATIENCE_S = 5.0  # A longer wait is reported on stderr.


@dataclass(frozen=True, kw_only=True)
class ToolAnswer:
    """Output of a tool, or the reason why there is none."""

    text: str = ""
    problem: str = ""  # One line: ``not installed``, ``exit 9: ...``, ``no answer in 10 s``; empty without one.
    hung: bool = False  # Whether it had to be killed; its driver will not answer further queries.


ToolRunner = Callable[[Sequence[str]], ToolAnswer]


def run_tool(command: Sequence[str], timeout_s: float = TOOL_TIMEOUT_S) -> ToolAnswer:
    """Run a tool in the C locale; kill it after ``timeout_s`` seconds, without waiting if its driver hangs."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        return ToolAnswer(problem="not installed" if isinstance(error, FileNotFoundError) else str(error))
    try:
        try:
            output, _ = process.communicate(timeout=min(timeout_s, _PATIENCE_S))
        except subprocess.TimeoutExpired:
            if timeout_s > _PATIENCE_S:
                print(f"perfsuite: waits for {command[0]}, {timeout_s:g} s at most", file=sys.stderr, flush=True)
            output, _ = process.communicate(timeout=max(0.0, timeout_s - _PATIENCE_S))
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1.0)
        if process.stdout:
            process.stdout.close()
        return ToolAnswer(problem=f"no answer in {timeout_s:g} s", hung=True)
    except BaseException:  # Ctrl-C or SIGTERM during the wait
        process.kill()
        raise
    text = output.decode("utf-8", errors="replace")
    if process.returncode != 0:
        message = " ".join(text.split())
        return ToolAnswer(problem=f"exit {process.returncode}: {message:.160}".rstrip(": "))
    return ToolAnswer(text=text)


class Host:
    """Files, tools and environment of one machine; each tool runs once."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        environ: Mapping[str, str] | None = None,
        run: ToolRunner = run_tool,
        cores: int | None = None,
    ) -> None:
        self.root = root  # Folder of /dev, /proc and /sys.
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self._run = run
        self._cores = cores
        self._answers: dict[tuple[str, ...], ToolAnswer] = {}

    def read(self, path: str | Path) -> str | None:
        """Return the text of a file below the root without surrounding white space; None if unreadable.

        ``path`` is relative to the root, or as :meth:`glob` returns it.
        """
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def has(self, path: str) -> bool:
        """Return whether a file or folder exists below the root, or may exist in a folder without access."""
        try:
            return (self.root / path).exists()
        except OSError:
            return True

    def glob(self, pattern: str) -> list[Path]:
        """Return matching files below the root, sorted with numbers in order: mtgpu.2 before mtgpu.10."""
        with contextlib.suppress(OSError):
            return sorted(self.root.glob(pattern), key=lambda path: (len(path.name), path.name))
        return []

    def tool(self, *command: str) -> ToolAnswer:
        """Return the answer of a vendor's tool; each command runs once, and none after one that hung."""
        if command not in self._answers:
            hung = [answer for asked, answer in self._answers.items() if answer.hung and asked[0] == command[0]]
            self._answers[command] = hung[0] if hung else self._run(command)
        return self._answers[command]

    def hung(self) -> str:
        """Return the tool that gave no answer, and its time limit; empty if all answered."""
        return next((f"{asked[0]}: {answer.problem}" for asked, answer in self._answers.items() if answer.hung), "")

    def cores(self) -> int:
        """Return how many logical cores container or batch system grant to ranks; its own binding does not count."""
        return self._cores if self._cores is not None else len(self.granted())

    def granted(self) -> frozenset[int]:
        """Return the numbers of those cores."""
        if not hasattr(os, "sched_setaffinity"):
            return frozenset(range(os.cpu_count() or 1))
        bound_to = os.sched_getaffinity(0)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        granted = os.sched_getaffinity(0)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, bound_to)
        return frozenset(granted)


def boot_of(host: Host) -> str:
    """Return the first twelve hex digits of the boot's identifier; empty if Linux does not show it."""
    return (host.read("proc/sys/kernel/random/boot_id") or "").replace("-", "")[:12]


def active_ports(host: Host) -> tuple[str, ...]:
    """Return ``mlx5_0 port 1: 200 Gb/sec (4X HDR) InfiniBand`` for every active port."""
    ports = []
    for port in host.glob("sys/class/infiniband/*/ports/*"):
        if "ACTIVE" in (host.read(port / "state") or ""):
            rate, layer = host.read(port / "rate") or "unknown", host.read(port / "link_layer") or ""
            ports.append(f"{port.parent.parent.name} port {port.name}: {rate} {layer}".strip())
    return tuple(sorted(ports))


_SEARCHED = 5000  # Limit of the groups that are searched for the process if its path does not lead to its group.
_PERIOD_US = "100000"  # The kernel's default.
_QUOTA_V1 = "cpu.cfs_quota_us"
_THROTTLED_SHARE = 0.01  # Share of the quota's periods; below it throttling is not reported.


Groups = tuple[tuple[str, ...], bool]
"""Folders below the host's root of the process's own group of a controller and of those above it, the own one first;
and whether the folder of the own group is not found, so that its limits are unknown."""


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
    return tuple(dict.fromkeys(folders)), hidden


def cpu_quota(host: Host) -> float | None:
    """Return the own group's quota in cores: infinity without a limit, None if unknown."""
    folders, unread = own_groups(host, "cpu")
    quotas = []
    for folder in folders:
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
    for folder in own_groups(host, "memory")[0]:
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
    own = next(iter(memory[0]), "")
    files = [f"{own}/memory.events", f"{own}/memory.oom_control"] if own else []
    group, whole = ([_oom_kills(host.read(file)) for file in names] for names in (files, ["proc/vmstat"]))
    return OomKills(group=max(group, default=0), host=max(whole))


def _oom_kills(text: str | None) -> int:
    found = re.search(r"^oom_kill (\d+)$", text or "", re.MULTILINE)
    return int(found[1]) if found else 0


def read_throttling(host: Host) -> Mapping[str, Throttling]:
    """Return the kernel's counts of the own group and of those above it, by folder."""
    counts = {}
    for folder in own_groups(host, "cpu")[0]:
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
        root, place = (
            re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
            for field in (fields.split() + [""] * 5)[3:5]
        )
        system, *options = [*kind.split(), ""]
        if system == "cgroup2":
            yield 2, root, place.strip("/")
        elif system == "cgroup" and controller in options[-2].split(","):
            yield 1, root, place.strip("/")


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
            if own and own in (host.read(file) or "").split():
                return PurePosixPath(file.parent.relative_to(host.root / place))
    return None
