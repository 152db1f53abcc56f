"""Signs that the machine was not left alone while something was timed.

Of about 530 recorded runs, a share of CPU time in wall time below 0.98 flags 38 % of the bad ones and no good one.
The load average flags nothing and is not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from perfsuite.platforms.host import Host
from perfsuite.records import Measurement

CPU_SHARE_FLOOR = 0.98
"""A rank that only computes and got less of its core than this shared it."""
SWITCHED_SHARE = 0.25
"""More samples than this with an involuntary context switch leave too few clean ones."""
STEAL_SHARE = 0.01
PRESSURE_PERCENT = 5.0


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """What the kernel counts about others: one reading."""

    stolen_ticks: int | None
    """Time that a hypervisor ran something else instead, since boot; None where /proc/stat does not tell."""
    all_ticks: int | None
    pressure_percent: float | None
    """Share of the last 10 s in which some task waited for a core (/proc/pressure/cpu); None in older kernels."""


def read_host_load(host: Host) -> HostLoad:
    """Now.  Pressure counts everybody's tasks, one's own too: it tells about others only before the ranks start."""
    cpu = re.match(r"cpu((?:\s+\d+)+)", host.read("proc/stat") or "")
    ticks = [int(count) for count in cpu[1].split()] if cpu else []
    pressure = re.search(r"^some avg10=([\d.]+)", host.read("proc/pressure/cpu") or "", re.MULTILINE)
    return HostLoad(
        stolen_ticks=ticks[7] if len(ticks) > 7 else None,
        all_ticks=sum(ticks[:8]) if len(ticks) > 7 else None,
        pressure_percent=float(pressure[1]) if pressure else None,
    )


def steal_share(before: HostLoad, after: HostLoad) -> float | None:
    """Share of all core time between two readings that a hypervisor took, 0 to 1; None when unknown.

    >>> def reading(stolen, all_ticks): return HostLoad(stolen_ticks=stolen, all_ticks=all_ticks, pressure_percent=None)
    >>> steal_share(reading(10, 1000), reading(40, 2000))
    0.03
    """
    if before.stolen_ticks is None or after.stolen_ticks is None or before.all_ticks is None or after.all_ticks is None:
        return None
    passed = after.all_ticks - before.all_ticks
    return (after.stolen_ticks - before.stolen_ticks) / passed if passed > 0 else None


def disturbance(measurement: Measurement, *, waits: bool, cores: int | None = None) -> str:
    """Why this measurement was disturbed, as a phrase; empty when no sign says so.

    ``waits`` is true where ranks wait inside a sample for each other or for a device (collectives, steps,
    accelerators): their CPU share says nothing then.  With more rank threads than ``cores`` ranks disturb each other,
    which is no news about the machine; nor is a switch where rank threads have every core, for then perfsuite's own
    driver and the kernel have no other: on an idle machine of two cores every sample of two ranks has one.
    """
    on_cpu = [rank for rank in measurement.ranks if rank.device == "cpu"]
    threads = sum(rank.threads for rank in on_cpu)
    if measurement.smoke or not on_cpu or (cores is not None and threads > cores):
        return ""
    worst = min(on_cpu, key=lambda rank: rank.cpu_share)
    if not waits and worst.cpu_share < CPU_SHARE_FLOOR:
        return f"rank {worst.rank} got {worst.cpu_share:.0%} of its core"
    has_room = cores is None or threads < cores
    if has_room and measurement.disturbed_share > SWITCHED_SHARE:
        return f"{measurement.disturbed_share:.0%} of the samples had an involuntary context switch"
    return ""


def warning(
    disturbances: Iterable[tuple[str, str]], *, before: HostLoad | None = None, after: HostLoad | None = None
) -> str:
    """The line that says the machine was not quiet, out of (case, phrase) pairs and two readings; empty when it was.

    >>> warning([("test_matmul[cpu-256]", "rank 0 got 81% of its core"), ("test_copy[cpu-1MiB]", "")])
    'the machine is not quiet: 1 of 2 cases disturbed, e.g. test_matmul[cpu-256]: rank 0 got 81% of its core'
    """
    cases = list(disturbances)
    bad = [(case, phrase) for case, phrase in cases if phrase]
    signs = []
    if bad:
        signs.append(f"{len(bad)} of {len(cases)} cases disturbed, e.g. {bad[0][0]}: {bad[0][1]}")
    if before and before.pressure_percent is not None and before.pressure_percent > PRESSURE_PERCENT:
        signs.append(f"tasks waited for a core in {before.pressure_percent:g} % of the 10 s before the first case")
    stolen = steal_share(before, after) if before and after else None
    if stolen is not None and stolen > STEAL_SHARE:
        signs.append(f"the hypervisor took {stolen:.1%} of the core time")
    return f"the machine is not quiet: {'; '.join(signs)}" if signs else ""
