"""Kernels besides the dense product: fp8, wide results, attention, grouped products, launching, and memory capacity.

Run shapes of another model with ``--perf-shapes FILE``, one line per shape: ``test_attention_kernel 2x32x8x4096x128``.
"""

from __future__ import annotations

import pytest

from perfsuite import acceptance, dtypes, sizes
from perfsuite.base.units import MIB
from perfsuite.workloads.attention import Attention
from perfsuite.workloads.grouped_matmul import GroupedMatmul
from perfsuite.workloads.kernel_launch import KernelLaunch
from perfsuite.workloads.matmul_mixed import ScaledMatmul, WideMatmul
from perfsuite.workloads.memory_capacity import MemoryCapacity

EXTENDED = pytest.mark.perf_extended
products = sizes(full=["4096x4096x4096", "8192x8192x8192", "4096x4096x11008"], small=["256x256x256"], param="shape")


@EXTENDED  # no CPU computes in fp8
@products
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_matmul_fp8(perf, shape, scaling):
    """m x k x n in e4m3, with one scale per factor, and one per row of A and column of B."""
    m, k, n = shape
    perf(ScaledMatmul(m=m, k=k, n=n, scaling=scaling))


@EXTENDED
@products
@dtypes("bf16", "fp16")
def test_matmul_wide(perf, shape, dtype):
    """m x k x n from 16-bit factors into fp32, as gradients are added up."""
    m, k, n = shape
    perf(WideMatmul(m=m, k=k, n=n, dtype=dtype))


@sizes(
    # Samples x heads x heads of keys x tokens x features: GPT-2 XL's size, a 7B model's, an 8B model's with groups.
    full=["8x25x25x1024x64", "2x32x32x4096x128", "2x32x8x8192x128"],
    small=["2x8x8x256x64", "2x8x2x256x64"],
    extended=["2x8x2x256x64"],
    param="shape",
)
@dtypes("bf16")
@pytest.mark.parametrize("backend", ["flash", *(pytest.param(name, marks=EXTENDED) for name in ("efficient", "math"))])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_kernel(perf, shape, dtype, backend, direction):
    """Causal attention of one layer by each of torch's backends; operations by FlashAttention's convention."""
    batch_size, heads, kv_heads, sequence_length, head_width = shape
    perf(
        Attention(
            batch_size=batch_size,
            heads=heads,
            kv_heads=kv_heads,
            sequence_length=sequence_length,
            head_width=head_width,
            dtype=dtype,
            backend=backend,
            direction=direction,
        )
    )


@EXTENDED
@sizes(
    # Experts x rows of all x k x n: the first product of Mixtral's experts, and of 64 small ones.
    full=["8x8192x4096x14336", "64x32768x2048x1408"],
    small=["8x512x64x128"],
    param="shape",
)
@dtypes("bf16")
@pytest.mark.parametrize("way", ["grouped", "loop"])
@pytest.mark.parametrize("skew", [1.0, 4.0], ids=["even", "skew4"])
def test_grouped_matmul(perf, shape, dtype, way, skew):
    """Every expert's rows times its weights, in one kernel and in a loop; evenly, and one with four times the mean."""
    groups, rows, k, n = shape
    perf(GroupedMatmul(groups=groups, rows=rows, k=k, n=n, dtype=dtype, way=way, skew=skew))


@acceptance()
def test_kernel_launch(perf):
    """The smallest kernel: the host's time to start one."""
    perf(KernelLaunch())


@sizes(full=["256MiB"], small=["4MiB"], param="block_bytes")
def test_memory_capacity(perf, block_bytes, scale):
    """How much memory one process can have; a CPU's is everybody's, of which 64 MiB are taken."""
    perf(MemoryCapacity(block_bytes=block_bytes, limit_bytes=64 * MIB if scale == "small" else None))
