"""Kernels that others measured, shipped with the published steps of the same machine."""

from __future__ import annotations

import functools
import json

from benchmarks.backtest.rows import DATA
from perfsuite.projection.calibration import KernelPoint

_STAGES = {"TN": "forward", "NN": "backward_input", "NT": "backward_weight"}
_GROUPED = {"fwd": "forward", "bwd_grad_act": "backward_input", "bwd_grad_w": "backward_weight"}


@functools.lru_cache(maxsize=4)
def measured_kernels(file: str) -> tuple[KernelPoint, ...]:
    """Points of a file of microbenchmarks.  Its TFLOPS of attention count all pairs, also those that a mask skips."""
    plain = json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))
    source = f"{plain['source']['repository']}, {plain['source']['file']}"
    points = [
        KernelPoint(
            kind="matmul",
            dtype="bf16",
            shape=(batch, m, n, k),
            time_s=2 * batch * m * n * k / rate / 1e12,
            stage=_STAGES[order],
            source=source,
        )
        for batch, m, k, n, order, _, rate in plain["matmul"]
    ]
    points += [
        KernelPoint(
            kind="grouped_matmul",
            dtype="bf16",
            shape=(groups, m, n, k),
            time_s=2 * groups * m * n * k / rate / 1e12,
            stage=_GROUPED[stage],
            source=source,
        )
        for groups, m, n, k, stage, rate in plain["grouped_matmul"]
    ]
    for operation, batch, tokens, heads, key_heads, features, values, contiguous, rate in plain["attention"]:
        if not contiguous:
            continue
        backward = operation == "sdp_bwd"
        flops = 2.0 * batch * heads * tokens**2 * (features + values) * (2.5 if backward else 1.0)
        points.append(
            KernelPoint(
                kind="attention_backward" if backward else "attention_forward",
                dtype="bf16",
                shape=(batch, tokens, heads, key_heads, features),
                time_s=flops / rate / 1e12 * 2 * features / (features + values),
                source=source,
            )
        )
    return tuple(points)
