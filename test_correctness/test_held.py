"""What a rank holds between steps: the closed form against the memory build, strategy by strategy."""

import importlib.util
import itertools
import math

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import GIB
from perfsuite.models.program import ENCODERS
from perfsuite.platforms import load_catalog
from perfsuite.published.recipes import find
from perfsuite.record.workload import Budget
from perfsuite.runtime.driver import Job
from perfsuite.workloads.training.train_step import TrainStep, held
from test_correctness.helpers.local_driver import COMPILER, FSDP, WORKER, driver_fixture

S4000 = load_catalog(()).find("s4000")
driver = driver_fixture("torch", FSDP, COMPILER, WORKER)
ONCE = Budget(smoke=True, timeout_s=300.0)
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
PROGRAM = {"encoders": "tiny-text-picture", "ema": "fp32"}
CASES = [
    *itertools.product(("ddp", "zero_redundancy", "fsdp"), ("fp32", "bf16")),
    *itertools.product(("zero0", "zero1", "zero2", "zero3"), ("fp32", "bf16")),
]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("strategy", "dtype"),
    [
        pytest.param(
            strategy,
            dtype,
            marks=[
                *([DEEPSPEED] if strategy.startswith("zero") and strategy != "zero_redundancy" else []),
                *([] if (strategy, dtype) in (("fsdp", "fp32"), ("zero2", "bf16")) else [pytest.mark.slow]),
            ],
        )
        for strategy, dtype in CASES
    ],
)
def test_the_memory_build_finds_what_the_closed_form_says(driver, strategy, dtype):
    """On two ranks; a step counter for each tensor, the batch and the loss are not in the form."""
    step = TrainStep(model="opensora-tiny", strategy=strategy, dtype=dtype, program=PROGRAM)
    found = driver.run(Job(workload=step, world_size=2, budget=ONCE, purpose="memory"))
    measured = {record.name.removesuffix("_bytes"): record.value for record in found.records}
    parts = held(step, 2, S4000)
    parameters = step.find_model().parameters
    assert parts["encoders"] == measured["encoders"]
    assert parts["EMA"] == pytest.approx(measured["ema"], rel=0.02)
    assert parts["weights"] == pytest.approx(measured["weights"], rel=0.02)
    whole = strategy == "zero_redundancy"  # torch's ZeroRedundancyOptimizer gives a rank whole parameters
    assert parts["optimizer"] == pytest.approx(measured["optimizer"], rel=0.1 if whole else 0.02)
    inputs = ENCODERS["tiny-text-picture"].inputs(step.find_model()).parts
    batches = 4 * sum(math.prod(part.shape) * (8 if part.below else 4) for part in inputs)
    assert parts["kept beside"] == pytest.approx(measured["untracked"] - batches, abs=0.1 * parameters)


@pytest.mark.parametrize(("ranks", "gib"), [(1, 21.889), (2, 17.598), (4, 15.445), (8, 14.395)])
def test_report_000_holds_what_it_printed(ranks, gib):
    step = TrainStep(**find(f"000-opensora-1x{ranks}").parameters)
    assert sum(held(step, ranks, S4000).values()) / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "fp32", "bf16"),
    [
        ("ddp", (4, 8), (4, 8)),
        ("zero_redundancy", (4, 1), (4, 1)),
        ("fsdp", (0.5, 1), (0.5, 1)),
        ("hybrid", (0.5, 1), (0.5, 1)),
        ("zero0", (4, 8), (2, 8)),
        ("zero1", (4, 1.5), (2, 1.5)),
        ("zero2", (4, 1.5), (2, 1.5)),
        ("zero3", (0.5, 1.5), (0.25, 1.5)),
    ],
)
def test_weights_and_state_are_spread_as_the_strategy_spreads_them(strategy, fp32, bf16):
    """Bytes of a parameter on one of eight ranks; ZeRO in 16 bits has narrow weights and their wide copy."""
    for dtype, expected in (("fp32", fp32), ("bf16", bf16)):
        step = TrainStep(model="gpt3-13b", strategy=strategy, dtype=dtype, mesh="dp8" if strategy == "hybrid" else "")
        parts, parameters = held(step, 8, S4000), step.find_model().parameters
        assert expected == pytest.approx([parts[name] / parameters for name in ("weights", "optimizer")], rel=1e-9)


def test_a_bucket_of_zero_3_is_no_larger_than_deepspeeds_own():
    step = TrainStep(model="llama2-7b", strategy="zero3", dtype="fp16")
    settings = step.find_strategy().settings(step.plan(MeshShape.of(dp=8)))
    assert settings["zero_optimization"]["reduce_bucket_size"] == 500_000_000
