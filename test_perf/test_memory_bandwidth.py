"""Bandwidth of device memory (copy and triad as STREAM counts them) and of the link between host and device.

1 MiB fits in a cache; from 256 MiB on the bandwidth is the memory's on most devices.  The record says which it is.
"""

from __future__ import annotations

import pytest

from perfsuite import acceptance, sizes, workloads

in_device_memory = sizes(full=["1MiB", "256MiB", "1GiB", "4GiB"], small=["1MiB", "256MiB"], param="buffer_bytes")
over_the_host_link = sizes(full=["1MiB", "64MiB", "1GiB"], small=["64MiB"], param="buffer_bytes")
pinned_and_not = pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])


@in_device_memory
def test_memory_copy(perf, buffer_bytes):
    perf(workloads.MemoryCopy(buffer_bytes=buffer_bytes))


@in_device_memory
def test_memory_triad(perf, buffer_bytes):
    perf(workloads.MemoryTriad(buffer_bytes=buffer_bytes))


@acceptance("1GiB", "64MiB")
@over_the_host_link
@pinned_and_not
def test_host_to_device(perf, buffer_bytes, pinned):
    perf(workloads.HostDeviceCopy(buffer_bytes=buffer_bytes, direction="host_to_device", pinned=pinned))


@acceptance("1GiB", "64MiB")
@over_the_host_link
@pinned_and_not
def test_device_to_host(perf, buffer_bytes, pinned):
    perf(workloads.HostDeviceCopy(buffer_bytes=buffer_bytes, direction="device_to_host", pinned=pinned))
