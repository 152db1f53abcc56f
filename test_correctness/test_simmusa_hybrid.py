"""Products of parallelisms on simulated devices: the same operators, messages and results as on a CPU."""

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.run.session import Case
from perfsuite.workloads.training.train_step import TrainStep
from simmusa.costs import Costs
from test_correctness.helpers.simmusa_ranks import ONCE, TRAINING, opened, require_built
from test_correctness.helpers.twin_sizes import as_its_twin

FAST = {
    "cp4": {"model": "llama2-tiny", "attention": "flash"},
    "ep4": {"model": "moe-tiny"},
    "pp2": {"model": "gpt2-tiny", "accumulation": 2},
}
SLOW = {
    "dp2-tp2": {"model": "llama2-tiny"},
    "tp2": {"model": "gpt2-tiny"},
    "pp2-ep2-tp2": {"model": "moe-tiny", "accumulation": 2},
    "tp4": {"model": "llama2-tiny", "overrides": {"kv_heads": 4}},
    "tp8": {"model": "gpt2-tiny", "overrides": {"heads": 8}},
    "cp2-tp2": {"model": "llama2-tiny", "options": {"context": "ulysses"}},
    "cp4": {"model": "llama2-tiny", "options": {"context": "ring"}, "attention": "math"},
    "pp2-dp2-tp2": {"model": "gpt2-tiny", "accumulation": 2, "dtype": "bf16"},
    "pp2-tp4": {"model": "llama2-tiny", "overrides": {"kv_heads": 4}, "accumulation": 4},
    "dp_replicate2-dp_shard2-tp2": {"model": "llama2-tiny"},
}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    require_built()
    preload = (*TRAINING, "torch.distributed.pipelining", "torch.distributed.tensor.parallel")
    with opened(Costs(), tmp_path_factory.mktemp("ranks"), preload) as session:
        yield session


def runs(session, mesh, case):
    """Whether the case trains like one process and its step ends with a finite loss that ranks agree about."""
    overrides = case.get("overrides", {})
    sizes = {"overrides": {"layers": 4, **overrides}} if "pp" in mesh else as_its_twin(case["model"], mesh, **overrides)
    workload = TrainStep(strategy="hybrid", mesh=mesh, **{**case, **sizes})
    size = MeshShape.parse(mesh).world_size
    name = f"test_it[s4000-{mesh}-{'-'.join(map(str, case))}]"
    return session.run(Case(id=name, workload=workload, world_size=size, budget=ONCE, platform="s4000"))


@pytest.mark.extended
@pytest.mark.parametrize("mesh", FAST)
def test_a_mesh_trains_on_simulated_devices(session, mesh):
    assert runs(session, mesh, FAST[mesh]).outcome == "smoke"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SLOW)
def test_more_meshes_train_on_simulated_devices(session, mesh):
    assert runs(session, mesh, SLOW[mesh]).outcome == "smoke"
