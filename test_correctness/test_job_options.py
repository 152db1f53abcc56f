"""Options of project and advise: nonsense is refused in one line, and no figure comes out of nothing."""

import json
import math
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfsuite.base.mesh import MeshShape
from perfsuite.record.step import Training
from perfsuite.workloads.training.train_step import TrainStep
from test_correctness.helpers.command_line import as_json, printed, refused, run

COUNTS = ["-1", "0", "1", "2", "3", "8", "64", "1000000000000", "9" * 30, "1.5", "nan", "", "eight", "٣"]
AMOUNTS = ["nan", "inf", "-inf", "-5", "0", "1e-300", "1e300", "50", "400", "", "fast", "5e-324"]
OVERRIDES = ["layers=0", "layers=-1", "layers=2", "heads=0", "heads=3", "width=0", "width=1", "words=0", "context=0"]
OVERRIDES += ["layers", "=", "layers=1e9", "sequence_length=0", "name=3", "x=1", "words_multiple=0"]
OVERRIDES += ["layers=99999999999"]
LAYOUTS = ["1", "dp8", "dp0", "dp", "tp8-dp2", "tp3", "pp4", "pp99", "ep4", "ep4-tp2", "cp2", "cp3", "dp8-dp8", "", "-"]
LAYOUTS += ["dp_shard2", "dp_replicate2-dp_shard4", "pp2-dp2-tp2", "dp-2", "tp1-pp1", "dp99999999999999999999", "dp16"]
MODELS = ["llama2-7b", "gpt2", "mixtral-8x7b", "moe-tiny", "latte-l", "opensora", "gpt3-175b", "llama", "", "\x1b[31m"]
PLATFORMS = ["h100", "s4000", "s5000", "s3000", "ascend910b", "cpu", "mi300x", "a40", "h1000", ""]
JOB = {
    "--model": MODELS,
    "--platform": PLATFORMS,
    "--world": COUNTS,
    "--global-batch": COUNTS,
    "--sequence-length": COUNTS,
    "--override": OVERRIDES,
    "--dtype": ["bf16", "fp16", "fp8", "tf32", "fp32", "int4"],
    "--network": AMOUNTS,
    "--machine": ["oneflow-4x8-v100", "004-8x8-h100", "none"],
    "--calibration": ["nothing.json", "."],
}
PROJECT = {
    **JOB,
    "--layout": LAYOUTS,
    "--micro-batch": COUNTS,
    "--schedule": ["1f1b", "gpipe", "zbv", "interleaved_1f1b", "naive", "looped_bfs", "x", ""],
    "--stages-per-rank": COUNTS,
    "--sharding": ["none", "optimizer", "gradients", "parameters", "all"],
    "--checkpointing": ["none", "selective", "full", "some"],
    "--curve": ["8..64", "1..4", "64..8", "0..8", "8", "a..b", "8..99999999999999999999", "8..1000001", "²..8"],
    "--mtbf": [*AMOUNTS, "llama3", "llama4"],
    "--checkpoint-s": AMOUNTS,
    "--recipe": ["003-MP_1x32x1_16_3072x32", "none"],
}
ADVISE = {**JOB, "--top": COUNTS, "--explain": LAYOUTS}
SWITCHES = {
    "project": ["--sequence-parallel", "--sensitivity", "--weak", "--strong", "--compiled"],
    "advise": ["--compiled"],
}
SOUND = {"--model": "llama2-7b", "--platform": "h100", "--global-batch": "64", "--world": "8"}


def sound():
    return [f"{option}={value}" for option, value in SOUND.items()]


FIGURES = ("step_time_s", "low_s", "high_s", "memory_total_bytes", "tokens_per_s", "memory_bytes")


@st.composite
def commands(draw):
    """Sound options, some of them replaced and others added, mostly by nonsense."""
    name = draw(st.sampled_from(["project", "project", "advise"]))
    grammar = PROJECT if name == "project" else ADVISE
    changed = draw(st.lists(st.sampled_from(sorted(grammar)), max_size=4, unique=True))
    chosen = SOUND | {option: draw(st.sampled_from(grammar[option])) for option in changed}
    if draw(st.booleans()) and "--world" not in changed:
        del chosen["--world"]
    switches = draw(st.lists(st.sampled_from(SWITCHES[name]), max_size=2, unique=True))
    plain = draw(st.sampled_from([["--json"], []]))
    return [name, *(f"{option}={value}" for option, value in chosen.items()), *switches, *plain]


def figures(plain):
    """(name, value) of all times, rates and sizes."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            if name in FIGURES:
                yield name, value
            yield from figures(value)
    elif isinstance(plain, list):
        for value in plain:
            yield from figures(value)


@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(command=commands())
def test_nonsense_is_refused_in_a_line_and_a_figure_is_a_number_above_0(command, capsys, monkeypatch):
    monkeypatch.setenv("PERFSUITE_TRACEBACK", "1")  # what nobody expected is raised
    code, out, err = run(capsys, *command)
    assert code in (0, 1, 4)
    if code == 4:
        assert "error: " in err.splitlines()[-1]
        assert out == ""
        return
    if "--json" not in command:
        assert not {"nan", "inf", "-inf"} & set(re.split(r"[\s,:]+", out))
        return
    found = dict(figures(json.loads(out)))
    assert code == 1 or found
    for name, value in found.items():
        assert math.isfinite(value), name
        assert value > 0, name


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("project", ["--micro-batch=0"], "--micro-batch=0 is not a valid count; give a whole number from 1 to"),
        ("project", ["--sequence-length=0"], "--sequence-length=0 is not a valid count"),
        ("advise", ["--global-batch=0"], "--global-batch=0 is not a valid count"),
        ("project", ["--network=nan"], "--network=nan is not valid; give GB/s from 0.001 to 1,000,000"),
        ("project", ["--network=5e-324"], "--network=4.94066e-324 is not valid"),
        ("project", ["--network=-5"], "--network=-5 is not valid"),
        ("advise", ["--network=inf"], "--network=inf is not valid"),
        ("project", ["--curve=8..64", "--mtbf=llama3", "--checkpoint-s=-10"], "--checkpoint-s=-10 is not valid"),
        ("project", ["--curve=8..64", "--mtbf=inf"], "--mtbf=inf is not a time between failures"),
        ("project", ["--curve=8..64", "--mtbf=5e-324"], "--mtbf=5e-324 is not a time between failures"),
        ("advise", ["--explain=dp4"], "--explain=dp4 has 4 devices, but --world is 8; give a layout of 8"),
        ("project", ["--mtbf=llama3"], "--mtbf needs a curve; add --curve"),
        ("project", ["--strong"], "--strong needs a curve; add --curve"),
        ("project", ["--curve=8..64", "--checkpoint-s=5"], "--checkpoint-s needs a goodput; add --mtbf"),
        ("project", ["--curve=8-64"], "not a range of devices"),
        ("project", ["--curve=8..64", "--mtbf=llama"], "llama3"),
        ("project", ["--layout=dp2-tp4", "--trace=/nowhere/x.json"], "no pipeline to draw"),
        ("project", ["--override=layers"], "FIELD=NUMBER"),
        ("advise", ["--platform=s400"], "s4000"),
        ("advise", ["--calibration=nothing.json"], "cannot be read"),
        ("project", ["--sharding=parameters", "--stages-per-rank=8"], "layout dp8 has no pp; add pp2 or more"),
        ("project", ["--layout=dp8", "--schedule=zbv"], "schedule zbv is about pp, which layout dp8 lacks"),
        ("project", ["--layout=dp8", "--sequence-parallel"], "sequence_parallel is about tp, which layout dp8 lacks"),
        ("project", ["--platform=s3000", "--dtype=fp32"], "no memory bandwidth, which elementwise kernels and"),
        ("project", ["--platform=s5000", "--dtype=fp8"], "no rate of bf16 products, in which the ends of a model run"),
    ],
)
def test_an_option_that_no_figure_follows_from_is_refused(name, options, said, capsys):
    assert said in refused(capsys, name, *sound(), *options)


def test_a_world_that_no_layout_divides_is_no_error(capsys):
    """A batch of 64 divides by none of the layouts of 3 devices, nor of 6."""
    command = ["advise", "--model=moe-tiny", "--platform=h100", "--global-batch=64", "--world=3"]
    plain = as_json(capsys, *command, code=1)
    assert (plain["legal"], plain["chosen"], plain["smallest"]["world_size"]) == (0, None, 96)


def projected(capsys, *options):
    return as_json(capsys, "project", *sound(), "--world=16", *options)


def test_a_network_by_option_is_that_of_a_row(capsys):
    """H100's row has 400 GB/s a node: both are nominal, and a share of it is achieved."""
    row, same, slow = (projected(capsys, *more) for more in ([], ["--network=400"], ["--network=4"]))
    assert row["step_time_s"] == same["step_time_s"] < slow["step_time_s"]
    assert "0.7 of 400: --network" in printed(capsys, "project", *sound(), "--network=400")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32"])
def test_a_step_holds_and_sends_what_strategy_hybrid_does(dtype, capsys):
    """In bf16 and fp16 gradients are reduced in 16 bits."""
    step = TrainStep(model="llama2-7b", strategy="hybrid", mesh="dp16", dtype=dtype)
    expected = step.work(MeshShape.parse("dp16")).training
    found = projected(capsys, f"--dtype={dtype}", "--sharding=parameters")["training"]
    for name in ("dtype", "gradient_dtype", "narrow", "strategy", "sharding"):
        assert found.get(name, getattr(Training(model=""), name)) == getattr(expected, name), name


PLAIN = """
[platform.plain]
title = "Plain"
family = "cuda"
names = ["Plain"]
link = { value = 450, unit = "GB/s", source = "its sheet" }
memory_bandwidth = { value = 3350, unit = "GB/s", source = "its sheet" }
"""
TFLOPS = """
[platform.plain.tflops]
bf16 = { value = 989, unit = "TFLOPS", source = "its sheet" }
"""
WHOLE = """
network = { value = 400, unit = "GB/s", source = "its sheet" }
devices_per_node = { value = 8, unit = "devices", source = "its sheet" }
memory = { value = 80, unit = "GiB", source = "its sheet" }
"""


def test_what_is_not_known_of_a_platform_is_said_and_widens_the_band(capsys, tmp_path):
    whole, plain = tmp_path / "whole.toml", tmp_path / "plain.toml"
    whole.write_text(PLAIN + WHOLE + TFLOPS)
    plain.write_text(PLAIN + TFLOPS)
    ours = ["--platform=plain"]
    known = projected(capsys, *ours, f"--platform-file={whole}")
    unknown = projected(capsys, *ours, f"--platform-file={plain}")
    flags = [{flag["name"] for flag in found["flags"]} for found in (known, unknown)]
    assert flags[1] - flags[0] == {"memory-unknown", "node"}
    widths = [found["high_s"] / found["step_time_s"] - 1 for found in (known, unknown)]
    assert widths[1] > 1.5 * widths[0]
    assert "2 figures assumed or missing" in unknown["regime"]
    command = ["advise", "--model=gpt2", *ours, "--world=8", "--global-batch=8", f"--platform-file={plain}"]
    assert "the memory size of plain is unknown" in refused(capsys, *command)


@pytest.mark.parametrize(
    ("missing", "world", "said"),
    [("link", 8, "the link between devices"), ("link", 1, ""), ("memory_bandwidth", 1, "memory")],
)
def test_messages_over_a_link_of_unknown_rate_are_not_free(missing, world, said, capsys, tmp_path):
    """Also in advise, which has no layout yet; one device sends none."""
    kept = [line for line in (PLAIN + WHOLE).splitlines() if not line.startswith(f"{missing} ")]
    (tmp_path / "p.toml").write_text("\n".join(kept) + TFLOPS)
    job = ["--model=gpt2", "--platform=plain", f"--platform-file={tmp_path / 'p.toml'}", f"--world={world}"]
    for name in ("project", "advise"):
        code, out, err = run(capsys, name, *job, "--global-batch=8")
        assert (code, bool(out)) == ((4, False) if said else (0, True)), name
        assert said in err
