"""Whether other programs disturbed a case: one meaning for the screen, the tables and the page.

Of about 530 recorded runs, a share of CPU time in wall time below 0.98 finds 38 % of the bad ones and no good one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from perfsuite.record.result import Result

CPU_SHARE_FLOOR = 0.98
"""A rank that only computes and got less of its core than this shared it."""
SWITCHED_SHARE = 0.25
"""More samples than this with an involuntary context switch leave too few clean ones."""


def disturbance(result: Result) -> str:
    """Return why the times of a result are disturbed, as a phrase; empty if nothing shows that they are.

    A single rank is disturbed if it got less than its core and was switched out involuntarily; a rank that only waits
    (sleeps, reads a file) is not.
    A training step may also wait for its data, so that a quarter of its samples must be switched out.
    Ranks that wait for each other are judged by their context switches alone, and only if a core is left for other
    programs: without one, perfsuite's own driver causes such switches.
    """
    measurement = result.measurement
    if result.outcome != "measured" or measurement is None or measurement.smoke:
        return ""
    on_cpu = [rank for rank in measurement.ranks if rank.device == "cpu"]
    switched = measurement.disturbed_share if on_cpu and measurement.involuntary_switches else 0.0
    if not switched:
        return ""
    threads, cores = sum(rank.threads for rank in on_cpu), _cores(result.environment)
    if cores is not None and threads > cores:
        return ""
    is_often = switched > SWITCHED_SHARE
    if measurement.world_size == 1 and on_cpu[0].cpu_share < CPU_SHARE_FLOOR and (measurement.aligned or is_often):
        return f"rank {on_cpu[0].rank} got {on_cpu[0].cpu_share:.0%} of its core"
    if (cores is None or threads < cores) and is_often:
        return f"{switched:.0%} of the samples had an involuntary context switch"
    return ""


def _cores(environment: Mapping[str, Any]) -> int | None:
    """Return how many cores the run could use, from a description such as ``0-3,8``; None if it is unknown."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", str((environment.get("cores") or {}).get("which") or ""))
    return sum(int(last or first) - int(first) + 1 for first, last in spans) or None
