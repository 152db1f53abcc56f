"""Measurements as the runtime would report them; a test says only what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from perfsuite.record.result import ClockFacts, Measurement, RankFacts


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
