"""The tables of report 003 out of fixed results: its order, its columns, its arithmetic, its rows beside."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.published.differences import Ran, differences
from perfsuite.published.lookup import lookup
from perfsuite.published.recipes import find
from perfsuite.reports.tables.case_names import GROUPS, case_name, log_name, name_in
from perfsuite.reports.tables.published import published_of
from test_correctness.helpers.report_runs import gpt, rows, run, style, table
from test_perf.test_oneflow import NAMES
from test_perf.test_oneflow import SMALL as SMALL_CASES

SMALL = [name for name in SMALL_CASES if not name.endswith("-math")]
PIPELINED = 32
"""Micro-batches of the report's pipelines."""


def case(text, platform="v100", **changes):
    """The result of a case of the report, or of one called by its rule."""
    name = case_name(text)
    ranks = name.dp * name.tp * name.pp
    steps = changes.pop("accumulation", PIPELINED if name.pp > 1 else 1)
    axes = [f"{axis}{size}" for axis, size in (("pp", name.pp), ("dp", name.dp), ("tp", name.tp)) if size > 1]
    return gpt(
        f"test_oneflow[{platform}-{text}]",
        ranks,
        1.0,
        **{
            "model": f"gpt-{name.width}x{name.layers}",
            "platform": platform,
            "hosts": max(1, ranks // 8),
            "strategy": "hybrid",
            "mesh": "-".join(axes) or "dp1",
            "micro_batch_size": name.batch // (name.dp * steps),
            "accumulation": steps,
            "dtype": "fp16",
            "builds": ("memory",),
            "records": (("whole_device_bytes", 11066 * 2**20),),
            **changes,
        },
    )


def test_the_reports_cases_stand_in_its_order_each_with_its_own_row_below():
    text = style("oneflow", run(*(case(name) for name in sorted(NAMES))))
    for title in ("Cases", "Results"):
        told = rows(text, title)
        assert [name for name in NAMES for _ in range(2)] == [row["case"] for row in told]
        assert [row["nodes x ranks"].startswith("published") for row in told] == [False, True] * 18
        assert list(dict.fromkeys(row["group"] for row in told)) == list(GROUPS)


def test_rows_that_nothing_was_measured_of_stand_in_the_reports_order_too():
    told = rows(style("oneflow", run(case("DP_1x1x1_2_1536x16"))), "Results")
    assert NAMES == [row["case"] for row in told if row["nodes x ranks"].startswith("published")]


def test_all_fourteen_columns_are_those_of_the_report():
    told = rows(style("oneflow", run(*map(case, NAMES))), "Cases")
    columns = [title for title in told[0] if title not in ("nodes x ranks", "attention", "not measured because")]
    assert columns == [
        *("group", "case", "nodes", "devices per node", "dp", "tp", "pp", "micro-batch", "micro-batch x dp"),
        *("accumulation", "global batch", "hidden size", "heads", "layers"),
    ]
    for mine, theirs in zip(told[::2], told[1::2], strict=True):
        assert [mine[title] for title in columns] == [theirs[title] for title in columns]
    last = [told[-2][title] for title in columns[2:]]
    assert last == ["4", "8", "2", "8", "2", "8", "16", "32", "512", "2304", "24", "24"]


def test_a_measured_case_has_the_log_name_that_the_report_prints():
    """By the rule, from what was measured; the report's cell stands below it."""
    (heads, *told) = table(style("oneflow", run(*map(case, NAMES))), "Logs")
    logs = [row[heads.index("log, as OneFlow calls it")] for row in told]
    assert logs[::2] == logs[1::2]
    assert len(set(logs)) == 16, "two runs are in two groups of the report"
    assert all(re.fullmatch(r"perf_test_logs/pretrain_gpt_\dn\dd_dp\d+_mp\d+_pp\d_\w+\.log", log) for log in logs)
    assert log_name({"nodes": 1, "dp": 8}) is None


def test_the_reports_row_stands_below_plain_products_and_another_kernel_is_a_difference():
    name = "2D_2x4x1_16_1536x16"
    chosen = case(name, attention="auto")
    plain = dataclasses.replace(
        case(name, attention="math"), case=f"test_perf/test_oneflow.py::test_oneflow[v100-{name}-math]"
    )
    told = rows(style("oneflow", run(chosen, plain)), "Results")
    at = [row["attention"] for row in told if row["case"] == name]
    assert at == ["auto", "math", ""]
    row = next(row for row in published_of(("003/results",)) if row.run.name == name).run
    recipe = find(f"003-{name}")
    ran = {
        how: Ran(
            workload="train_step",
            parameters={**recipe.parameters, "attention": how},
            world_size=8,
            nodes=1,
            platform="v100",
        )
        for how in ("auto", "math")
    }
    assert () == differences(ran["math"], row)
    (phrase,) = differences(ran["auto"], row)
    assert phrase.startswith("attention math (ours: ")


def test_results_are_milliseconds_mebibytes_and_samples():
    mine, theirs, *_ = rows(style("oneflow", run(case("DP_1x1x1_2_1536x16"))), "Results")
    names = ("latency ms", "memory MiB (whole card)", "samples/s (all devices)")
    assert ["1000", "11066", "2"] == [mine[name] for name in names]
    assert ["406.2 [M]", "11066 [M]", "4.92 [M]"] == [theirs[name] for name in names]


def test_the_arithmetic_is_checked_below_the_table():
    rule = "dp = ranks / (tp x pp) and accumulation = global batch / (micro-batch x dp)"
    good = case("2D_2x4x1_16_1536x16")
    assert f"- checked: {rule} in every row" in style("oneflow", run(good))
    other = {**good.parameters, "micro_batch_size": 4}
    text = style("oneflow", run(dataclasses.replace(good, parameters=other)))
    assert f"checked: {rule}" not in text
    assert "accumulation 1 is not batch 16 / (micro 4 x dp 2)" in text


def test_a_case_that_is_not_what_its_name_says_is_named():
    wrong = dataclasses.replace(case("2D_2x4x1_16_1536x16"), case="t.py::test_oneflow[v100-2D_4x2x1_16_1536x16]")
    text = style("oneflow", run(wrong))
    assert "its name says dp 4, and it ran with 2; its name says tp 2, and it ran with 4" in text


def test_published_rows_of_other_hardware_follow_the_small_cases_and_are_not_compared():
    small = [
        case(name, platform="cpu", dtype="fp32", **({"accumulation": 4} if name.count("_PP_") else {}))
        for name in SMALL
    ]
    text = style("oneflow", run(*small))
    told = rows(text, "Results")
    mine = [row["case"] for row in told if not row["nodes x ranks"].startswith("published")]
    assert [name for group in GROUPS for name in SMALL if case_name(name).group == group] == sorted(
        mine, key=lambda name: (GROUPS.index(case_name(name).group), SMALL.index(name))
    )
    published = [row["case"] for row in told[len(mine) :] if row["nodes x ranks"].startswith("published")]
    assert len(told) == len(mine) + len(published), "no published row is between measured ones"
    assert {"DP_8x1x1_16_1536x16", "2D_8x1x1_16_1536x16", "2D_4x2x1_16_1536x16"} < set(published)
    assert "platform v100, not cpu; model gpt-1536x16, not gpt-64x4" in text


@pytest.mark.parametrize("text", NAMES)
def test_every_published_row_is_found_by_the_case_of_its_name(text):
    name, result = case_name(text), case(text)
    found = lookup("v100", result.workload, result.parameters, result.world_size, metric="step_time_s")
    assert text in [figure.name for figure in found]
    assert {(name.dp, name.tp, name.pp)} == {
        tuple(figure.parameters[axis] for axis in ("dp", "tp", "pp")) for figure in found
    }


@given(
    prefix=st.sampled_from(["DP", "MP", "2D", "DP_PP", "MP_PP", "2D_PP"]), numbers=st.tuples(*[st.integers(1, 999)] * 6)
)
def test_a_name_is_found_in_an_id_and_says_what_it_says(prefix, numbers):
    dp, tp, pp, batch, width, layers = numbers
    text = f"{prefix}_{dp}x{tp}x{pp}_{batch}_{width}x{layers}"
    name = name_in(f"t.py::test_x[s4000-{text}-fp16]")
    assert (name.text, name.dp, name.tp, name.pp, name.batch, name.width, name.layers) == (text, *numbers)
    assert name.group == ("PP" if prefix.endswith("PP") else prefix)
    assert name_in(f"t.py::test_{text}[cpu-ws8]") is None
