"""The same kernel on every device of the host at once, to find slow devices.

There is no communication; the summary lists the median device, the slowest one, the spread, and the outliers.
"""

from __future__ import annotations

from perfsuite import acceptance, dtypes, sizes, world_sizes
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import HostDeviceCopy, MemoryTriad

# On a CPU all ranks share the one device, so these are extended cases.
pytestmark = [world_sizes(2, extended=[2], full=[2, 4, 8], more=True), acceptance()]


@sizes(full=["8192x8192x8192"], small=["256x256x256"], param="shape")
@dtypes("bf16")
def test_matmul_everywhere(perf, ranks, shape, dtype):
    m, k, n = shape
    perf(Matmul(m=m, k=k, n=n, dtype=dtype), on=ranks)


@sizes(full=["1GiB"], small=["64MiB"], param="buffer_bytes")
def test_memory_everywhere(perf, ranks, buffer_bytes):
    perf(MemoryTriad(buffer_bytes=buffer_bytes), on=ranks)


@sizes(full=["1GiB"], small=["64MiB"], param="buffer_bytes")
def test_host_link_everywhere(perf, ranks, buffer_bytes):
    """All links at once; devices behind one switch share its link."""
    perf(HostDeviceCopy(buffer_bytes=buffer_bytes), on=ranks)
