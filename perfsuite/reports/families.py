"""The figures of cases for a screen and for the tiles of a page, and a line per family of training cases.

A disturbed figure is marked ``~``, has no share of a peak, and is neither a tile nor part of a scaling line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perfsuite.base.text import printable
from perfsuite.base.units import format_bytes, format_seconds, plural, readable_rate, significant
from perfsuite.metrics.disturbance import disturbance, is_oversubscribed
from perfsuite.metrics.spec import LAUNCH_BOUND, devices_used, on_every_device
from perfsuite.record.result import ABOVE_MEASURED_PEAK, Metric, Result
from perfsuite.reports.devices import burst
from perfsuite.reports.document import Tile, grouped
from perfsuite.reports.ids import short_name, test_of
from perfsuite.reports.scaling import Scaling, scalings

RATES = ("tflops_per_device", "tflops")
_PROCESSED = ("tokens_per_s_per_device", "samples_per_s_per_device", "samples_per_s")
OTHERS = "times"  # The family of cases whose work has no known amount, such as a function of the user's own.
MOST_PARTS = 60  # Parts of a line that are written out: more than a screen of any width takes.


FamilyLine = tuple[str, tuple[str, ...], int]
"""Family (training, scaling, pipelines or OTHERS), at most MOST_PARTS texts, and the number of further ones."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A metric of a result that has a value."""

    result: Result
    name: str
    value: float  # In the metric's unit, per device where a kernel ran on several devices at once.

    @property
    def metric(self) -> Metric:
        """The metric with its unit and peak."""
        return self.result.metric(self.name)

    @property
    def is_disturbed(self) -> bool:
        """Whether something else ran on the cores of the case."""
        return bool(disturbance(self.result))

    @property
    def text(self) -> str:
        """``694 GFLOPS``, ``~694 GFLOPS`` if it is disturbed."""
        return f"{'~' * self.is_disturbed}{_rate(self.value, self.metric.unit)}"

    @property
    def share(self) -> str:
        """``90 % measured``: the share of the peak, and the kind of the peak."""
        return share_of_peak(self.metric, self.result, with_peak=False)

    @property
    def burst(self) -> str:
        """``burst of 0.4 s`` for a rate that no power cap could lower yet; else empty."""
        return burst(self.result) if self.name in RATES else ""


_Parts = tuple[Iterable[str], int]  # Texts, which may be made one by one as they are asked for, and how many there are.


def family_lines(results: Iterable[Result]) -> list[FamilyLine]:
    """Return a line for every family that has a measured case."""
    measured = [result for result in results if result.outcome == "measured"]
    steps = _steps(measured)
    bubbles = [one for one in measured if "bubble_ratio" in one.values]
    bubbles.sort(key=lambda one: (one.values["bubble_ratio"], short_name(one.case)))
    families: dict[str, _Parts] = {
        "training": (map(_step, steps), len(steps)),
        "scaling": _scaling(measured),
        "pipelines": (map(_bubble, bubbles), len(bubbles)),
        OTHERS: _times(measured),
    }
    lines: list[FamilyLine] = []
    for family, (parts, count) in families.items():
        texts = tuple(itertools.islice(parts, MOST_PARTS))
        lines += [(family, texts, count - len(texts))] if texts else []
    return lines


def marked(result: Result, text: str) -> str:
    """Return the text of a figure, after ``~`` if the result is disturbed."""
    return f"~{text}" if text and disturbance(result) else text


def drawable(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """Return the results that a chart of times may have, and the note of a table that has all of them."""
    kept = [result for result in results if not disturbance(result)]
    left = len(results) - len(kept)
    return kept, [f"~ disturbed by other programs: {plural(left, 'case')}, not drawn"] if left else []


def share_of_peak(metric: Metric, result: Result | None = None, *, with_peak: bool = True) -> str:
    """Return ``90 % of measured 772 GFLOPS``, without the peak ``90 % measured``.

    Empty without a peak and for a disturbed ``result``; ``(peak exceeded)`` above a measured peak.
    """
    if metric.exceeds_measured_peak:
        return "(peak exceeded)"
    share = metric.share_of_peak
    if share is None or metric.peak is None:
        return f"({LAUNCH_BOUND})" if metric.note.startswith(LAUNCH_BOUND) else ""
    if result is not None and disturbance(result):
        return ""
    peak = f"of {metric.peak.kind} {_rate(metric.peak.value, metric.peak.unit)}" if with_peak else metric.peak.kind
    return f"{100 * share:.0f} % {peak}"


def _rate(value: float, unit: str) -> str:
    name, times = readable_rate([value], unit)
    return f"{significant(value * times, 3)} {name}"


def figure_of(result: Result, *names: str) -> Figure | None:
    """Return the first of these metrics that has a value; None without any."""
    for name in names:
        if name in result.values:
            value = result.values[name]
            if name == "tflops" and result.measurement is not None and on_every_device(result):  # the sum of all
                value /= devices_used(result.measurement)
            return Figure(result=result, name=name, value=value)
    return None


def best(pairs: Iterable[tuple[str, Figure | None]]) -> list[tuple[str, Figure]]:
    """Return the best figure under each name, the largest first; figures above their measured peak are last.

    A disturbed figure, and one without a peak such as that of a cache, is taken only if there is no other.
    """
    found: dict[str, Figure] = {}
    for name, figures in grouped((name, figure) for name, figure in pairs if figure is not None).items():
        figures.sort(key=lambda figure: -figure.value)
        with_peak = [one for one in figures if one.result.peak(one.name) is not None] or figures
        found[name] = next((one for one in with_peak if not one.is_disturbed), with_peak[0])
    return sorted(found.items(), key=lambda item: (item[1].metric.exceeds_measured_peak, -item[1].value))


def _is_step(result: Result) -> bool:
    return bool(result.work.tokens or result.work.samples)


def is_kernel(result: Result) -> bool:
    """Whether a case is a kernel that computes, neither a training step nor a collective."""
    return bool(result.work.flops) and not _is_step(result) and not result.work.collective


def memory_name(result: Result) -> str:
    """Return the name of a memory kernel, or the direction of a copy between host and device."""
    if result.work.memory_path != "device":
        return result.work.memory_path.replace("_", " ")
    return printable(result.workload.rpartition(":")[2].removeprefix("Memory").lower() or "device", 20)


def _steps(results: Sequence[Result]) -> list[Figure]:
    """Rates of steps: the best of each model first, tokens before samples, disturbed ones last."""
    rates = [found for one in results if _is_step(one) and (found := figure_of(one, *_PROCESSED)) is not None]
    rates.sort(key=lambda rate: (rate.is_disturbed, rate.name != _PROCESSED[0], -rate.value))
    leading: dict[str, str] = {}
    for rate in rates:
        leading.setdefault(str(rate.result.parameters.get("model")), rate.result.case)
    return sorted(rates, key=lambda rate: rate.result.case not in leading.values())


def _step(rate: Figure) -> str:
    return ", ".join(filter(None, (f"{short_name(rate.result.case)} {_per_device(rate)}", _mfu(rate))))


def _per_device(rate: Figure) -> str:
    scaled = f"{significant(rate.value / 1e3, 3)}k" if rate.value >= 1e4 else significant(rate.value, 3)
    unit = f"{rate.metric.unit}{'/device' if rate.metric.convention == 'per device' else ''}"
    return f"{'~' * rate.is_disturbed}{scaled} {unit}"


def _mfu(rate: Figure) -> str:
    metric = next((metric for metric in rate.result.metrics if metric.name == "mfu_percent"), None)
    if metric is None or rate.is_disturbed:
        return ""
    if metric.note == ABOVE_MEASURED_PEAK:
        return "MFU (peak exceeded)"
    kind = f" of {metric.peak.kind}" if metric.peak is not None else ""
    return "" if metric.value is None else f"MFU {significant(metric.value, 2)} %{kind}"


def _scaling(results: Sequence[Result]) -> _Parts:
    """A part for each series, the longest first; doubtful series are counted and left out."""
    series = grouped((scaling.point.series, scaling) for scaling in scalings(results).values())
    doubts = {key: next((one.doubt for one in members if one.doubt), "") for key, members in series.items()}
    sound = sorted((series[key] for key, doubt in doubts.items() if not doubt), key=lambda members: -len(members))
    texts: Iterable[str] = map(_series, sound)
    if len(sound) < len(series):
        first = next(filter(None, doubts.values()))
        texts = itertools.chain(texts, [f"{len(series) - len(sound)} of {len(series)} left out: {first}"])
    return texts, len(sound) + (len(sound) < len(series))


def _series(members: Sequence[Scaling]) -> str:
    ranks = "/".join(str(one.point.ranks) for one in members)
    shares = " ".join(f"{100 * one.efficiency:.0f}" for one in members)
    shared = " (ranks share devices)" if any(one.shared for one in members[1:]) else ""
    return f"{short_name(members[0].point.series[0])} {ranks} ranks: {shares} %{shared}"


def _bubble(result: Result) -> str:
    simulated = result.values.get("simulated_bubble_ratio")
    own = f" (own durations {100 * simulated:.0f} %)" if simulated is not None else ""
    bubble = marked(result, f"{100 * result.values['bubble_ratio']:.0f} % bubble")
    return f"{short_name(result.case)} {bubble}{own}"


def _times(results: Sequence[Result]) -> _Parts:
    """Return the median time of each case that no other family has a figure of."""
    own = [one for one in results if not (one.work.flops or one.work.collective or one.work.memory_path)]
    own = [one for one in own if not _is_step(one) and not {"bubble_ratio", "capacity_gib"} & set(one.values)]
    return (f"{short_name(one.case)} {marked(one, format_seconds(one.median_s, 3))}" for one in own), len(own)


def tiles(results: Iterable[Result]) -> Iterator[Tile]:
    """Yield the figures of a page's first lines: compute in each dtype, a memory, the largest collective, a step.

    Disturbed figures are left out.
    """
    measured = [result for result in results if result.outcome == "measured"]
    kernels = ((one.work.dtype, figure_of(one, *RATES)) for one in measured if is_kernel(one))
    shown = [(f"{dtype} compute", one) for dtype, one in best(kernels)]
    moved = best((memory_name(one), figure_of(one, "gb_per_s")) for one in measured if one.work.memory_path)
    shown += [(f"memory {name}", one) for name, one in moved[:1]]
    buses = [found for one in measured if (found := figure_of(one, "busbw_gb_per_s")) and one.work.message_bytes]
    buses = [one for one in buses if one.result.work.collective == "all_reduce"] or buses
    buses = [one for one in buses if not is_oversubscribed(one.result)] or buses
    if buses:
        largest = max(buses, key=lambda one: (one.result.world_size, one.result.work.message_bytes))
        work, ranks = largest.result.work, plural(largest.result.world_size, "rank")
        shown.append((f"{work.collective}, {ranks}, {format_bytes(int(work.message_bytes))}", largest))
    for label, one in shown:
        if not one.is_disturbed:
            note = share_of_peak(one.metric, one.result)
            note = f"{note} ({one.burst})".strip() if one.burst else note
            bus = " bus" if one.name == "busbw_gb_per_s" else ""
            yield label, f"{one.text}{bus}", note
    for rate in _steps(measured)[:1]:
        if not rate.is_disturbed:
            result = rate.result
            label = f"{result.parameters.get('model', test_of(result.case))}, {plural(result.world_size, 'rank')}"
            yield label, _per_device(rate), _mfu(rate)
