"""Training with the tokens of a sequence spread over ranks: the same loss, gradients and step as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.mesh import MeshShape
from perfsuite.platforms import families
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.strategies.hybrid import Hybrid
from perfsuite.workload import Budget
from perfsuite.workloads.training.parity import TrainParity

ROOT = Path(__file__).parent.parent
ONCE = Budget(smoke=True, timeout_s=300.0)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    transport = LocalTransport(
        start_method="fork",
        preload=("torch", "torch._dynamo", "perfsuite.runtime.ranks.worker", *Hybrid.preload),
        log_directory=tmp_path_factory.mktemp("logs"),
    )
    driver = Driver(transport=transport, family=families()["cpu"], rootpath=ROOT, device_count=1)
    yield driver
    driver.close()


def parity(driver, mesh, **case):
    shape = MeshShape.parse(mesh)
    workload = TrainParity(**{"model": "llama2-tiny", "strategy": "hybrid", **case})
    job = Job(workload=workload, world_size=shape.world_size, shape=shape, budget=ONCE, fresh=True)
    return {record.name: record.value for record in driver.run(job).records}["parity_error"]


FAST = [
    ("cp2", {"options": {"context": "zigzag"}}),
    ("cp2", {"options": {"context": "ring"}, "model": "gpt2-tiny", "attention": "math"}),
    ("cp2", {"options": {"context": "ulysses"}, "accumulation": 2}),
    ("cp2-tp2", {"model": "gpt2-tiny"}),
]


@pytest.mark.parametrize(("mesh", "case"), FAST, ids=[f"{mesh}-{n}" for n, (mesh, _) in enumerate(FAST)])
def test_spread_sequences_train_alike(driver, mesh, case):
    assert parity(driver, mesh, **case) <= 1e-5
