"""Which rank comes late: host times at which a rank enters its first communication, in iterations that are not timed.

Ranks that wait for each other all show the same step time, so the slowest one cannot be told from it.  It can be told
from who enters the communication last.  torch sends every collective through its dispatcher, also those of DDP and of
functional collectives, so a dispatch mode sees them without touching the workload.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite.records import Sample

_FEWEST, _MOST = 3, 5
"""Iterations that are watched: a median needs three, and more than five tell no more."""
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


class _FirstCommunication(TorchDispatchMode):
    """Notes when the first communication operation is dispatched."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps a mode for its compiler otherwise, whose import takes over a second in every fresh worker."""
        return False

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._now_s = now_s
        self.entered_s: float | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.entered_s is None and func.namespace in _NAMESPACES:
            self.entered_s = self._now_s()
        return func(*args, **(kwargs or {}))


def iterations_within(time_s: float, samples: Sequence[Sample]) -> int:
    """How many iterations to watch: as many as end within ``time_s``, 3 to 5; the same on all ranks, as samples are."""
    median_s = statistics.median(sample.time_s for sample in samples)
    return int(min(_MOST, max(_FEWEST, time_s / median_s))) if median_s > 0 else _MOST


def arrival_times(
    run: Callable[[], Any], align: Callable[[], None], iterations: int, now_s: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds from the common start of an iteration to this rank's first communication; empty when it has none.

    ``now_s`` is the host's time.
    """
    arrivals = []
    for _ in range(iterations):
        align()
        start_s = now_s()
        with _FirstCommunication(now_s) as seen:
            run()
        if seen.entered_s is not None:
            arrivals.append(seen.entered_s - start_s)
    return arrivals
