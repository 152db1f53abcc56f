"""Products of parallelisms on real ranks: parity with one process, what they refuse, and what they leave on a rank."""

import dataclasses
import functools
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import InvalidParameter, RanksFailed, WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.models import find
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.workloads.training.parity import TrainParity
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.conftest import OF_RANKS
from test_correctness.helpers import training_faults
from test_correctness.helpers.hybrid_ranks import Doubtful, DrawnParity, OlderParity, overflow_on_one_rank
from test_correctness.helpers.local_driver import driver_fixture, parity_error, records, run
from test_correctness.helpers.moe_ranks import FreshFunction
from test_correctness.helpers.several import Build, records_of

NARROW = ("bf16", "fp16")

driver = driver_fixture(*OF_RANKS)


def parity(driver, mesh, *, model="llama2-70b", **case):
    return parity_error(driver, mesh, model=model, strategy="hybrid", **case)


FAST = {
    "tp2 tied": ("tp2", {"model": "gpt2"}),
    "tp2 whole tokens and logits": ("tp2", {"options": {"sequence_parallel": False, "loss_parallel": False}}),
    "tp2 full checkpointing in bf16": ("tp2", {"checkpointing": "full", "dtype": "bf16"}),
    "dp2 replicated": ("dp2", {"options": {"data": "replicate"}, "model": "gpt2"}),
    "dp2-tp2 replicated": ("dp2-tp2", {"options": {"data": "replicate"}, "model": "gpt2"}),
    "pp2-tp2 tied and zbv": ("pp2-tp2", {"options": {"schedule": "zbv"}, "model": "gpt2", "accumulation": 4}),
    "pp2 in fp16": ("pp2", {"dtype": "fp16", "accumulation": 2}),
}


@pytest.fixture(scope="module")
def on_mesh(driver):
    """Records of the FAST cases of a mesh, which run on one set of ranks."""

    @functools.cache
    def found(mesh):
        parts = {
            name: Build(workload=TrainParity(**{"model": "llama2-70b", "strategy": "hybrid", **case}))
            for name, (where, case) in FAST.items()
            if where == mesh
        }
        return records_of(driver, mesh, parts)

    return found


# Four ranks of DTensors: data parallelism that replicates and tensor parallelism have cases of their own.
@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "dp2-tp2 replicated" else name for name in FAST],
)
def test_a_product_of_parallelisms_is_the_same_training(on_mesh, name):
    mesh, case = FAST[name]
    assert on_mesh(mesh)[name]["parity_error"] <= (2e-2 if case.get("dtype") in NARROW else 1e-5)


SLOW = {
    "tp2": {"dtype": "fp16"},
    "dp_replicate2-dp_shard2-tp2": {},
    "pp4-tp2": {"accumulation": 4, "dtype": "bf16"},
    "pp2-cp2-tp2": {"accumulation": 2, "dtype": "fp16"},
    "pp2-dp2-cp2-tp2": {"accumulation": 2},
    "pp2-ep2-cp2-tp2": {"accumulation": 2, "model": "moe-tiny"},
    "pp2-dp2-ep2-cp2-tp2": {"accumulation": 2, "model": "moe-tiny"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SLOW)
def test_the_grid_of_products(driver, mesh):
    assert parity(driver, mesh, **SLOW[mesh]) <= (2e-2 if SLOW[mesh].get("dtype") in NARROW else 1e-5)


# -- any mesh, any sizes -----------------------------------------------------------------------------------------


@st.composite
def drawn(draw):
    """A mesh of 2 to 8 ranks and a training that divides by all its axes."""
    sizes = {"pp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1}
    for _ in range(draw(st.integers(1, 3))):
        sizes[draw(st.sampled_from(sorted(sizes)))] *= 2
    pp, ep, cp, tp = (sizes[axis] for axis in ("pp", "ep", "cp", "tp"))
    mesh = "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
    kind = "moe-tiny" if ep > 1 else draw(st.sampled_from(["gpt2-tiny", "llama2-tiny", "moe-tiny"]))
    heads = tp * cp * draw(st.sampled_from([1, 2])) * 2
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "zbv", "interleaved_1f1b"])) if pp > 1 else None
    stages = 2 * pp if schedule in ("zbv", "interleaved_1f1b") else pp
    overrides = {
        "layers": stages + draw(st.integers(0, 1)),
        "heads": heads,
        "width": heads * draw(st.sampled_from([4, 8])),
        "words": 16 * tp * draw(st.integers(1, 3)),
    }
    length = 2 * cp * tp * draw(st.integers(1, 4))
    if kind == "gpt2-tiny":
        overrides["context"] = length
    else:
        overrides |= {"kv_heads": heads // draw(st.sampled_from([1, 2])), "hidden": 8 * tp, "sequence_length": length}
    if kind == "moe-tiny":
        overrides |= {"experts": ep * draw(st.sampled_from([2, 4]))}
    options = {"schedule": schedule} if schedule else {}
    if cp > 1:
        options["context"] = draw(st.sampled_from(["zigzag", "ring", "ulysses"]))
    if tp > 1 and kind != "moe-tiny":
        options["sequence_parallel"] = draw(st.booleans())
    case = {
        "model": kind,
        "overrides": overrides,
        "options": options,
        "micro_batch_size": draw(st.integers(1, 2)),
        "accumulation": pp * draw(st.sampled_from([2, 4])) if schedule else draw(st.integers(1, 2)),
        "checkpointing": draw(st.sampled_from(["none", "full"])) if schedule != "zbv" else "none",
    }
    return mesh, case


ANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@settings(ANY, max_examples=1)
@given(drawn())
def test_any_mesh_is_the_same_training(driver, case):
    assert parity(driver, case[0], kind=DrawnParity, **case[1]) <= 1e-5


@pytest.mark.slow
@settings(ANY, max_examples=50)
@given(drawn())
def test_many_meshes_are_the_same_training(driver, case):
    assert parity(driver, case[0], kind=DrawnParity, **case[1]) <= 1e-5


# -- what is refused before a rank starts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"mesh": "tp5"}, "tp5 does not divide heads=32 of model llama2-7b; choose tp from 4, 2, 8, 1"),
        ({"mesh": "tp16", "model": "llama2-70b"}, "tp16 does not divide key heads=8 ... choose tp from 8, 4, 2, 1"),
        ({"model": "gpt2"}, "tp2 does not divide the 50257 rows ... pad it to 50432 ... words_multiple=128"),
        ({"overrides": {"sequence_length": 4097}}, "sequence_length=4097 ... is not a multiple of cp x tp = 2"),
        (
            {"mesh": "cp16-tp2", "model": "llama2-70b", "options": {"context": "ulysses"}},
            "cp=16 does not divide the 4 key heads of a tp rank (8 over tp=2), which context='ulysses' spreads",
        ),
        ({"options": {"context": "ring"}}, "context='ring' ... applies to cp, which mesh tp2 lacks; leave it out"),
        ({"options": {"async_tensor": True}}, "async_tensor without compiled=True has no effect... set compiled=True"),
        (
            {"mesh": "dp2-ep2", "model": "moe-tiny", "global_batch_size": 6},
            "global_batch_size=6 does not divide by accumulation 1 x 4 replicas (dp 2 x ep 2) = 4; choose 4 or 8",
        ),
        (
            {"model": "llama2-tiny", "overrides": {"hidden": 345}},
            "tp2 does not divide hidden=345 of model llama2-tiny; choose tp from 1, ... heads=4, key heads=2 too",
        ),
        (
            {"mesh": "cp2-tp2", "overrides": {"sequence_length": 62}, "options": {"context": "ring"}},
            "choose 60 or 64, or set sequence_parallel to False",
        ),
        ({"options": {"sequence_parallel": "no"}}, "sequence_parallel='no' ... has a wrong type; choose True or False"),
        ({"mesh": "pp2", "options": {"stages_per_rank": "2"}}, "stages_per_rank='2' ... choose a whole number"),
        ({"attention": "fast"}, "attention='fast' is unknown; choose from auto, math, flash"),
    ],
)
def test_what_cannot_be_is_named_with_the_legal_choices(case, message):
    with pytest.raises(InvalidParameter, match=re.escape(message).replace(r"\.\.\.", ".*")):
        TrainStep(**{"strategy": "hybrid", "model": "llama2-7b", "mesh": "tp2", **case})


def test_experts_train_alike_where_torch_cannot_leave_parameters_out(driver):
    assert parity(driver, "ep2", kind=OlderParity, model="moe-tiny") <= 1e-5


# -- faults ------------------------------------------------------------------------------------------------------


def run_faulty(driver, mesh, fault, *, timeout_s=300.0, **arguments):
    workload = FreshFunction(function=training_faults.faulty_part, arguments={**arguments, "fault": fault})
    return run(driver, workload, mesh, budget=Budget(smoke=True, timeout_s=timeout_s))


@pytest.mark.parametrize(
    ("mesh", "model", "part", "rank"),
    [
        ("cp2", "llama2-tiny", "blocks.1.attention.core", "1 (cp 1)"),
        ("ep2", "moe-tiny", "blocks.0.mlp.experts", "1 (ep 1)"),
        pytest.param("pp2-tp2", "llama2-tiny", "blocks.1.mlp.gate", "3 (pp 1, tp 1)", marks=pytest.mark.slow),
        pytest.param("pp2-ep2", "moe-tiny", "blocks.0.mlp.router", "0 (pp 0, ep 0)", marks=pytest.mark.slow),
    ],
)
def test_the_part_and_the_rank_that_gave_the_first_nan_are_named(driver, mesh, model, part, rank):
    with pytest.raises(WrongResult) as failed:
        run_faulty(driver, mesh, "nan", model=model, part=part, culprit=int(rank[0]))
    named = f"mean over replicas; in the first step {part} on rank {rank} was the first part without finite numbers"
    assert named in str(failed.value)


@pytest.mark.parametrize(
    ("mesh", "model", "part", "rank"),
    [
        ("tp2", "llama2-tiny", "blocks.0.mlp.gate", "1 (tp 1)"),
        pytest.param("cp2", "llama2-tiny", "blocks.1.mlp.expand", "1 (cp 1)", marks=pytest.mark.slow),
        pytest.param("ep2", "moe-tiny", "blocks.0.mlp.experts", "1 (ep 1)", marks=pytest.mark.slow),
        pytest.param("pp2-dp2", "gpt2-tiny", "blocks.0.mlp.contract", "1 (pp 0, dp 1)", marks=pytest.mark.slow),
    ],
)
def test_a_nan_of_a_backward_is_named_after_the_first_step(driver, mesh, model, part, rank):
    with pytest.raises(WrongResult) as failed:
        run_faulty(driver, mesh, "nan backwards", model=model, part=part, culprit=int(rank[0]))
    said = f"; in the first step's backward {part} on rank {rank} was the first part without finite gradients"
    assert f"parameters of {model} under hybrid in fp32 after a step{said}" in str(failed.value)


@pytest.mark.parametrize("fault", ["die", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_rank_lost_among_experts_is_named_and_the_next_case_runs(driver, fault):
    limit_s = 20.0 if fault == "hang" else 300.0
    with pytest.raises(RanksFailed) as failed:
        run_faulty(driver, "ep2", fault, timeout_s=limit_s, model="moe-tiny", part="mlp.experts", culprit=1)
    report = str(failed.value)
    assert re.match(r"rank 1 \(ep 1\) on \S+ (died: exit code 7|hung at \S+ in wrong)", report)
    waiting = r"rank 0 \(ep 0\) on \S+ was waiting for the other ranks in \w+, called at \S+expert_dispatch"
    assert fault != "hang" or re.search(waiting, report)
    assert parity(driver, "ep2", model="moe-tiny") <= 1e-5


# -- what is left on a rank --------------------------------------------------------------------------------------


def test_all_ranks_step_or_none(driver):
    found = records(run(driver, FunctionWorkload(function=overflow_on_one_rank), "pp2"))
    assert {"parameter_after_0": 1.0, "parameter_after_1": -1.0, "scale": 4.0} == found


def test_a_twin_that_passed_is_not_checked_again(driver):
    case = TrainStep(model="gpt2-tiny", strategy="ddp")
    cases = [case, dataclasses.replace(case, micro_batch_size=2), dataclasses.replace(case, dtype="bf16")]
    assert [True, False, True] == ["parity_error" in records(run(driver, each, "dp2")) for each in cases]


def test_a_twin_that_failed_fails_every_time(driver):
    for _ in range(2):
        with pytest.raises(WrongResult, match="a twin that is never right"):
            run(driver, Doubtful(model="gpt2-tiny", strategy="ddp"), "dp2")


def test_a_twin_has_sizes_that_every_axis_divides():
    shape = MeshShape.parse("cp4-tp8")
    for name in ("gpt2", "llama2-7b", "llama2-70b"):
        twin = find(name).twin(shape)
        twin.check_tensor_parallel(8)
        assert (twin.heads // 8 % 4, twin.key_heads // 8 % 4, twin.tokens_per_sample % (2 * 4 * 8)) == (0, 0, 0)
        assert find(name).twin() == find(name).twin(MeshShape.parse("dp8"))
