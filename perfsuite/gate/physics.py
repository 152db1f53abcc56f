"""Rules that no correct measurement breaks.  A result that breaks one is an error of measurement.

Each rule checks one result and needs no baseline.  A peak that perfsuite measured never makes a result impossible,
because the hardware may reach more.  An unlikely result is flagged, not impossible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from perfsuite.base.collectives import busbw_factor, link_bound_gb_per_s
from perfsuite.base.units import plural
from perfsuite.metrics.pipeline import bubble_ratio, impossible_bubble
from perfsuite.metrics.spec import SUPERLINEAR_SLACK, devices_used, speed_up
from perfsuite.record.result import Metric, Peak, Peaks, Result
from perfsuite.record.step import Timeline
from perfsuite.schedules.replay import replay

PEAK_SLACK = 0.01  # Accepted excess over a published boost-clock peak: clocks and data sheets are rounded.
SPAN_SLACK = 0.05  # Accepted excess of one part over the whole step: spans and the step are medians of different series
SUM_SLACK = 0.1  # Accepted shortfall of the sum of all parts from the step.
WORK_SLACK = 0.01
EQUAL_SAMPLES = 5
_REMAINDER = "remainder"


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A rule that a result breaks."""

    rule: str  # Name of the rule, as in perfsuite docs gate.
    message: str  # Description with the numbers.
    severity: Literal["impossible", "flagged"] = "impossible"  # Flagged: possible, but unlikely.

    def __str__(self) -> str:
        return self.message if self.message.startswith(f"{self.rule} ") else f"{self.rule}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A result with facts about its machine."""

    result: Result
    peaks: Peaks | None  # Peaks of the device; None: only the peaks in the metrics are used.
    network: Peak | None  # GB/s per direction of a whole host's network, for results of several hosts.
    base: Result | None = None  # The same case on the smallest number of ranks; None if it was not measured.


def violations(result: Result, *, peaks: Peaks | None = None, network: Peak | None = None) -> tuple[Violation, ...]:
    """Return every rule that a result breaks; ``peaks`` are of the device and ``network`` of a host, if known."""
    broken = examine(result, peaks=peaks, network=network)
    return tuple(violation for violation in broken if violation.severity == "impossible")


def examine(
    result: Result, *, peaks: Peaks | None = None, network: Peak | None = None, base: Result | None = None
) -> tuple[Violation, ...]:
    """Return the impossible and the unlikely properties of a result; empty for a smoke run.  ``base`` is the same case
    on fewer ranks, for the speed-up.
    """
    if result.outcome == "smoke":
        return ()
    subject = Subject(result=result, peaks=peaks, network=network, base=base)
    return tuple(violation for rule in RULES for violation in rule(subject))


def speed_up_violation(faster: float, ranks: int, base_ranks: int = 1) -> str:
    """Return a remark if a speed-up over ``base_ranks`` ranks is above linear; else empty.

    It is possible if the parts of a split problem fit into a cache and the whole does not.

    >>> speed_up_violation(8.9, 8)
    'speed-up 8.9 on 8 times the ranks is above linear'
    """
    most = ranks / base_ranks
    over = faster > most * (1 + SUPERLINEAR_SLACK)
    return f"speed-up {faster:.3g} on {most:.3g} times the ranks is above linear" if over else ""


def _times(subject: Subject) -> Iterator[Violation]:
    for time_s in subject.result.measurement.times_s if subject.result.measurement else ():
        if not (math.isfinite(time_s) and time_s > 0):
            yield Violation(rule="time", message=f"a sample of {time_s!r} s: no work takes no time")
            return


def _above_peak(subject: Subject) -> Iterator[Violation]:
    for metric in subject.result.metrics:
        peak = metric.peak
        if metric.value is None or peak is None or peak.kind != "published":
            continue
        if metric.name.startswith("busbw") or metric.unit == "percent":
            continue  # a link and a utilisation have other rules
        if metric.value > peak.value * (1 + PEAK_SLACK):
            text = f"{metric.name} {metric.value:.4g} is above the peak {peak.value:.4g} {peak.unit} ({peak.source})"
            yield Violation(rule="above-peak", message=text)


def _above_link(subject: Subject) -> Iterator[Violation]:
    metric = next((metric for metric in subject.result.metrics if metric.name == "busbw_gb_per_s"), None)
    measurement = subject.result.measurement
    if metric is None or metric.value is None or measurement is None:
        return
    of_ranks = [rank.host for rank in sorted(measurement.ranks, key=lambda rank: rank.rank)]
    hosts = len(set(of_ranks))
    link = (metric.peak or subject.network) if hosts > 1 else metric.peak
    if link is None or link.kind != "published":
        return
    ranks, collective = measurement.world_size, subject.result.work.collective
    bound = link_bound_gb_per_s(link.value, of_ranks, collective)
    if metric.value <= bound * (1 + PEAK_SLACK):
        return
    text = (
        f"busbw {metric.value:.4g} GB/s is above {bound:.4g}, the limit of links of {link.value:.4g} GB/s for "
        f"{ranks} ranks on {plural(hosts, 'host')} ({link.source})"
    )
    # Switches that reduce halve the bytes that a rank sends: S once instead of twice (n-1)/n.
    if collective == "all_reduce" and metric.value <= link.value * busbw_factor(collective, ranks) * (1 + PEAK_SLACK):
        text += "; only reduction inside the switches can do that"
        yield Violation(rule="above-link", message=text, severity="flagged")
    else:
        yield Violation(rule="above-link", message=text)


def _utilisation(subject: Subject) -> Iterator[Violation]:
    for metric in subject.result.metrics:
        if not metric.name.startswith(("mfu", "hfu")) or metric.value is None:
            continue
        whole = 100.0 if metric.unit in ("%", "percent") else 1.0
        if metric.value > whole * (1 + PEAK_SLACK) and _is_published(subject, metric):
            yield Violation(rule="utilisation", message=f"{metric.name} {metric.value / whole:.1%} is above 100 %")


def _is_published(subject: Subject, metric: Metric) -> bool:
    peak = metric.peak or (subject.peaks.tflops.get(subject.result.work.dtype) if subject.peaks else None)
    return peak.kind == "published" if peak else "measured" not in metric.note


def _throughput_times_latency(subject: Subject) -> Iterator[Violation]:
    measurement, work = subject.result.measurement, subject.result.work
    if measurement is None:
        return
    for field, amount in (("samples", work.samples), ("tokens", work.tokens)):
        for suffix, share in (("", 1), ("_per_device", devices_used(measurement))):
            name = f"{field}_per_s{suffix}"
            value = subject.result.values.get(name)
            done = amount if value is None else value * share * measurement.median_s
            if amount and abs(done - amount) > WORK_SLACK * amount:
                text = f"{name} {value:.4g} times {measurement.median_s:.4g} s is {done:.4g} {field}"
                yield Violation(rule="throughput-latency", message=f"{text}, not {amount:.4g}")


def _parts(subject: Subject) -> Iterator[Violation]:
    measurement = subject.result.measurement
    if measurement is None or not measurement.spans:
        return
    step_s, broken = measurement.median_s, []
    for span in measurement.spans:
        if span.time_s < -SPAN_SLACK * step_s:
            broken.append(f"the {span.name} of the step is {span.time_s:.4g} s: its parts are longer than the step")
        elif span.count <= 1 and span.time_s > step_s * (1 + SPAN_SLACK):
            broken.append(f"{span.name} takes {span.time_s:.4g} s of a step of {step_s:.4g} s")
    whole_s = sum(span.time_s for span in measurement.spans)
    complete = any(span.name == _REMAINDER for span in measurement.spans)
    if complete and not broken and whole_s < step_s * (1 - SUM_SLACK):
        broken = [f"the parts and their remainder sum to {whole_s:.4g} s of a step of {step_s:.4g} s"]
    yield from (Violation(rule="parts", message=text) for text in broken)


def _bubble(subject: Subject) -> Iterator[Violation]:
    value, measurement = subject.result.values.get("bubble_ratio"), subject.result.measurement
    if value is None:
        return
    if not 0 <= value < 1:
        yield Violation(rule="bubble", message=f"bubble_ratio {value:.4g} is not between 0 and 1")
        return
    bound = bubble_bound(measurement.timeline) if measurement and measurement.timeline else None
    if bound is not None and impossible_bubble(value, bound):
        text = f"bubble_ratio {value:.4g} is below {bound:.4g}, the least with the durations of its actions"
        yield Violation(rule="bubble", message=text)


def bubble_bound(timeline: Timeline) -> float | None:
    """Return the bubble ratio of the timeline's schedule with the measured durations and no other time.  None for a
    schedule outside of the catalogue, and for an incomplete timeline. The formula for equal stages is not a bound: if
    ranks share cores, the first and last actions of a step run faster than the others.
    """
    simulated = replay(timeline).simulated
    return bubble_ratio(simulated) if simulated else None


def _constant(subject: Subject) -> Iterator[Violation]:
    measurement = subject.result.measurement
    if measurement is None or subject.result.simulated or len(measurement.times_s) < EQUAL_SAMPLES:
        return
    times = set(measurement.times_s)
    if len(times) == 1:
        text = f"all {len(measurement.times_s)} samples are exactly {times.pop()!r} s: no clock does that"
        yield Violation(rule="constant", message=text)


def _memory(subject: Subject) -> Iterator[Violation]:
    records = subject.result.measurement.records if subject.result.measurement else ()
    values = {record.name: record.value for record in records}
    short = values.get("parts_beyond_peak_bytes", 0.0)  # the largest of all ranks
    if short > 0:
        parts, peak = values.get("parts_at_once_bytes", math.nan), values.get("peak_bytes", math.nan)
        text = f"on a rank the peak is {short:.0f} bytes less than the sum of simultaneous allocations"
        yield Violation(rule="memory", message=f"{text} (most of any rank: peak {peak:.0f}, parts {parts:.0f} bytes)")


def _speed_up(subject: Subject) -> Iterator[Violation]:
    result, base = subject.result, subject.base
    if base is None or result.measurement is None or base.measurement is None or base.world_size >= result.world_size:
        return
    work, base_work = result.work.samples or result.work.tokens, base.work.samples or base.work.tokens
    times_s = (result.measurement.median_s, base.measurement.median_s)
    if work and base_work and min(times_s) > 0:
        faster = speed_up(work, times_s[0], base_work, times_s[1])
        if remark := speed_up_violation(faster, result.world_size, base.world_size):
            text = f"{remark} (base: {plural(base.world_size, 'rank')})"
            yield Violation(rule="speed-up", message=text, severity="flagged")


RULES: tuple[Callable[[Subject], Iterator[Violation]], ...] = (
    *(_times, _above_peak, _above_link, _utilisation, _throughput_times_latency, _parts, _bubble, _constant),
    *(_memory, _speed_up),
)
"""Each rule yields one violation per breach."""
