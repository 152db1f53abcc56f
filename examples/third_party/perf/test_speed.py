"""Performance cases: each function runs on every rank and returns one iteration."""

import pytest
import torch
from averaging import average_, average_in_buckets_

from perfsuite import sizes, world_sizes


def whole(rank, elements):
    """Average in one message."""
    tensor = torch.ones(elements, device=rank.device)
    return lambda: average_(tensor, rank.group())


def bucketed(rank, elements, buckets):
    """Average in several concurrent messages."""
    tensor = torch.ones(elements, device=rank.device)
    return lambda: average_in_buckets_(tensor, buckets, rank.group())


@world_sizes(2)
@sizes(full=["64MiB"], small=["64KiB"])
def test_whole(perf, ranks, message_bytes):
    perf(whole, on=ranks, elements=message_bytes // 4)


@world_sizes(2)
@pytest.mark.parametrize("buckets", [2, 8])
@pytest.mark.perf_tolerance(0.1)  # many small messages scatter more
def test_bucketed(perf, ranks, buckets):
    result = perf(bucketed, on=ranks, elements=1 << 14, buckets=buckets)
    assert result.world_size == 2
