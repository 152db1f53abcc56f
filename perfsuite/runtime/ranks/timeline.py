"""Rank side of a pipeline's timeline: what one rank did in each of its last steps, and when, on the host's clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perfsuite.metrics.pipeline import COMPUTE

MESSAGES = ("send", "receive")
"""Only posted: moments, not spans."""
KINDS = (*COMPUTE, *MESSAGES, "wait")
"""Names of spans that a timeline is made of."""
KEPT_STEPS = 64
"""Steps whose parts are kept, the latest; of earlier ones only the sums."""


class KeptSpan(NamedTuple):
    """One span of a step, as a rank keeps and sends it."""

    name: str
    stage: int
    micro_batch: int
    start_s: float
    """On the host's ``perf_counter``."""
    end_s: float


@dataclass(kw_only=True)
class StepKeeper:
    """What a timeline needs of this rank's samples."""

    schedule: str
    ranks: int
    """Ranks of the pipeline."""
    rank: int
    """This rank's place in it."""
    pipeline: int
    """Which pipeline it is, where several run side by side: the world's rank of its first rank."""
    world_rank: int = 0
    """This rank among all."""
    place: str = ""
    """Which pipeline it is in words, where several run side by side."""
    busy: list[tuple[float, float, float]] = field(default_factory=list)
    """Per sample: seconds of computing, start of the first and end of the last action."""
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
        """What the driver needs, all times ``offset_s`` later; None where no step was kept.

        The step sent whole is the one nearest to the median of the samples' ``times_s``.  These are the same on all
        ranks, so that all of them send the same step.
        """
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
