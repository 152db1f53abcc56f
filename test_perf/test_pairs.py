"""Every pair of ranks by itself, as a matrix: the link that is slower than its like is named.

``one``: each sends to each other one alone; ``both``: the two send to each other at the same time.
"""

from __future__ import annotations

import pytest

from perfsuite import acceptance, sizes, workloads, world_sizes

pytestmark = [world_sizes(4, full=[2, 4, 8]), acceptance()]
directions = pytest.mark.parametrize("directions", ["one", pytest.param("both", marks=pytest.mark.extended)])


@sizes(full=["1KiB"], small=["1KiB"])
@directions
def test_pair_latency(perf, ranks, message_bytes, directions):
    perf(workloads.Pairs(message_bytes=message_bytes, directions=directions, messages=32), on=ranks)


@sizes(full=["64MiB"], small=["1MiB"])
@directions
def test_pair_bandwidth(perf, ranks, message_bytes, directions):
    perf(workloads.Pairs(message_bytes=message_bytes, directions=directions), on=ranks)
