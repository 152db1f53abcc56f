"""Training with the tokens of a sequence spread over ranks: the same loss, gradients and step as in one process."""

import importlib.util
import itertools

import pytest

from perfsuite.strategies.hybrid import Hybrid
from perfsuite.workloads.training.parity import TrainParity
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.local_driver import COMPILER, WORKER, driver_fixture, records, run

driver = driver_fixture("torch", COMPILER, WORKER, *Hybrid.preload)


def parity(driver, mesh, **case):
    workload = TrainParity(**{"model": "llama2-tiny", "strategy": "hybrid", **case})
    return records(run(driver, workload, mesh, fresh=True))["parity_error"]


CASES = [
    pytest.param("cp2-tp2", {"options": {"context": "zigzag"}}, marks=pytest.mark.extended),
    ("cp2", {"options": {"context": "ring"}, "model": "gpt2-tiny", "attention": "math"}),
    ("cp2", {"options": {"context": "ulysses"}, "accumulation": 2}),
]
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
NARROW = itertools.product(("bf16", "fp16"), ("zigzag", "ring", "ulysses"))
SLOW += [("cp2", {"options": {"context": context}, "dtype": dtype}) for dtype, context in NARROW]
CASES += [pytest.param(*each, marks=pytest.mark.slow) for each in SLOW]


@pytest.mark.parametrize(("mesh", "case"), CASES)
def test_spread_sequences_train_alike(driver, mesh, case):
    assert parity(driver, mesh, **case) <= (2e-2 if "dtype" in case else 1e-5)


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
    traffic = run(driver, case, "cp2", fresh=True, purpose="traffic").traffic
    return {(each.axis, each.collective, each.part): (each.calls, each.message_bytes) for each in traffic}
