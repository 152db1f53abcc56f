"""Arithmetic rate of one device: dense matrix products, m x k times k x n."""

from __future__ import annotations

from perfsuite import dtypes, sizes, workloads

SQUARE = ["1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "8192x8192x8192"]
# A tall product, one with a long inner dimension, and the first layer of a 7B model's MLP.
NOT_SQUARE = ["16384x1024x1024", "1024x16384x1024", "4096x4096x11008"]


@sizes(
    full=SQUARE + NOT_SQUARE,
    small=["256x256x256", "512x512x512", "1024x1024x1024", "1024x256x512"],
    param="shape",
)
@dtypes("fp32", "tf32", "bf16", "fp16", "int8")
def test_matmul(perf, shape, dtype):
    m, k, n = shape
    perf(workloads.Matmul(m=m, k=k, n=n, dtype=dtype))
