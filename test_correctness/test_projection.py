"""Projections: what must hold exactly, whatever the constants."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import ConfigurationError, InvalidParameter
from perfsuite.metrics.pipeline import peak_activations, step_bounds_s
from perfsuite.models import MODELS, find
from perfsuite.platforms import load_catalog
from perfsuite.projection import engine, memory, operations
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import Calibration, Constant, read_calibration, write_calibration
from perfsuite.projection.engine import Projector
from perfsuite.projection.job import Job
from perfsuite.projection.layout import Layout
from perfsuite.projection.memory import memory_of
from perfsuite.projection.operations import Attention, Collective, Matmul, Share, Traffic
from perfsuite.projection.pipeline import Pipeline
from perfsuite.projection.scaling import goodput, worlds_between
from perfsuite.projection.sensitivity import elasticities
from perfsuite.projection.step import project
from perfsuite.projection.timeline import pipeline_timeline
from perfsuite.projection.traffic import Implementation
from perfsuite.records import Training
from perfsuite.schedules import SCHEDULES, StageTimes, make_schedule, simulate

CATALOG = load_catalog()
A100 = CATALOG.find("a100")
ROW = Calibration.from_platform(A100)


def job(layout="1", calibration=ROW, platform="a100", **fields) -> Job:
    fields = {"model": "llama2-7b", "dtype": "bf16", "layout": layout, **fields}
    return Job.of(Training(**fields), CATALOG.find(platform))


def with_constant(name: str, factor: float) -> Calibration:
    constant = ROW.constants[name]
    changed = dataclasses.replace(constant, value=factor * constant.value)
    return dataclasses.replace(ROW, constants={**ROW.constants, name: changed})


LAYOUTS = [
    {"layout": "1"},
    {"layout": "dp8"},
    {"layout": "dp16", "sharding": "optimizer"},
    {"layout": "dp32", "sharding": "parameters", "checkpointing": "full"},
    {"layout": "dp_replicate4-dp_shard8", "sharding": "parameters"},
    {"layout": "tp8-dp2", "sequence_parallel": True},
    {"layout": "pp4-tp2-dp2", "schedule": "1f1b", "num_micro_batches": 8},
    {"layout": "pp2-dp2", "schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_micro_batches": 4},
    {"layout": "pp2", "schedule": "zbv", "stages_per_rank": 2, "num_micro_batches": 4},
    {"layout": "cp4-dp2"},
    {"layout": "dp2-ep4", "model": "mixtral-8x7b"},
    {"layout": "dp8", "model": "opensora"},
    {"layout": "dp2", "model": "gpt2", "dtype": "fp32", "attention": "math"},
]


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_has_the_model_s_own_parameters_and_operations(name):
    model = find(name)
    plain = Architecture.of(model)
    assert model.parameters == plain.parameters
    assert model.forward_flops == pytest.approx(plain.forward_flops, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "llama2-7b", "llama2-70b", "mixtral-8x7b", "latte-xl", "opensora"])
def test_operations_of_a_block_are_the_model_s(name):
    """Products and attention of all blocks, forward; gradients are twice and 2.5 times that."""
    model = Architecture.of(find(name))
    layout = Layout.parse("1", global_batch=1)
    share = Share(model=model, layout=layout, code=Implementation(name="", source="", causal_skips=False))
    passes = operations.block(share, experts=bool(model.experts))

    def products(part):
        return sum(2 * one.groups * one.m * one.n * one.k for one in part if isinstance(one, Matmul))

    def scores(part):
        return sum(one.flops for one in part if isinstance(one, Attention))

    blocks = products(passes.forward) + scores(passes.forward)
    head = products(operations.head(share).forward)
    expected = model.forward_flops - model.more_flops
    assert expected == pytest.approx(model.layers * blocks + head, rel=1e-9)
    assert 2 * products(passes.forward) == products((*passes.backward_input, *passes.backward_weight))
    assert 2.5 * scores(passes.forward) == pytest.approx(scores(passes.backward_input))


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_parts_sum_to_the_step_and_the_band_holds_it(fields):
    found = project(job(**fields), ROW)
    assert found.step_time_s == pytest.approx(sum(part.seconds for part in found.parts), rel=1e-9)
    assert all(part.seconds >= 0 for part in found.parts)
    assert found.low_s < found.step_time_s < found.high_s
    assert math.isfinite(found.memory.total)
    assert found.memory.total > 0


@pytest.mark.parametrize("name", ["matmul_bf16_tflops", "attention_bf16_tflops", "memory_gb_per_s", "link_gb_per_s"])
@pytest.mark.parametrize("fields", [fields for fields in LAYOUTS if "dtype" not in fields], ids=str)
def test_a_faster_device_is_never_slower(fields, name):
    base = project(job(**fields), ROW).step_time_s
    assert project(job(**fields), with_constant(name, 1.5)).step_time_s <= base * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name, spec in SCHEDULES.items() if spec.bubble is not None])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 8), (4, 12)])
def test_the_closed_form_is_the_simulator_s_for_equal_stages(name, ranks, count):
    stages = SCHEDULES[name].fewest_stages_per_rank
    times = StageTimes.in_proportion([1.0] * ranks * stages, forward_s=0.3, backward_input_s=0.4, backward_weight_s=0.2)
    pipeline = Pipeline(schedule=name, ranks=ranks, num_micro_batches=count, stages_per_rank=stages, times=times)
    made = make_schedule(name, ranks=ranks, num_micro_batches=count, stages_per_rank=stages)
    first, last = step_bounds_s(simulate(made, times))
    assert last - first == pytest.approx(pipeline.step_s(), rel=1e-9)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv"])
def test_many_micro_batches_are_the_first_few_and_a_repeated_rest(name, monkeypatch):
    stages = SCHEDULES[name].fewest_stages_per_rank
    costs = [1.0] * (4 * stages)
    costs[-1], costs[0] = 1.4, 1.1
    times = StageTimes.in_proportion(costs, forward_s=0.3, backward_input_s=0.4, backward_weight_s=0.2)
    pipeline = Pipeline(schedule=name, ranks=4, num_micro_batches=96, stages_per_rank=stages, times=times)
    whole = pipeline.step_s()
    monkeypatch.setattr("perfsuite.projection.pipeline.MOST_ACTIONS", 100)
    assert whole == pytest.approx(pipeline.step_s(), rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zbv"])
def test_activations_in_flight_are_the_schedule_s(schedule):
    stages = SCHEDULES[schedule].fewest_stages_per_rank
    model = Architecture.of(find("llama2-7b"))
    layout = Layout.parse("pp4", global_batch=8, schedule=schedule, stages_per_rank=stages)
    code = Implementation(name="", source="")
    made = make_schedule(schedule, ranks=4, num_micro_batches=8, stages_per_rank=stages)
    timeline = simulate(made, StageTimes.in_proportion([1.0] * made.num_stages))
    share = Share(model=model, layout=layout, code=code)
    size = model.layers // layout.stages * memory.block_bytes(share, experts=False)
    held = peak_activations(timeline, [size] * made.num_stages)
    assert held[0] == pytest.approx(memory._rank(model, layout, code, 0.0, rank=0).activations)


def test_what_replicas_share_out_is_divided_by_them():
    model, code = Architecture.of(find("llama2-7b")), Implementation(name="", source="", gradient_bytes=4)
    whole = memory_of(model, Layout.parse("dp8", global_batch=8), code)
    kinds = ("optimizer", "gradients", "parameters")
    for count, sharding in enumerate(kinds, 1):
        found = memory_of(model, Layout.parse("dp8", global_batch=8, sharding=sharding), code)
        for index, kind in enumerate(kinds):
            expected = getattr(whole, kind) / (8 if index < count else 1)
            assert expected == pytest.approx(getattr(found, kind))


# -- every term by itself: what one of them adds, exactly ----------------------------------------------------------


def plain_rates() -> Calibration:
    """1 TFLOPS, 1 GB/s of memory, link and network, and no latency: seconds are operations and bytes."""
    rates = {"matmul_bf16_tflops": 1.0, "attention_bf16_tflops": 1.0}
    rates |= {"memory_gb_per_s": 1.0, "link_gb_per_s": 1.0, "network_gb_per_s": 1.0}
    return Calibration(device="a100", constants={n: Constant(value=v, unit="", source="") for n, v in rates.items()})


SMALL = Architecture(
    name="small", layers=4, width=64, heads=4, key_heads=4, hidden=256, gated=False, vocabulary=128, tokens=32
)
CODE = Implementation(name="", source="", data_overlap=0.0)


def parts(layout: Layout, code: Implementation = CODE, constants: Calibration | None = None) -> dict[str, float]:
    projector = Projector(
        model=SMALL, code=code, calibration=constants or plain_rates(), devices_per_node=8, dtype="bf16"
    )
    found: dict[str, float] = {}
    for _, resource, seconds in projector.step(layout).parts:
        found[resource] = found.get(resource, 0.0) + seconds
    return found


def test_recomputation_is_one_more_forward_of_the_blocks():
    kept = parts(Layout.parse("1", global_batch=2))
    again = parts(Layout.parse("1", global_batch=2, checkpointing="full"))
    share = Share(model=SMALL, layout=Layout.parse("1", global_batch=2), code=CODE)
    forward = operations.block(share, experts=False).forward
    flops = sum(one.flops for one in forward if isinstance(one, Attention))
    assert 2 * SMALL.layers * flops / 1e12 == pytest.approx(again["attention"] - kept["attention"])
    moved = sum(one.moved_bytes for one in forward if isinstance(one, Traffic))
    assert 2 * SMALL.layers * moved / 1e9 == pytest.approx(again["memory"] - kept["memory"])


def test_elementwise_traffic_is_bytes_per_token_width_and_hidden():
    more = dataclasses.replace(CODE, forward_width_bytes=CODE.forward_width_bytes + 3, backward_hidden_bytes=16)
    layout = Layout.parse("1", global_batch=1)
    added = SMALL.layers * SMALL.tokens * (3 * SMALL.width + 10 * SMALL.hidden)
    assert added / 1e9 == pytest.approx(parts(layout, more)["memory"] - parts(layout)["memory"])


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
    assert 2 * (2 * 2 + 4) * blocks * 7 / 8 / 1e9 == pytest.approx(found["link"])


def test_a_gather_that_begins_late_waits_while_the_scatter_hides():
    layout = Layout.parse("dp8", global_batch=8, sharding="parameters")
    hidden = dataclasses.replace(CODE, data_overlap=1.0, backward_width_bytes=1e9)
    late = parts(layout, dataclasses.replace(hidden, prefetches_backward=False))["link"]
    gathers = SMALL.layers * 2 * SMALL.block_parameters() * 7 / 8 / 1e9
    assert gathers == pytest.approx(late - parts(layout, hidden).get("link", 0.0))


@pytest.mark.parametrize(("sequence_parallel", "messages"), [(False, 4 * 2), (True, 4 + 6)])
def test_tensor_parallel_messages_of_a_block(sequence_parallel, messages):
    """Four all-reduces; or gathers and scatters, and the inputs gathered again in the backward."""
    layout = Layout.parse("tp4", global_batch=1, sequence_parallel=sequence_parallel)
    whole = 2 * SMALL.tokens * SMALL.width
    head = 2 * whole
    assert (SMALL.layers * messages * whole + head) * 3 / 4 / 1e9 == pytest.approx(parts(layout)["link"])


def test_context_parallel_ring_hides_behind_attention_only():
    layout = Layout.parse("cp4", global_batch=1)
    behind = parts(layout)["attention"]
    ring = 3 * SMALL.layers * 2 * (SMALL.tokens / 4) * 2 * SMALL.width * 3 / 1e9
    gradients = 2 * 4 * SMALL.parameters * 3 / 4 / 1e9
    assert ring + gradients - behind == pytest.approx(parts(layout)["link"], rel=1e-6)


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


def test_experts_are_sent_and_come_back_in_both_passes():
    model = Architecture.of(find("moe-tiny"))
    layout = Layout.parse("ep4", global_batch=4)
    share = Share(model=model, layout=layout, code=CODE)
    passes = operations.block(share, experts=True)
    sent = [one for one in (*passes.forward, *passes.backward_input) if isinstance(one, Collective)]
    assert ["all_to_all"] * 4 == [one.collective for one in sent]
    assert {2.0 * model.tokens * model.top_k * model.width} == {one.message_bytes for one in sent}


def test_the_slowest_of_many_takes_longer_by_the_spread():
    spread = dataclasses.replace(
        plain_rates(), traits={"rank_spread_ratio": Constant(value=0.01, unit="ratio", source="")}
    )
    code = dataclasses.replace(CODE, data_overlap=1.0)
    found = parts(Layout.parse("dp2048", global_batch=2048), code, spread)
    rest = sum(seconds for resource, seconds in found.items() if resource != "straggler")
    assert 0.01 * (3.42 - 1.42) == pytest.approx(found["straggler"] / rest, rel=0.02)


def test_a_host_that_is_slower_than_its_device_binds_the_step_and_makes_it_a_lower_bound():
    traits = {"launch_us": Constant(value=1e6, unit="us", source="")}
    found = project(job(), dataclasses.replace(ROW, traits=traits))
    assert (found.binding, found.lower_bound) == ("host", True)
    assert "host-bound" in {flag.name for flag in found.flags}


def test_memory_at_its_limit_is_a_lower_bound():
    found = project(job(micro_batch_size=4), ROW)
    assert found.lower_bound
    assert "memory-limit" in {flag.name for flag in found.flags}


def test_elasticities_are_shares_of_a_step():
    found = elasticities(job("dp16", sharding="parameters"), ROW)
    assert set(found) == {"matmul", "attention", "memory", "link", "network"}
    assert 0.9 < sum(found.values()) < 1.1


def test_the_timeline_is_as_long_as_the_pipeline_s_part_of_the_step():
    piped = job("pp2-dp2", schedule="1f1b", num_micro_batches=4)
    first, last = step_bounds_s(pipeline_timeline(piped, ROW))
    found = project(piped, ROW)
    inside = sum(part.seconds for part in found.parts if part.name in ("forward", "backward", "bubble"))
    assert last - first == pytest.approx(inside, rel=1e-9)


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 3, 16]),
    micro=st.integers(1, 3),
    count=st.integers(1, 6),
)
def test_legal_layouts_are_read_as_they_are_written(tp, pp, dp, micro, count):
    text = str(Layout.parse(f"dp{dp}-tp{tp}-pp{pp}", global_batch=dp * micro * count, micro_batch_size=micro))
    layout = Layout.parse(text, global_batch=dp * micro * count, micro_batch_size=micro)
    assert (text, count) == (str(layout), layout.num_micro_batches)
    assert layout.world_size == tp * pp * dp
    layout.check(find("llama2-7b"))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("dp6", {"global_batch": 512}, "choose 510 or 516"),
        ("tp3", {"global_batch": 4}, "choose tp from 1, 2, 4, 8, 16, 32"),
        ("pp64", {"global_batch": 4}, "choose 32, 16"),
        ("ep2", {"global_batch": 4}, "no experts|missing experts"),
    ],
)
def test_what_cannot_be_spread_names_what_can(text, options, message):
    with pytest.raises(InvalidParameter, match=message):
        Layout.parse(text, **options).check(find("llama2-7b"))


def test_a_layout_of_another_size_than_the_world_names_the_nearest():
    with pytest.raises(InvalidParameter, match="16 ranks for a world of 32; choose dp4"):
        Layout.parse("dp2-tp8", global_batch=4).check(find("llama2-7b"), world_size=32)


def test_an_unknown_rate_is_refused_and_an_assumed_network_said():
    with pytest.raises(ConfigurationError, match="no rate of fp8 products is known of s4000; choose --dtype bf16"):
        project(job(platform="s4000", dtype="fp8"), Calibration.from_platform(CATALOG.find("s4000")))
    found = project(job("dp64", platform="s4000"), Calibration.from_platform(CATALOG.find("s4000")))
    assert "network" in {flag.name for flag in found.flags}


def test_tensor_parallelism_over_nodes_is_flagged():
    found = project(job("tp16-dp2"), ROW)
    assert "tensor-across-nodes" in {flag.name for flag in found.flags}


def test_a_simulated_calibration_projects_no_real_platform():
    with pytest.raises(ConfigurationError, match="simulated"):
        project(job(), dataclasses.replace(ROW, simulated=True))


def test_the_band_widens_with_distance_from_what_was_measured():
    situ = dataclasses.replace(ROW, regime="in situ", largest_world=8)
    widths = []
    for world in (8, 64, 512):
        found = project(job(f"dp{world}"), situ)
        widths.append(found.high_s / found.low_s)
    assert widths == sorted(widths)
    assert widths[0] < widths[2]


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_calibration_survives_its_file(tmp_path):
    path = tmp_path / "a100.json"
    write_calibration(ROW, path)
    assert read_calibration(path) == ROW


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], r"line \d+: .*truncated"),
        (lambda text: "[]", "no calibration"),
        (lambda text: json.dumps({**json.loads(text), "schema": 99}), "schema 99.*newer"),
        (lambda text: text.replace("a100", "h100", 1), "checksum"),
    ],
)
def test_a_file_that_is_none_says_why(tmp_path, change, message):
    path = tmp_path / "a100.json"
    write_calibration(ROW, path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ConfigurationError, match=message):
        read_calibration(path)


def test_a_curve_doubles_to_its_end():
    assert [8, 16, 32, 48] == worlds_between(8, 48)
    with pytest.raises(InvalidParameter, match=r"8\.\.1024"):
        worlds_between(8, 4)


def test_goodput_falls_with_the_devices():
    shares = [goodput(world, 10.0, mtbf_device_h=50_700, checkpoint_s=60) for world in (8, 1024, 100_000)]
    assert shares == sorted(shares, reverse=True)
    assert 0.9 < shares[1] < 1


def test_a_projector_keeps_what_it_priced():
    projector = Projector(
        model=SMALL, code=CODE, calibration=plain_rates(), devices_per_node=8, dtype="bf16", simulated=False
    )
    for world in (1, 2, 4, 8):
        projector.step(Layout.parse(f"dp{world}", global_batch=8))
    assert len(projector._blocks) == 1
    assert engine.block_share(SMALL, Layout.parse("dp2", global_batch=2), experts=False) == SMALL.block_parameters()
