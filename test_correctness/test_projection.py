"""Projections of whole steps, their layouts and files: what must hold exactly, whatever the constants."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.cli.job_checks import elasticities
from perfsuite.metrics.pipeline import step_bounds_s
from perfsuite.models import find
from perfsuite.platforms import load_catalog
from perfsuite.projection.calibration import Calibration, Constant, read_calibration, write_calibration
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.layout import Layout
from perfsuite.projection.scaling import curve, goodput, worlds_between
from perfsuite.projection.step import pipeline_timeline, project
from perfsuite.record.step import Training

CATALOG = load_catalog()
A100 = CATALOG.find("a100")
ROW = Calibration.from_platform(A100)


def job(layout="1", calibration=ROW, platform="a100", **fields) -> TrainingJob:
    fields = {"model": "llama2-7b", "dtype": "bf16", "layout": layout, **fields}
    return TrainingJob.of(Training(**fields), CATALOG.find(platform))


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


@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_parts_sum_to_the_step_and_the_band_holds_it(fields):
    found = project(job(**fields), ROW)
    assert found.step_time_s == pytest.approx(sum(part.seconds for part in found.parts), rel=1e-9)
    assert all(part.seconds >= 0 for part in found.parts)
    flags = {flag.name for flag in found.flags}
    assert (found.low_s <= found.step_time_s <= found.high_s) != ("outside-band" in flags)
    assert math.isfinite(found.memory.total)
    assert found.memory.total > 0


@pytest.mark.parametrize("name", ["matmul_bf16_tflops", "attention_bf16_tflops", "memory_gb_per_s", "link_gb_per_s"])
@pytest.mark.parametrize("fields", [fields for fields in LAYOUTS if "dtype" not in fields], ids=str)
def test_a_faster_device_is_never_slower(fields, name):
    base = project(job(**fields), ROW).step_time_s
    assert project(job(**fields), with_constant(name, 1.5)).step_time_s <= base * (1 + 1e-12)


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
        ("tp3", {"global_batch": 4}, "choose tp from 2, 4, 1, 8, 16, 32"),
        ("pp64", {"global_batch": 4}, "choose 32, 16"),
        ("ep2", {"global_batch": 4}, "no experts|missing experts"),
    ],
)
def test_what_cannot_be_spread_names_what_can(text, options, message):
    with pytest.raises(InvalidParameter, match=message):
        Layout.parse(text, **options).check(find("llama2-7b"))


def test_experts_under_tp_need_sequence_parallelism():
    layout = Layout.parse("ep4-tp2", global_batch=4)
    with pytest.raises(InvalidParameter, match="every row of model mixtral-8x7b 2 times; add --sequence-parallel"):
        layout.check(find("mixtral-8x7b"))
    dataclasses.replace(layout, sequence_parallel=True).check(find("mixtral-8x7b"))


def test_a_layout_of_another_size_than_the_world_names_the_nearest():
    with pytest.raises(InvalidParameter, match="16 ranks for a world of 32; choose dp4"):
        Layout.parse("dp2-tp8", global_batch=4).check(find("llama2-7b"), world_size=32)


def test_an_unknown_rate_is_refused_and_an_assumed_network_said():
    with pytest.raises(ConfigurationError, match="no rate of fp8 products is known of s4000; choose --dtype bf16"):
        project(job(platform="s4000", dtype="fp8"), Calibration.from_platform(CATALOG.find("s4000")))
    found = project(job("dp64", platform="mi300x"), Calibration.from_platform(CATALOG.find("mi300x")))
    assert "network" in {flag.name for flag in found.flags}


@pytest.mark.parametrize("strategy", ["hybrid", "ddp"])
def test_fsdp2_does_not_overlap_on_an_s4000_unless_it_is_turned_on(strategy, monkeypatch):
    """mp_22: gathers and scatters hide behind nothing; DDP's buckets and other architectures do."""
    calibration = Calibration.from_platform(CATALOG.find("s4000"))
    sharding = "parameters" if strategy == "hybrid" else "none"
    fields = {"platform": "s4000", "strategy": strategy, "sharding": sharding, "num_micro_batches": 8, "narrow": True}
    step = job("dp8", **fields)
    off = project(step, calibration)
    monkeypatch.setenv("TORCH_MUSA_FSDP2_DISABLE_OVERLAP", "0")
    on = project(step, calibration)
    assert "overlap" not in {flag.name for flag in on.flags}
    if strategy == "ddp":
        assert off == on
        return
    assert "overlap" in {flag.name for flag in off.flags}
    assert off.by_resource["link"] > 3 * on.by_resource["link"]
    measured = dataclasses.replace(calibration, traits={"overlap_ratio": Constant(value=1.0, unit="ratio", source="")})
    monkeypatch.delenv("TORCH_MUSA_FSDP2_DISABLE_OVERLAP")
    assert project(step, measured).by_resource["link"] == off.by_resource["link"]
    assert "overlap" not in {
        flag.name for flag in project(job("dp8", sharding="parameters", strategy="fsdp"), ROW).flags
    }


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


def test_a_calibration_survives_its_file(tmp_path):
    path = tmp_path / "a100.json"
    write_calibration(ROW, path)
    assert read_calibration(path) == ROW


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], r":\d+: .*truncated"),
        (lambda text: "[]", "no calibration"),
        (lambda text: '{"a": 1}', "line 1"),
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


def test_a_curve_by_a_simulated_calibration_has_its_points():
    points, missing = curve(
        job("dp8", num_micro_batches=2), dataclasses.replace(ROW, simulated=True), [8, 16], weak=True
    )
    assert ([8, 16], []) == ([point.projection.world_size for point in points], missing)


def test_goodput_falls_with_the_devices():
    shares = [goodput(world, 10.0, mtbf_device_h=50_700, checkpoint_s=60) for world in (8, 1024, 100_000)]
    assert shares == sorted(shares, reverse=True)
    assert 0.9 < shares[1] < 1
