"""Lines on devices during timing: throttled ones, the course of sustained runs, and outliers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from perfsuite.base.units import format_seconds, plural, significant
from perfsuite.metrics.spec import on_every_device
from perfsuite.record.describe import held_down_elsewhere
from perfsuite.record.result import RankFacts, Result
from perfsuite.record.step import DeviceLook
from perfsuite.reports.document import Grid, grouped
from perfsuite.statistics.robust import median

POWER_CAPPED_S = 2.0
"""Load after which a device runs as its power cap lets it: NVML averages power over one second (nvml.h)."""
BURST_NOTE = f"less than {POWER_CAPPED_S:g} s of load and no power cap seen: bursts; --perf-sustain=15s times longer"
_READINGS = (("clock", "clock_mhz", "MHz"), ("power", "power_w", "W"), ("temperature", "temperature_c", "°C"))


def throttled_lines(results: Iterable[Result]) -> list[str]:
    """Return a line for every case during which a device was throttled."""
    lines = []
    for case, measurement in ((result.case, result.measurement) for result in results if result.measurement):
        for device, looks in grouped((look.device, look) for look in measurement.looks).items():
            if reasons := Counter(reason for look in looks for reason in look.throttle or ()):
                held = f"{sum(bool(look.throttle) for look in looks)} of {plural(len(looks), 'look')}"
                why = ", ".join(reason for reason, _ in reasons.most_common())
                course = _course(looks, "clock", "clock_mhz", "MHz")
                lines.append(f"{case}: device {device} was held down ({why}) in {held} while it was timed{course}")
        if elsewhere := held_down_elsewhere(measurement.ranks):
            lines.append(f"{case}: {elsewhere} as its last sample ended")
    return lines


def burst(result: Result) -> str:
    """Return ``burst of 0.4 s`` for a device that was timed before its power cap could lower the clock; else empty.

    Without a power cap among the looks, also without telemetry, less than POWER_CAPPED_S of load is a burst.
    """
    measurement = result.measurement
    if measurement is None or measurement.smoke or result.simulated or measurement.ranks[0].device == "cpu":
        return ""
    load_s = measurement.warmup_s + measurement.iterations * sum(measurement.times_s)
    capped = any("power cap" in (look.throttle or ()) for look in measurement.looks)
    return "" if capped or load_s >= POWER_CAPPED_S else f"burst of {format_seconds(load_s, 2)}"


def sustained_lines(results: Iterable[Result]) -> list[str]:
    """Return lines on each case: the medians of its first and last third, and the course of each device."""
    lines = []
    for result in results:
        measurement = result.measurement
        if measurement is None or measurement.smoke or not measurement.times_s:
            continue
        times = measurement.times_s
        third = max(1, len(times) // 3)
        first_s, last_s = statistics.median(times[:third]), statistics.median(times[-third:])
        lines.append(
            f"{result.case}: {plural(len(times), 'sample')}, median of the first third {format_seconds(first_s)}, "
            f"of the last {format_seconds(last_s)} ({last_s / first_s - 1:+.1%})"
        )
        for device, looks in grouped((look.device, look) for look in measurement.looks).items():
            courses = "".join(_course(looks, *reading) for reading in _READINGS)
            lines.append(f"  device {device}{courses or ': nothing can be read (perfsuite env says what is missing)'}")
    return lines


def _course(looks: Sequence[DeviceLook], name: str, field: str, unit: str) -> str:
    values = [value for look in looks if (value := getattr(look, field)) is not None]
    if not values:
        return ""
    ends = f"{significant(values[0])} to {significant(values[-1])} {unit}"
    return f", {name} {ends} (lowest {significant(min(values))}, highest {significant(max(values))})"


_OUT_OF_LINE = 0.02  # Least relative distance of an outlier from the median device.
_DEVIATIONS = 4.0
_OF_NORMAL = 1.4826  # Standard deviations in a median absolute deviation of normal values.
_FEWEST = 3  # Devices that are needed to name an outlier.


def every_device_grid(results: Iterable[Result]) -> Grid:
    """Return a row for every case on several devices: fastest, slowest, and outliers."""
    rows = []
    for result in filter(on_every_device, results):
        assert result.measurement is not None
        ranks = result.measurement.ranks
        middle_s = median([rank.median_s for rank in ranks])
        several = len({rank.host for rank in ranks}) > 1

        def label(rank: RankFacts, middle_s: float = middle_s, several: bool = several) -> str:
            name = f"{rank.host} {rank.device}" if several else rank.device
            return f"{name} {format_seconds(rank.median_s, 3)} ({rank.median_s / middle_s - 1:+.1%})"

        ends = [label(pick(ranks, key=lambda rank: rank.median_s)) for pick in (min, max)]
        odd = ", ".join(map(label, outliers(ranks)))
        spread = f"{result.measurement.rank_spread:.1%}"
        rows.append((result.name, str(len(ranks)), format_seconds(middle_s, 3), *ends, spread, odd))
    columns = ("every device", "devices", "median", "fastest", "slowest", "spread", "out of line")
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    cells = tuple(tuple(row[index] for index in kept) for row in rows)
    return Grid(title="", columns=tuple(columns[index] for index in kept), rows=cells)


def outliers(ranks: Iterable[RankFacts]) -> list[RankFacts]:
    """Return ranks that are 2 % and four robust standard deviations from the median of all, the farthest first."""
    all_ranks = list(ranks)
    if len(all_ranks) < _FEWEST:
        return []
    middle_s = median([rank.median_s for rank in all_ranks])
    sigma_s = _OF_NORMAL * median([abs(rank.median_s - middle_s) for rank in all_ranks])
    allowed_s = max(_OUT_OF_LINE * middle_s, _DEVIATIONS * sigma_s)
    odd = [rank for rank in all_ranks if abs(rank.median_s - middle_s) > allowed_s]
    return sorted(odd, key=lambda rank: -abs(rank.median_s - middle_s))
