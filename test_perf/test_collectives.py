"""Latency and bandwidth of every collective over message sizes and world sizes.

The sizes are S as nccl-tests counts it (docs/metrics.md).  Gradients are summed in fp32 or bf16, so these two are swept
over all sizes; the other dtypes at one.  Operations that only move bytes do not depend on the dtype.
"""

from __future__ import annotations

from perfsuite import dtypes, sizes, world_sizes
from perfsuite.workloads.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllUneven,
    Barrier,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    SendRecv,
)

pytestmark = world_sizes(2, 4, 8)
over_sizes = sizes(
    full=["1KiB", "64KiB", "1MiB", "16MiB", "64MiB", "256MiB", "1GiB"],
    small=["1KiB", "1MiB", "16MiB"],
)


@over_sizes
@dtypes("fp32", "bf16")
def test_all_reduce(perf, ranks, message_bytes, dtype):
    perf(AllReduce(message_bytes=message_bytes, dtype=dtype), on=ranks)


@sizes(full=["64MiB"], small=["1MiB"])
@world_sizes(4)
@dtypes("fp64", "fp16", "int32", "int8")
def test_all_reduce_dtypes(perf, ranks, message_bytes, dtype):
    perf(AllReduce(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
@dtypes("fp32", "bf16")
def test_reduce_scatter(perf, ranks, message_bytes, dtype):
    perf(ReduceScatter(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_all_gather(perf, ranks, message_bytes, dtype):
    perf(AllGather(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_all_to_all(perf, ranks, message_bytes, dtype):
    perf(AllToAll(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_all_to_all_uneven(perf, ranks, message_bytes, dtype):
    perf(AllToAllUneven(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_broadcast(perf, ranks, message_bytes, dtype):
    perf(Broadcast(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_reduce(perf, ranks, message_bytes, dtype):
    perf(Reduce(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_gather(perf, ranks, message_bytes, dtype):
    perf(Gather(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_scatter(perf, ranks, message_bytes, dtype):
    perf(Scatter(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_send_recv(perf, ranks, message_bytes, dtype):
    perf(SendRecv(message_bytes=message_bytes, dtype=dtype), on=ranks)


def test_barrier(perf, ranks):
    perf(Barrier(), on=ranks)
