"""Every pair of ranks by itself, as a matrix, to find slow links.

``one``: each rank sends to each other one alone; ``both``: the two send to each other at the same time.  Between nodes
pairs send in rounds, all at once: 512 ranks have 261,632 pairs.
"""

from __future__ import annotations

import os

import pytest

from perfsuite import acceptance, sizes, workloads, world_sizes
from perfsuite.runtime.transports.launchers import detect_launch
from perfsuite.workloads.pair_rounds import PairRounds

pytestmark = [world_sizes(4, full=[2, 4, 8]), acceptance()]
directions = pytest.mark.parametrize("directions", ["one", pytest.param("both", marks=pytest.mark.perf_extended)])


@sizes(full=["1KiB"], small=["1KiB"])
@directions
def test_pair_latency(perf, ranks, message_bytes, directions):
    perf(workloads.Pairs(message_bytes=message_bytes, directions=directions, messages=32), on=ranks)


@sizes(full=["64MiB"], small=["1MiB"])
@directions
def test_pair_bandwidth(perf, ranks, message_bytes, directions):
    perf(workloads.Pairs(message_bytes=message_bytes, directions=directions), on=ranks)


@sizes(full=["64MiB"], small=["1MiB"])
@world_sizes(4, extended=[4], full=[], more=True)
def test_pair_rounds(perf, ranks, message_bytes):
    """Four rounds of disjoint pairs of nodes; within one node, and without a launcher, every rank counts as a node."""
    launch = detect_launch(os.environ)
    here = launch.local_world_size if launch else 1
    several = ranks.world_size % here == 0 and ranks.world_size > here
    perf(PairRounds(message_bytes=message_bytes, ranks_per_node=here if several else 1), on=ranks)
