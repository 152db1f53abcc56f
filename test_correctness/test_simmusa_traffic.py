"""Training over meshes on simulated devices: it trains, and its traffic takes what the cost model says, to the ns."""

import contextlib
import dataclasses

import pytest

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.mesh import MeshShape
from perfsuite.workloads.training.train_step import TrainStep
from simmusa.costs import Costs
from test_correctness.helpers.simmusa_ranks import ONCE, QUICK, TRAINING, measure_on, opened
from test_correctness.helpers.twin_sizes import as_its_twin

MESSAGES = Costs(alpha_ns=1_000_000, link_bytes_per_s=1e9)
"""Only messages take time: a byte a nanosecond."""
PRODUCTS = Costs(flops_per_s={"fp32": 1e9}, alpha_ns=1_000_000, link_bytes_per_s=1e9)
"""And an operation as long as a byte."""
PRELOAD = (*TRAINING, "torch.distributed.tensor.parallel", "torch.distributed.pipelining")
EXACT = 1e-9


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measures a step of llama2-tiny on a mesh, its traffic build included; one session for all cases of a price."""
    with contextlib.ExitStack() as stack:
        sessions = {}

        def measure(mesh, costs, *, budget=QUICK, **case):
            given = {"strategy": "hybrid", "builds": ("traffic",), **as_its_twin("llama2-tiny", mesh, kv_heads=4)}
            workload, ranks = TrainStep(mesh=mesh, **{**given, **case}), MeshShape.parse(mesh).world_size
            prices = str(costs.as_dict())
            if prices not in sessions:
                folder = tmp_path_factory.mktemp("ranks")
                sessions[prices] = stack.enter_context(opened(costs, folder, PRELOAD))
            return measure_on(sessions[prices], workload, ranks, budget=budget)

        yield measure


def closed_form(result):
    """What one rank posts, and its (calls, bytes, seconds) by axis at the prices of MESSAGES."""
    parameters = {name: value for name, value in result.parameters.items() if name != "builds"}
    workload, shape = TrainStep(**parameters), MeshShape.parse(result.parameters["mesh"])
    return workload.find_strategy().traffic(workload.plan(shape), shape, 0)


def seconds(calls):
    """A byte takes a nanosecond, a call a millisecond more."""
    return sum(call.calls * 1e-3 + call.message_bytes * 1e-9 for call in calls)


def metric(result, name):
    return result.metric(name).value


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param("tp2", {}, marks=pytest.mark.extended),
        pytest.param("tp4", {}, marks=pytest.mark.slow),
        pytest.param("dp2", {"reshard": False}, marks=pytest.mark.slow),
        pytest.param("tp2", {"sequence_parallel": False}, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_messages_takes_its_closed_form(measured, mesh, options):
    result = measured(mesh, MESSAGES, options=options)
    form = closed_form(result)
    assert pytest.approx(seconds(form), rel=EXACT) == result.median_s
    assert pytest.approx(seconds(form), rel=EXACT) == metric(result, "communication_time_s")
    assert sum(call.message_bytes for call in form) == metric(result, "communication_bytes")
    axis, ranks = mesh[:2], int(mesh[2])
    moved = sum(call.message_bytes * busbw_factor(call.collective, ranks) for call in form)
    assert pytest.approx(moved / seconds(form) / 1e9, rel=EXACT) == metric(result, f"{axis}_busbw_gb_per_s")
    assert pytest.approx(0.0, abs=1e-12) == metric(result, "compute_time_s")
    assert pytest.approx(100.0) == metric(result, "communication_percent")


@pytest.mark.slow
def test_products_are_the_time_of_the_part_that_computes_them(measured):
    result = measured("tp2", PRODUCTS, builds=("traffic", "exposed"))
    model = TrainStep(model="llama2-tiny", overrides=result.parameters["overrides"]).find_model()
    tokens, layers, samples = model.tokens_per_sample, model.layers, result.parameters["micro_batch_size"]
    projections = 2 * tokens * model.width * (2 * model.width + 2 * model.key_width)
    attention = samples * (projections + 4 * tokens**2 * model.width)
    mlp = samples * 2 * tokens * 3 * model.width * model.hidden
    components = {each.name: each for each in result.measurement.components}
    # Each rank has half of both; a backward has twice the products of a forward.
    assert pytest.approx(3 * layers * mlp / 2 * 1e-9, rel=EXACT) == components["mlp"].compute_s
    assert pytest.approx(3 * layers * attention / 2 * 1e-9, rel=EXACT) == components["attention"].compute_s
    form = closed_form(result)
    for name in ("attention", "mlp"):
        sent = seconds([call for call in form if call.part == name])
        assert pytest.approx(sent, rel=EXACT) == components[name].communication_s
    # Nothing overlaps: what the messages take is what a silent step saves.
    share = 100 * seconds(form) / result.median_s
    assert pytest.approx(share, rel=EXACT) == metric(result, "communication_percent")
    assert pytest.approx(share, rel=EXACT) == metric(result, "exposed_communication_percent")


def times(result):
    return {(each.axis, each.collective, each.part): each.time_s for each in result.measurement.traffic}


@pytest.mark.slow
def test_a_slowed_collective_shows_in_its_axis_and_part_alone(measured):
    options = {"sequence_parallel": False}
    plain = times(measured("dp2-tp2", MESSAGES, options=options))
    slow = dataclasses.replace(MESSAGES, slow={"mccl::allgather": 3.0})
    slowed = times(measured("dp2-tp2", slow, options=options))
    gathers = {key for key in plain if key[1] == "all_gather"}
    assert {("dp", "all_gather", "data")} == gathers
    expected = {key: time_s * (3 if key in gathers else 1) for key, time_s in plain.items()}
    assert pytest.approx(expected, rel=EXACT) == slowed


MESHES = [
    pytest.param(mesh, case, marks=mark)
    for mark, mesh, case in (
        (pytest.mark.extended, "cp4", {"model": "llama2-tiny", "attention": "flash"}),
        (pytest.mark.extended, "ep4", {"model": "moe-tiny"}),
        (pytest.mark.extended, "pp2", {"model": "gpt2-tiny", "accumulation": 2}),
        (pytest.mark.slow, "dp2-tp2", {"model": "llama2-tiny"}),
        (pytest.mark.slow, "tp2", {"model": "gpt2-tiny"}),
        (pytest.mark.slow, "pp2-ep2-tp2", {"model": "moe-tiny", "accumulation": 2}),
        (pytest.mark.slow, "tp4", {"model": "llama2-tiny", "overrides": {"kv_heads": 4}}),
        (pytest.mark.slow, "tp8", {"model": "gpt2-tiny", "overrides": {"heads": 8}}),
        (pytest.mark.slow, "cp2-tp2", {"model": "llama2-tiny", "options": {"context": "ulysses"}}),
        (pytest.mark.slow, "cp4", {"model": "llama2-tiny", "options": {"context": "ring"}, "attention": "math"}),
        (pytest.mark.slow, "pp2-dp2-tp2", {"model": "gpt2-tiny", "accumulation": 2, "dtype": "bf16"}),
        (pytest.mark.slow, "pp2-tp4", {"model": "llama2-tiny", "overrides": {"kv_heads": 4}, "accumulation": 4}),
        (pytest.mark.slow, "dp_replicate2-dp_shard2-tp2", {"model": "llama2-tiny"}),
    )
]


@pytest.mark.parametrize(("mesh", "case"), MESHES)
def test_a_mesh_trains_on_simulated_devices(measured, mesh, case):
    """Like one process; its step ends with a finite loss that ranks agree about."""
    overrides = case.get("overrides", {})
    sizes = {"overrides": {"layers": 4, **overrides}} if "pp" in mesh else as_its_twin(case["model"], mesh, **overrides)
    assert measured(mesh, Costs(), budget=ONCE, builds=(), **{**case, **sizes}).outcome == "smoke"
