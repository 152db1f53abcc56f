"""What new runs of a case say beside the stored ones: a gain that two sessions of the machine show, a loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from perfsuite.baselines.baseline import Entry
from perfsuite.baselines.runs import RunSummary, in_order, usually_clean
from perfsuite.record.own_metrics import Better


def log_times(runs: Sequence[RunSummary], *, clean_only: bool) -> list[float]:
    """ln seconds of the measured runs: of their clean samples, or of all where ranks share cores anyway."""
    if clean_only:
        return [run.location for run in runs if run.location is not None and run.has_clean]
    return [math.log(run.median_s) for run in runs if run.quantiles_s]


def gain(runs: Sequence[RunSummary], reference: Sequence[RunSummary], quantity: str, better: Better = "lower") -> float:
    """How much better the median of the runs is than the reference's, relative to it; 0 where nothing can be told.

    ``quantity`` is ``time``, a metric with a better direction, or ``memory``: of a case that did not fit, that it fits
    is a gain of 1.
    """
    if quantity == "memory" and all(run.outcome == "out_of_memory" for run in reference):
        return float(all(run.outcome == "measured" for run in runs))
    if quantity == "time":
        clean_only = usually_clean(reference)
        before, now = (log_times(side, clean_only=clean_only) for side in (reference, runs))
        return math.expm1(statistics.median(before) - statistics.median(now)) if before and now else 0.0
    before, now = ([run.metrics[quantity] for run in side if quantity in run.metrics] for side in (reference, runs))
    if not before or not now or not statistics.median(before):
        return 0.0
    change = statistics.median(now) / statistics.median(before) - 1
    return {"lower": -change, "higher": change, "neither": 0.0}[better]


def confirming(
    entry: Entry, runs: Sequence[RunSummary], gains: Mapping[str, float], machine_session: Mapping[str, str]
) -> tuple[RunSummary, ...]:
    """All runs of the sessions of the machine, the present one the last, that in succession show one gain.

    Empty unless there are two such sessions.  ``runs`` are those of the present session; ``gains`` has by quantity what
    a gain has to be above.  Only runs that are no part of the reference can confirm.
    """
    known = {run.key for run in entry.reference}
    groups: dict[str, list[RunSummary]] = {}
    for run in (*(run for run in entry.runs if run.key not in known), *runs):
        groups.setdefault(machine_session[run.session], []).append(run)
    now = machine_session[runs[-1].session]
    sessions = [group for name, group in groups.items() if name != now]
    for quantity, least in gains.items():
        meaning = entry.case.metrics.get(quantity)
        shown: list[list[RunSummary]] = []
        for group in (groups[now], *reversed(sessions)):
            if not gain(group, entry.reference, quantity, meaning.better if meaning else "lower") > least:
                break
            shown.append(group)
        if len(shown) > 1:
            return in_order(run for group in shown for run in group)
    return ()


def slowdown(runs: Sequence[RunSummary], stored: Sequence[RunSummary]) -> float:
    """How much slower the runs are than stored ones that the gate cannot use, by the medians; below 0 where faster.

    0 where not every run is slower than every stored one.
    """
    clean_only = usually_clean(stored) and all(run.has_clean for run in runs)
    before, now = (log_times(side, clean_only=clean_only) for side in (stored, runs))
    if not before or not now or min(now) <= max(before):
        return 0.0
    return math.expm1(statistics.median(now) - statistics.median(before))
