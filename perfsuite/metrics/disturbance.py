"""Whether other programs disturbed a case: one meaning for the screen, the tables and the page.

Of about 530 recorded runs, a share of CPU time in wall time below 0.98 finds 38 % of the bad ones and no good one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from perfsuite.record.result import Result

CPU_SHARE_FLOOR = 0.98  # A rank that only computes and got less of its core than this shared it.
SWITCHED_SHARE = 0.25  # More samples than this with an involuntary context switch leave too few clean ones.

COMPUTES = frozenset({"tflops", "gb_per_s"})  # Metrics of cases whose ranks compute or move bytes all the time.


def disturbance(result: Result) -> str:
    """Return why the times of a result are disturbed, as a phrase; empty if nothing shows that they are.  A single rank
    that computes (it has a rate of operations or bytes) is disturbed if it got less than its core: a hypervisor takes a
    core without a switch. Any other rank may sleep or read a file, so it must be switched out too. A training step may
    also wait for its data, so that a quarter of its samples must be switched out. Ranks that wait for each other are
    judged by their context switches alone, and only if a core is left for other programs: without one, perfsuite's own
    driver causes such switches.
    """
    measurement = result.measurement
    if result.outcome != "measured" or measurement is None or measurement.smoke:
        return ""
    on_cpu = [rank for rank in measurement.ranks if rank.device == "cpu"]
    if not on_cpu or is_oversubscribed(result):
        return ""
    threads, cores = sum(rank.threads for rank in on_cpu), _cores(result.environment)
    switched = measurement.disturbed_share if measurement.involuntary_switches else 0.0
    is_often, computes = switched > SWITCHED_SHARE, not COMPUTES.isdisjoint(result.values)
    if measurement.world_size == 1 and on_cpu[0].cpu_share < CPU_SHARE_FLOOR:
        if is_often or (measurement.aligned and (switched or computes)):
            return f"rank {on_cpu[0].rank} got {on_cpu[0].cpu_share:.0%} of its core"
    elif (cores is None or threads < cores) and is_often:
        return f"{switched:.0%} of the samples had an involuntary context switch"
    return ""


def is_oversubscribed(result: Result) -> bool:
    """Return whether ranks share devices, or have more threads than their host has cores; False if that is unknown."""
    ranks = result.measurement.ranks if result.measurement is not None else ()
    threads: Counter[str] = Counter()
    for rank in ranks:
        threads[rank.host] += rank.threads * (rank.device == "cpu")
    others = [(rank.host, rank.device) for rank in ranks if rank.device != "cpu"]
    cores = _cores(result.environment) if any(threads.values()) else None
    return len(set(others)) < len(others) or (cores is not None and max(threads.values()) > cores)


def _cores(environment: Mapping[str, Any]) -> int | None:
    """Return how many cores the run could use, from a description such as ``0-3,8``; None if it is unknown."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", str((environment.get("cores") or {}).get("which") or ""))
    return sum(int(last or first) - int(first) + 1 for first, last in spans) or None
