"""A line per family of cases: its best figure, the share of the peak with its kind, the series over sizes or ranks."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.text import printable
from perfsuite.base.units import format_bytes, format_seconds, plural, readable_rate, significant
from perfsuite.metrics.spec import LAUNCH_BOUND
from perfsuite.record.result import ABOVE_MEASURED_PEAK, Metric, Result
from perfsuite.reports.alpha_beta import fit_collectives
from perfsuite.reports.devices import burst
from perfsuite.reports.document import Tile
from perfsuite.reports.ids import short_name, test_of
from perfsuite.reports.scaling import Scaling, scalings

_RATES = ("tflops_per_device", "tflops")
_PROCESSED = ("tokens_per_s_per_device", "samples_per_s_per_device", "samples_per_s")
OTHERS = "times"
"""The family of cases whose work has no known amount, such as a function of the user's own."""
MOST_PARTS = 60
"""Parts of a line that are written out: more than a screen of any width takes."""


@dataclass(frozen=True, kw_only=True)
class FamilyLine:
    """What one family of cases did."""

    family: str
    """compute, memory, collectives, training, scaling, pipelines or OTHERS."""
    parts: tuple[str, ...]
    """Each whole by itself, at most MOST_PARTS; a screen puts as many on a line as fit."""
    more: int = 0
    """How many there are beyond them."""


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """A metric with a value; what else is known of it is decoded only where it is shown."""

    result: Result
    name: str
    value: float

    @property
    def metric(self) -> Metric:
        """All of it."""
        return self.result.metric(self.name)

    @property
    def figure(self) -> str:
        """``694 GFLOPS``."""
        return _rate(self.value, self.metric.unit)

    @property
    def note(self) -> str:
        """``90 % of measured 772``, and whether it was a burst."""
        share = share_of_peak(self.metric).removesuffix(self.figure.partition(" ")[2]).strip()
        short = burst(self.result) if self.name in _RATES else ""
        return " ".join(filter(None, (share, f"({short})" if short else "")))

    @property
    def told(self) -> str:
        """``694 GFLOPS 90 % of measured 772``."""
        return f"{self.figure} {self.note}".strip()


_Parts = tuple[Iterable[str], int]
"""Texts, which may be made one by one as they are asked for, and how many there are."""


def family_lines(results: Iterable[Result]) -> list[FamilyLine]:
    """A line for every family that has a measured case."""
    measured = [result for result in results if result.outcome == "measured"]
    families: dict[str, _Parts] = {
        "compute": _written(_compute(measured)),
        "memory": _written(_memory(measured)),
        "collectives": _written(_collectives(measured)),
        "training": _training(measured),
        "scaling": _scaling(measured),
        "pipelines": _pipelines(measured),
        OTHERS: _times(measured),
    }
    lines = []
    for family, (parts, count) in families.items():
        told = tuple(itertools.islice(parts, MOST_PARTS))
        lines += [FamilyLine(family=family, parts=told, more=count - len(told))] if told else []
    return lines


def _written(parts: Iterable[str]) -> _Parts:
    """Of families that have a few parts at any number of cases."""
    texts = tuple(parts)
    return texts, len(texts)


def share_of_peak(metric: Metric) -> str:
    """``90 % of measured 772``; of what is above a measured peak, which was none, never a figure."""
    if metric.exceeds_measured_peak:
        return "(peak exceeded)"
    share = metric.share_of_peak
    if share is None or metric.peak is None:
        return f"({LAUNCH_BOUND})" if metric.note.startswith(LAUNCH_BOUND) else ""
    return f"{100 * share:.0f} % of {metric.peak.kind} {_rate(metric.peak.value, metric.peak.unit)}"


def _rate(value: float, unit: str) -> str:
    name, times = readable_rate([value], unit)
    return f"{significant(value * times, 3)} {name}"


def _found(result: Result, *names: str) -> _Figure | None:
    """The first of these metrics that has a value."""
    values = result.values
    for name in names:
        if name in values:
            return _Figure(result=result, name=name, value=values[name])
    return None


def _best(pairs: Iterable[tuple[str, _Figure | None]]) -> list[tuple[str, _Figure]]:
    """The best figure under each name, the largest first, those above what was taken for their peak last.

    One without a peak, as of a cache, only where no other is.
    """
    named: dict[str, list[_Figure]] = defaultdict(list)
    for name, figure in pairs:
        if figure is not None:
            named[name].append(figure)
    best: dict[str, _Figure] = {}
    for name, figures in named.items():
        figures.sort(key=lambda figure: -figure.value)
        best[name] = next((one for one in figures if one.result.peak(one.name) is not None), figures[0])
    return sorted(best.items(), key=lambda item: (item[1].metric.exceeds_measured_peak, -item[1].value))


def _is_step(result: Result) -> bool:
    return bool(result.work.tokens or result.work.samples)


def _computes(result: Result) -> bool:
    return bool(result.work.flops) and not _is_step(result) and not result.work.collective


def _compute(results: Sequence[Result]) -> Iterator[str]:
    told = [(one.work.dtype, _square(one.parameters), _found(one, *_RATES)) for one in filter(_computes, results)]
    yield from (f"{name} {one.told}" for name, one in _best((dtype, rate) for dtype, _, rate in told))
    series: dict[str, dict[int, _Figure]] = defaultdict(dict)
    for dtype, size, rate in told:
        if rate is not None and size and (size not in series[dtype] or rate.value > series[dtype][size].value):
            series[dtype][size] = rate
    for dtype, by_size in series.items():
        if len(by_size) > 1:
            yield f"{dtype} {_over_sizes(by_size)}"


def _square(parameters: Mapping[str, Any]) -> int:
    """Side of a square product; 0 of what is none."""
    sides = {parameters.get(name) for name in ("m", "k", "n")}
    side = sides.pop()
    return side if not sides and isinstance(side, int) else 0


def _over_sizes(by_size: Mapping[int, _Figure]) -> str:
    """``512/1024 square: 14.7 20 GFLOPS``."""
    sizes = sorted(by_size)
    unit, times = readable_rate([by_size[size].value for size in sizes], by_size[sizes[0]].metric.unit)
    figures = " ".join(significant(by_size[size].value * times, 3) for size in sizes)
    return f"{_counts(sizes)} square: {figures} {unit}"


def _memory(results: Sequence[Result]) -> Iterator[str]:
    held = (one for one in results if not one.work.memory_path)
    for name, one in (*_moved(results), *_best(("capacity", _found(one, "capacity_gib")) for one in held)):
        yield f"{name} {one.told}"


def _moved(results: Sequence[Result]) -> list[tuple[str, _Figure]]:
    return _best((_of_memory(one), _found(one, "gb_per_s")) for one in results if one.work.memory_path)


def _of_memory(result: Result) -> str:
    """What streams, or which way a copy goes."""
    if result.work.memory_path != "device":
        return result.work.memory_path.replace("_", " ")
    return printable(result.workload.rpartition(":")[2].removeprefix("Memory").lower() or "device", 20)


def _collectives(results: Sequence[Result]) -> Iterator[str]:
    series: dict[tuple[str, str], dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    barriers: dict[int, float] = {}
    for result in results:
        work = result.work
        busbw = result.values.get("busbw_gb_per_s") if work.collective else None
        if work.collective and work.message_bytes and busbw is not None:
            sizes = series[work.collective, work.dtype][work.message_bytes]
            sizes[result.world_size] = max(busbw, sizes.get(result.world_size, 0.0))
        elif work.collective:
            barriers[result.world_size] = result.median_s
    fits = {(fit.collective, fit.dtype, fit.world_size): fit.fit for fit in fit_collectives(results)}
    for (name, dtype), by_size in series.items():
        size = max(by_size)
        ranks = sorted(by_size[size])
        unit, times = readable_rate([by_size[size][count] for count in ranks], "GB/s")
        figures = " ".join(significant(by_size[size][count] * times, 3) for count in ranks)
        known = [fits.get((name, dtype, count)) for count in ranks]
        alphas = [format_seconds(fit.alpha_us / 1e6, 2) if fit else "?" for fit in known]
        alpha = f", alpha {' '.join(alphas)}" if any(known) else ""
        told = f"{format_bytes(int(size))}, {_counts(ranks)} ranks: {figures} {unit} bus{alpha}"
        yield f"{name} {dtype} {told}"
    if barriers:
        counts = sorted(barriers)
        times_s = " ".join(format_seconds(barriers[count], 2) for count in counts)
        yield f"barrier {_counts(counts)} ranks: {times_s}"


def _counts(ranks: Sequence[int]) -> str:
    return "/".join(map(str, ranks))


def _training(results: Sequence[Result]) -> _Parts:
    """The best step of each model, then the others."""
    told = _steps(results)
    return map(_step, told), len(told)


def _steps(results: Sequence[Result]) -> list[_Figure]:
    """Rates of steps: the best of each model first, tokens before samples."""
    rates = [found for one in results if _is_step(one) and (found := _found(one, *_PROCESSED)) is not None]
    rates.sort(key=lambda rate: (rate.name != _PROCESSED[0], -rate.value))
    best: dict[str, str] = {}
    for rate in rates:
        best.setdefault(str(rate.result.parameters.get("model")), rate.result.case)
    return sorted(rates, key=lambda rate: rate.result.case not in best.values())


def _step(rate: _Figure) -> str:
    told = (f"{short_name(rate.result.case)} {_per_device(rate.metric, rate.value)}", _mfu(rate.result))
    return ", ".join(filter(None, told))


def _per_device(metric: Metric, value: float) -> str:
    scaled = f"{significant(value / 1e3, 3)}k" if value >= 1e4 else significant(value, 3)
    return f"{scaled} {metric.unit}{'/device' if metric.convention == 'per device' else ''}"


def _mfu(result: Result) -> str:
    metric = next((metric for metric in result.metrics if metric.name == "mfu_percent"), None)
    if metric is None:
        return ""
    if metric.note == ABOVE_MEASURED_PEAK:
        return "MFU (peak exceeded)"
    kind = f" of {metric.peak.kind}" if metric.peak is not None else ""
    return "" if metric.value is None else f"MFU {significant(metric.value, 2)} %{kind}"


def _scaling(results: Sequence[Result]) -> _Parts:
    """A part for each series, the longest first."""
    series: dict[tuple[str, ...], list[Scaling]] = defaultdict(list)
    for scaling in scalings(results).values():
        series[scaling.point.series].append(scaling)
    ordered = sorted(series.values(), key=lambda members: -len(members))
    return map(_series, ordered), len(ordered)


def _series(members: Sequence[Scaling]) -> str:
    ranks = _counts([one.point.ranks for one in members])
    shares = " ".join(f"{100 * one.efficiency:.0f}" for one in members)
    shared = " (ranks share devices)" if any(one.shared for one in members[1:]) else ""
    return f"{short_name(members[0].point.series[0])} {ranks} ranks: {shares} %{shared}"


def _pipelines(results: Sequence[Result]) -> _Parts:
    """The least idle first."""
    bubbles = [one for one in results if "bubble_ratio" in one.values]
    bubbles.sort(key=lambda one: (one.values["bubble_ratio"], short_name(one.case)))
    return map(_bubble, bubbles), len(bubbles)


def _bubble(result: Result) -> str:
    simulated = result.values.get("simulated_bubble_ratio")
    own = f" (own durations {100 * simulated:.0f} %)" if simulated is not None else ""
    return f"{short_name(result.case)} {100 * result.values['bubble_ratio']:.0f} % bubble{own}"


def _times(results: Sequence[Result]) -> _Parts:
    """Return the median time of each case that no other family has a figure of."""
    own = [one for one in results if not (one.work.flops or one.work.collective or one.work.memory_path)]
    own = [one for one in own if not _is_step(one) and not {"bubble_ratio", "capacity_gib"} & set(one.values)]
    return (f"{short_name(one.case)} {format_seconds(one.median_s, 3)}" for one in own), len(own)


def tiles(results: Iterable[Result]) -> Iterator[Tile]:
    """The figures that a page begins with: compute in each dtype, a memory, the largest collective, a step."""
    measured = [result for result in results if result.outcome == "measured"]
    kernels = ((one.work.dtype, _found(one, *_RATES)) for one in measured if _computes(one))
    shown = [(f"{dtype} compute", one) for dtype, one in _best(kernels)]
    shown += [(f"memory {name}", one) for name, one in _moved(measured)[:1]]
    yield from (Tile(label=label, figure=one.figure, note=one.note) for label, one in shown)
    buses = [found for one in measured if (found := _found(one, "busbw_gb_per_s")) and one.work.message_bytes]
    buses = [one for one in buses if one.result.work.collective == "all_reduce"] or buses
    if buses:
        largest = max(buses, key=lambda one: (one.result.world_size, one.result.work.message_bytes))
        work, ranks = largest.result.work, plural(largest.result.world_size, "rank")
        label = f"{work.collective}, {ranks}, {format_bytes(int(work.message_bytes))}"
        yield Tile(label=label, figure=f"{largest.figure} bus", note=largest.note)
    for rate in _steps(measured)[:1]:
        result = rate.result
        label = f"{result.parameters.get('model', test_of(result.case))}, {plural(result.world_size, 'rank')}"
        yield Tile(label=label, figure=_per_device(rate.metric, rate.value), note=_mfu(result))
