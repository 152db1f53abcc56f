"""The layer of experts as a workload: its check on real ranks, what it records, its twin, DeepSpeed's, bad input."""

import importlib.util

import pytest

from perfsuite.base.errors import InvalidParameter, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import derive
from perfsuite.record.result import Peaks
from perfsuite.record.workload import Budget
from perfsuite.workloads.moe_layer import MoeLayer
from test_correctness.helpers import broken_experts
from test_correctness.helpers.local_driver import COMPILER, WORKER, driver_fixture, records, run

QUICK = Budget(min_rounds=3, max_time_s=0.02, warmup_time_s=0.01, timeout_s=90.0)
SIZES = {"batch_size": 4, "sequence_length": 16, "width": 16, "hidden": 24, "experts": 4}
DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

driver = driver_fixture("torch", COMPILER, WORKER)


def layer(kind=MoeLayer, **case):
    return kind(**{"mesh": "ep2", **SIZES, **case})


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"top_k": 1, "skew": 3.0},
        {"capacity_factor": 0.75},
        {"mesh": "dp2-ep2", "dtype": "bf16"},
        {"mesh": "1"},
        # Above what one process checks whole: its twin is, and of itself some tokens.
        {"width": 512, "hidden": 1024, "sequence_length": 8, "skew": 1.5},
    ],
    ids=["top2", "skew", "capacity", "bf16", "alone", "sampled"],
)
def test_a_layer_is_checked_against_a_loop(driver, case):
    workload = layer(**case)
    found = records(run(driver, workload, workload.mesh))
    assert (found["dropped_share"] > 0) == ("capacity_factor" in case)
    if "skew" in case:
        assert found["expert_imbalance"] == pytest.approx(case["skew"], rel=0.01)
    assert workload.checked_whole == (workload.width < 512)
    assert (workload.twin() is None) == workload.checked_whole


@DEEPSPEED
@pytest.mark.parametrize(
    ("mesh", "capacity_factor"),
    [
        pytest.param("dp2-ep2", None, id="dp2-ep2-dropless"),
        pytest.param("ep4", 0.75, id="ep4-capacity"),
        pytest.param("dp2-ep2", 0.75, id="dp2-ep2-capacity", marks=pytest.mark.slow),
        pytest.param("ep4", None, id="ep4-dropless", marks=pytest.mark.slow),
    ],
)
def test_deepspeed_s_layer_is_checked_against_a_loop(driver, mesh, capacity_factor):
    measurement = run(driver, layer(mesh=mesh, implementation="deepspeed", capacity_factor=capacity_factor), mesh)
    assert measurement.process == "fresh"
    assert (records(measurement)["dropped_share"] > 0) == (capacity_factor is not None)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (broken_experts.Doubled, "output of"),
        (broken_experts.OtherExpert, "output of"),
        (broken_experts.NoGradient, "gradient of the input of"),
        (broken_experts.HalfGradient, "gradient of gate of"),
        (broken_experts.LargeOther, "output of 8 tokens of"),
    ],
)
def test_a_wrong_layer_is_found(driver, broken, said):
    large = {"width": 512, "hidden": 1024, "sequence_length": 8} if broken is broken_experts.LargeOther else {}
    with pytest.raises(WrongResult, match=f"{said} .*against a plain loop"):
        run(driver, layer(broken, **large), "ep2")


def test_all_to_alls_and_computation_make_up_the_step(driver):
    workload = layer()
    measurement = run(driver, workload, workload.mesh, budget=QUICK)
    spans = {span.name: span for span in measurement.spans}
    # Counts, rows there and back, and both ways again in the backward.
    assert spans["communication"].count == 5
    assert sum(span.time_s for span in spans.values()) == pytest.approx(measurement.median_s, rel=1e-9)
    work = workload.work(MeshShape.parse(workload.mesh))
    assert work.flops["exact"] == 6.0 * 4 * 16 * (16 * 4 + 2 * 3 * 16 * 24)
    metrics = {
        metric.name: metric.value
        for metric in derive(workload.metrics, work=work, measurement=measurement, peaks=Peaks())
    }
    assert None not in metrics.values()
    assert metrics["compute_time_s"] + metrics["communication_time_s"] <= metrics["step_time_s"] == measurement.median_s
    assert metrics["expert_imbalance"] >= 1
    assert metrics["dropped_percent"] == 0
    # Two samples of 16 tokens on each rank, two rows of 16 numbers for each token, four times; four counts.
    assert records(measurement)["communication_bytes"] == 4 * (2 * 16 * 2 * 16 * 4) + 4 * 8


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"mesh": "tp2"}, "mesh tp2 has axis tp, which does not spread a single layer; give it dp and ep"),
        ({"mesh": "ep3", "batch_size": 3}, "ep=3 does not divide experts=4"),
        ({"batch_size": 5}, "batch_size=5 does not divide by the 2 ranks of mesh ep2; choose 4 or 6"),
        ({"dtype": "int8"}, "dtype='int8' is unknown; choose from fp32, tf32, bf16"),
        ({"implementation": "megatron"}, "implementation='megatron' is unknown; choose from perfsuite, deepspeed"),
        ({"implementation": "deepspeed", "skew": 1.5}, "does not work with DeepSpeed's router"),
        ({"implementation": "deepspeed", "capacity_factor": 1.0, "top_k": 1}, "specified for top_k=2 only"),
        ({"top_k": 5}, "top_k=5 .* more than its experts=4"),
    ],
)
def test_layers_that_cannot_be(case, said):
    with pytest.raises(InvalidParameter, match=said):
        layer(**case)
