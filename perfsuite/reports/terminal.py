"""The tables at the end of a run, as lines of plain text."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.text import folded, listed, printable
from perfsuite.base.units import format_seconds, plural, readable_rate, readable_unit, significant
from perfsuite.metrics import REGISTRY, AlphaBeta, fit_alpha_beta, is_headline
from perfsuite.metrics.disturbance import disturbance
from perfsuite.record.describe import phrases
from perfsuite.record.result import ABOVE_MEASURED_PEAK, ClockFacts, Measurement, Metric, Peak, Result
from perfsuite.record.verdict import Verdict
from perfsuite.reports.devices import BURST_NOTE, burst, every_device_grid
from perfsuite.reports.document import Grid
from perfsuite.reports.families import marked, share_of_peak
from perfsuite.reports.layout import grid_lines, lay_out
from perfsuite.reports.pairs import pair_grids
from perfsuite.reports.pipeline import pipeline_grids
from perfsuite.reports.scaling import scaling_grid, scalings

_STEADY = 1e-3
_BURST_RATES = frozenset({"tflops", "tflops_per_device", "mfu_percent"})
"""Rates that are larger before a power cap lowers the clock."""
SAME_AS_MEDIAN = "latency_us"  # The median column shows it already.


def metric_tables(
    results: Iterable[Result],
    width: int | None = None,
    *,
    verdicts: Mapping[str, str] = MappingProxyType({}),
    reused: Collection[str] = (),
) -> list[str]:
    """Return a table per test file and family of metrics: cases, times, metrics and ranks.

    ``verdicts``: the word of the gate by node id; ``reused``: cases from the journal that the run resumed.  Settings
    that are equal in all rows are printed once above the table.
    """
    families: dict[tuple[str, tuple[str, ...]], list[Result]] = {}
    for result in results:
        file = result.case.partition("::")[0]
        names = tuple(metric.name for metric in result.metrics if is_headline(metric.name))
        if result.outcome == "out_of_memory":  # it has no metrics: put it in the table of its file
            names = next((key[1] for key in families if key[0] == file), ())
        if result.outcome != "smoke":
            families.setdefault((file, names), []).append(result)
    lines: list[str] = []
    above = ""
    for (file, names), members in families.items():
        lines += [""] if file == above else ["", file]
        above = file
        shown = [name for name in names if name != SAME_AS_MEDIAN]
        lines += [*_table(members, shown, width, verdicts, reused), *_notes(members, reused)]
    return lines


_SETTINGS = ("ranks", "spread\nslowest", "last\nby", "samples", "verdict")
"""Columns that are printed once above a table if they are equal in all rows."""
Cell = Callable[[Result], str]


def _table(
    rows: Sequence[Result],
    names: Sequence[str],
    width: int | None,
    verdicts: Mapping[str, str],
    reused: Collection[str],
) -> list[str]:
    columns: list[tuple[str, Cell]] = [("ranks", lambda row: str(row.world_size)), ("median", _median)]
    # A training step's share of the peak is its MFU: one column under the name that people look for.
    share = "MFU" if any(_find(row, "mfu_percent") for row in rows) else "of\npeak"
    for name in names:
        unit, scale = _unit(name, rows)
        columns.append((_heading(name, unit), functools.partial(_value, name=name, scale=scale)))
        columns.append((share, functools.partial(_share, name=name)))
    columns += [
        ("spread\nslowest", _spread),
        ("last\nby", _late),
        ("samples", _samples),
        ("verdict", lambda row: verdicts.get(row.case, "")),
    ]
    headings, cells = ["case"], [[row.name + (" *" if row.case in reused else "") for row in rows]]
    equal = []
    for heading, cell in columns:
        column = [cell(row) for row in rows]
        if heading in _SETTINGS and len(rows) > 1 and column[0] and len(set(column)) == 1:
            equal.append(f"{' '.join(heading.split())} {column[0]}")
        elif any(column):
            headings.append(heading)
            cells.append(column)
    above = [f"  in every row: {', '.join(equal)}"] if equal else []
    return [*above, *lay_out(headings, [list(row) for row in zip(*cells, strict=True)], width)]


def _unit(name: str, rows: Sequence[Result]) -> tuple[str, float]:
    metrics = [metric for row in rows if (metric := _find(row, name))]
    unit = next((metric.unit for metric in metrics), "")
    return readable_rate([metric.value or 0.0 for metric in metrics], unit)


def _heading(name: str, unit: str) -> str:
    """Return the name of a metric and its unit below: ``busbw``, ``GB/s``."""
    if name.endswith("_per_device"):
        return f"{unit}\nper device"
    spec = REGISTRY[name].unit.lower().replace("/", "_per_") if name in REGISTRY else unit
    quantity = name.removesuffix(spec).rstrip("_").replace("_", " ")
    return f"{quantity}\n{unit}" if quantity else unit


def _find(row: Result, name: str) -> Metric | None:
    return next((metric for metric in row.metrics if metric.name == name), None)


def _value(row: Result, *, name: str, scale: float = 1.0) -> str:
    metric = _find(row, name)
    if metric is None:
        return ""
    return "-" if metric.value is None else significant(metric.value * scale, _digits(row))


def _share(row: Result, *, name: str) -> str:
    metric = _find(row, name)
    if metric is not None and metric.is_above_measured_peak:
        return ABOVE_MEASURED_PEAK
    share = metric.share_of_peak if metric and not disturbance(row) else None
    return "" if share is None else f"{share:.1%}"


def _median(row: Result) -> str:
    if row.outcome == "out_of_memory":
        return row.detail
    return marked(row, format_seconds(row.median_s, _digits(row)))


def _digits(result: Result) -> int:
    """Return 4 digits if the middle half of the samples agrees to a thousandth, else 3."""
    times = sorted(result.measurement.times_s) if result.measurement else []
    middle = times[len(times) // 4 : len(times) - len(times) // 4]
    return 4 if not middle or middle[-1] - middle[0] <= _STEADY * middle[0] else 3


def _spread(row: Result) -> str:
    seen = row.measurement
    return f"{seen.rank_spread:.1%} r{seen.slowest_rank}" if seen and seen.world_size > 1 else ""


def _late(row: Result) -> str:
    arrival = row.measurement.arrival if row.measurement else None
    return f"r{arrival.late_rank} {format_seconds(float(f'{arrival.lag_s:.2g}'))}" if arrival else ""


def _samples(row: Result) -> str:
    seen = row.measurement
    return f"{len(seen.times_s)} x {seen.iterations}{'' if seen.warmup_steady else ' ^'}" if seen else ""


def _notes(rows: Sequence[Result], reused: Collection[str]) -> list[str]:
    cases: dict[str, list[str]] = {}
    for row in rows:
        for metric in row.metrics:
            if metric.note and metric.name != SAME_AS_MEDIAN and is_headline(metric.name):
                cases.setdefault(f"{metric.name}: {metric.note}", []).append(row.name)
            if metric.name in _BURST_RATES and burst(row):
                cases.setdefault(f"{metric.name}: {BURST_NOTE}", []).append(row.name)
    lines = [f"  {note}{'' if len(names) == len(rows) else f' ({listed(names, 1)})'}" for note, names in cases.items()]
    hidden = {metric.name for row in rows for metric in row.metrics if not is_headline(metric.name)}
    if hidden:
        more = plural(len(hidden), "more metric")
        lines.append(f"  {more} per case: perfsuite show --case, --benchmark-json and --junitxml have them")
    lines += [
        f"  {purpose} ({row.name}): {why}"
        for row in rows
        if row.measurement
        for purpose, why in row.measurement.failed_builds.items()
    ]
    if any(row.case in reused for row in rows):
        lines.append("  * from the journal of the run that this one resumes")
    reasons = [reason for row in rows if (reason := disturbance(row))]
    if reasons:
        lines.append(f"  ~ disturbed, without a share of the peak: {plural(len(reasons), 'case')}, as {reasons[0]}")
    if any(row.measurement and not row.measurement.warmup_steady for row in rows):
        lines.append("  ^ the warm-up ended before the time per iteration was steady")
    return lines


def peak_lines(results: Iterable[Result]) -> list[str]:
    """Return a line for each peak that a share is of, with its source."""
    peaks: dict[str, Peak] = {}
    for result in results:
        for metric in result.metrics:
            if metric.peak is not None:
                what = result.work.dtype if result.work.flops else result.work.memory_path or "link"
                peaks.setdefault(f"{what.replace('_', ' ')} {metric.peak.value:.4g} {metric.peak.unit}", metric.peak)
    return [
        f"peak {text} ({'' if peak.source.startswith(peak.kind) else f'{peak.kind}: '}{peak.source})"
        for text, peak in peaks.items()
    ]


def clock_lines(results: Iterable[Result]) -> list[str]:
    """Return a line for each clock: the worst resolution and cost that a rank measured."""
    clocks: dict[str, list[ClockFacts]] = {}
    for result in results:
        if result.measurement is not None:
            clocks.setdefault(result.measurement.clock.name, []).append(result.measurement.clock)
    return [
        f"clock {name}: resolution {format_seconds(max(clock.resolution_s for clock in facts))}, "
        f"reading it adds {format_seconds(max(clock.cost_s for clock in facts))} to a sample"
        for name, facts in clocks.items()
    ]


def tables(
    results: Sequence[Result], width: int, *, verdicts: Mapping[str, str], reused: Collection[str] = ()
) -> list[str]:
    """Return all tables: metrics by file, fits of collectives, pairs, devices, scaling and pipelines."""
    grids = [
        fits_grid(fit_collectives(results)),
        *pair_grids(results),
        every_device_grid(results),
        scaling_grid(scalings(results).values()),
        *pipeline_grids(results),
    ]
    return [*metric_tables(results, width, verdicts=verdicts, reused=reused), *grid_lines(grids, width)]


_UNSET: tuple[object, ...] = (None, "", False, {}, [], ())


_UNEVEN = 1.25  # A mean above so many medians is printed: the median is not the time of a loop.


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
        mean_s = statistics.fmean(times)
        mean = f" (mean {format_seconds(mean_s)})" if mean_s > _UNEVEN * measurement.median_s else ""
        yield (
            "timed",
            f"{plural(len(times), 'sample')} of {plural(measurement.iterations, 'iteration')}, {measurement.backend}, "
            f"{measurement.process} processes: median {median}{mean}, {least} to {most}"
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


LEAST_SIZES = 3


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """The fit of one collective on so many ranks in one dtype."""

    collective: str
    world_size: int
    dtype: str
    sizes: int  # Different message sizes that were measured.
    fit: AlphaBeta | None  # None where no straight line can be fitted; ``reason`` then says why.
    reason: str = ""

    @property
    def busbw_limit_gb_per_s(self) -> float | None:
        """busbw that large messages approach, GB/s."""
        return None if self.fit is None else self.fit.beta_gb_per_s * busbw_factor(self.collective, self.world_size)


def fit_collectives(results: Iterable[Result]) -> tuple[CollectiveFit, ...]:
    """A fit per collective, world size and dtype that was measured at three sizes or more, in order of appearance."""
    points: dict[tuple[str, int, str], dict[float, float]] = {}
    for result in results:
        if result.outcome == "measured" and result.work.collective and result.work.message_bytes:
            key = (result.work.collective, result.world_size, result.work.dtype)
            points.setdefault(key, {})[result.work.message_bytes] = result.median_s
    fits = []
    for (name, ranks, dtype), times in points.items():
        if len(times) >= LEAST_SIZES:
            fit, reason = None, ""
            try:
                fit = fit_alpha_beta(list(times.items()))
            except ValueError as error:
                reason = str(error)
            one = CollectiveFit(
                collective=name, world_size=ranks, dtype=dtype, sizes=len(times), fit=fit, reason=reason
            )
            fits.append(one)
    return tuple(fits)


def fits_grid(fits: Sequence[CollectiveFit]) -> Grid:
    """Return the fits with the standard errors of their parameters."""
    names = ("ranks", "dtype", "alpha\nus", "beta\nGB/s", "busbw\nlimit", "misfit", "sizes")
    rows = []
    for one in fits:
        fit, limit = one.fit, one.busbw_limit_gb_per_s
        figures = ("-", "-", "-", one.reason)
        if fit is not None and limit is not None:
            figures = (
                f"{fit.alpha_us:.4g} ±{fit.alpha_error_us:.2g}",
                f"{fit.beta_gb_per_s:.4g} ±{fit.beta_error_gb_per_s:.2g}",
                f"{limit:.4g}",
                f"{fit.misfit:.0%}{'' if fit.trusted else ' not a line'}",
            )
        rows.append((one.collective, str(one.world_size), one.dtype, *figures, str(one.sizes)))
    return Grid(title="", columns=("t(S) = alpha + S / beta", *names), rows=tuple(rows))
