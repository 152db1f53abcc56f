"""Everything that is known of one case: facts for a terminal and a page, and tables of its spans and ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator

from perfsuite.base.text import folded, printable
from perfsuite.base.units import format_seconds, plural, readable_unit, significant
from perfsuite.metrics import REGISTRY
from perfsuite.metrics.disturbance import disturbance
from perfsuite.record.describe import phrases
from perfsuite.record.result import Measurement, Result
from perfsuite.record.verdict import Verdict
from perfsuite.reports.document import Grid
from perfsuite.reports.families import share_of_peak
from perfsuite.reports.layout import lay_out

_UNSET: tuple[object, ...] = (None, "", False, {}, [], ())


def case_facts(result: Result) -> Iterator[tuple[str, str]]:
    """How a case was set up and timed: label and text."""
    parameters = {name: value for name, value in result.parameters.items() if value not in _UNSET}
    if parameters:
        yield "parameters", ", ".join(f"{name}={json.dumps(value, default=str)}" for name, value in parameters.items())
    measurement = result.measurement
    if measurement is not None and measurement.times_s and result.outcome == "measured":
        times = sorted(measurement.times_s)
        steady = "" if measurement.warmup_steady else "; the warm-up ended before the time per iteration was steady"
        median, least, most = (format_seconds(time_s) for time_s in (measurement.median_s, times[0], times[-1]))
        yield (
            "timed",
            f"{plural(len(times), 'sample')} of {plural(measurement.iterations, 'iteration')}, {measurement.backend}, "
            f"{measurement.process} processes: median {median}, {least} to {most}"
            f"{f'; disturbed: {reason}' if (reason := disturbance(result)) else ''}{steady}",
        )
    elif result.outcome == "measured":
        yield "timed", f"median {format_seconds(result.median_s)}"


def case_metrics(result: Result) -> Iterator[tuple[str, str]]:
    """Every metric of a case with its value, unit, share of the peak, and the interval where it has one."""
    values = {metric.name: metric.value for metric in result.metrics}
    intervals = {name: REGISTRY[name].interval or () for name in values if name in REGISTRY}
    ends = {end for interval in intervals.values() for end in interval}
    for metric in result.metrics:
        if metric.name in ends:
            continue
        if metric.value is None:
            yield metric.name, f"unknown: {metric.note}" if metric.note else "unknown"
            continue
        interval = (values.get(end) for end in intervals.get(metric.name, ()))
        ends_known = [significant(value, 2) for value in interval if value is not None]
        between = f" ({' to '.join(ends_known)})" if len(set(ends_known)) == 2 else ""
        figure = f"{significant(metric.value)}{between} {metric.unit}".strip()
        yield metric.name, f"{figure}  {share_of_peak(metric, result)}".strip()


def case_grids(measurement: Measurement) -> Iterator[Grid]:
    """Spans of a step and its ranks."""
    spans = tuple(
        (span.name, format_seconds(span.time_s), f"{span.count:g}", f"r{span.slowest_rank}")
        for span in measurement.spans
    )
    if spans:
        yield Grid(title="", columns=("span", "time", "count", "slowest"), rows=spans)
    name, unit = readable_unit([rank.max_rss_bytes for rank in measurement.ranks])
    ranks = tuple(
        (
            *(str(rank.rank), rank.device, str(rank.threads)),
            *map(format_seconds, (rank.median_s, rank.min_s, rank.max_s)),
            *(f"{rank.cpu_share:.0%}", significant(rank.max_rss_bytes / unit, 3)),
        )
        for rank in measurement.ranks
    )
    columns = ("rank", "device", "threads", "median", "least", "most", "CPU share", f"RSS\n{name}")
    yield Grid(title="", columns=columns, rows=ranks)


def case_lines(result: Result, verdict: Verdict | None, width: int) -> Iterator[str]:
    """All of it in lines for a terminal, the verdict last."""
    yield printable(result.case, 10_000)
    about = f"{result.platform}, ranks {result.world_size}, {result.outcome} {result.detail}".strip()
    facts = [f"{label}  {text}" for label, text in case_facts(result)]
    metrics = list(case_metrics(result))
    widest = max((len(name) for name, _ in metrics), default=0)
    for line in (about, *facts, *(f"{name.ljust(widest)}  {text}" for name, text in metrics)):
        yield from folded(f"  {printable(line, 2000)}", width, "    ")
    for grid in case_grids(result.measurement) if result.measurement is not None else ():
        yield from (f"  {line}" for line in lay_out(grid.columns, grid.rows, width - 2))
    for phrase in phrases(verdict) if verdict is not None else ():
        yield from folded(f"  {printable(phrase)}", width, "    ")
