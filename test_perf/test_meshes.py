"""Meshes: the same model on the same ranks split in several ways, and times of the parts of a step (report 004)."""

from __future__ import annotations

from perfsuite import sizes, workloads
from perfsuite.base.mesh import MeshShape

TINY = {"layers": 8, "width": 64, "heads": 8, "words": 128, "context": 32}
"""Overrides of gpt2-tiny: eight ranks along any axis divide these sizes."""
PADDED = {"words_multiple": 128}
"""Overrides of GPT-3: every tp divides the padded vocabulary."""
ON_8 = ["dp8", "pp8", "tp8", "pp2-tp4", "pp2-dp2-tp2"]
PLAIN = "pp4-dp2"
"""A mesh of two axes for plain runs, with the report's model and batch; the report has no such mesh."""
# Report 004's meshes of 64 cards, without its tp64, which does not divide 96 heads.
ON_64 = ["dp64", "pp64", "dp2-tp32", "pp8-tp8", "pp8-dp2-tp4"]


def ranks(mesh):
    """Return the ranks of a mesh."""
    return MeshShape.parse(mesh).world_size


def full_case(world_size):
    """Return a GPT-3 model that fills this many cards, and the batch of all their meshes."""
    model, batch = {8: ("gpt3-13b", 64), 64: ("gpt3-175b", 128)}[world_size]
    return {"model": model, "overrides": PADDED, "dtype": "bf16", "checkpointing": "full", "global_batch_size": batch}


@sizes(param="mesh", full=[*ON_8, *ON_64], small=[*ON_8, PLAIN], extended=ON_8, ranks=ranks)
def test_meshes(perf, mesh, scale, require_fit):
    """Report 004: data, pipeline and tensor parallelism, alone and combined, with the same batch."""
    shape = MeshShape.parse(mesh)
    small = {"model": "gpt2-tiny", "overrides": TINY, "global_batch_size": 8}
    case = small if scale == "small" else full_case(shape.world_size)
    share = case["global_batch_size"] // shape.replicas
    # Micro-batches of one sample; small cases have as many as stages, at most four, because messages dominate their
    # time.
    accumulation = min(shape.size("pp"), 4) if scale == "small" else share
    workload = workloads.TrainStep(strategy="hybrid", mesh=mesh, accumulation=accumulation, builds=("memory",), **case)
    require_fit(workload, shape.world_size)
    perf(workload, on=shape.world_size)


@sizes(param="mesh", full=["pp8-dp2-ep2-cp2-tp4"], small=["pp2-ep2-cp2-tp2"], extended=["pp2-ep2-cp2-tp2"], ranks=ranks)
def test_components(perf, mesh, require_fit):
    """Report 004: computation and communication of experts, attention, gradients and messages between stages."""
    shape = MeshShape.parse(mesh)
    full = {"model": "moe-1.6t", "dtype": "bf16", "checkpointing": "full", "accumulation": 32}
    case = full if shape.size("dp") > 1 else {"model": "moe-tiny", "accumulation": 2}
    workload = workloads.TrainStep(strategy="hybrid", mesh=mesh, builds=("traffic",), **case)
    require_fit(workload, shape.world_size)
    perf(workload, on=shape.world_size)
