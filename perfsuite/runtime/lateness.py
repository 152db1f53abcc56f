"""Which rank of a case comes late, from the arrival times that the ranks brought back."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from perfsuite.record.step import Arrival


def judge_arrivals(per_rank: Sequence[Sequence[float]]) -> Arrival | None:
    """The rank that is last most often, and by how much; None when some rank never communicates.

    ``per_rank[r][i]`` is rank r's arrival in iteration i, in seconds.
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
