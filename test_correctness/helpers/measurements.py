"""Measurements as the runtime would report them; a test says only what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from perfsuite.metrics import derive
from perfsuite.record.result import ClockFacts, Measurement, Metric, Peaks, RankFacts, Result, Work


def rank_facts(rank: int = 0, *, time_s: float = 1.0, **changes: Any) -> RankFacts:
    """A rank on the CPU of one host, all samples of which took ``time_s``."""
    return dataclasses.replace(
        RankFacts(
            rank=rank,
            host="here",
            device="cpu",
            threads=1,
            cores=None,
            median_s=time_s,
            min_s=time_s,
            max_s=time_s,
            cpu_share=1.0,
            max_rss_bytes=1 << 20,
        ),
        **changes,
    )


def measurement_of(times_s: Sequence[float], ranks: Iterable[RankFacts], **changes: Any) -> Measurement:
    """These seconds per iteration, of these ranks."""
    return dataclasses.replace(
        Measurement(
            times_s=tuple(times_s),
            iterations=1,
            warmup_iterations=3,
            warmup_steady=True,
            aligned=True,
            clock=ClockFacts(name="perf_counter", resolution_s=1e-9, cost_s=1e-7),
            ranks=tuple(ranks),
            backend="gloo",
            process="fresh",
            transport="local",
        ),
        **changes,
    )


def result_of(
    measurement: Measurement | None = None,
    case: str = "test_it.py::test_it[cpu]",
    *,
    work: Work | None = None,
    metrics: Sequence[str | Metric] = (),
    peaks: Peaks | None = None,
    **changes: Any,
) -> Result:
    """A case that measured this; ``metrics`` are given, or by their names derived from work and measurement."""
    work = work or Work()
    named = tuple(each for each in metrics if isinstance(each, str))
    derived = derive(named, work=work, measurement=measurement, peaks=peaks or Peaks()) if named else ()
    plain = Result(
        case=case,
        workload="test_it:Workload",
        parameters={},
        platform="cpu",
        world_size=measurement.world_size if measurement else 1,
        outcome="measured",
        work=work,
        metrics=(*derived, *(each for each in metrics if not isinstance(each, str))),
        measurement=measurement,
    )
    return dataclasses.replace(plain, **changes)
