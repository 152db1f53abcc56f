"""One training on many meshes: the same losses, operations and weights, whatever strategy spreads it how."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.mesh import MeshShape
from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.pipelines import staged
from test_correctness.helpers.several import Build, records_of

ROOT = Path(__file__).parent.parent
TINY = {"model": "gpt2-tiny", "overrides": {"layers": 4, "width": 32, "words": 64, "context": 16}}
BATCH = 8
STEPS = 3
MESHES = {
    "dp1": {"strategy": "single", "accumulation": 2},
    "dp2": {"strategy": "ddp", "accumulation": 2},
    "dp_replicate2-dp_shard2": {"strategy": "fsdp"},
    "pp2": staged(num_micro_batches=4),
    "pp2-dp2": staged(schedule="interleaved_1f1b", num_micro_batches=4),
    "dp2-tp2": {"strategy": "hybrid", "accumulation": 2},
}
PURPOSES = {
    "memory": [mesh for mesh in MESHES if mesh != "dp2"],  # first, of a process in which nothing has run
    "loss": MESHES,
    "flops": ("dp1", "pp2-dp2", "dp2-tp2"),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    transport = LocalTransport(
        start_method="fork",
        preload=("torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch._dynamo"),
        log_directory=tmp_path_factory.mktemp("logs"),
    )
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def built(driver):
    """Records of builds by purpose and mesh; those of a mesh on one set of ranks."""
    data = {"data": "generated", "dataset_samples": STEPS * BATCH}  # synthetic ones repeat after four micro-batches
    found = {purpose: {} for purpose in PURPOSES}
    for mesh, spread in MESHES.items():
        case = TrainStep(mesh=mesh, global_batch_size=BATCH, loss_steps=STEPS, **data, **spread, **TINY)
        parts = {name: Build(workload=case, purpose=name) for name, meshes in PURPOSES.items() if mesh in meshes}
        for purpose, records in records_of(driver, mesh, parts).items():
            found[purpose][mesh] = records
    return found


@pytest.mark.parametrize("mesh", list(MESHES)[1:])
def test_the_same_samples_give_the_same_losses(built, mesh):
    for name in ("first_loss", "final_loss"):
        assert pytest.approx(built["loss"]["dp1"][name], rel=1e-5) == built["loss"][mesh][name]


def test_parts_take_the_operations_of_the_whole(built):
    counted = {mesh: records["counted_flops"] for mesh, records in built["flops"].items()}
    assert dict.fromkeys(counted, counted["dp1"]) == counted


@pytest.mark.parametrize("mesh", MESHES)
def test_the_batch_is_spread_over_replicas_alone(built, mesh):
    records, replicas = built["loss"][mesh], MeshShape.parse(mesh).replicas
    assert BATCH == records["global_batch"] == records["local_batch"] * records["accumulation"] * replicas


def test_what_is_spread_takes_its_share_of_the_memory(built):
    weights = {mesh: memory["weights_bytes"] for mesh, memory in built["memory"].items()}
    assert weights["dp_replicate2-dp_shard2"] == pytest.approx(weights["dp1"] / 2, rel=0.01)
    assert weights["pp2-dp2"] == pytest.approx(weights["pp2"] / 2, rel=0.01)
    assert weights["dp2-tp2"] == pytest.approx(weights["dp1"] / 4, rel=0.05)
    for mesh, memory in built["memory"].items():
        assert 0 == max(0, memory["parts_beyond_peak_bytes"])
        assert ("peak_activations_bytes_rank1" in memory) == (MeshShape.parse(mesh).size("pp") == 2)
