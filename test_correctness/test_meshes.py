"""One training on many meshes: the same losses, operations and weights, whatever strategy spreads it how."""

import functools

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.local_driver import COMPILER, FSDP, PIPELINING, WORKER, driver_fixture
from test_correctness.helpers.pipelines import staged
from test_correctness.helpers.several import Build, records_of

TINY = {"model": "gpt2-tiny", "overrides": {"layers": 4, "width": 32, "words": 64, "context": 16}}
BATCH = 8
STEPS = 3
MESHES = {
    "dp1": {"strategy": "single", "accumulation": 2},
    "dp2": {"strategy": "ddp", "accumulation": 2},
    "dp_replicate2-dp_shard2": {"strategy": "fsdp"},
    "pp2": staged(num_micro_batches=4),
    "pp2-dp2": staged(schedule="interleaved_1f1b", num_micro_batches=4),
    "tp2": {"strategy": "hybrid", "accumulation": 2},
    "dp2-tp2": {"strategy": "hybrid", "accumulation": 2},
}
COUNTED = ("dp1", "pp2-dp2", "tp2", "dp2-tp2")
"""Meshes whose operations are counted."""


SLOW = ("dp2-tp2", "dp_replicate2-dp_shard2")
"""Four ranks of DTensors: tp2 and pp2-dp2 tell the same of each axis, test_hybrid.py and test_train_step.py of both."""


def marked(meshes):
    """Parameters of a test."""
    return [pytest.param(mesh, marks=pytest.mark.slow) if mesh in SLOW else mesh for mesh in meshes]


driver = driver_fixture("torch", FSDP, PIPELINING, COMPILER, WORKER)


@pytest.fixture(scope="module")
def built(driver):
    """Records of the memory build of a mesh, or of its builds for loss and operations, on one set of ranks."""
    data = {"data": "generated", "dataset_samples": STEPS * BATCH}  # synthetic ones repeat after four micro-batches

    @functools.cache
    def found(mesh, memory):
        case = TrainStep(mesh=mesh, global_batch_size=BATCH, loss_steps=STEPS, **data, **MESHES[mesh], **TINY)
        together = ["memory"] if memory else ["loss", "flops"] if mesh in COUNTED else ["loss"]
        return records_of(driver, mesh, {name: Build(workload=case, purpose=name) for name in together})

    return lambda mesh, purpose: found(mesh, purpose == "memory")[purpose]


@pytest.mark.extended
@pytest.mark.parametrize("mesh", marked(list(MESHES)[1:]))
def test_the_same_samples_give_the_same_losses(built, mesh):
    for name in ("first_loss", "final_loss"):
        assert pytest.approx(built("dp1", "loss")[name], rel=1e-5) == built(mesh, "loss")[name]


@pytest.mark.extended
@pytest.mark.parametrize("mesh", marked(COUNTED[1:]))
def test_parts_take_the_operations_of_the_whole(built, mesh):
    assert built("dp1", "flops")["counted_flops"] == built(mesh, "flops")["counted_flops"]


@pytest.mark.parametrize("mesh", marked(MESHES))
def test_the_batch_is_spread_over_replicas_alone(built, mesh):
    records, replicas = built(mesh, "memory"), MeshShape.parse(mesh).replicas
    assert BATCH == records["global_batch"] == records["local_batch"] * records["accumulation"] * replicas


@pytest.mark.parametrize("mesh", marked(mesh for mesh in MESHES if mesh != "dp2"))
def test_what_is_spread_takes_its_share_of_the_memory(built, mesh):
    memory = built(mesh, "memory")
    shares = {"dp_replicate2-dp_shard2": ("dp1", 2, 0.01), "pp2-dp2": ("pp2", 2, 0.01)}
    shares |= {"tp2": ("dp1", 2, 0.05), "dp2-tp2": ("dp1", 4, 0.05)}
    if mesh in shares:
        whole, parts, within = shares[mesh]
        assert memory["weights_bytes"] == pytest.approx(built(whole, "memory")["weights_bytes"] / parts, rel=within)
    assert 0 == max(0, memory["parts_beyond_peak_bytes"])
    assert ("peak_activations_bytes_rank1" in memory) == (MeshShape.parse(mesh).size("pp") == 2)
