"""A line per family of cases: its best figure, the share of the peak with its kind, the series over sizes or ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.metrics.spec import significant
from perfsuite.records import ABOVE_MEASURED_PEAK, Metric, Result
from perfsuite.reports.alpha_beta import fit_collectives
from perfsuite.reports.scaling import Scaling, scalings
from perfsuite.text import printable
from perfsuite.units import format_bytes, format_seconds, readable_rate

_RATES = ("tflops_per_device", "tflops")


@dataclass(frozen=True, kw_only=True)
class FamilyLine:
    """What one family of cases did."""

    family: str
    """compute, memory, collectives, training, scaling or pipelines."""
    parts: tuple[str, ...]
    """Each whole by itself; a screen puts as many on a line as fit."""


def family_lines(results: Iterable[Result]) -> list[FamilyLine]:
    """A line for every family that has a measured case."""
    measured = [result for result in results if result.outcome == "measured"]
    lines = (
        ("compute", _compute(measured)),
        ("memory", _memory(measured)),
        ("collectives", _collectives(measured)),
        ("training", _training(measured)),
        ("scaling", _scaling(measured)),
        ("pipelines", _pipelines(measured)),
    )
    told = [FamilyLine(family=family, parts=tuple(parts)) for family, parts in lines]
    return [line for line in told if line.parts]


def short_name(case: str) -> str:
    """A case without file, ``test_`` and platform.

    >>> short_name("test_perf/test_train.py::test_ddp[cpu-ws2-gpt2-tiny]")
    'ddp ws2-gpt2-tiny'
    """
    test, _, words = case.rpartition("::")[2].partition("[")
    words = words.removesuffix("]").partition("-")[2]
    return printable(f"{test.removeprefix('test_')} {words}".strip(), 60)


def share_of_peak(metric: Metric) -> str:
    """``90 % of measured 772``; of what is above a measured peak, which was none, never a figure."""
    if metric.exceeds_measured_peak:
        return "(peak exceeded)"
    share = metric.share_of_peak
    if share is None or metric.peak is None:
        return ""
    return f"{100 * share:.0f} % of {metric.peak.kind} {_rate(metric.peak.value, metric.peak.unit)}"


def _rate(value: float, unit: str) -> str:
    name, times = readable_rate([value], unit)
    return f"{significant(value * times, 3)} {name}"


def _figure(metric: Metric, value: float) -> str:
    figure = _rate(value, metric.unit)
    return f"{figure} {share_of_peak(metric).removesuffix(figure.partition(' ')[2])}".strip()


def _metric(result: Result, *names: str) -> tuple[Metric, float] | None:
    """The first of these metrics that has a value."""
    metrics = {metric.name: metric for metric in result.metrics}
    for name in names:
        metric = metrics.get(name)
        if metric is not None and metric.value is not None:
            return metric, metric.value
    return None


def _best(pairs: Iterable[tuple[str, tuple[Metric, float] | None]]) -> Iterator[str]:
    """The best figure under each name, the largest first, those above what was taken for their peak last.

    One without a peak, as of a cache, only where no other is.
    """
    best: dict[str, tuple[Metric, float]] = {}
    for name, pair in pairs:
        if pair is not None and (name not in best or _better(pair, best[name])):
            best[name] = pair
    for name, (metric, value) in sorted(best.items(), key=lambda item: (item[1][0].exceeds_measured_peak, -item[1][1])):
        yield f"{name} {_figure(metric, value)}"


def _better(one: tuple[Metric, float], other: tuple[Metric, float]) -> bool:
    return (one[0].peak is not None, one[1]) > (other[0].peak is not None, other[1])


def _is_step(result: Result) -> bool:
    return bool(result.work.tokens or result.work.samples)


def _compute(results: Sequence[Result]) -> Iterator[str]:
    kernels = (one for one in results if one.work.flops and not _is_step(one) and not one.work.collective)
    told = [(one, _metric(one, *_RATES)) for one in kernels]
    yield from _best((one.work.dtype, rate) for one, rate in told)
    series: dict[str, dict[int, tuple[Metric, float]]] = defaultdict(dict)
    for one, rate in told:
        size = _square(one.parameters)
        if (
            rate is not None
            and size
            and (size not in series[one.work.dtype] or rate[1] > series[one.work.dtype][size][1])
        ):
            series[one.work.dtype][size] = rate
    for dtype, by_size in series.items():
        if len(by_size) > 1:
            yield f"{dtype} {_over_sizes(by_size)}"


def _square(parameters: Mapping[str, Any]) -> int:
    """Side of a square product; 0 of what is none."""
    sides = {parameters.get(name) for name in ("m", "k", "n")}
    side = sides.pop()
    return side if not sides and isinstance(side, int) else 0


def _over_sizes(by_size: Mapping[int, tuple[Metric, float]]) -> str:
    """``512/1024 square: 14.7 20 GFLOPS``."""
    sizes = sorted(by_size)
    unit, times = readable_rate([by_size[size][1] for size in sizes], by_size[sizes[0]][0].unit)
    figures = " ".join(significant(by_size[size][1] * times, 3) for size in sizes)
    return f"{_counts(sizes)} square: {figures} {unit}"


def _memory(results: Sequence[Result]) -> Iterator[str]:
    moved = [one for one in results if one.work.memory_path]
    yield from _best((_of_memory(one), _metric(one, "gb_per_s")) for one in moved)
    held = (one for one in results if not one.work.memory_path)
    yield from _best(("capacity", _metric(one, "capacity_gib")) for one in held)


def _of_memory(result: Result) -> str:
    """What streams, or which way a copy goes."""
    if result.work.memory_path != "device":
        return result.work.memory_path.replace("_", " ")
    return printable(result.workload.rpartition(":")[2].removeprefix("Memory").lower() or "device", 20)


def _collectives(results: Sequence[Result]) -> Iterator[str]:
    series: dict[tuple[str, str], dict[float, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    barriers: dict[int, float] = {}
    for result in results:
        busbw = _metric(result, "busbw_gb_per_s")
        work = result.work
        if work.collective and work.message_bytes and busbw is not None:
            sizes = series[work.collective, work.dtype][work.message_bytes]
            sizes[result.world_size] = max(busbw[1], sizes.get(result.world_size, 0.0))
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


def _training(results: Sequence[Result]) -> Iterator[str]:
    steps = [one for one in results if _is_step(one)]
    told: list[tuple[Result, Metric, float]] = []
    for one in steps:
        rate = _metric(one, "tokens_per_s_per_device", "samples_per_s_per_device", "samples_per_s")
        if rate is not None:
            told.append((one, *rate))
    told.sort(key=lambda entry: (entry[1].unit != "tokens/s", -entry[2]))
    best: dict[str, str] = {}
    for one, _, _ in told:
        best.setdefault(str(one.parameters.get("model")), one.case)
    for one, metric, value in sorted(told, key=lambda entry: entry[0].case not in best.values()):
        utilisation = next((metric for metric in one.metrics if metric.name == "mfu_percent"), None)
        yield f"{short_name(one.case)} {_per_device(metric, value)}{_mfu(utilisation)}"


def _per_device(metric: Metric, value: float) -> str:
    scaled = f"{significant(value / 1e3, 3)}k" if value >= 1e4 else significant(value, 3)
    return f"{scaled} {metric.unit}{'/device' if metric.convention == 'per device' else ''}"


def _mfu(metric: Metric | None) -> str:
    if metric is None:
        return ""
    if metric.note == ABOVE_MEASURED_PEAK:
        return ", MFU (peak exceeded)"
    kind = f" of {metric.peak.kind}" if metric.peak is not None else ""
    return "" if metric.value is None else f", MFU {significant(metric.value, 2)} %{kind}"


def _scaling(results: Sequence[Result]) -> Iterator[str]:
    series: dict[tuple[str, ...], list[Scaling]] = defaultdict(list)
    for scaling in scalings(results).values():
        series[scaling.point.series].append(scaling)
    for members in sorted(series.values(), key=lambda members: -len(members)):
        ranks = _counts([one.point.ranks for one in members])
        shares = " ".join(f"{100 * one.efficiency:.0f}" for one in members)
        shared = " (ranks share devices)" if any(one.shared for one in members[1:]) else ""
        yield f"{short_name(members[0].point.series[0])} {ranks} ranks: {shares} %{shared}"


def _pipelines(results: Sequence[Result]) -> Iterator[str]:
    bubbles = []
    for one in results:
        measured, simulated = _metric(one, "bubble_ratio"), _metric(one, "simulated_bubble_ratio")
        if measured is not None:
            own = f" (own durations {100 * simulated[1]:.0f} %)" if simulated else ""
            bubbles.append((measured[1], short_name(one.case), own))
    for bubble, name, own in sorted(bubbles):
        yield f"{name} {100 * bubble:.0f} % bubble{own}"
