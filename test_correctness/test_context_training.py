"""Training with the tokens of a sequence spread over ranks: the same loss, gradients and step as in one process."""

import importlib.util
import re

import pytest

from perfsuite.base.errors import UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.strategies.hybrid import Hybrid
from perfsuite.workloads.training.parity import TrainParity
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.local_driver import COMPILER, WORKER, driver_fixture

ONCE = Budget(smoke=True, timeout_s=300.0)

driver = driver_fixture("torch", COMPILER, WORKER, *Hybrid.preload)


def parity(driver, mesh, **case):
    shape = MeshShape.parse(mesh)
    workload = TrainParity(**{"model": "llama2-tiny", "strategy": "hybrid", **case})
    job = Job(workload=workload, world_size=shape.world_size, shape=shape, budget=ONCE, fresh=True)
    return {record.name: record.value for record in driver.run(job).records}["parity_error"]


FAST = [
    ("cp2-tp2", {"options": {"context": "zigzag"}}),
    ("cp2", {"options": {"context": "ring"}, "model": "gpt2-tiny", "attention": "math"}),
    ("cp2", {"options": {"context": "ulysses"}, "accumulation": 2}),
]


@pytest.mark.parametrize(("mesh", "case"), FAST, ids=[f"{mesh}-{n}" for n, (mesh, _) in enumerate(FAST)])
def test_spread_sequences_train_alike(driver, mesh, case):
    assert parity(driver, mesh, **case) <= 1e-5


SLOW = [
    ("cp4", {"options": {"context": "zigzag"}, "checkpointing": "full", "attention": "flash"}),
    ("cp4", {"options": {"context": "ring"}, "checkpointing": "selective", "attention": "math"}),
    ("cp2", {"options": {"context": "ulysses", "data": "replicate"}, "checkpointing": "selective"}),
    ("dp2-cp2", {"options": {"context": "ring", "reshard": False}, "accumulation": 2}),
    ("cp2-tp2", {"options": {"context": "ulysses", "sequence_parallel": False}}),
    ("pp2-dp2-cp2", {"accumulation": 2}),
    ("cp8", {"model": "gpt2-tiny"}),
    ("cp2", {"options": {"context": "zigzag"}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "case"), SLOW, ids=[f"{mesh}-{n}" for n, (mesh, _) in enumerate(SLOW)])
def test_spread_sequences_train_alike_with_what_else_there_is(driver, mesh, case):
    assert parity(driver, mesh, **case) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("context", ["zigzag", "ring", "ulysses"])
def test_spread_sequences_train_alike_in_half_precision(driver, context, dtype):
    assert parity(driver, "cp2", dtype=dtype, options={"context": context}) <= 2e-2


def needs_deepspeed(test):
    return pytest.mark.slow(
        pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")(test)
    )


@needs_deepspeed
def test_sequences_that_deepspeed_spreads_train_alike(driver):
    assert parity(driver, "cp2", options={"context": "deepspeed"}) <= 1e-5


@needs_deepspeed
def test_deepspeed_sends_what_ulysses_sends(driver):
    own, peers = (sent(driver, context) for context in ("ulysses", "deepspeed"))
    assert own == peers
    assert {"cp"} == {axis for axis, collective, _ in own if collective == "all_to_all"}


def sent(driver, context):
    options = {"context": context}
    case = TrainStep(model="llama2-tiny", strategy="hybrid", mesh="cp2", options=options, builds=("traffic",))
    job = Job(workload=case, world_size=2, shape=MeshShape.of(cp=2), budget=ONCE, fresh=True, purpose="traffic")
    return {
        (each.axis, each.collective, each.part): (each.calls, each.message_bytes) for each in driver.run(job).traffic
    }


def test_what_torch_cannot_spread_is_a_skip_that_says_so(driver):
    with pytest.raises(UnsupportedCase) as refused:
        parity(driver, "cp2", options={"context": "torch"})
    if "strategy fsdp" in str(refused.value):
        raise refused.value  # an older torch trains along no data axis of a cpu
    assert re.match(r"context='torch': torch \S+ cannot spread attention on cpu", str(refused.value))
