"""Every term of a projection by itself: what one of them adds, exactly."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.schedule import peak_activations
from perfsuite.metrics.pipeline import step_bounds_s
from perfsuite.models import MODELS, find
from perfsuite.platforms import load_catalog
from perfsuite.projection import memory, operations
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import Calibration, Constant, KernelPoint
from perfsuite.projection.engine import Projector, rank_parameters
from perfsuite.projection.implementation import Implementation, implementation_of
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.kernels import KernelTimes, Links
from perfsuite.projection.layout import Layout
from perfsuite.projection.memory import memory_of
from perfsuite.projection.operations import BlockAttention, MatmulKernel, MemoryKernels, Share, end_parameters
from perfsuite.projection.pipeline import PricedPipeline
from perfsuite.record.step import Training
from perfsuite.schedules import SCHEDULES, StageTimes, make_schedule, simulate
from perfsuite.strategies.activations import Sent


def plain_rates(**other: float) -> Calibration:
    """1 TFLOPS, 1 GB/s of memory, link and network, and no latency: seconds are operations and bytes."""
    rates = {"matmul_bf16_tflops": 1.0, "attention_bf16_tflops": 1.0}
    rates |= {"memory_gb_per_s": 1.0, "link_gb_per_s": 1.0, "network_gb_per_s": 1.0, **other}
    return Calibration(device="a100", constants={n: Constant(value=v, unit="", source="") for n, v in rates.items()})


SMALL = Architecture(
    name="small", layers=4, width=64, heads=4, key_heads=4, hidden=256, gated=False, vocabulary=128, tokens=32
)
CODE = Implementation(name="", source="", data_overlap=0.0)


def parts(
    layout: Layout,
    code: Implementation = CODE,
    constants: Calibration | None = None,
    model: Architecture = SMALL,
) -> dict[str, float]:
    projector = Projector(
        model=model, code=code, calibration=constants or plain_rates(), devices_per_node=8, dtype="bf16"
    )
    found: dict[str, float] = {}
    for _, resource, seconds in projector.step(layout).parts:
        found[resource] = found.get(resource, 0.0) + seconds
    return found


def block(layout: Layout, code: Implementation = CODE) -> operations.Passes:
    return operations.block(Share(model=SMALL, layout=layout, code=code), experts=False)


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_has_the_model_s_own_parameters_and_operations(name):
    model = find(name)
    plain = Architecture.of(model)
    assert model.parameters == plain.parameters
    assert model.forward_flops == pytest.approx(plain.forward_flops, rel=1e-12)


def products(part):
    return sum(2 * one.groups * one.m * one.n * one.k for one in part if isinstance(one, MatmulKernel))


def scores(part):
    return sum(one.flops for one in part if isinstance(one, BlockAttention))


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "llama2-70b", "mixtral-8x7b", "latte-xl", "opensora"])
def test_operations_of_a_block_are_the_model_s(name):
    """Products and attention of all blocks, forward; gradients are twice and 2.5 times that."""
    model = Architecture.of(find(name))
    layout = Layout.parse("1", global_batch=1)
    share = Share(model=model, layout=layout, code=Implementation(name="", source="", causal_skips=False))
    passes = operations.block(share, experts=bool(model.experts))
    blocks = products(passes.forward) + scores(passes.forward)
    head = products(operations.head(share).forward)
    expected = model.forward_flops - model.more_flops
    assert expected == pytest.approx(model.layers * blocks + head, rel=1e-9)
    assert 2 * products(passes.forward) == products((*passes.backward_input, *passes.backward_weight))
    assert 2.5 * scores(passes.forward) == pytest.approx(scores(passes.backward_input))


@pytest.mark.parametrize("name", [name for name, spec in SCHEDULES.items() if spec.bubble is not None])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 8), (4, 12)])
def test_the_closed_form_is_the_simulator_s_for_equal_stages(name, ranks, count):
    stages = SCHEDULES[name].fewest_stages_per_rank
    times = StageTimes.in_proportion([1.0] * ranks * stages, forward_s=0.3, backward_input_s=0.4, backward_weight_s=0.2)
    pipeline = PricedPipeline(schedule=name, ranks=ranks, num_micro_batches=count, stages_per_rank=stages, times=times)
    made = make_schedule(name, ranks=ranks, num_micro_batches=count, stages_per_rank=stages)
    first, last = step_bounds_s(simulate(made, times))
    assert last - first == pytest.approx(pipeline.step_s(), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_many_micro_batches_are_the_first_few_and_a_repeated_rest(name, monkeypatch):
    stages = SCHEDULES[name].fewest_stages_per_rank
    costs = [1.0] * (4 * stages)
    costs[-1], costs[0] = 1.4, 1.1
    times = StageTimes.in_proportion(costs, forward_s=0.3, backward_input_s=0.4, backward_weight_s=0.2)
    pipeline = PricedPipeline(schedule=name, ranks=4, num_micro_batches=96, stages_per_rank=stages, times=times)
    whole = pipeline.step_s()
    monkeypatch.setattr("perfsuite.projection.pipeline.MOST_ACTIONS", 100)
    assert whole == pytest.approx(pipeline.step_s(), rel=1e-9)


def test_a_number_of_micro_batches_that_leaves_no_even_rounds_is_simulated_whole(monkeypatch):
    times = StageTimes.in_proportion([1.0, 1.2] * 8)
    pipeline = PricedPipeline(
        schedule="interleaved_1f1b", ranks=8, num_micro_batches=63, stages_per_rank=2, times=times
    )
    assert not SCHEDULES["interleaved_1f1b"].legal_count(8, 63 - 24)
    whole = pipeline.step_s()
    monkeypatch.setattr("perfsuite.projection.pipeline.MOST_ACTIONS", 100)
    assert whole == pipeline.step_s()


@pytest.mark.parametrize("count", [8, 10, 40])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_in_flight_are_the_schedule_s(schedule, count):
    stages = SCHEDULES[schedule].fewest_stages_per_rank
    model = Architecture.of(find("llama2-7b"))
    layout = Layout.parse("pp4", global_batch=count, schedule=schedule, stages_per_rank=stages)
    code = Implementation(name="", source="")
    made = make_schedule(schedule, ranks=4, num_micro_batches=count, stages_per_rank=stages)
    timeline = simulate(made, StageTimes.in_proportion([1.0] * made.num_stages))
    share = Share(model=model, layout=layout, code=code)
    size = model.layers // layout.stages * memory.block_bytes(share, experts=False)
    held = peak_activations(timeline, [size] * made.num_stages)
    assert held[0] == pytest.approx(memory.Memories(model=model, code=code).loads(share, [0])[0].activations)


def test_what_replicas_share_out_is_divided_by_them():
    model, code = Architecture.of(find("llama2-7b")), Implementation(name="", source="", gradient_bytes=4)
    whole = memory_of(model, Layout.parse("dp8", global_batch=8), code)
    kinds = ("optimizer", "gradients", "parameters")
    for count, sharding in enumerate(kinds, 1):
        found = memory_of(model, Layout.parse("dp8", global_batch=8, sharding=sharding), code)
        for index, kind in enumerate(kinds):
            expected = getattr(whole, kind) / (8 if index < count else 1)
            assert expected == pytest.approx(getattr(found, kind))


def test_recomputation_is_one_more_forward_of_the_blocks():
    kept = parts(Layout.parse("1", global_batch=2))
    again = parts(Layout.parse("1", global_batch=2, checkpointing="full"))
    forward = block(Layout.parse("1", global_batch=2)).forward
    assert 2 * SMALL.layers * scores(forward) / 1e12 == pytest.approx(again["attention"] - kept["attention"])
    moved = sum(one.moved_bytes for one in forward if isinstance(one, MemoryKernels))
    assert 2 * SMALL.layers * moved / 1e9 == pytest.approx(again["memory"] - kept["memory"])


def test_elementwise_traffic_is_bytes_per_token_width_and_hidden():
    more = dataclasses.replace(CODE, forward_width_bytes=CODE.forward_width_bytes + 3, backward_hidden_bytes=16)
    layout = Layout.parse("1", global_batch=1)
    added = SMALL.layers * SMALL.tokens * (3 * SMALL.width + 10 * SMALL.hidden)
    assert added / 1e9 == pytest.approx(parts(layout, more)["memory"] - parts(layout)["memory"])


def test_what_elementwise_kernels_move_over_their_count_is_of_the_blocks():
    twice = plain_rates(traffic_ratio=2.0)
    layout = Layout.parse("1", global_batch=1)
    blocks = (CODE.forward_width_bytes + CODE.backward_width_bytes) * SMALL.width
    blocks += (CODE.forward_hidden_bytes + CODE.backward_hidden_bytes) * SMALL.hidden
    grown = parts(layout, constants=twice)["memory"] - parts(layout)["memory"]
    assert SMALL.layers * SMALL.tokens * blocks / 1e9 == pytest.approx(grown)


def test_attention_is_half_of_all_pairs_under_a_mask_and_gradients_take_2_5_times_as_long():
    found = parts(Layout.parse("1", global_batch=1))["attention"]
    assert 3.5 * 0.5 * SMALL.layers * 4 * SMALL.tokens**2 * SMALL.width / 1e12 == pytest.approx(found)


def test_gradients_are_reduced_once_a_step():
    """All-reduce of S bytes over n ranks moves 2 S (n - 1) / n."""
    found = parts(Layout.parse("dp8", global_batch=16))
    assert 2 * 4 * SMALL.parameters * 7 / 8 / 1e9 == pytest.approx(found["link"], rel=1e-6)


def test_sharded_parameters_are_gathered_twice_and_gradients_scattered_in_every_micro_batch():
    found = parts(Layout.parse("dp8", global_batch=16, sharding="parameters"))
    blocks = SMALL.layers * SMALL.block_parameters()
    rest = SMALL.parameters - blocks  # gathered once, and kept until its gradient is scattered
    assert 2 * ((2 * 2 + 4) * blocks + (2 + 4) * rest) * 7 / 8 / 1e9 == pytest.approx(found["link"])


def test_gradients_of_sharded_parameters_may_wait_for_the_last_micro_batch():
    once = dataclasses.replace(CODE, scattered_bytes=6.0)
    found = parts(Layout.parse("dp8", global_batch=16, sharding="parameters"), once)
    blocks = SMALL.layers * SMALL.block_parameters()
    gathered = 2 * 2 * (2 * blocks + SMALL.parameters - blocks)
    assert (gathered + 4 * SMALL.parameters) * 7 / 8 / 1e9 == pytest.approx(found["link"])


MIXED = dataclasses.replace(SMALL, experts=8, top_k=2, expert_hidden=256)


@pytest.mark.parametrize("model", [SMALL, MIXED])
def test_nothing_hides_the_first_gather_the_last_scatter_and_those_of_the_ends(model):
    """Where work hides all others: what is before the first block and behind its scatter is the embedding alone."""
    layout = Layout.parse("dp8", global_batch=8, sharding="parameters")
    code = dataclasses.replace(CODE, data_overlap=1.0, forward_width_bytes=1e9, backward_width_bytes=1e9)
    block = model.block_parameters(experts=bool(model.experts))
    rest = model.parameters - model.layers * block
    waits = (2 + 4) * (block + rest) * 7 / 8
    moved = 2 * model.tokens * model.width
    before = 3 * moved + rest * code.sharded_bytes / 2
    behind = 5 * moved + 2 * model.embedding_parameters
    hidden = sum(min(size * block * 7 / 8, work) for size, work in ((2, before), (4, behind)))
    assert (waits - hidden) / 1e9 == pytest.approx(parts(layout, code, model=model)["link"])


def test_gathers_begin_late_where_the_host_waits_for_routes():
    layout = Layout.parse("dp8", global_batch=8, sharding="parameters")
    code = dataclasses.replace(CODE, data_overlap=1.0, forward_width_bytes=1e9, backward_width_bytes=1e9)
    late = dataclasses.replace(code, waits_for_routes=True)
    block = MIXED.block_parameters(experts=True)
    rest = MIXED.parameters - MIXED.layers * block
    before = 3 * 2 * MIXED.tokens * MIXED.width + rest * code.sharded_bytes / 2  # hid a part of the first
    more = parts(layout, late, model=MIXED)["link"] - parts(layout, code, model=MIXED)["link"]
    assert ((MIXED.layers - 1) * 2 * block * 7 / 8 + before) / 1e9 == pytest.approx(more)
    assert parts(layout, late) == parts(layout, code)


@pytest.mark.parametrize(
    ("sequence_parallel", "again", "of_block", "of_ends"),
    [(False, False, 4 * 2, 4), (True, False, 4 + 4, 4), (True, True, 4 + 6, 5)],
)
def test_tensor_parallel_messages_of_a_block(sequence_parallel, again, of_block, of_ends):
    """Four all-reduces; or gathers and scatters, and in some software the inputs gathered again in the backward."""
    layout = Layout.parse("tp4", global_batch=1, sequence_parallel=sequence_parallel)
    whole = 2 * SMALL.tokens * SMALL.width
    loss = 2 * 3 * 4 * SMALL.tokens
    norms = 2 * 2 * SMALL.width * (2 * SMALL.layers + 1) * sequence_parallel
    sent = (SMALL.layers * of_block + of_ends) * whole + loss + norms
    found = parts(layout, dataclasses.replace(CODE, gathers_again=again))["link"]
    assert sent * 3 / 4 / 1e9 == pytest.approx(found)


@pytest.mark.parametrize("again", [False, True])
def test_recomputation_repeats_the_messages_of_a_block_but_the_last_where_it_stops_early(again):
    code = dataclasses.replace(CODE, stops_early=again)
    kept, twice = (
        parts(Layout.parse("tp4", global_batch=1, checkpointing=way), code)["link"] for way in ("none", "full")
    )
    repeated = 2 * (1 if again else 2) * 2 * SMALL.tokens * SMALL.width * 3 / 4
    assert SMALL.layers * repeated / 1e9 == pytest.approx(twice - kept)


def test_context_parallel_ring_hides_behind_attention_only():
    layout = Layout.parse("cp4", global_batch=1)
    behind = parts(layout)["attention"] * 3 / 4  # the last step's keys are there before it begins
    keys = 2 * (SMALL.tokens / 4) * 2 * SMALL.width
    ring = SMALL.layers * (3 + 3 + 4) * keys / 1e9  # their gradients go one step further, home
    gradients = 2 * 4 * SMALL.parameters * 3 / 4 / 1e9
    assert ring + gradients - behind == pytest.approx(parts(layout)["link"], rel=1e-6)


def test_a_ring_computes_a_kernel_for_each_step():
    """Its own keys under the mask, then half of each other rank's: together a rank's part of all pairs."""
    whole, shared = (
        [one for one in block(Layout.parse(mesh, global_batch=1)).forward if isinstance(one, BlockAttention)]
        for mesh in ("1", "cp4")
    )
    assert [(8, 8, True), *3 * [(8, 4, False)]] == [(one.queries, one.keys, one.causal) for one in shared]
    assert sum(one.flops for one in shared) == pytest.approx(whole[0].flops / 4)


def test_the_parts_of_a_ring_s_attention_are_added_up():
    """Forward for each step after the first, of queries; backward for each, of queries, keys and values."""
    code = dataclasses.replace(CODE, ring_bytes=(40.0, 12.0))
    layout = Layout.parse("cp4", global_batch=1)
    more = parts(layout, code)["memory"] - parts(layout)["memory"]
    assert SMALL.layers * 8 * 64 * (40 * 3 + 12 * 4 * 3) / 1e9 == pytest.approx(more)
    written = dataclasses.replace(CODE, score_bytes=(1.0, 1.0), ring_score_bytes=(48.0, 52.0))
    plain = dataclasses.replace(written, ring_score_bytes=(1.0, 1.0))
    pairs = 4 * (8 * 8 + 3 * 8 * 4)
    more = parts(layout, written)["memory"] - parts(layout, plain)["memory"]
    assert SMALL.layers * pairs * (48 + 52 - 2) / 1e9 == pytest.approx(more)


def test_nothing_hides_the_way_home_of_the_last_gradients_of_keys():
    slow = plain_rates(attention_bf16_tflops=1e-9)
    found = parts(Layout.parse("cp4", global_batch=1), constants=slow)["link"]
    home = SMALL.layers * 2 * 8 * 2 * 64
    gradients = 2 * 4 * SMALL.parameters * 3 / 4
    assert (home + gradients) / 1e9 == pytest.approx(found, rel=1e-6)


def test_stage_messages_and_bubble_of_a_pipeline():
    layout = Layout.parse("pp4", global_batch=8)
    with_messages = parts(layout)
    message = 2 * SMALL.tokens * SMALL.width / 1e9
    assert 8 * message == pytest.approx(
        with_messages["link"], rel=1e-6
    )  # the head's rank is busiest: it sends back only
    assert with_messages["bubble"] > 0
    hidden = parts(layout, dataclasses.replace(CODE, stage_overlap=1.0))
    assert "link" not in hidden or hidden["link"] == 0


@pytest.mark.parametrize(("mesh", "tp"), [("ep4", 1), ("ep4-tp2", 2)])
def test_experts_are_sent_and_come_back_in_both_passes(mesh, tp):
    """The rows of a rank's own tokens, along ep and then to each of tp."""
    model = Architecture.of(find("moe-tiny"))
    share = Share(model=model, layout=Layout.parse(mesh, global_batch=4, sequence_parallel=tp > 1), code=CODE)
    passes = operations.block(share, experts=True)
    rows = 2.0 * model.tokens / tp * model.top_k * model.width
    for part in (passes.forward, passes.backward_input):
        sent = [one for one in part if isinstance(one, Sent) and one.collective == "all_to_all"]
        assert [("ep", 2, rows), ("tp", 2, tp * rows)][:tp] == [
            (one.axis, one.calls, one.message_bytes) for one in sent if one.calls == 2
        ]


def test_a_token_is_sent_to_a_node_once_if_the_code_does_so():
    """Four of eight experts are on other nodes: copies to each, or one to each node with any of them."""
    links = Links(calibration=plain_rates(), devices_per_node=8)
    group = Layout.parse("ep32", global_batch=32).groups(8)["ep"]
    every, once = (links.seconds("all_to_all", 8e9, group, copies=copies).network for copies in (1, 8))
    assert every == pytest.approx(8 * 8 * 3 / 4)
    assert once == pytest.approx(8 * 3 * (1 - (3 / 4) ** 8))
    model = dataclasses.replace(Architecture.of(find("moe-tiny")), experts=16)
    code = dataclasses.replace(CODE, routes_once=True)
    two = [parts(Layout.parse("ep16", global_batch=16), one, model=model)["network"] for one in (CODE, code)]
    assert two[1] < two[0]


def test_the_slowest_of_many_takes_longer_by_the_spread():
    spread = dataclasses.replace(
        plain_rates(), traits={"rank_spread_ratio": Constant(value=0.01, unit="ratio", source="")}
    )
    code = dataclasses.replace(CODE, data_overlap=1.0)
    found = parts(Layout.parse("dp2048", global_batch=2048), code, spread)
    rest = sum(seconds for resource, seconds in found.items() if resource != "straggler")
    assert 0.01 * (3.42 - 1.42) == pytest.approx(found["straggler"] / rest, rel=0.02)


def test_between_measured_products_their_ratio_to_the_rates_is_carried_over():
    """One that waits for memory is not taken for its neighbour that waits for its operations."""
    rates = plain_rates()
    alone = KernelTimes(calibration=rates, dtype="bf16")
    sides = (512, 4096)
    points = tuple(
        KernelPoint(
            kind="matmul",
            dtype="bf16",
            shape=(1, side, side, side),
            time_s=1.1 * alone.matmul(MatmulKernel(m=side, n=side, k=side)),
        )
        for side in sides
    )
    times = KernelTimes(calibration=dataclasses.replace(rates, kernels=points), dtype="bf16")
    for m, n, k in ((512, 512, 512), (400, 512, 640), (16, 4096, 4096), (4096, 4096, 2048), (3000, 4096, 4096)):
        product = MatmulKernel(m=m, n=n, k=k)
        ratio = 1.0 if m == 16 else 1.1
        assert times.matmul(product) == pytest.approx(ratio * alone.matmul(product))
    assert (1, 3, 1) == (times.found["measured"], times.found["between"], times.found["rate"])


def test_the_last_bucket_of_gradients_has_nothing_left_to_hide_behind():
    code = dataclasses.replace(CODE, data_overlap=1.0)
    layout = Layout.parse("dp2", global_batch=16, micro_batch_size=8)
    hidden = parts(layout, code).get("link", 0.0)
    whole = code.gradient_bytes * rank_parameters(SMALL, layout)[0]
    exposed = [
        parts(layout, dataclasses.replace(code, bucket_bytes=share * whole))["link"] for share in (2.0, 1.0, 0.25)
    ]
    assert exposed[0] == exposed[1] == pytest.approx(4 * exposed[2])
    assert exposed[2] > hidden


def test_gradients_of_the_only_micro_batch_are_added_to_nothing():
    model = find("gpt2")
    one, two = (implementation_of(model, Training(model="gpt2", num_micro_batches=count)) for count in (1, 2))
    four = implementation_of(model, Training(model="gpt2", num_micro_batches=4))
    # Of fp32 two are read and one is written, each time but the first.
    assert (6.0, 9.0) == tuple(code.accumulation_bytes - one.accumulation_bytes for code in (two, four))
    assert dataclasses.replace(two, accumulation_bytes=one.accumulation_bytes) == one


def test_gradients_of_the_ends_are_added_up_as_well():
    code = dataclasses.replace(CODE, accumulation_bytes=8.0)
    layout = Layout.parse("dp1", global_batch=3, micro_batch_size=1)
    more = parts(layout, code)["memory"] - parts(layout, dataclasses.replace(code, accumulation_bytes=0.0))["memory"]
    whole = SMALL.layers * SMALL.block_parameters() + operations.end_parameters(SMALL, layout, first=True, last=True)
    assert pytest.approx(3 * 8.0 * whole / 1e9) == more


def test_a_projector_keeps_what_it_priced():
    projector = Projector(model=SMALL, code=CODE, calibration=plain_rates(), devices_per_node=8, dtype="bf16")
    for world in (1, 2, 4, 8):
        projector.step(Layout.parse(f"dp{world}", global_batch=8))
    assert len(projector._stages._blocks) == 1
    assert operations.block_share(SMALL, Layout.parse("dp2", global_batch=2), experts=False) == SMALL.block_parameters()


def test_recomputing_that_stops_early_leaves_out_the_last_product():
    layout = Layout.parse("1", global_batch=2, checkpointing="full")
    whole, early = (block(layout, dataclasses.replace(CODE, stops_early=stops)).recompute for stops in (False, True))
    (left_out,) = set(whole) - set(early)
    assert (SMALL.width, SMALL.hidden) == (left_out.n, left_out.k)
    assert len(whole) == len(early) + 1


def test_memory_at_most_is_of_the_passes_or_of_the_optimizer():
    """Gradients that nothing keeps come while activations go; the optimizer's roots come when those are gone."""
    own = dataclasses.replace(CODE, keeps_gradients=False, updating_bytes=4.0)
    few, many = (
        memory_of(SMALL, Layout.parse("1", global_batch=count, micro_batch_size=count), own) for count in (1, 64)
    )
    resident = few.parameters + few.optimizer
    assert resident + few.gradients + 4 * SMALL.parameters == pytest.approx(few.total)
    assert resident + many.activations + many.logits + many.temporary == pytest.approx(many.total)
    several = memory_of(SMALL, Layout.parse("1", global_batch=128, micro_batch_size=64), own)
    assert many.total + several.gradients == pytest.approx(several.total)


def test_gradients_of_a_unit_are_joined_and_scattered_and_kept_in_full():
    """FSDP1: two blocks gathered and the ends, whose head's gradient waits; scattered in 16 bits, kept in 32."""
    unit = dataclasses.replace(CODE, gradient_bytes=2.0, kept_gradient_bytes=4.0, unit_gradient_bytes=8.0)
    layout = Layout.parse("dp8", global_batch=8, sharding="parameters")
    found, before = (memory_of(SMALL, layout, code) for code in (unit, dataclasses.replace(CODE, gradient_bytes=2.0)))
    block = SMALL.block_parameters()
    ends = SMALL.parameters - SMALL.layers * block
    assert 4 * SMALL.parameters / 8 == pytest.approx(found.gradients) == pytest.approx(2 * before.gradients)
    assert (8 - 2) * block + (2 + 2) * ends == pytest.approx(found.temporary - before.temporary)


def test_gradients_that_wait_for_the_last_micro_batch_are_whole_until_then():
    once = dataclasses.replace(CODE, keeps_gradients=False, scattered_bytes=8.0)
    one, two = (memory_of(SMALL, Layout.parse("dp8", global_batch=8 * n, sharding="parameters"), once) for n in (1, 2))
    assert (0.0, 4 * SMALL.parameters) == pytest.approx((one.accumulated, two.accumulated))
    assert one.gradients == two.gradients == pytest.approx(4 * SMALL.parameters / 8)


def test_on_cores_the_optimizer_goes_from_tensor_to_tensor():
    training = Training(model="gpt2-tiny")
    found = {
        name: TrainingJob.of(training, load_catalog().find(name)).implementation.updating_bytes
        for name in ("cpu", "s4000")
    }
    assert {"cpu": 0.0, "s4000": 4.0} == found


# -- perfsuite's own steps -----------------------------------------------------------------------------------------


GPT = {"layers": 3, "width": 64, "heads": 4, "words": 16, "words_multiple": 1, "context": 8}


def job(platform="s4000", **training):
    given = {"model": "gpt2-tiny", "overrides": GPT, "dtype": "fp32", "attention": "math", **training}
    return TrainingJob.of(Training(**given), load_catalog().find(platform))


def optimizer_s(made):
    """Where a kernel takes a second and nothing else takes any time."""
    constants = {"kernel_us": 1e6, "matmul_fp32_tflops": 1e12, "link_gb_per_s": 1e12}
    known = {name: Constant(value=value, unit="", source="") for name, value in constants.items()}
    calibration = Calibration(device=made.device.name, constants=known)
    projector = Projector(
        model=made.architecture,
        code=made.implementation,
        calibration=calibration,
        devices_per_node=made.devices_per_node,
        dtype="fp32",
    )
    return sum(seconds for name, _, seconds in projector.step(made.layout).parts if name == "optimizer")


def test_the_optimizer_starts_kernels_for_a_list_of_tensors_or_for_each():
    tensors = 3 * 12 + 4
    assert 13 == pytest.approx(optimizer_s(job("h100")))
    assert 13 * tensors == pytest.approx(optimizer_s(job("s4000")))
    # DeepSpeed's parameters are one flat tensor.
    assert 13 == pytest.approx(optimizer_s(job("s4000", strategy="zero1", layout="dp2", sharding="optimizer")))
    # A stage has its own blocks, and no more.
    assert 13 * (12 + 2) == pytest.approx(optimizer_s(job("s4000", layout="pp3", strategy="pipeline", schedule="1f1b")))


def passes(made):
    """Bytes beside what a rank keeps for good, at the fullest moment."""
    found = memory_of(made.architecture, made.layout, made.implementation)
    return found.activations + found.logits + found.temporary, found


@pytest.mark.parametrize("batch", [1, 256])
def test_sharded_parameters_at_the_fullest_moment(batch):
    """Few tokens: behind the middle block, whose gradients are there beside those that are scattered; many: inside the
    last block."""
    made = job(strategy="fsdp", layout="dp2", sharding="parameters", micro_batch_size=batch)
    model, layout = made.architecture, made.layout
    total, found = passes(made)
    tokens, element = batch * model.tokens, 4
    block, ends = element * model.block_parameters(), element * end_parameters(model, layout, first=True, last=True)
    head = element * (model.vocabulary * model.width + 2 * model.width)
    flowing, ends_kept = element * tokens * model.width, 8 * tokens * model.width
    kept = (found.activations - ends_kept) / model.layers
    if batch == 1:  # whole: its own parameters, the next block's, two blocks' gradients; the last one's were halved
        expected = kept + ends + head + flowing + 4 * block + block / 2
    else:
        products = element * (tokens * model.hidden + model.hidden * model.width)
        expected = 3 * kept + ends + head + flowing + 2 * block + products
    assert pytest.approx(expected) == total


def test_buckets_wait_beside_the_gradients_of_several_micro_batches():
    one, three = (passes(job(strategy="ddp", layout="dp2", num_micro_batches=count))[1] for count in (1, 3))
    assert (one.gradients, 2 * one.gradients) == (one.accumulated, three.accumulated)
