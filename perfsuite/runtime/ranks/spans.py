"""Named parts of a step: recorded as pairs of clock stamps, read only after the step.

Medians of parts do not add up to the median of the step. So the reported parts come from one sample, the median sample
(of an even number: the mean of the two in the middle), on the rank that took longest in it. Each part's own median over
the samples is reported too, to compare the ranks.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perfsuite.metrics.pipeline import COMPUTE
from perfsuite.platforms.base import Clock

MESSAGES = ("send", "receive")  # Posted messages: moments, not spans.
KINDS = (*COMPUTE, *MESSAGES, "wait")  # Names of the spans of a timeline.
KEPT_STEPS = 64  # Number of the latest steps whose parts are kept; earlier ones leave only sums.


class KeptSpan(NamedTuple):
    """One span of a step, in the form for the driver."""

    name: str
    stage: int
    micro_batch: int
    start_s: float  # On the host's ``perf_counter``.
    end_s: float


@dataclass(kw_only=True)
class StepKeeper:
    """Keeps the data of this rank's samples for a timeline."""

    schedule: str
    ranks: int  # Ranks of the pipeline.
    rank: int  # This rank's index in it.
    pipeline: int  # World rank of its first rank, which identifies it if there are several pipelines.
    world_rank: int = 0
    place: str = ""  # Name of the pipeline, if there are several.
    busy: list[tuple[float, float, float]] = field(default_factory=list)
    """By sample: seconds of computing, start of the first and end of the last action."""
    kept: deque[list[KeptSpan]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def take(self, spans: Sequence[KeptSpan]) -> None:
        """Keep the last iteration of a sample."""
        parts = [part for part in spans if part.name in KINDS]
        actions = [part for part in parts if part.name in COMPUTE]
        if not actions:
            return
        self.kept.append(parts)
        self.busy.append(
            (
                sum(part.end_s - part.start_s for part in actions),
                min(part.start_s for part in actions),
                max(part.end_s for part in actions),
            )
        )

    def report(self, times_s: Sequence[float], *, offset_s: float) -> dict[str, Any] | None:
        """Return the data for the driver, ``offset_s`` later, with the step at the median; None without steps."""
        if not self.busy or len(self.busy) != len(times_s):
            return None
        first_kept = len(times_s) - len(self.kept)
        median = sorted(times_s)[len(times_s) // 2]
        chosen = min(range(first_kept, len(times_s)), key=lambda index: abs(times_s[index] - median))
        return {
            "schedule": self.schedule,
            "ranks": self.ranks,
            "rank": self.rank,
            "pipeline": self.pipeline,
            "world_rank": self.world_rank,
            "place": self.place,
            "busy": [[busy, first + offset_s, last + offset_s] for busy, first, last in self.busy],
            "parts": [
                [part.name, part.stage, part.micro_batch, part.start_s + offset_s, part.end_s + offset_s]
                for part in self.kept[chosen - first_kept]
            ],
        }


REMAINDER = "remainder"  # Name of the time outside of all spans.


@dataclass(kw_only=True)
class _Span:
    name: str
    attributes: dict[str, Any]
    start: object
    host_start_s: float
    end: object = None
    host_end_s: float = 0.0


@dataclass(kw_only=True)
class SpanRecorder:
    """Collects the spans of a sample; :meth:`close_sample` turns them into times per iteration."""

    clock: Clock
    open_spans: list[_Span] = field(default_factory=list)
    samples: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    """By sample: name -> (seconds per iteration, spans per iteration)."""
    keeper: StepKeeper | None = None  # Keeps spans for a pipeline's timeline; None for steps without one.
    is_sampling: bool = False  # Whether the first sample has begun.

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Mark a part of the step on the device's and the host's clock."""
        span = _Span(name=name, attributes=attributes, start=self.clock.stamp(), host_start_s=self.clock.now_s())
        try:
            yield
        finally:
            span.end = self.clock.stamp()
            span.host_end_s = self.clock.now_s()
            self.open_spans.append(span)

    def discard(self) -> None:
        """Forget the spans of warm-up and checks: a sample begins."""
        self.is_sampling = True
        self.open_spans.clear()

    def close_sample(self, start: object, end: object, iterations: int) -> None:
        """Read the spans of a sample between ``start`` and ``end``; the device has passed both."""
        ended_s = self.clock.now_s()  # the device has just passed ``end``
        if not self.open_spans:
            self.samples.append({})
            return
        if self.keeper is not None:
            self.keeper.take(self._last_iteration(end, ended_s, iterations))
        totals: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        intervals = []
        for span in self.open_spans:
            begin = self.clock.elapsed_s(start, span.start)
            length = self.clock.elapsed_s(span.start, span.end)
            seconds, count = totals[span.name]
            totals[span.name] = (seconds + length / iterations, count + 1 / iterations)
            intervals.append((begin, begin + length))
        rest_s = self.clock.elapsed_s(start, end) - _covered(intervals)
        if abs(rest_s) < self.clock.facts().resolution_s:  # a rounding error
            rest_s = 0.0
        totals[REMAINDER] = (rest_s / iterations, 1.0)
        self.samples.append(dict(totals))
        self.open_spans.clear()

    def _last_iteration(self, end: object, ended_s: float, iterations: int) -> list[KeptSpan]:
        """Return the spans of the sample's last iteration, on the host's clock; all iterations have equally many."""
        spans = self.open_spans[-(len(self.open_spans) // iterations) :]
        return [
            KeptSpan(
                name=span.name,
                stage=span.attributes.get("stage", -1),
                micro_batch=span.attributes.get("micro_batch", -1),
                start_s=self.clock.host_s(span.start, end, ended_s),
                end_s=self.clock.host_s(span.end, end, ended_s),
            )
            for span in spans
        ]

    def middle(self, times_s: Sequence[float], own_s: Sequence[float]) -> list[tuple[float, dict[str, float]]]:
        """Return (this rank's seconds, seconds by span) of the one or two median samples of ``times_s``.

        ``times_s`` is the same on all ranks, so all choose the same samples. Spans that do not overlap and the
        remainder sum to this rank's seconds. Empty without samples.
        """
        if not self.samples:
            return []
        chosen = ((own_s[index], self.samples[index]) for index in median_places(times_s))
        return [(seconds, {name: part for name, (part, _) in parts.items()}) for seconds, parts in chosen]

    def report(self) -> dict[str, tuple[float, float]]:
        """Return name -> (median seconds, median count) per iteration over the samples."""
        names = {name: None for sample in self.samples for name in sample}
        return {
            name: (
                statistics.median(sample.get(name, (0.0, 0.0))[0] for sample in self.samples),
                statistics.median(sample.get(name, (0.0, 0.0))[1] for sample in self.samples),
            )
            for name in names
        }


def median_places(values: Sequence[float]) -> tuple[int, ...]:
    """Return the index of the median, or the two whose mean is the median.

    >>> median_places([3.0, 9.0, 4.0]), median_places([3.0, 9.0, 4.0, 1.0])
    ((2,), (0, 2))
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    return tuple(order[(len(order) - 1) // 2 : len(order) // 2 + 1])


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals: spans may nest and overlap.

    >>> _covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
