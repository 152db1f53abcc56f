"""Traffic of real ranks: known collectives are counted exactly, and steps post what their closed forms say."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import FunctionWorkload
from perfsuite.schedules import make_schedule
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers import local_driver, traffic_steps
from test_correctness.helpers.local_driver import COMPILER, FSDP, PIPELINING, WORKER, driver_fixture, records

SLOW = pytest.mark.slow

driver = driver_fixture("torch", FSDP, PIPELINING, "torch.distributed.tensor.parallel", COMPILER, WORKER)


def told(measurement):
    return {(each.axis, each.collective, each.part): (each.calls, each.message_bytes) for each in measurement.traffic}


def step(mesh="", **case):
    case = {"model": "llama2-tiny", "strategy": "hybrid", "mesh": mesh, "builds": ("traffic",), **case}
    return TrainStep(**case)


def run(driver, workload, mesh="dp2", *, purpose="traffic"):
    return local_driver.run(driver, workload, mesh, purpose=purpose)


def posted(driver, workload):
    return told(run(driver, workload, workload.mesh or "dp2"))


# -- counting ----------------------------------------------------------------------------------------------------


def test_known_collectives_are_counted_exactly(driver):
    workload = FunctionWorkload(function=traffic_steps.known_collectives)
    found = run(driver, workload, "dp2-tp2", purpose="time")
    rows = 12 * 5 * 4  # bytes of 12 rows of 5 fp32 numbers
    assert {
        ("tp", "all_reduce", "attention"): (2, 2 * rows),
        # torch.distributed gathers 12 rows of two halves, DTensor the scattered 12 rows.
        ("tp", "all_gather", "attention"): (2, 2 * rows),
        ("tp", "reduce_scatter", "attention"): (2, 2 * rows),
        ("tp", "all_to_all", "attention"): (3, 3 * rows),
        ("tp", "scatter", "attention"): (1, rows),
        ("tp", "gather", "attention"): (1, rows),
        ("tp", "reduce", "attention"): (1, rows),
        ("tp", "broadcast", "attention"): (2, 2 * rows // 2),
        ("tp", "send", "attention"): (1, rows),
        ("tp", "receive", "attention"): (1, rows),
        ("dp", "all_reduce", "data"): (1, 12),
        ("dp-tp", "all_reduce", "other"): (1, 24),
    } == told(found)
    assert all(each.ranks == (4 if each.axis == "dp-tp" else 2) for each in found.traffic)
    assert {("all_to_all", True)} == {(each.collective, each.uneven) for each in found.traffic if each.uneven}
    assert all(each.time_s > 0 for each in found.traffic if each.collective != "receive")


# -- closed forms ------------------------------------------------------------------------------------------------
# Every build compares what each rank posts with its closed form; here are the numbers that both should be.

WHOLE = 64 * 128 * 4
"""Bytes of the features of one sample of llama2-tiny and gpt2-tiny."""
BLOCK = 4 * (128 * (2 * 128 + 2 * 64 + 3 * 344) + 2 * 128)
"""Bytes of a layer of llama2-tiny."""
REST = 4 * (2 * 512 + 1) * 128


def test_ddp_sends_every_gradient_once_in_buckets(driver):
    whole = 4 * step(strategy="ddp").find_model().parameters
    found = posted(driver, step(strategy="ddp", accumulation=2))
    assert {("dp", "all_reduce", "data"): (1, whole)} == found
    small = posted(driver, step(strategy="ddp", model="gpt2-tiny", options={"bucket_mib": 0.1}, checkpointing="full"))
    (calls, size) = small["dp", "all_reduce", "data"]
    assert (7, 4 * step(strategy="ddp", model="gpt2-tiny").find_model().parameters) == (calls, size)


def test_the_optimizer_that_is_spread_sends_every_value(driver):
    found = posted(driver, step(strategy="zero_redundancy"))
    assert found["dp", "all_reduce", "data"][1] == found["dp", "broadcast", "data"][1] == 2 * BLOCK + REST
    assert 2 * 9 + 3 == found["dp", "broadcast", "data"][0]


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp_gathers_what_it_freed(driver, reshard):
    found = posted(driver, step(strategy="fsdp", options={"reshard": reshard}))
    times = 2 if reshard else 1
    assert (2 * times + 1, 2 * times * BLOCK + REST) == found["dp", "all_gather", "data"]
    assert (3, 2 * BLOCK + REST) == found["dp", "reduce_scatter", "data"]


@pytest.mark.extended
def test_copies_of_what_is_spread_are_summed(driver):
    found = posted(driver, step("dp_replicate2-dp_shard2", strategy="fsdp"))
    assert (3, (2 * BLOCK + REST) // 2) == found["dp_replicate", "all_reduce", "data"]


@pytest.mark.extended
def test_tensor_parallel_steps(driver):
    found = posted(driver, step("tp2", checkpointing="full"))
    assert (6, 6 * WHOLE) == found["tp", "all_gather", "attention"] == found["tp", "reduce_scatter", "attention"]
    assert (6, 6 * WHOLE) == found["tp", "all_gather", "mlp"]
    assert (4, 4 * WHOLE) == found["tp", "reduce_scatter", "mlp"]
    found = posted(driver, step("tp2", model="gpt2-tiny", options={"sequence_parallel": False}))
    assert (4, 4 * WHOLE) == found["tp", "all_reduce", "attention"] == found["tp", "all_reduce", "mlp"]


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=SLOW)])
def test_a_pipeline_of_tensor_parallel_stages(driver, tp):
    found = posted(driver, step("pp2-tp2" if tp > 1 else "pp2", accumulation=2, model="gpt2-tiny"))
    assert (2 + 1, 2 * WHOLE // tp + 4 * 512 * 128 // tp) == found["pp", "send", "pipeline"]


@pytest.mark.extended
def test_uneven_rows_are_exact_over_all_ranks(driver):
    found = run(driver, step("ep2", model="moe-tiny"), "ep2")
    (rows,) = (each for each in found.traffic if each.collective == "all_to_all")
    # Of each of two layers the rows to the experts and back, in the forward and in the backward, and their counts.
    assert (2 * (4 + 1), True, "ep", "mlp") == (rows.calls, rows.uneven, rows.axis, rows.part)
    mean = 4 * 64 * 2 * 128 * 4 + 8 * 8
    assert rows.message_bytes >= 2 * mean  # of the rank that has most


def test_a_closed_form_that_is_not_what_is_posted_fails(driver):
    workload = step(strategy="test_correctness.helpers.traffic_steps:Misjudged")
    with pytest.raises(
        WrongResult, match=r"dp / all_reduce / data 1 calls of \d+ bytes and not 2 of .* \(found by rank 0\)"
    ):
        run(driver, workload)


# -- silence -----------------------------------------------------------------------------------------------------


def test_a_silent_step_that_posts_fails(driver):
    workload = step(strategy="test_correctness.helpers.traffic_steps:Loud", builds=("exposed",))
    with pytest.raises(WrongResult, match="a silent step posts 1 calls of 8 bytes on real groups: all_reduce along dp"):
        run(driver, workload, purpose="exposed")


@SLOW
@pytest.mark.parametrize(
    ("mesh", "case"),
    [
        ("tp2", {}),
        ("tp2", {"dtype": "bf16", "model": "gpt2-tiny"}),
        ("cp2", {}),
        ("cp2", {"options": {"context": "ulysses"}}),
        ("dp2", {}),
    ],
)
def test_along_one_axis_a_step_can_be_silent(driver, mesh, case):
    workload = step(mesh, **{**case, "builds": ("exposed",)})
    told = records(run(driver, workload, mesh, purpose="exposed"))
    assert told["exposed_share_low"] <= told["exposed_share"] <= told["exposed_share_high"] < 1


# -- any mesh ----------------------------------------------------------------------------------------------------

DENSE = (
    *("tp2", "tp4", "cp2", "cp4", "dp2", "dp3", "dp2-tp2", "cp2-tp2", "dp2-cp2", "pp2-tp2", "pp2-cp2", "pp2-dp2"),
    *("dp2-cp2-tp2", "pp2-dp2-tp2", "pp2-cp2-tp2", "pp4-tp2", "dp_replicate2-dp_shard2-tp2", "dp4-tp2"),
)
EXPERTS = (
    *("ep2", "tp2", "cp2", "dp2-ep2", "ep2-tp2", "ep2-cp2", "ep4", "pp2-ep2", "pp2-ep2-tp2"),
    *("dp2-ep2-tp2", "ep2-cp2-tp2"),
)


@st.composite
def steps(draw):
    """Training steps of language models on meshes of up to eight ranks."""
    model = draw(st.sampled_from(["llama2-tiny", "gpt2-tiny", "moe-tiny"]))
    shape = MeshShape.parse(draw(st.sampled_from(EXPERTS if model == "moe-tiny" else DENSE)))
    names = {name for name, size in shape.axes if size > 1}
    chosen = draw(options(names, model))
    accumulation = draw(st.sampled_from([2, 4] if "pp" in names else [1, 2]))
    layers = 2
    if "pp" in names:  # one more than there are stages: some stage has two
        schedule = make_schedule(chosen["schedule"], ranks=shape.size("pp"), num_micro_batches=accumulation)
        layers = schedule.num_stages + 1
    return TrainStep(
        model=model,
        strategy="hybrid",
        mesh=str(shape),
        overrides={"layers": layers, **draw(sizes(model))},
        options=chosen,
        accumulation=accumulation,
        micro_batch_size=draw(st.sampled_from([1, 2])),
        dtype=draw(st.sampled_from(["fp32", "fp32", "bf16"])),
        checkpointing=draw(st.sampled_from(["none", "none", "full"])),
        builds=("traffic",),
    )


@st.composite
def sizes(draw, model):
    """Heads that every mesh divides; fewer key heads; experts that drop and experts that do not."""
    chosen = {"width": 128, "heads": 16}
    if model != "gpt2-tiny":
        chosen["kv_heads"] = draw(st.sampled_from([8, 16]))
    if model == "moe-tiny":
        chosen["capacity_factor"] = draw(st.sampled_from([None, None, 1.25]))
        chosen["group_tokens"] = 16
        chosen["balance_weight"] = draw(st.sampled_from([0.01, 0.0]))
    return chosen


@st.composite
def options(draw, names, model):
    """Those of the axes that the mesh has."""
    chosen = {}
    if "tp" in names:
        chosen["sequence_parallel"] = model == "moe-tiny" or draw(st.sampled_from([True, True, False]))
        chosen["loss_parallel"] = draw(st.sampled_from([True, True, False]))
    if "cp" in names:
        chosen["context"] = draw(st.sampled_from(["zigzag", "ring", "ulysses"]))
    if names - {"pp", "tp"}:
        chosen["data"] = draw(st.sampled_from(["shard", "shard", "replicate"]))
    if "pp" in names:
        chosen["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b"]))
    return chosen


@settings(max_examples=100)
@given(steps())
def test_steps_that_are_drawn_can_be_trained(workload):
    shape = MeshShape.parse(workload.mesh)
    assert workload.find_strategy().traffic(workload.plan(shape), shape, 0)


@SLOW
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps())
def test_every_rank_of_a_random_mesh_posts_its_closed_form(driver, workload):
    measurement = run(driver, workload, workload.mesh)
    assert measurement.traffic
    assert {each.name for each in measurement.components} >= {"attention", "mlp", "other"}
