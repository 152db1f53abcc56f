"""Experts: mixtures compared with a dense model of equal active parameters, and the cost of routing (report 004)."""

from __future__ import annotations

import pytest

from perfsuite import sizes, workloads
from perfsuite.base.mesh import MeshShape

MESHES = {
    "moe-tiny-dense": "dp4",
    "moe-tiny": "ep4",
    "moe-tiny-64": "dp2-ep4",
    "mixtral-8x7b-dense": "dp32",
    "mixtral-8x7b": "dp4-ep8",
    "mixtral-64": "dp8-ep8",
}
"""Ranks: the report's number of cards, or an eighth; ep spans a node."""
EXTENDED = pytest.mark.perf_extended
ROUTINGS = {
    "top2": {},
    "top1": {"top_k": 1},
    "capacity": {"capacity_factor": 1.25},
    "skew4": {"skew": 4.0},
}


def layer(shape, mesh, **case):
    """Return a layer for (samples on all ranks, tokens of each, features of a token and of an expert)."""
    batch_size, sequence_length, width, hidden = shape
    return workloads.MoeLayer(
        mesh=mesh,
        batch_size=batch_size,
        sequence_length=sequence_length,
        width=width,
        hidden=hidden,
        dtype="fp32" if width == 64 else "bf16",
        **case,
    )


@sizes(
    param="model",
    full=["mixtral-8x7b-dense", "mixtral-8x7b", "mixtral-64"],
    small=["moe-tiny-dense", "moe-tiny", "moe-tiny-64"],
    extended=["moe-tiny-dense", "moe-tiny-64"],
)
def test_experts_and_dense(perf, model, require_fit):
    """Report 004: throughput, memory and MFU of 8 and of 64 experts and of a dense model of equal active parameters."""
    small = {"dtype": "fp32"} if model.startswith("moe-tiny") else {"dtype": "bf16", "checkpointing": "full"}
    mesh, ranks = MESHES[model], MeshShape.parse(MESHES[model]).world_size
    workload = workloads.TrainStep(model=model, strategy="hybrid", mesh=mesh, builds=("memory",), **small)
    require_fit(workload, ranks)
    perf(workload, on=ranks)


@sizes(
    param="shape",
    # Mixtral's experts: the report states neither sizes nor length.
    full=[f"{batch}x2048x4096x14336" for batch in (32, 64, 128, 256)],
    small=[f"{batch}x16x64x128" for batch in (32, 64, 128, 256)],
    extended=[f"{batch}x16x64x128" for batch in (64, 128, 256)],
)
@pytest.mark.parametrize("routing", ["top2", *(pytest.param(name, marks=EXTENDED) for name in list(ROUTINGS)[1:])])
def test_routing(perf, shape, routing):
    """Report 004: one layer on 8 ranks with 8 experts each, forward and backward, and the time of its all-to-alls.  In
    addition to the report's top 2: one expert per token, a capacity that drops rows, and an expert with four times the
    mean load.
    """
    perf(layer(shape, "ep8", experts=64, **ROUTINGS[routing]), on=8)


@sizes(param="shape", full=["32x2048x4096x14336"], small=["32x16x64x128"])
@pytest.mark.parametrize("mesh", ["ep4", pytest.param("dp2-ep2", marks=EXTENDED)])
@pytest.mark.parametrize("routing", ["top2", pytest.param("capacity", marks=EXTENDED)])
@pytest.mark.parametrize("implementation", ["deepspeed", pytest.param("perfsuite", marks=EXTENDED)])
def test_deepspeed_experts(perf, shape, mesh, routing, implementation):
    """DeepSpeed's layer and perfsuite's with the same sizes on the same four ranks, dropless and with a capacity."""
    perf(layer(shape, mesh, experts=8, implementation=implementation, **ROUTINGS[routing]), on=4)
