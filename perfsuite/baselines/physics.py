"""Rules that no true measurement breaks, whatever was stored before.  A result that does is an error of measurement.

Each rule looks at one result and needs no baseline.  A peak that perfsuite measured itself never makes a result
impossible: it is a share of what was seen, not of what can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from perfsuite.records import Measurement, Metric, Result

_PEAK_SLACK = 0.01
"""Clocks and data sheets are rounded: 1 % above a published boost-clock peak is no contradiction."""
_SUM_SLACK = 0.02
"""Spans and the step are read at different instants; beyond 2 % of the step they do not belong together."""
_WORK_SLACK = 0.01
_EQUAL_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A rule and how a result breaks it."""

    rule: str
    message: str
    """With the numbers."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def violations(result: Result) -> tuple[Violation, ...]:
    """Every rule that ``result`` breaks; empty for a result that may be true."""
    return tuple(Violation(rule=name, message=message) for name, rule in RULES for message in rule(result))


def link_bound_gb_per_s(link_gb_per_s: float, ranks: int, hosts: int) -> float:
    """The most bus bandwidth that a link of this one-directional rate allows.

    On one host the link itself.  Over h hosts a hierarchical algorithm sends only (h-1)/h of the message over the
    network where the bus factor counts (n-1)/n: B x [(n-1)/n] / [(h-1)/h].

    >>> link_bound_gb_per_s(25.0, ranks=16, hosts=2), link_bound_gb_per_s(150.0, ranks=8, hosts=1)
    (46.875, 150.0)
    """
    if hosts < 2:
        return link_gb_per_s
    return link_gb_per_s * ((ranks - 1) / ranks) / ((hosts - 1) / hosts)


def speed_up_violation(speed_up: float, ranks: int, base_ranks: int = 1) -> str:
    """Why a speed-up over ``base_ranks`` ranks cannot be; empty when it can.

    >>> speed_up_violation(8.9, 8)
    'speed-up 8.9 on 8 times the ranks is above linear'
    """
    most = ranks / base_ranks
    return f"speed-up {speed_up:.3g} on {most:.3g} times the ranks is above linear" if speed_up > most * 1.05 else ""


def _above_peak(result: Result) -> Iterator[str]:
    for metric in result.metrics:
        peak = metric.peak
        if metric.value is None or peak is None or peak.kind != "published" or metric.name.startswith("busbw"):
            continue
        if metric.value > peak.value * (1 + _PEAK_SLACK):
            yield f"{metric.name} {metric.value:.4g} is above the peak {peak.value:.4g} {peak.unit} ({peak.source})"


def _above_link(result: Result) -> Iterator[str]:
    metric = _metric(result, "busbw_gb_per_s")
    measurement = result.measurement
    if metric is None or metric.value is None or metric.peak is None or measurement is None:
        return
    hosts = len({rank.host for rank in measurement.ranks})
    bound = link_bound_gb_per_s(metric.peak.value, measurement.world_size, hosts)
    if metric.peak.kind == "published" and metric.value > bound * (1 + _PEAK_SLACK):
        yield (
            f"busbw {metric.value:.4g} GB/s is above {bound:.4g}, what links of {metric.peak.value:.4g} GB/s allow "
            f"{measurement.world_size} ranks on {hosts} hosts ({metric.peak.source})"
        )


def _utilisation(result: Result) -> Iterator[str]:
    for metric in result.metrics:
        if metric.name.startswith(("mfu", "hfu")) and metric.value is not None:
            whole = 100.0 if metric.unit == "%" else 1.0
            published = metric.peak is None or metric.peak.kind == "published"
            if metric.value > whole * (1 + _PEAK_SLACK) and published:
                yield f"{metric.name} {metric.value / whole:.1%} is above 100 %"


def _throughput_times_latency(result: Result) -> Iterator[str]:
    for name, work in (("samples_per_s", result.work.samples), ("tokens_per_s", result.work.tokens)):
        metric = _metric(result, name)
        if metric is None or metric.value is None or not work or result.measurement is None:
            continue
        done = metric.value * result.measurement.median_s
        if abs(done - work) > _WORK_SLACK * work:
            yield f"{name} {metric.value:.4g} times {result.measurement.median_s:.4g} s is {done:.4g}, not {work:.4g}"


def _parts_do_not_sum(result: Result) -> Iterator[str]:
    measurement = result.measurement
    if measurement is None or not measurement.spans:
        return
    step_s = max(rank.median_s for rank in measurement.ranks)
    for span in measurement.spans:
        if span.time_s < -_SUM_SLACK * step_s:
            yield f"the {span.name} of the step is {span.time_s:.4g} s: its parts are longer than the step"
        elif span.count <= 1 and span.time_s > step_s * (1 + _SUM_SLACK) and not measurement.aligned:
            yield f"span {span.name} takes {span.time_s:.4g} s of a step of {step_s:.4g} s"


def _bubble(result: Result) -> Iterator[str]:
    metric = _metric(result, "bubble_ratio")
    if metric is not None and metric.value is not None and not 0 <= metric.value < 1:
        yield f"bubble_ratio {metric.value:.4g} is not between 0 and 1"


def _constant(result: Result) -> Iterator[str]:
    measurement: Measurement | None = result.measurement
    if measurement is None or result.simulated or len(measurement.samples) < _EQUAL_SAMPLES:
        return
    times = {sample.time_s for sample in measurement.samples}
    if len(times) == 1:
        yield f"all {len(measurement.samples)} samples are {times.pop()!r} s to the bit: no clock does that"


def _metric(result: Result, name: str) -> Metric | None:
    return next((metric for metric in result.metrics if metric.name == name), None)


RULES: tuple[tuple[str, Callable[[Result], Iterator[str]]], ...] = (
    ("above-peak", _above_peak),
    ("above-link", _above_link),
    ("utilisation", _utilisation),
    ("throughput-latency", _throughput_times_latency),
    ("parts", _parts_do_not_sum),
    ("bubble", _bubble),
    ("constant", _constant),
)
"""Name and rule; a rule yields one message per breach."""
