"""The suite on simulated devices: every figure equals what the cost model says, to the last digit."""

import pytest

from perfsuite.base.errors import RanksFailed
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import FunctionWorkload
from perfsuite.run.session import Case
from perfsuite.workloads import collective
from perfsuite.workloads.matmul import Matmul
from perfsuite.workloads.memory_bandwidth import HostDeviceCopy, MemoryCopy, MemoryTriad
from perfsuite.workloads.training.train_step import TrainStep
from simmusa.costs import Costs
from test_correctness.helpers import simmusa_ranks
from test_correctness.helpers.context_ranks import SpreadAttention
from test_correctness.helpers.pipelines import staged
from test_correctness.helpers.simmusa_ranks import ONCE, QUICK, TRAINING, SetCosts, opened, require_built
from test_correctness.helpers.twin_sizes import as_its_twin

EXACT = 1e-12
SLOW = pytest.mark.slow
PRICES = Costs(
    launch_ns=1_000,
    flops_per_s={"fp32": 10e12, "tf32": 20e12, "bf16": 40e12},
    bytes_per_s=500e9,
    host_bytes_per_s=50e9,
    alpha_ns=20_000,
    link_bytes_per_s=100e9,
)
"""Below the published peaks: a faster device would be impossible."""
ARITHMETIC_ALONE = Costs(flops_per_s={"fp32": 1e9}, alpha_ns=1_000_000, link_bytes_per_s=1e9)
"""One operation takes a nanosecond and nothing else on the device takes any time."""

ONLY_ARITHMETIC = Costs(flops_per_s={"fp32": 1e9})
"""The same with messages that take no time either."""


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    require_built()
    with opened(PRICES, tmp_path_factory.mktemp("ranks"), TRAINING) as session:
        yield session


@pytest.fixture(scope="module")
def only_arithmetic(tmp_path_factory):
    """Ranks that begin with these costs: a pipeline's are fresh, whatever others were told."""
    require_built()
    preload = (*TRAINING, "torch.distributed.pipelining", "torch.distributed.tensor.parallel")
    with opened(ONLY_ARITHMETIC, tmp_path_factory.mktemp("ranks"), preload) as session:
        yield session


def run(session, workload, ranks=1):
    name = f"test_it[s4000-ws{ranks}-{workload}]"
    return session.run(Case(id=name, workload=workload, world_size=ranks, budget=QUICK, platform="s4000"))


def at_costs(session, costs, ranks):
    workload = SetCosts(costs=costs.as_dict())
    session.run(Case(id="costs", workload=workload, world_size=ranks, budget=ONCE, platform="s4000"))


def metric(result, name):
    return next(each.value for each in result.metrics if each.name == name)


def one_launch(time_ns, iterations):
    """Seconds of an iteration when the launches after the first hide behind the work before."""
    return (PRICES.launch_ns + iterations * time_ns) / iterations * 1e-9


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_tflops_of_a_product(session, dtype):
    result = run(session, Matmul(m=256, k=512, n=256, dtype=dtype))
    flops = 2 * 256 * 512 * 256
    time_s = one_launch(PRICES.kernel_time_ns(flops=flops, dtype=dtype), result.measurement.iterations)
    assert pytest.approx(flops / time_s / 1e12, rel=EXACT) == metric(result, "tflops")
    assert result.simulated
    assert ("s4000", True) == (result.platform, result.fingerprint.startswith("simulated-s4000-8x-"))
    assert set(result.measurement.times_s) == {result.median_s}


@pytest.mark.parametrize("kind", [MemoryCopy, MemoryTriad])
def test_bandwidth_of_device_memory(session, kind):
    result = run(session, kind(buffer_bytes=1 << 20))
    moved = (2 if kind is MemoryCopy else 3) << 20
    time_s = one_launch(PRICES.kernel_time_ns(moved_bytes=moved), result.measurement.iterations)
    assert pytest.approx(moved / time_s / 1e9, rel=EXACT) == metric(result, "gb_per_s")


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
@pytest.mark.parametrize("pinned", [True, False])
def test_bandwidth_of_the_host_link(session, direction, pinned):
    result = run(session, HostDeviceCopy(buffer_bytes=1 << 20, direction=direction, pinned=pinned))
    copy_ns = round((1 << 20) / 50e9 * 1e9)
    # A pageable copy blocks the host, so that every launch shows.
    time_s = one_launch(copy_ns, result.measurement.iterations) if pinned else (copy_ns + PRICES.launch_ns) * 1e-9
    assert pytest.approx((1 << 20) / time_s / 1e9, rel=EXACT) == metric(result, "gb_per_s")


COLLECTIVES = {
    "all_reduce": (collective.AllReduce, 1.0),
    "reduce_scatter": (collective.ReduceScatter, 0.5),
    "all_gather": (collective.AllGather, 0.5),
    "all_to_all": (collective.AllToAll, 0.5),
    "broadcast": (collective.Broadcast, 1.0),
    "reduce": (collective.Reduce, 1.0),
    "gather": (collective.Gather, 0.5),
    "scatter": (collective.Scatter, 0.5),
}
"""Kind and bandwidth factor on two ranks."""


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in COLLECTIVES), *(pytest.param("all_reduce", ranks, marks=SLOW) for ranks in (4, 8))],
)
def test_bus_bandwidth(session, name, ranks):
    kind, factor = COLLECTIVES[name]
    result = run(session, kind(message_bytes=1 << 20), ranks=ranks)
    time_s = one_launch(PRICES.communication_time_ns(1 << 20), result.measurement.iterations)
    factor *= 2 * (ranks - 1) / ranks
    assert pytest.approx(factor * (1 << 20) / time_s / 1e9, rel=EXACT) == metric(result, "busbw_gb_per_s")


def test_other_communication_runs(session):
    assert run(session, collective.Barrier(), ranks=2).median_s > PRICES.alpha_ns * 1e-9
    assert run(session, collective.SendRecv(message_bytes=1 << 20), ranks=2).median_s > 0
    assert run(session, collective.AllToAllUneven(message_bytes=1 << 20), ranks=2).median_s > 0


def test_messages_of_a_ring_cross(session):
    result = run(session, FunctionWorkload(function=simmusa_ranks.exchanges_in_a_ring), ranks=2)
    k = result.measurement.iterations
    # Both directions at once; the second launch of an exchange hides behind the first.
    at_least_ns = PRICES.communication_time_ns(1e6)
    assert at_least_ns * k <= result.median_s * 1e9 * k <= (at_least_ns + 2 * PRICES.launch_ns) * k + 1
    assert {"got0": 1.0, "got1": 0.0} == {each.name: each.value for each in result.measurement.records}


def test_the_watched_iteration_has_the_memory_of_every_other_one(session):
    workload = FunctionWorkload(function=simmusa_ranks.sums_what_it_frees)
    result = session.run(Case(id="left", workload=workload, world_size=2, budget=ONCE, platform="s4000"))
    assert {"left_bytes": 0.0} == {each.name: each.value for each in result.measurement.records}


@pytest.mark.extended
@pytest.mark.parametrize(("method", "attention"), [("zigzag", "flash"), ("ring", "math"), ("ulysses", "math")])
def test_attention_of_spread_tokens(session, method, attention):
    workload = SpreadAttention(method=method, cp=4, attention=attention, key_heads=4)
    case = Case(id=f"spread[{method}]", workload=workload, world_size=4, budget=ONCE, platform="s4000")
    found = {record.name: record.value for record in session.run(case).measurement.records}
    assert {"out", "d_query", "d_key", "d_value"} == set(found)
    assert max(found.values()) <= 1e-5


def test_a_collective_begins_with_its_last_rank(session):
    late = FunctionWorkload(function=simmusa_ranks.sums_with_a_late_rank, arguments={"side": 500})
    result = run(session, late, ranks=2)
    records = {each.name: each.value for each in result.measurement.records}
    product_ns, reduce_ns = PRICES.kernel_time_ns(flops=2 * 500**3), PRICES.communication_time_ns(1024)
    expected_ms = pytest.approx((PRICES.launch_ns + product_ns + reduce_ns) * 1e-6, rel=EXACT)
    assert {"rank0_ms": expected_ms, "rank1_ms": expected_ms} == records


def test_communication_that_nobody_waits_for_fails(session):
    with pytest.raises(RanksFailed, match=r"(reads|writes) memory that communicator"):
        run(session, FunctionWorkload(function=simmusa_ranks.reads_too_early), ranks=2)


# -- training ----------------------------------------------------------------------------------------------------


def spans(result):
    return {each.name: each.time_s for each in result.measurement.spans}


@pytest.mark.extended
def test_spans_and_mfu_of_a_step(session):
    at_costs(session, ARITHMETIC_ALONE, 1)
    workload = TrainStep(model="gpt2-tiny", micro_batch_size=2, builds=("memory",))
    result = run(session, workload)
    flops = result.work.flops["exact"]
    assert pytest.approx(flops * 1e-9, rel=EXACT) == result.median_s
    assert pytest.approx(1e-3, rel=EXACT) == metric(result, "tflops_per_device")
    assert pytest.approx(100 * 1e-3 / 25, rel=EXACT) == metric(result, "mfu_percent")
    found = spans(result)
    assert pytest.approx(flops / 3 * 1e-9, rel=EXACT) == found["forward"]
    assert pytest.approx(flops * 2 / 3 * 1e-9, rel=EXACT) == found["backward"]
    assert [pytest.approx(0.0, abs=1e-15)] * 3 == [found[name] for name in ("data", "optimizer", "remainder")]
    parameters = workload.find_model().parameters
    assert 4 * parameters / 2**30 == metric(result, "weights_gib") == metric(result, "gradients_gib")


@pytest.mark.extended
def test_gradients_that_do_not_overlap_show_in_the_backward(session):
    at_costs(session, ARITHMETIC_ALONE, 2)
    workload = TrainStep(model="gpt2-tiny", strategy="ddp", options={"overlap": False}, micro_batch_size=2)
    result = run(session, workload, ranks=2)
    flops = workload.work(MeshShape.of(dp=2)).flops["exact"] / 2
    reduce_s = ARITHMETIC_ALONE.communication_time_ns(4 * workload.find_model().parameters) * 1e-9
    assert pytest.approx(flops * 1e-9 + reduce_s, rel=EXACT) == result.median_s
    assert pytest.approx(flops * 2 / 3 * 1e-9 + reduce_s, rel=EXACT) == spans(result)["backward"]


@pytest.mark.extended
def test_exposed_communication_is_what_the_step_would_save(session):
    at_costs(session, ARITHMETIC_ALONE, 2)
    workload = TrainStep(
        model="gpt2-tiny", strategy="ddp", options={"overlap": False}, micro_batch_size=2, builds=("exposed",)
    )
    result = run(session, workload, ranks=2)
    flops = result.work.flops["exact"] / 2
    reduce_s = ARITHMETIC_ALONE.communication_time_ns(4 * workload.find_model().parameters) * 1e-9
    share = reduce_s / (flops * 1e-9 + reduce_s)
    assert pytest.approx(100 * share, rel=1e-9) == metric(result, "exposed_communication_percent")


@pytest.mark.extended
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_of_a_pipeline_without_costs_of_communication_is_the_simulated_one(only_arithmetic, schedule):
    workload = TrainStep(model="gpt2-tiny", mesh="pp2", **staged(schedule=schedule, num_micro_batches=4))
    result = run(only_arithmetic, workload, ranks=2)
    measured = metric(result, "bubble_ratio")
    assert pytest.approx(metric(result, "simulated_bubble_ratio"), abs=1e-6) == measured
    assert pytest.approx(metric(result, "median_bubble_ratio"), abs=1e-6) == measured
    assert measured > 1 / 5  # the formula of equal stages; the head makes them unequal


@pytest.mark.extended
@pytest.mark.parametrize(
    ("strategy", "options", "ranks"),
    [
        pytest.param("ddp", {}, 2, marks=SLOW),
        ("fsdp", {}, 2),
        pytest.param("fsdp", {"reshard": False}, 4, marks=SLOW),
        pytest.param("fsdp", {"mixed_precision": False}, 8, marks=SLOW),
        pytest.param("zero_redundancy", {}, 2, marks=SLOW),
    ],
)
def test_strategies_train_and_repeat_to_the_nanosecond(session, strategy, options, ranks):
    at_costs(session, ARITHMETIC_ALONE, ranks)
    workload = TrainStep(strategy=strategy, options=options, **as_its_twin("gpt2-tiny"))
    result = run(session, workload, ranks=ranks)
    assert 1 == len({round(time_s * 1e9) for time_s in result.measurement.times_s})
    flops = result.work.flops["exact"] / ranks
    assert flops * 1e-9 < result.median_s  # communication is never free


@pytest.mark.extended
@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(each, marks=SLOW) for each in ("zero0", "zero1", "zero2"))]
)
def test_deepspeed_trains_and_repeats_to_the_nanosecond(session, strategy):
    workload = TrainStep(model="gpt2-tiny", strategy=strategy, micro_batch_size=2)
    result = run(session, workload, ranks=2)
    assert 1 == len({round(time_s * 1e9) for time_s in result.measurement.times_s})
    assert result.work.flops["exact"] / 2 / 10e12 < result.median_s
