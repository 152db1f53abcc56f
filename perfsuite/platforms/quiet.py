"""Signs that other programs disturbed the machine during the measurement.

The load average shows none and is not used.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from perfsuite.base.units import plural
from perfsuite.platforms.cgroups import Throttling, cpu_quota, read_throttling, throttled
from perfsuite.platforms.host import Host
from perfsuite.platforms.telemetry import family_of_processes
from perfsuite.record.run import NOT_QUIET, THROTTLED

STEAL_SHARE = 0.01
PRESSURE_PERCENT = 5.0
OTHERS_SHARE = 0.05  # Share of other programs: a tenth of a core of two. Idle systems use 0.01 to 0.02.


@dataclass(frozen=True, kw_only=True)
class CoreTime:
    """Core seconds since boot of the cores that this run may use."""

    granted_s: float
    busy_s: float  # Time in which programs ran there; interrupts do not count.
    own_s: float  # Time of this run's processes, ended ones included.


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """One reading of the kernel's counts about other programs."""

    stolen_ticks: int | None  # Time that a hypervisor used for others since boot; None if /proc/stat does not have it.
    all_ticks: int | None
    pressure_percent: float | None  # Share of the last 10 s with a waiting task (/proc/pressure/cpu).
    core_time: CoreTime | None = None  # None if /proc/stat does not have it.
    quota: str = ""  # Quota of the own control group, ``0.2 cores``; empty without a limit and if unknown.
    quota_share: float = 1.0  # The same as a share of the granted cores' time.
    throttling: Mapping[str, Throttling] = field(default_factory=dict)  # By the quotas of all own groups.


def read_host_load(host: Host, roots: Iterable[int]) -> HostLoad:
    """Return the present load; all processes of the run descend from ``roots``. Pressure includes the run's tasks."""
    quota = cpu_quota(host) or math.inf
    cpu = re.match(r"cpu((?:\s+\d+)+)", host.read("proc/stat") or "")
    ticks = [int(count) for count in cpu[1].split()] if cpu else []
    pressure = re.search(r"^some avg10=([\d.]+)", host.read("proc/pressure/cpu") or "", re.MULTILINE)
    return HostLoad(
        stolen_ticks=ticks[7] if len(ticks) > 7 else None,
        all_ticks=sum(ticks[:8]) if len(ticks) > 7 else None,
        pressure_percent=float(pressure[1]) if pressure else None,
        core_time=_core_time(host, roots),
        quota=f"{quota:.3g} cores" if quota < math.inf else "",
        quota_share=min(1.0, quota / host.cores()),
        throttling=read_throttling(host),
    )


def _core_time(host: Host, roots: Iterable[int]) -> CoreTime | None:
    lines = re.findall(r"^cpu(\d+)((?:\s+\d+){8})", host.read("proc/stat") or "", re.MULTILINE)
    granted = host.granted()
    ticks = [[int(count) for count in counts.split()] for core, counts in lines if int(core) in granted]
    if not ticks:
        return None
    user, nice, system = 0, 1, 2
    busy = sum(core[user] + core[nice] + core[system] for core in ticks)
    a_second = os.sysconf("SC_CLK_TCK")
    return CoreTime(granted_s=sum(map(sum, ticks)) / a_second, busy_s=busy / a_second, own_s=_own_time(host, roots))


def _own_time(host: Host, roots: Iterable[int]) -> float:
    """Return the core time of the run's processes and their ended children."""
    ticks = 0
    for pid in family_of_processes(roots):
        after_name = (host.read(f"proc/{pid}/stat") or "").rpartition(")")[2].split()
        ticks += sum(map(int, after_name[11:15]))  # own and children's, in user code and in the kernel
    return ticks / os.sysconf("SC_CLK_TCK")


def others_share(before: HostLoad, after: HostLoad) -> float | None:
    """Return the share of the granted cores' time that other programs took between two readings; None if unknown.

    If the own control group exhausted its quota, the rest of the cores was not available to the run.

    >>> def reading(granted_s, busy_s, own_s):
    ...     core_time = CoreTime(granted_s=granted_s, busy_s=busy_s, own_s=own_s)
    ...     return HostLoad(stolen_ticks=None, all_ticks=None, pressure_percent=None, core_time=core_time)
    >>> others_share(reading(100.0, 50.0, 10.0), reading(300.0, 190.0, 110.0))
    0.2
    """
    one, other = before.core_time, after.core_time
    if one is None or other is None or other.granted_s <= one.granted_s:
        return None
    passed_s = other.granted_s - one.granted_s
    others_s = (other.busy_s - one.busy_s) - (other.own_s - one.own_s)
    if throttled(before.throttling, after.throttling):
        others_s -= (1 - after.quota_share) * passed_s
    return max(0.0, others_s) / passed_s


def steal_share(before: HostLoad, after: HostLoad) -> float | None:
    """Return the share of all core time that a hypervisor took between two readings, 0 to 1; None if unknown.

    >>> def reading(stolen, all_ticks): return HostLoad(stolen_ticks=stolen, all_ticks=all_ticks, pressure_percent=None)
    >>> steal_share(reading(10, 1000), reading(40, 2000))
    0.03
    """
    if before.stolen_ticks is None or after.stolen_ticks is None or before.all_ticks is None or after.all_ticks is None:
        return None
    passed = after.all_ticks - before.all_ticks
    return (after.stolen_ticks - before.stolen_ticks) / passed if passed > 0 else None


def warnings(
    disturbances: Iterable[tuple[str, str]], *, before: HostLoad | None = None, after: HostLoad | None = None
) -> list[str]:
    """Return the lines about lost time, from (case, phrase) pairs and two readings.

    Time that the own control group's quota withholds does not count as taken by others.

    >>> warnings([("test_matmul[cpu-256]", "rank 0 got 81% of its core"), ("test_copy[cpu-1MiB]", "")])
    ['the machine is not quiet: 1 of 2 cases disturbed, e.g. test_matmul[cpu-256]: rank 0 got 81% of its core']
    """
    cases = list(disturbances)
    bad = [(case, phrase) for case, phrase in cases if phrase]
    disturbed = [f"{len(bad)} of {plural(len(cases), 'case')} disturbed, e.g. {bad[0][0]}: {bad[0][1]}"] if bad else []
    signs = _signs_of_others(before, after) if before and after else []
    quota = _held_by_quota(before, after) if before and after else ""
    lines = {THROTTLED: [quota], NOT_QUIET: signs}
    lines[THROTTLED if quota else NOT_QUIET] += disturbed  # last: the screen may cut the example
    return [head + "; ".join(filter(None, parts)) for head, parts in lines.items() if any(parts)]


def _held_by_quota(before: HostLoad, after: HostLoad) -> str:
    held = throttled(before.throttling, after.throttling)
    if held is None:
        return ""
    share = held.throttled / max(1, held.periods)
    limit = f" ({after.quota})" if after.quota else ""
    return (
        f"the CPU quota of the own cgroup{limit} throttled the run in {share:.0%} of its periods, {held.held_s:.3g} s "
        "over all cores"
    )


def _signs_of_others(before: HostLoad, after: HostLoad) -> list[str]:
    signs = []
    others = others_share(before, after)
    if others is not None and others > OTHERS_SHARE:
        signs.append(f"other programs took {others:.0%} of the core time")
    stolen = steal_share(before, after)
    if stolen is not None and stolen > STEAL_SHARE:
        signs.append(f"the hypervisor took {stolen:.1%} of the core time")
    if before.pressure_percent is not None and before.pressure_percent > PRESSURE_PERCENT:
        signs.append(f"tasks waited for a core in {before.pressure_percent:.0f} % of the 10 s before the first case")
    return signs
