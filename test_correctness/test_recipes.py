"""Recipes are the published runs: every row has one or a reason, and nothing differs that nobody gave a reason for."""

import dataclasses
import functools
import importlib.util
from inspect import signature
from pathlib import Path

import pytest

from perfsuite.base.errors import InvalidParameter
from perfsuite.models.program import Program
from perfsuite.platforms import load_catalog
from perfsuite.published.differences import DEFAULTS, Ran, differences, equality
from perfsuite.published.lookup import rows, shipped
from perfsuite.published.recipes import WITHOUT_RECIPE, find, recipe_of, recipes, why_none
from perfsuite.published.recipes.recipe import OURS, TEST, UNSAID
from perfsuite.workloads.moe_layer import MoeLayer
from perfsuite.workloads.tensor_linear import TensorLinear
from perfsuite.workloads.training.train_step import TrainStep

WORKLOADS = {"train_step": TrainStep, "tensor_linear": TensorLinear, "moe_layer": MoeLayer}
PLATFORMS = load_catalog(()).models
ROWS = [row for row in rows(shipped()) if set(row.platforms) & set(PLATFORMS)]
LEAST_SHARE = 0.95
"""Of the published rows that name hardware of ours, that a recipe runs."""


def as_run(recipe, **changes):
    """The recipe as a case that ran."""
    fields = {name: getattr(recipe, name) for name in ("workload", "parameters", "world_size", "nodes")}
    return Ran(**{**fields, **changes})


def key(row):
    return f"{row.report}/{row.table}", row.line


ROW_AT = {key(row): row for row in ROWS}


def test_nearly_every_published_row_has_a_recipe_and_the_others_a_reason():
    having = [row for row in ROWS if recipe_of(*key(row))]
    assert len(having) / len(ROWS) >= LEAST_SHARE, f"{len(having)} of {len(ROWS)}"
    assert set(WITHOUT_RECIPE) == {key(row) for row in ROWS if not recipe_of(*key(row))}
    assert all(why_none(*without) for without in WITHOUT_RECIPE)


def test_a_recipe_names_rows_that_there_are_once():
    named = [row for recipe in recipes() for row in recipe.rows]
    assert len(named) == len(set(named))
    assert set(named) <= {key(row) for row in ROWS}
    assert len({recipe.name for recipe in recipes()}) == len(recipes())
    assert len({recipe.case("a100") for recipe in recipes()}) == len(recipes())


def test_nothing_differs_between_a_recipe_and_its_rows():
    told = {key(row): differences(recipe, row) for row in ROWS if (recipe := recipe_of(*key(row)))}
    assert {} == {row: phrases for row, phrases in told.items() if phrases}


def test_a_recipe_is_a_workload_that_its_ranks_can_be_given_and_differs_in_no_default():
    """A journal has every field of a workload, defaults too."""
    for recipe in recipes():
        workload = WORKLOADS[recipe.workload](**recipe.parameters)
        ran = as_run(recipe, parameters=workload.parameters())
        for row in (ROW_AT[place] for place in recipe.rows):
            assert () == differences(dataclasses.replace(ran, platform=row.platforms[0]), row)


def test_a_reason_fills_silence_only():
    """What the report says and a recipe has otherwise is a difference, whatever reason the recipe gives."""
    row, recipe = ROW_AT["002/performance", 50], find("002-llama2_7b-fp16-1x8")
    other = dataclasses.replace(
        recipe, parameters={**recipe.parameters, "micro_batch_size": 1}, own={**recipe.own, "micro_batch_size": "ours"}
    )
    assert ("micro_batch_size 3, not 1",) == differences(other, row)


@pytest.mark.parametrize(
    ("table", "line", "changes", "told"),
    [
        ("002/performance", 50, {"dtype": "fp32"}, "dtype amp, not fp32"),
        ("002/performance", 50, {"dtype": "bf16"}, "dtype fp16 (ours: "),
        ("002/performance", 50, {"program": {}}, "clip 1.0 (ours: "),
        ("000/compute", 19, {"program": {}}, "encoders t5xxl-sdvae (ours: "),
        ("000/memory", 34, {"data": "synthetic"}, "data video (ours: "),
        ("001/latte-l", 24, {"program": {"encoders": "sdvae", "clip": 0.1, "logs": True}}, "ema fp32 (ours: "),
        ("003/results", 111, {"program": {"ema": "fp32"}}, "ema none (ours: unknown), not fp32"),
        ("003/results", 111, {"program": {"saves": True}}, "saves False (ours: "),
        ("002/performance", 50, {"overrides": {"sequence_length": 2048}}, "sequence_length 4096, not 2048"),
        ("002/performance", 50, {"micro_batch_size": 1}, "micro_batch_size 3, not 1"),
        ("002/performance", 50, {"compiled": True}, "compiled None (ours: "),
        ("000/compute", 19, {"overrides": {}}, "sequence_length 512, not 4096"),
        ("001/latte-l", 30, {"num_workers": 1}, "num_workers 16, not 1"),
        ("001/latte-l", 24, {"num_workers": 1}, "num_workers 16 (ours: "),
        ("001/latte-l", 24, {"strategy": "zero2"}, "strategy ddp, not zero2"),
        ("003/results", 111, {"overrides": {"words_multiple": 1}}, "vocabulary 50304, not 50257"),
        ("003/results", 111, {"overrides": {"layers": 8}}, "num_layers 16, not 8"),
        ("003/results", 111, {"checkpointing": "none"}, "checkpointing full (ours: "),
        ("004/ddp", 221, {"overrides": {}}, "sequence_length 2048, not 1024"),
        ("004/ddp", 221, {"micro_batch_size": 1}, "global_batch_size 256 (ours: "),
        ("004/ddp", 221, {"micro_batch_size": 2}, "global_batch_size a batch of 32, not 64"),
        (
            "004/multi-node",
            254,
            {"global_batch_size": 32, "accumulation": 1, "micro_batch_size": 1},
            "global_batch_size 1024, not 32",
        ),
        ("004/schedules", 274, {"mesh": "pp2-dp4"}, "mesh pp4 and more, not pp2-dp4"),
        ("004/tensor", 314, {"overrides": {"words_multiple": 128, "layers": 8}}, "num_layers 96, not 8"),
    ],
)
def test_another_setting_is_a_difference(table, line, changes, told):
    recipe, row = recipe_of(table, line), ROW_AT[table, line]
    same = dict(recipe.parameters)
    ran = as_run(recipe, parameters={**same, **changes})
    assert any(phrase.startswith(told) for phrase in differences(ran, row)), differences(ran, row)


def test_another_platform_another_count_and_other_hosts_are_differences():
    recipe, row = find("002-llama2_7b-fp16-1x8"), ROW_AT["002/performance", 50]
    ran = as_run(recipe, platform="h200", world_size=16, nodes=2)
    phrases = differences(ran, row)
    assert phrases[0] == "platform s4000, not h200"
    assert {"devices 8, not 16", "nodes 1, not 2"} <= set(phrases)
    assert "nodes 1, not set here" in differences(as_run(recipe, nodes=None), row)


def test_what_neither_side_gave_a_reason_for_is_a_difference():
    row, recipe = ROW_AT["002/performance", 50], find("002-llama2_7b-fp16-1x8")
    assert differences(dataclasses.replace(recipe, own={}), row) == (
        "checkpointing full, not stated by the report",
        "dtype fp16, only partly stated by the report",
        "global_batch_size 24, not stated by the report",
        "mesh dp8, not stated by the report",
        "strategy zero3, not stated by the report",
    )


def test_a_run_is_equal_only_as_far_as_its_report_says():
    told = {key(row): equality(recipe, row) for row in ROWS if (recipe := recipe_of(*key(row)))}
    assert set(told.values()) == {
        "equal",
        "equal as far as the report says: gradient clipping, EMA of the weights not stated",
        "equal as far as the report says: gradient clipping, EMA of the weights, loss scale not stated",
    }
    whole = {report for (table, _), text in told.items() if text == "equal" for report in [table.partition("/")[0]]}
    assert whole == {"000", "001", "002", "004"}
    # Report 004's rows of one layer have no training program.
    trained = [
        text
        for (table, line), text in told.items()
        if table.startswith("004/")
        if WORKLOADS[recipe_of(table, line).workload] is TrainStep
    ]
    assert "equal" not in trained


def test_another_reading_of_a_row_differs_by_what_it_reads_otherwise():
    for recipe in (recipe for recipe in recipes() if recipe.beside):
        first = find(recipe.beside)
        row = ROW_AT[first.rows[0]]
        names = {phrase.partition(" ")[0] for phrase in differences(recipe, row)}
        other = {"dtype", "loss_scale"} | (set() if "tf32" in recipe.name else {"mixed_precision", "strategy"})
        assert names == ({"attention"} if recipe.name.endswith("-auto") else other), recipe.name


def test_settings_that_a_recipe_leaves_out_are_those_of_the_workload():
    fields = {field.name: field.default for field in dataclasses.fields(TrainStep)}
    assert {name: fields[name] for name in DEFAULTS} == dict(DEFAULTS)
    program = {field.name for field in dataclasses.fields(Program)}
    assert set(OURS) <= {*fields, *program, "nodes"}
    assert program == {name for name in OURS if name in program} | set(UNSAID)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(InvalidParameter, match="002-llama2_7b-bf16-1x8"):
        find("002-llama2_7b-bf16")


SUITE = Path(__file__).parent.parent / "test_perf"
STORED = Path(__file__).parent / "ids"


def arguments(recipe):
    """What the test of a recipe gets of its case at the full scale."""
    words = recipe.words.split("-")
    return {
        "test_oneflow": lambda: {"case": recipe.words, "scale": "full"},
        "test_schedules": lambda: {"mesh": "pp4-dp2", "schedule": words[2], "num_micro_batches": int(words[3][1:])},
        "test_stage_counts": lambda: {"mesh": recipe.words},
        "test_meshes": lambda: {"mesh": recipe.words, "scale": "full"},
        "test_components": lambda: {"mesh": recipe.words},
        "test_column_and_row": lambda: {"features": (8192, 8192), "split": words[1]},
        "test_long_sequences": lambda: {"length": int(words[0]), "way": words[1], "scale": "full"},
        "test_attention": lambda: {"length": int(words[0]), "method": words[1], "scale": "full"},
        "test_routing": lambda: {"shape": tuple(map(int, words[0].split("x"))), "routing": words[1]},
    }[recipe.test.partition("::")[2]]()


@functools.cache
def module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("name", [recipe.name for recipe in recipes() if recipe.test != TEST])
def test_where_another_test_runs_a_row_that_case_is_the_recipe(name):
    recipe, ran = find(name), []
    file, _, function = recipe.test.partition("::")
    test = getattr(module(SUITE.parent / file), function)
    fixtures = {"require_fit": lambda step, world_size: None} if "require_fit" in signature(test).parameters else {}
    test(lambda workload, on=1: ran.append((workload, on)), **arguments(recipe), **fixtures)
    assert [(WORKLOADS[recipe.workload](**recipe.parameters), recipe.world_size)] == ran


def test_every_recipe_is_a_case_of_the_suite_and_has_a_small_one_on_a_cpu():
    full, small = ((STORED / f"{name}.txt").read_text().splitlines() for name in ("s4000", "cpu"))
    assert {recipe.case("s4000") for recipe in recipes()} <= set(full)
    assert {recipe.small for recipe in recipes()} <= set(small)
