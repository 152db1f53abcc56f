"""Putting the reports of the ranks of a case together into one Measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from perfsuite.base.errors import CaseError
from perfsuite.record.codec import from_json
from perfsuite.record.own_metrics import OwnMetric, Reduce
from perfsuite.record.result import ClockFacts, Measurement, RankFacts, Record
from perfsuite.record.step import DeviceLook, SpanTotal
from perfsuite.runtime.lateness import judge_arrivals
from perfsuite.runtime.ranks.spans import REMAINDER
from perfsuite.runtime.timelines import join
from perfsuite.runtime.traffic import join_components, join_traffic
from perfsuite.runtime.transports.base import Message


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
    """``reports[r]`` is rank r's, ``looks`` are the driver's at the devices meanwhile.

    Raises CaseError for a record that is not finite or that the ranks disagree about, in value or in meaning.
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
    """Seconds by span in the median sample on the rank that took longest in it; see :mod:`.ranks.spans`."""
    ranks = [report["middle"] for report in reports]
    worst = [max(samples, key=lambda sample: float(sample[0])) for samples in zip(*ranks, strict=True)]
    samples = [parts or {REMAINDER: seconds} for seconds, parts in worst]  # a rank may mark nothing
    names = {name: None for sample in samples for name in sample}
    return {name: sum(sample.get(name, 0.0) for sample in samples) / len(samples) for name in names}


def _records(reports: Sequence[Message]) -> tuple[Record, ...]:
    names = {name: None for report in reports for name in report["records"]}
    return tuple(_record(name, [report["records"].get(name) for report in reports]) for name in names)


def _record(name: str, per_rank: Sequence[Any]) -> Record:
    given = {rank: value for rank, value in enumerate(per_rank) if value is not None}
    _, unit, how, metric = next(iter(given.values()))
    values = [value for value, *_ in given.values()]
    # A maximum loses NaN, a mean spreads it, it is unequal to itself; and JSON has neither it nor infinity.
    odd = [f"rank {rank} recorded {name}={value[0]}" for rank, value in given.items() if not math.isfinite(value[0])]
    if odd:
        more = f" (so did {len(odd) - 4} more ranks)" if len(odd) > 4 else ""
        raise CaseError(f"{', '.join(odd[:4])}{more}; a record must be a finite number")
    for rank, (_, *meaning) in given.items():
        if meaning != [unit, how, metric]:
            first = next(iter(given))
            raise CaseError(
                f"ranks {first} and {rank} record {name} in two ways: unit {unit!r}, reduce {how!r}, {metric}; and "
                f"unit {meaning[0]!r}, reduce {meaning[1]!r}, {meaning[2]}; record it alike on all ranks"
            )
    if how == "equal" and any(value != values[0] for value in values):
        told = ", ".join(f"rank {rank}: {value[0]!r}" for rank, value in list(given.items())[:4])
        raise CaseError(f"ranks disagree about {name}, which must be equal on all of them: {told}")
    if how == "only" and len(values) > 1:
        raise CaseError(f"{name} was recorded by ranks {', '.join(map(str, given))}, but reduce='only' allows one rank")
    value = _COMBINED.get(how, max)(values)
    return Record(
        name=name, value=value, unit=unit, reduce=cast(Reduce, how), metric=OwnMetric(**metric) if metric else None
    )


_COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {"mean": statistics.fmean, "min": min, "sum": math.fsum}
)
"""By ``reduce``: the value of the case; of every other way it is the maximum."""
