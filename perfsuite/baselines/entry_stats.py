"""The statistics of an entry, over its run medians, by the names and definitions that pytest-benchmark's tables use.

Quartiles split an odd number of values by the weighted method (Langford's method 3) and an even number at the middle;
outliers are counted beyond one standard deviation from the mean and beyond 1.5 interquartile ranges from the quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from perfsuite.baselines.runs import rounded

DIGITS = 6
"""Significant digits; the medians themselves have four."""


def entry_stats(medians_s: Sequence[float], *, iterations: int) -> dict[str, Any]:
    """pytest-benchmark's ``stats`` of runs with these medians in seconds; ``rounds`` is the number of runs.

    >>> stats = entry_stats([1.0, 2.0, 3.0, 4.0, 10.0], iterations=1)
    >>> stats["median"], stats["q1"], stats["q3"], stats["outliers"], stats["ops"]
    (3.0, 1.75, 5.5, '1;0', 0.25)
    """
    ordered = sorted(medians_s)
    q1, q3 = _quartiles(ordered)
    iqr = q3 - q1
    mean = statistics.fmean(ordered)
    stddev = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    inside = [value for value in ordered if q1 - 1.5 * iqr <= value <= q3 + 1.5 * iqr]
    beyond_deviation = sum(abs(value - mean) > stddev for value in ordered)
    beyond_quartiles = len(ordered) - len(inside)
    plain = {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "median": statistics.median(ordered),
        "q1": q1,
        "q3": q3,
        "iqr": iqr,
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean,
        "total": sum(ordered),
    }
    return {
        **{name: rounded(value, DIGITS) for name, value in plain.items()},
        "rounds": len(ordered),
        "iterations": iterations,
        "stddev_outliers": beyond_deviation,
        "iqr_outliers": beyond_quartiles,
        "outliers": f"{beyond_deviation};{beyond_quartiles}",
    }


def _quartiles(ordered: Sequence[float]) -> tuple[float, float]:
    count = len(ordered)
    if count == 1:
        return ordered[0], ordered[0]
    if count % 2 == 0:
        return statistics.median(ordered[: count // 2]), statistics.median(ordered[count // 2 :])
    whole, rest = divmod(count, 4)
    if rest == 1:
        lower = 0.25 * ordered[whole - 1] + 0.75 * ordered[whole]
        upper = 0.75 * ordered[3 * whole] + 0.25 * ordered[3 * whole + 1]
    else:
        lower = 0.75 * ordered[whole] + 0.25 * ordered[whole + 1]
        upper = 0.25 * ordered[3 * whole + 1] + 0.75 * ordered[3 * whole + 2]
    return lower, upper
