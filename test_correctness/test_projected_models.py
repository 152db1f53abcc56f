"""Models in projections: words that tensor parallelism pads, and the parameter count that is printed."""

import re

import pytest

from perfsuite import workloads
from perfsuite.base.mesh import MeshShape
from perfsuite.models import find
from perfsuite.platforms import load_catalog
from perfsuite.projection.advisor import case_of
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.layout import Layout, Layouts
from perfsuite.record.step import Training
from test_correctness.helpers.command_line import as_json, printed


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("gpt2-xl", {}, {1: 50257, 2: 50432, 4: 50688, 5: 50560, 8: 51200}),
        ("gpt-1536x16", {}, {1: 50304, 2: 50432, 8: 51200}),  # always padded, as its report has it
        ("llama2-7b", {}, {1: 32000, 8: 32000, 64: 32000}),  # 64 divides 32,000 words: nothing to pad
        ("llama2-7b", {"words": 32001}, {1: 32001, 2: 32256, 8: 32768}),
        ("latte-l", {}, {1: 0}),
    ],
)
def test_words_that_tp_does_not_divide_are_padded_to_128_times_tp(name, overrides, words):
    model = find(name, overrides)
    assert {tp: model.built_for(tp).vocabulary for tp in words} == words
    for tp, rows in words.items():
        built = model.built_for(tp)
        tables = 1 if name.startswith("gpt") else 2
        assert built.parameters - model.parameters == tables * (rows - model.vocabulary) * model.width


@pytest.mark.parametrize("name", ["gpt3-13b", "gpt3-175b"])
def test_a_layout_with_tensor_parallelism_is_legal_for_words_that_it_does_not_divide(name):
    choices = Layouts(model=find(name), world_size=64, global_batch=64, devices_per_node=8)
    assert {layout.shape.size("tp") for layout in choices.legal()} == {1, 2, 4, 8}
    training = Training(model=name, layout="dp2-tp4", dtype="bf16", micro_batch_size=1)
    job = TrainingJob.of(training, load_catalog().find("a100"))
    assert (job.architecture.vocabulary, job.model.vocabulary, job.published.vocabulary) == (50688, 50688, 50257)


@pytest.mark.parametrize(
    ("name", "mesh", "overrides"),
    [("gpt3-13b", "dp2-tp4", {"words_multiple": 128}), ("gpt3-13b", "dp8", {}), ("llama2-7b", "dp2-tp4", {})],
)
def test_the_case_of_a_layout_pads_what_the_projection_pads(name, mesh, overrides):
    layout = Layout.parse(mesh, global_batch=8)
    call = case_of(Training(model=name, dtype="bf16"), layout)
    step, _ = eval(call, {"perf": lambda step, on: (step, on), "workloads": workloads})
    assert step.overrides == overrides
    assert step.find_model() == find(name).built_for(layout.shape.size("tp"))
    step.plan(MeshShape.parse(mesh))  # the suite accepts it


def test_project_prints_parameters_and_padded_words(capsys):
    command = ["project", "--model", "gpt2-xl", "--platform", "a100", "--layout", "dp2-tp5", "--global-batch", "8"]
    said = printed(capsys, *command)
    assert "gpt2-xl: 1,557,611,200 parameters, 48 layers x 1,600, 25 heads, 50,257 words" in said
    assert "50,257 words are padded to a multiple of 128 x tp: 50,560 at tp5 (1,558,096,000 parameters)" in said
    assert "padded" not in printed(capsys, *command, "--layout", "dp2")
    plain = as_json(capsys, *command)
    assert [plain[name] for name in ("parameters", "words", "padded_words")] == [1557611200, 50257, 50560]


def test_advise_prints_the_model_and_the_words_of_each_tp(capsys):
    command = ["advise", "--model", "gpt3-13b", "--platform", "a100", "--world", "16", "--global-batch", "64"]
    lines = printed(capsys, *command).splitlines()
    assert lines[1].startswith("  gpt3-13b: 12,853,386,240 parameters, 40 layers x 5,120, 40 heads, 50,257 words")
    assert re.findall(r"([\d,]+) at (tp\d+)", lines[2]) == [("50,432", "tp2"), ("50,688", "tp4"), ("51,200", "tp8")]
