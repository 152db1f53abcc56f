"""The advisor: legal layouts, why others are not, ties by the error of a difference, and what fits nowhere."""

import dataclasses
import itertools
import re
from collections import Counter

import pytest

from perfsuite import workloads
from perfsuite.base.mesh import MeshShape
from perfsuite.models import find
from perfsuite.platforms import load_catalog
from perfsuite.projection.advisor import advise, case_of, difference_error, errors_of, job_of
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.job import Node, TrainingJob
from perfsuite.projection.layout import Layouts
from perfsuite.projection.memory import memory_of
from perfsuite.projection.step import project
from perfsuite.record.step import Training
from test_correctness.helpers.command_line import as_json, printed


def advice_of(model="llama2-7b", platform="h100", world=8, batch=8, **overrides):
    device = load_catalog().find(platform)
    training = Training(model=model, overrides=overrides, dtype="bf16", strategy="hybrid", narrow=True)
    base = TrainingJob.of(training, device, node=Node(devices=8, network_gb_per_s=400.0))
    calibration = Calibration.from_platform(device)
    return advise(training, base=base, calibration=calibration, world_size=world, global_batch=batch)


@pytest.fixture(scope="module")
def advice():
    return advice_of()


def test_every_layout_is_legal_and_fits(advice):
    model = find("llama2-7b")
    assert advice.legal == len(advice.ranked) + advice.rejected["more than 92% of 78.8 GiB"]
    for one in advice.ranked:
        one.layout.check(model, world_size=8)
        assert one.layout.global_batch == 8
        assert one.memory.fits
        assert sum(one.by_resource.values()) == pytest.approx(one.step.seconds)
    assert len({(one.layout, one.layout.checkpointing) for one in advice.ranked}) == len(advice.ranked)


@pytest.mark.parametrize(
    ("model", "world", "batch", "reason"),
    [
        ("llama2-7b", 16, 64, "tp beyond a node of 8"),
        ("llama2-7b", 48, 96, "tp does not divide heads, features or words"),
        ("llama2-7b", 64, 512, "pp above 32 layers"),
        ("llama2-7b", 16, 6, "the batch does not divide by 16 replicas"),
        ("latte-l", 16, 64, "the model is spread along dp only"),
    ],
)
def test_rejected_layouts_are_counted_by_the_rule(model, world, batch, reason):
    choices = Layouts(model=find(model), world_size=world, global_batch=batch, devices_per_node=8)
    layouts = list(choices.legal())
    assert choices.rejected[reason] > 0
    assert all(layout.global_batch == batch for layout in layouts)


@pytest.mark.parametrize(
    ("model", "pp", "stages"), [("llama2-70b", 4, [1, 2, 4, 5, 10, 20]), ("llama2-70b", 3, [1, 2, 4])]
)
def test_stages_are_interleaved_by_every_divisor_and_unevenly(model, pp, stages):
    """80 layers on four ranks are 20 each; on three ranks the first stages have one more."""
    choices = Layouts(model=find(model), world_size=pp, global_batch=4 * pp, devices_per_node=8)
    found = {layout.stages_per_rank for layout in choices.legal() if layout.shape.size("pp") == pp}
    assert stages == sorted(found)


def test_the_limit_of_memory_is_that_of_a_projection(advice):
    """What advise lists, project does not call at its limit, and the other way round."""
    calibration = Calibration.from_platform(advice.job.device)
    assert advice.job.capacity == 0.985 * 80 * 2**30
    least, most = 0.9 * advice.job.capacity, 0.95 * advice.job.capacity
    seen = Counter()
    layouts = Layouts(model=find("llama2-7b"), world_size=8, global_batch=64, devices_per_node=8, fused_attention=True)
    for layout in layouts.legal():
        job = job_of(advice.job, layout)
        found = memory_of(job.architecture, layout, job.implementation, job.capacity)
        if least < found.total < most and layout.num_micro_batches < 9:
            flags = {flag.name for flag in project(job, calibration).flags}
            assert found.fits == ("memory-limit" not in flags) == (found.share <= 0.92)
            seen[found.fits] += 1
    assert min(seen[True], seen[False]) > 1


def test_ties_hold_the_fastest_and_begin_with_the_simplest(advice):
    fastest = advice.ranked[0]
    assert fastest in advice.ties
    assert advice.chosen is advice.ties[0]
    kinds = [sum(size > 1 for _, size in one.layout.shape.axes) for one in advice.ties]
    assert sorted(kinds) == kinds
    for one in advice.ranked:
        slower = one.step.seconds - fastest.step.seconds
        assert (slower <= difference_error(fastest, one, advice.errors)) == (one in advice.ties)


def test_recomputing_scores_that_are_never_kept_is_no_choice(advice):
    assert {one.layout.checkpointing for one in advice.ranked} == {"none", "full"}
    assert advice.rejected["selective recomputation is not tried where attention is fused"] > 0
    kept = Layouts(model=find("llama2-7b"), world_size=8, global_batch=8, devices_per_node=8)
    assert {layout.checkpointing for layout in kept.legal()} == {"none", "selective", "full"}


def test_shared_constants_cancel_in_a_difference(advice):
    first, *_, last = advice.ranked
    wide = dict.fromkeys(advice.errors, 1.0)
    assert difference_error(first, first, wide) == pytest.approx(0.01 * first.step.seconds)
    assert difference_error(first, last, wide) > difference_error(first, last, advice.errors)
    known = Calibration.from_platform(load_catalog().find("h100"))
    exact = {name: dataclasses.replace(each, relative_error=0.0) for name, each in known.constants.items()}
    assert errors_of(dataclasses.replace(known, constants=exact))["link"] == 0.0


def test_case_of_a_layout_is_that_layout(advice):
    said = 0
    for one in advice.ranked[:60]:
        call = case_of(advice.job.training, one.layout)
        if not call:
            assert one.layout.sharding == "optimizer"
            continue
        step, ranks = eval(call, {"perf": lambda step, on: (step, on), "workloads": workloads})
        record = step.work(MeshShape.parse(step.mesh)).training
        assert (ranks, record.sharding, record.schedule) == (8, one.layout.sharding, one.layout.schedule)
        for name in ("micro_batch_size", "num_micro_batches", "checkpointing"):
            assert getattr(record, name) == getattr(one.layout, name)
        said += 1
    assert said > 10


@pytest.mark.slow
def test_where_nothing_fits_the_smallest_world_is_told():
    advice = advice_of("llama2-70b", "s4000", world=8, batch=8)
    assert (advice.ranked, advice.chosen) == ((), None)
    world, layout, memory = advice.smallest
    assert (world, layout.checkpointing) == (32, "full")
    assert memory.fits


def test_command_tells_layout_band_and_what_to_measure(capsys):
    arguments = ["advise", "--model", "llama2-7b", "--platform", "s4000", "--world", "4", "--global-batch", "4"]
    out = printed(capsys, *arguments, "--explain", "dp2-tp2", "--top", "2")
    counts = [int(count) for count in re.findall(r"(\d+) (?:layouts|rejected, |fit)", out.splitlines()[0])]
    assert counts[0] == counts[1] + counts[2]
    assert counts[1] == sum(int(count) for count in re.findall(r"^ +(\d+) rejected: ", out, re.MULTILINE))
    command = 'python -m pytest test_perf/test_matmul.py -k "s4000"'
    for said in ("80 %", "not dp2-tp2", "perf(workloads.TrainStep(model='llama2-7b'", command):
        assert said in out
    plain = as_json(capsys, *arguments)
    assert plain["chosen"] == plain["ties"][0]
    assert plain["band_s"][0] < plain["chosen"]["step_time_s"] < plain["band_s"][1]


@pytest.mark.extended
def test_layouts_that_take_as_long_are_one_line_with_all_names(capsys):
    arguments = ["advise", "--model=llama2-7b", "--platform=h100", "--world=16", "--global-batch=64", "--top=100000"]
    ranked = as_json(capsys, *arguments)["ranked"]
    times = Counter(
        (re.sub("(optimizer|gradients|parameters) sharded, ", "", x["layout"]), x["step_time_s"]) for x in ranked
    )
    assert max(times.values()) == 2
    out = printed(capsys, *arguments)
    table = [line for line in out.splitlines() if re.search(r" samples .* GiB", line)]
    rows = [line.partition(" samples")[0] for line in table]
    assert "dp16, optimizer or gradients sharded, 4 x 1" in rows
    assert len(set(rows)) == len(rows) == len(times)
    tied = [line for line in table if line.endswith(("  equal", "  recommended"))]
    assert table[: len(tied)] == tied
    assert len(tied) > 1
    assert f"simplest of {len(tied)} layouts whose times differ by less than the error" in out
    advised = re.search(r"^run ([a-z0-9-]+)", out, re.MULTILINE)[1]
    assert "is the mesh of the recommended layout" in printed(capsys, *arguments, "--explain", advised)


def test_a_layout_takes_as_long_as_perfsuite_project_says(capsys):
    """Spread parameters are other code, tp pads the words: each layout is priced as its own job."""
    job = ["--model=llama2-7b", "--override=layers=4", "--platform=s4000", "--world=4", "--global-batch=4"]
    ranked = as_json(capsys, "advise", *job, "--top", "10000")["ranked"]
    for mesh, sharding in itertools.product(("dp4", "dp2-tp2"), ("none", "parameters")):
        by_tokens = ["--sequence-parallel"] if "tp" in mesh else []
        options = ["--layout", mesh, "--sharding", sharding, *by_tokens]
        expected = as_json(capsys, "project", *job, *options)["step_time_s"]
        spread = "" if sharding == "none" else f", {sharding} sharded"
        pattern = rf"{mesh}{spread}, \d+ x 1 samples"
        told = [x["step_time_s"] for x in ranked if x["mesh"] == mesh and re.fullmatch(pattern, x["layout"])]
        assert told == [pytest.approx(expected, rel=1e-9)]
