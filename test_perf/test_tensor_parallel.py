"""Tensor parallelism: a GPT split over more and more ranks, and one layer split by columns and by rows (report 004)."""

from __future__ import annotations

import pytest

from perfsuite import sizes, workloads, world_sizes

HEADS = {"layers": 1, "width": 128, "heads": 8, "words": 512, "context": 64}
"""Overrides of gpt2-tiny: as many heads as the most ranks of the small cases."""
CASES = {
    "gpt2-tiny": {"overrides": HEADS, "micro_batch_size": 2},
    "gpt3-13b": {"overrides": {"words_multiple": 128}, "dtype": "bf16", "checkpointing": "full"},
    # Eight of its 96 layers, because eight cards cannot hold all; the id does not show it.
    "gpt3-175b": {"overrides": {"words_multiple": 128, "layers": 8}, "dtype": "bf16", "checkpointing": "full"},
}
BUILDS = ("memory", "exposed", "traffic")


@sizes(param="model", full=["gpt3-13b", "gpt3-175b"], small=["gpt2-tiny"])
@world_sizes(1, 2, 4, 8, extended=[4, 8])
def test_tensor_parallel(perf, ranks, model, require_fit):
    """Report 004: throughput, memory, communication and MFU; cases whose model does not fit on few cards are skipped.
    gpt3-175b has eight of its 96 layers: each layer is as in the report, the model as a whole is not.
    """
    workload = workloads.TrainStep(
        model=model, strategy="hybrid", mesh=f"tp{ranks.world_size}", builds=BUILDS, **CASES[model]
    )
    require_fit(workload, ranks.world_size)
    perf(workload, on=ranks)


@sizes(param="features", full=["8192x8192"], small=["512x512"])
@pytest.mark.parametrize("split", ["none", "column", "column_gather", "row", "row_scatter"])
def test_column_and_row(perf, features, split):
    """Report 004: Y = X W on four cards, with the all-gather that completes a column-parallel product."""
    features_in, features_out = features
    ranks = 1 if split == "none" else 4
    workload = workloads.TensorLinear(
        split=split,
        mesh="1" if ranks == 1 else f"tp{ranks}",
        features_in=features_in,
        features_out=features_out,
        rows=features_in,
        dtype="fp32" if features_in == 512 else "bf16",
    )
    perf(workload, on=ranks)
