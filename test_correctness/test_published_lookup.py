"""Published figures are found by the case that measures the same run, in the units of its metrics."""

from fractions import Fraction

import pytest

from perfsuite.metrics import REGISTRY
from perfsuite.models import MODELS
from perfsuite.published.lookup import figures, lookup, select, shipped


def test_lookup_finds_the_run_of_a_case():
    case = {"model": "OpenSora", "micro_batch_size": 1, "mesh": "dp8"}
    found = lookup("s4000", "perfsuite.workloads.training.train_step:TrainStep", case, 8, metric="samples_per_s")
    assert [("2.025", 2.025, "M?", 8, "s4000")] == [
        (figure.text, figure.value, figure.label, figure.world_size, figure.platforms[0]) for figure in found
    ]
    for part in ("published 2.025 images/s", "aggregate over the cards", "[M?: ", "000_7dc6157a632cc5f9", "line 11"):
        assert part in str(found[0])


def test_what_a_case_leaves_open_it_does_not_state():
    case = {"model": "opensora", "micro_batch_size": None, "global_batch_size": None, "mesh": ""}
    assert ["2.025"] == [figure.text for figure in lookup("s4000", "train_step", case, 8, metric="samples_per_s")]


def oneflow(**changes):
    """The case that measures the first run of report 003 on eight devices, or one that differs from it."""
    same = {"model": "gpt-1536x16", "mesh": "dp8", "micro_batch_size": 2, "dtype": "fp16"}
    return {name: value for name, value in {**same, **changes}.items() if value is not None}


def test_a_run_of_another_length_or_vocabulary_is_another_run():
    def times(**changes):
        return [each.text for each in lookup("v100", "train_step", oneflow(**changes), 8, metric="step_time_s")]

    assert times() == ["417.952 (ms)", "417.902 (ms)"]
    assert times(overrides={"context": 2048, "words": 50304, "words_multiple": 1}) == times()
    for overrides in ({"context": 1024}, {"sequence_length": 1024}, {"words": 50257, "words_multiple": 1}):
        assert times(overrides=overrides) == []
    shape = {"hidden_size": 1536, "num_layers": 16, "num_heads": 16, "model": None}
    assert times(**shape, sequence_length=1024) == []


def test_the_vocabulary_of_every_published_row_is_padded_for_its_ranks():
    rows = {
        (each.model, each.parameters["tp"]): each.parameters
        for each in select(platform="v100")
        if each.table == "results"
    }
    assert len({tp for _, tp in rows}) == 6
    for (model, tp), parameters in rows.items():
        assert parameters["vocabulary"] == MODELS[model].padded(tp).vocabulary
        assert parameters["sequence_length"] == MODELS[model].tokens_per_sample


def test_report_002_states_no_strategy():
    (figure,) = select(platform="s4000", model="Llama2-7B", metric="final_loss")
    assert "strategy" not in figure.parameters


def test_lookup_by_shape_of_the_model():
    case = {"hidden_size": 2304, "num_layers": 24, "num_heads": 24, "mesh": "dp2-pp2-tp8", "micro_batch_size": 8}
    times = lookup("v100", "TrainStep", {**case, "num_micro_batches": 32}, 32, metric="step_time_s")
    assert [14.375352] == [figure.metric_value for figure in times]
    assert "ms" == times[0].unit
    assert [] == lookup("v100", "TrainStep", {**case, "num_micro_batches": 16}, 32, metric="step_time_s")


@pytest.mark.parametrize(
    "change",
    [
        {"platform": "h200"},
        {"workload": "matmul"},
        {"world_size": 4},
        {"parameters": {"model": "gpt2-xl"}},
        {"parameters": {}},
        {"parameters": {"model": "latte-l", "micro_batch_size": 2, "mesh": "dp8"}},
        {"parameters": {"model": "latte-l", "strategy": "fsdp"}},
        {"metric": "mfu_percent"},
    ],
)
def test_lookup_of_another_run_finds_nothing(change):
    case = {
        "platform": "rtx4090",
        "workload": "train_step",
        "parameters": {"model": "latte-l", "strategy": "ddp", "micro_batch_size": 1, "mesh": "dp8"},
        "world_size": 8,
        "metric": "samples_per_s",
    }
    assert ["12.16"] == [figure.text for figure in lookup(**case)]
    assert [] == lookup(**{**case, **change})


def test_memory_and_loss_of_report_002_are_put_right():
    found = {figure.metric: figure for figure in select(platform="s4000", model="Llama2-7B")}
    assert {"whole_device_gib": 44.2, "final_loss": 3.2} == {name: each.metric_value for name, each in found.items()}
    assert {"M?"} == {figure.label for figure in found.values()}


def test_select_narrows():
    everything = select()
    assert len(everything) == len(list(figures(shipped()))) == 360
    a100 = select(platform="a100", metric="samples_per_s", world_size=8)
    assert {"004/ddp", "004/fsdp"} <= {f"{figure.report}/{figure.table}" for figure in a100}
    assert all(figure.world_size == 8 and figure.metric == "samples_per_s" for figure in a100)


def test_figures_use_the_units_of_the_metrics():
    """Where the registry has a metric of this name, the converted figure is in its unit."""
    scales = {
        (figure.metric, figure.unit): Fraction(str(figure.metric_value)) / Fraction(str(figure.value))
        for figure in figures(shipped())
        if figure.value
    }
    for (metric, unit), factor in scales.items():
        if metric.endswith("_s") and unit == "ms":
            assert abs(factor * 1000 - 1) < Fraction(1, 10**6), metric
        if unit == "%":
            share = factor * (1 if metric.endswith("_percent") else 100)
            assert abs(share - 1) < Fraction(1, 10**6), metric
    in_other_units = ("step_time_s", "compute_time_s", "communication_time_s", "whole_device_gib", "bubble_ratio")
    for (metric, _), factor in scales.items():
        if metric in REGISTRY:
            assert factor == 1 or metric in in_other_units, metric
    assert {metric for metric, _ in scales} - set(REGISTRY) <= {
        *("communication_overhead", "communication_share", "component_share", "iterations_per_s", "peak_without_gib"),
        *("scaling_efficiency", "speedup", "speedup_same_length"),
    }


def test_every_figure_has_a_unit_a_source_and_a_reason():
    for figure in figures(shipped()):
        assert figure.source
        assert figure.reason
        assert figure.unit or figure.metric in ("final_loss",), figure
        assert figure.world_size or figure.table == "long-sequences", figure  # that table does not say


def test_models_have_the_names_of_their_configurations():
    named = {figure.model for figure in figures(shipped())}
    assert {"opensora", "latte-l", "latte-xl", "llama2-7b", "gpt2-xl", "gpt3-13b", "gpt3-175b"} <= named & set(MODELS)
    without = named - set(MODELS)
    assert all(name.startswith(("gpt-", "moe-")) or not name for name in without), without
