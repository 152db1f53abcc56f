"""Latency and bandwidth of every collective over message sizes and world sizes.

Sizes are S as nccl-tests counts it (perfsuite docs metrics).  Gradients are summed in fp32 or bf16, so these two are
swept over all sizes; the other dtypes have one.  Operations that only move bytes do not depend on the dtype.  Pairs are
half the world apart (rank r and r + n/2), so that on several hosts they span two.  On few cores the two most frequent
collectives of training run with all world sizes, the others with the smallest and the largest.
"""

from __future__ import annotations

from perfsuite import acceptance, dtypes, sizes, workloads, world_sizes

pytestmark = world_sizes(2, 4, 8, extended=[4], more=True)
every_world_size = world_sizes(2, 4, 8, more=True)
FULL = ["1KiB", "64KiB", "1MiB", "16MiB", "64MiB", "256MiB", "1GiB"]
over_sizes = sizes(full=FULL, small=["1KiB", "1MiB", "16MiB"])
in_one_small_size = sizes(full=FULL, small=["1MiB"])


@acceptance("1GiB", "16MiB")
@over_sizes
@every_world_size
@dtypes("fp32", "bf16")
def test_all_reduce(perf, ranks, message_bytes, dtype):
    perf(workloads.AllReduce(message_bytes=message_bytes, dtype=dtype), on=ranks)


@sizes(full=["64MiB"], small=["1MiB"])
@world_sizes(4)
@dtypes("fp64", "fp16", "int32", "int8")
def test_all_reduce_dtypes(perf, ranks, message_bytes, dtype):
    perf(workloads.AllReduce(message_bytes=message_bytes, dtype=dtype), on=ranks)


@acceptance("1GiB", "16MiB")
@over_sizes
@dtypes("fp32", "bf16")
def test_reduce_scatter(perf, ranks, message_bytes, dtype):
    perf(workloads.ReduceScatter(message_bytes=message_bytes, dtype=dtype), on=ranks)


@acceptance("1GiB", "16MiB")
@over_sizes
@every_world_size
def test_all_gather(perf, ranks, message_bytes, dtype):
    perf(workloads.AllGather(message_bytes=message_bytes, dtype=dtype), on=ranks)


@acceptance("1GiB", "16MiB")
@over_sizes
def test_all_to_all(perf, ranks, message_bytes, dtype):
    perf(workloads.AllToAll(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_all_to_all_uneven(perf, ranks, message_bytes, dtype):
    perf(workloads.AllToAllUneven(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_broadcast(perf, ranks, message_bytes, dtype):
    perf(workloads.Broadcast(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_reduce(perf, ranks, message_bytes, dtype):
    perf(workloads.Reduce(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_gather(perf, ranks, message_bytes, dtype):
    perf(workloads.Gather(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_scatter(perf, ranks, message_bytes, dtype):
    perf(workloads.Scatter(message_bytes=message_bytes, dtype=dtype), on=ranks)


@over_sizes
def test_send_recv(perf, ranks, message_bytes, dtype):
    perf(workloads.SendRecv(message_bytes=message_bytes, dtype=dtype), on=ranks)


@in_one_small_size
@world_sizes(4, 8, more=True)  # a ring of two ranks is a pair
def test_ring_shift(perf, ranks, message_bytes, dtype):
    perf(workloads.RingShift(message_bytes=message_bytes, dtype=dtype), on=ranks)


@in_one_small_size
@world_sizes(2, 8, more=True)
def test_one_direction(perf, ranks, message_bytes, dtype):
    perf(workloads.OneDirection(message_bytes=message_bytes, dtype=dtype), on=ranks)


def test_barrier(perf, ranks):
    perf(workloads.Barrier(), on=ranks)
