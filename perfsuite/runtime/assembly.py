"""Keep the deadline of a case, read its devices, and combine the reports of its ranks into one Measurement."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from perfsuite.base.errors import CaseError
from perfsuite.metrics.pipeline import COMPUTE, bubble_ratio, idle_share
from perfsuite.platforms.telemetry import Telemetry
from perfsuite.record.codec import from_json
from perfsuite.record.own_metrics import OwnMetric, Reduce
from perfsuite.record.result import ClockFacts, Measurement, RankFacts, Record
from perfsuite.record.step import Arrival, Component, DeviceLook, SpanTotal, Timeline, TimelineEvent, Traffic
from perfsuite.runtime.protocol import TIMING
from perfsuite.runtime.ranks.spans import MESSAGES, REMAINDER
from perfsuite.runtime.transports.base import Message
from perfsuite.schedules import replay

_BETWEEN_S = 0.4  # Seconds between two readings: device drivers average power over some tenths of a second.
_STOPPED_S = 3.0  # A longer gap between two looks (0.5 s at most) means that the process was stopped.
_STOPS = 3  # Gaps that extend a deadline. With slow telemetry gaps repeat, and the deadline must still come.


class Deadline:
    """A time limit that excludes the time in which this process was stopped: Ctrl-Z and fg do not fail a case."""

    def __init__(self, limit_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._looked_s = now()
        self._end_s = self._looked_s + limit_s
        self._stops = 0

    def left_s(self) -> float:
        """Return the seconds that are left. The caller asks at least every half second."""
        now_s = self._now()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        if passed_s > _STOPPED_S and self._stops < _STOPS:
            self._stops += 1
            self._end_s += passed_s
        return self._end_s - now_s

    def shorten(self, limit_s: float) -> None:
        """Set the time left to at most ``limit_s``."""
        self._end_s = min(self._end_s, self._now() + limit_s)


class DeviceWatch:
    """Reads clocks, power, temperature and throttle reasons of the devices for one job, without a thread."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._now = now
        self._began_s: float | None = None
        self._last_s = 0.0
        self.looks: list[DeviceLook] = []

    def tick(self, phases: Iterable[str]) -> None:
        """Read the devices, unless no rank is timing or the last reading is too recent."""
        if TIMING not in phases:
            return
        now_s = self._now()
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._last_s < _BETWEEN_S:
            return
        self._last_s = now_s
        self.looks += [
            DeviceLook(
                device=reading.index,
                at_s=now_s - self._began_s,
                clock_mhz=reading.clock_mhz,
                power_w=reading.power_w,
                temperature_c=reading.temperature_c,
                throttle=reading.throttle,
            )
            for reading in self._telemetry.read()
        ]


def assemble(
    reports: Sequence[Message],
    *,
    aligned: bool,
    backend: str,
    fresh: bool,
    transport: str,
    smoke: bool,
    looks: Sequence[DeviceLook] = (),
) -> Measurement:
    """Return the measurement of ``reports`` (by rank), with ``looks``, the driver's readings of the devices.

    Raises CaseError for a record that is not finite, or whose value or meaning differs between ranks.
    """
    lead = reports[0]
    memory = [report["peak_memory_bytes"] for report in reports if report["peak_memory_bytes"] is not None]
    timeline, bubbles = join(reports)
    return Measurement(
        times_s=tuple(lead["times_s"]),
        involuntary_switches=tuple(lead["involuntary_switches"]),
        yardsticks_s=tuple(lead["yardsticks_s"]),
        iterations=lead["iterations"],
        control=lead["control"],
        warmup_iterations=lead["warmup_iterations"],
        warmup_steady=lead["warmup_steady"],
        warmup_s=lead["warmup_s"],
        aligned=aligned,
        clock=from_json(ClockFacts, lead["clock"]),
        ranks=tuple(from_json(RankFacts, report["rank"]) for report in reports),
        backend=backend,
        process="fresh" if fresh else "reused",
        transport=transport,
        arrival=judge_arrivals([report["arrivals"] for report in reports]),
        spans=_spans(reports),
        records=(*_records(reports), *bubbles),
        timeline=timeline,
        traffic=join_traffic(reports),
        components=join_components(reports),
        peak_memory_bytes=max(memory) if memory else None,
        smoke=smoke,
        looks=tuple(looks),
        imports={name: file for report in reports for name, file in report["imports"].items()},
    )


def _spans(reports: Sequence[Message]) -> tuple[SpanTotal, ...]:
    names = {name: None for report in reports for name in report["spans"]}
    parts = _parts_of_the_step(reports) if names else {}
    totals = []
    for name in names:
        medians = [report["spans"].get(name, (0.0, 0.0)) for report in reports]
        slowest = max(range(len(reports)), key=lambda rank: medians[rank][0])
        totals.append(
            SpanTotal(
                name=name,
                time_s=parts.get(name, 0.0),
                count=float(medians[slowest][1]),
                slowest_rank=slowest,
                slowest_s=medians[slowest][0],
            )
        )
    return tuple(totals)


def _parts_of_the_step(reports: Sequence[Message]) -> dict[str, float]:
    """Return seconds by span in the median sample, on the rank that took longest in it; see :mod:`.ranks.spans`."""
    ranks = [report["middle"] for report in reports]
    worst = [max(samples, key=lambda sample: float(sample[0])) for samples in zip(*ranks, strict=True)]
    samples = [parts or {REMAINDER: seconds} for seconds, parts in worst]  # a rank may have no spans
    names = {name: None for sample in samples for name in sample}
    return {name: sum(sample.get(name, 0.0) for sample in samples) / len(samples) for name in names}


def _records(reports: Sequence[Message]) -> tuple[Record, ...]:
    names = {name: None for report in reports for name in report["records"]}
    return tuple(_record(name, [report["records"].get(name) for report in reports]) for name in names)


def _record(name: str, per_rank: Sequence[Any]) -> Record:
    by_rank = {rank: value for rank, value in enumerate(per_rank) if value is not None}
    _, unit, how, metric = next(iter(by_rank.values()))
    values = [value for value, *_ in by_rank.values()]
    # NaN is lost in a maximum, spreads in a mean and is unequal to itself; JSON has neither NaN nor infinity.
    odd = [f"rank {rank} recorded {name}={value[0]}" for rank, value in by_rank.items() if not math.isfinite(value[0])]
    if odd:
        more = f" (and {len(odd) - 4} more ranks)" if len(odd) > 4 else ""
        raise CaseError(f"{', '.join(odd[:4])}{more}; a record must be a finite number")
    for rank, (_, *meaning) in by_rank.items():
        if meaning != [unit, how, metric]:
            first = next(iter(by_rank))
            raise CaseError(
                f"ranks {first} and {rank} record {name} in two ways: unit {unit!r}, reduce {how!r}, {metric}; and "
                f"unit {meaning[0]!r}, reduce {meaning[1]!r}, {meaning[2]}; record it in the same way on all ranks"
            )
    if how == "equal" and any(value != values[0] for value in values):
        some = ", ".join(f"rank {rank}: {value[0]!r}" for rank, value in list(by_rank.items())[:4])
        raise CaseError(f"ranks disagree about {name}, which must be equal on all of them: {some}")
    if how == "only" and len(values) > 1:
        raise CaseError(
            f"{name} was recorded by ranks {', '.join(map(str, by_rank))}, but reduce='only' allows one rank"
        )
    value = _COMBINED.get(how, max)(values)
    return Record(
        name=name, value=value, unit=unit, reduce=cast(Reduce, how), metric=OwnMetric(**metric) if metric else None
    )


_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {"mean": statistics.fmean, "min": min, "sum": math.fsum}
)
"""Function that combines the ranks' values, by ``reduce``; any other ``reduce`` takes the maximum."""


def judge_arrivals(per_rank: Sequence[Sequence[float]]) -> Arrival | None:
    """Return the rank that is last most often and its lag; None if some rank never communicates.

    ``per_rank[r][i]`` is the arrival of rank r in iteration i, in seconds.
    """
    iterations = min((len(times) for times in per_rank), default=0)
    if len(per_rank) < 2 or iterations == 0:
        return None
    medians = [statistics.median(times) for times in per_rank]
    late = max(range(len(per_rank)), key=medians.__getitem__)
    lags = [
        per_rank[late][index] - statistics.median(times[index] for rank, times in enumerate(per_rank) if rank != late)
        for index in range(iterations)
    ]
    return Arrival(late_rank=late, lag_s=max(0.0, statistics.median(lags)), iterations=iterations)


_Kept = dict[str, Any]  # Report of :meth:`perfsuite.runtime.ranks.spans.StepKeeper.report`.


def join(reports: Sequence[Message]) -> tuple[Timeline | None, tuple[Record, ...]]:
    """Return the timeline of the step nearest to the median, and records of its measured and simulated bubbles.

    Of several pipelines the one with the longest step counts. Returns None and () if the ranks kept no steps.
    """
    pipelines: dict[int, list[_Kept]] = defaultdict(list)
    for report in reports:
        if kept := report.get("steps"):
            pipelines[kept["pipeline"]].append(kept)
    whole = [sorted(ranks, key=lambda kept: kept["rank"]) for ranks in pipelines.values()]
    whole = [ranks for ranks in whole if len(ranks) == ranks[0]["ranks"]]
    if not whole:
        return None, ()
    timelines = [_timeline(ranks) for ranks in whole]
    longest = max(range(len(whole)), key=lambda index: max(event.end_s for event in timelines[index].events))
    timeline = timelines[longest]
    return timeline, (*_bubbles(whole[longest]), *_simulated(timeline))


def _timeline(ranks: Sequence[_Kept]) -> Timeline:
    zero = min(start_s for kept in ranks for _, _, _, start_s, _ in kept["parts"])
    events = [event for kept in ranks for event in _events(kept, zero)]
    place = ranks[0]["place"]
    return Timeline(
        ranks=len(ranks),
        events=tuple(events),
        source="measured",
        schedule=ranks[0]["schedule"],
        world_ranks=tuple(kept["world_rank"] for kept in ranks) if place else (),
        place=place,
    )


def _events(kept: _Kept, zero: float) -> list[TimelineEvent]:
    """Return a rank's events in order of their start; two parts of one action (the last stage's loss) are one event."""
    events: list[TimelineEvent] = []
    for name, stage, micro_batch, start_s, end_s in sorted(kept["parts"], key=lambda part: part[3]):
        event = TimelineEvent(
            kind=name,
            rank=kept["rank"],
            stage=stage,
            micro_batch=micro_batch,
            start_s=start_s - zero,
            end_s=(start_s if name in MESSAGES else end_s) - zero,
        )
        last = (events[-1].kind, events[-1].stage, events[-1].micro_batch) if events else None
        if name in COMPUTE and last == (name, stage, micro_batch):
            event = dataclasses.replace(event, start_s=events.pop().start_s)
        events.append(event)
    return events


def _bubbles(ranks: Sequence[_Kept]) -> tuple[Record, ...]:
    """Return median and quartiles of bubble_ratio over the steps of all samples."""
    bubbles = []
    for step in zip(*(kept["busy"] for kept in ranks), strict=True):
        length_s = max(last for _, _, last in step) - min(first for _, first, _ in step)
        if length_s > 0:
            bubbles.append(idle_share([busy for busy, _, _ in step], length_s))
    if not bubbles:
        return ()
    low, high = (min(bubbles), max(bubbles))
    if len(bubbles) > 1:
        low, _, high = statistics.quantiles(bubbles, n=4, method="inclusive")
    return (
        _ratio("bubble_ratio_median", statistics.median(bubbles)),
        _ratio("bubble_ratio_low", low),
        _ratio("bubble_ratio_high", high),
    )


def _simulated(timeline: Timeline) -> tuple[Record, ...]:
    """Return records of the schedule replayed with this timeline's durations; () if that is impossible."""
    imbalance = replay(timeline).imbalance
    if imbalance is None:
        return ()
    return (
        _ratio("bubble_ratio_simulated", bubble_ratio(imbalance.simulated)),
        _ratio("bubble_ratio_balanced", bubble_ratio(imbalance.balanced)),
        _ratio("binding_stage_excess", imbalance.excess),
        Record(name="binding_stage", value=float(imbalance.stage), unit="", reduce="equal"),
    )


def _ratio(name: str, value: float) -> Record:
    return Record(name=name, value=float(value), unit="ratio", reduce="equal")


_Key = tuple[str, str, str]  # Axis, collective and part.


def join_traffic(reports: Sequence[Message]) -> tuple[Traffic, ...]:
    """Return the largest numbers by axis, collective and part; raise CaseError if ranks of one place differ in them."""
    joined: dict[_Key, Traffic] = {}
    places: dict[str, tuple[int, dict[_Key, tuple[int, int]]]] = {}
    for rank, kept in _kept(reports):
        read = [from_json(Traffic, plain) for plain in kept["traffic"]]
        entries = {(entry.axis, entry.collective, entry.part): entry for entry in read}
        counts = {key: (entry.calls, 0 if entry.uneven else entry.message_bytes) for key, entry in entries.items()}
        first, expected = places.setdefault(kept["place"], (rank, counts))
        if kept["place"] and counts != expected:
            key = next(key for key in (*counts, *expected) if counts.get(key) != expected.get(key))
            found = [(first, expected.get(key, (0, 0))), (rank, counts.get(key, (0, 0)))]
            raise CaseError(
                f"ranks of the same place differ in {key[1]} along {key[0]} for {key[2]}: "
                + ", ".join(f"rank {who}: {calls} of {size} bytes" for who, (calls, size) in found)
            )
        for key, entry in entries.items():
            most = joined.get(key, entry)
            joined[key] = dataclasses.replace(
                most,
                calls=max(most.calls, entry.calls),
                message_bytes=max(most.message_bytes, entry.message_bytes),
                time_s=max(most.time_s, entry.time_s),
            )
    return tuple(joined.values())


def join_components(reports: Sequence[Message]) -> tuple[Component, ...]:
    """Return one component of each name; each time is the largest of the ranks."""
    joined: dict[str, Component] = {}
    for _, kept in _kept(reports):
        for plain in kept["components"]:
            component = from_json(Component, plain)
            other = joined.get(component.name, component)
            joined[component.name] = dataclasses.replace(
                component,
                compute_s=max(component.compute_s, other.compute_s),
                communication_s=max(component.communication_s, other.communication_s),
            )
    return tuple(joined.values())


def _kept(reports: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    return ((rank, report["traffic"]) for rank, report in enumerate(reports) if report["traffic"] is not None)
