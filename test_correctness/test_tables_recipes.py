"""Published runs as cases: each above its own row, whatever a table selects, and named where it was not measured."""

import dataclasses

from perfsuite.published.recipes import find, recipes
from perfsuite.reports.ids import without_ranks
from perfsuite.reports.tables.placement import NOT_HERE
from perfsuite.reports.tables.published import id_of_row, is_recipe, plain_id
from test_correctness.helpers.report_runs import rows, run, style, trained


def ran(name, time_s=1.0, platform="a100", **changes):
    """The result of a published run."""
    recipe = find(name)
    node = recipe.case(platform)
    result = trained(
        node.rpartition("::")[2],
        recipe.world_size,
        time_s,
        platform=platform,
        hosts=recipe.nodes,
        **{**recipe.parameters, **changes},
    )
    return dataclasses.replace(result, case=node)


def test_every_recipe_is_found_by_the_id_of_its_case():
    for recipe in recipes():
        node = recipe.case("h100")
        assert is_recipe(node)
        assert all(id_of_row(*row) == plain_id(node) for row in recipe.rows)
    assert not is_recipe("test_perf/test_train_step.py::test_ddp[h100-ws2-gpt2-xl]")


def test_published_runs_of_one_kind_are_a_series_over_their_ranks():
    names = [f"004-gpt2-xl-ddp-b32-1x{ranks}" for ranks in (1, 2, 4, 8)]
    assert len({without_ranks(find(name).case("a100")) for name in names}) == 1
    text = style("methods", run(*(ran(name, 1.0 + index / 10) for index, name in enumerate(names))))
    for title, last in (("Data parallel, DDP: gpt2-xl", 221), ("Weak scaling: gpt2-xl", 478)):
        told = rows(text, title)
        published = [row for row in told if row["nodes x ranks"].startswith("published")]
        measured = [row for row in told if row not in published]
        assert ["1 (base)", "1.82 vs 1 rank"] == [row["speed-up"] for row in measured[:2]]
        assert [not row.get("not measured because") for row in published] == [
            int(row["nodes x ranks"].split()[1]) <= 8 for row in published
        ]
        assert f"line {last}" in text or f", {last}" in text
    assert "- published, lines 472, 473, 474, 475 of 004" in text
    assert "platform a100 or h100, not" not in text
    assert "line 476)" in text, "the runs on 16 ranks and more are named"
    assert "-k NAME runs those not measured here: 004-gpt2-xl-ddp-b32-2x8 (line 476)" in text


def test_a_fixed_batch_is_a_series_however_its_micro_batches_are_shared_out():
    names = [f"004-multi-node-gpt3-13b-fsdp-{layout}" for layout in ("1x8", "2x8", "4x8")]
    told = rows(style("methods", run(*(ran(name, 4.0 / (1 + index)) for index, name in enumerate(names)))), FSDP_13B)
    measured = [row for row in told if not row["nodes x ranks"].startswith("published")]
    assert ["1 (base)", "2 vs 8 ranks", "3 vs 8 ranks"] == [row["speed-up"] for row in measured]
    assert ["published" in row["nodes x ranks"] for row in told] == [False, True] * 3


FSDP_13B = "Data parallel, FSDP: gpt3-13b"


def test_the_very_run_is_the_same_run_whatever_else_was_measured():
    published = ran("002-llama2_7b-fp16-1x8", platform="s4000")
    other = trained("test_llama2", 8, 0.5, model="llama2-7b", strategy="fsdp", micro_batch_size=1, dtype="bf16")
    text = style("flagperf", run(other, published))
    told = rows(text, "Performance")
    at = next(index for index, row in enumerate(told) if row["nodes x ranks"].startswith("published"))
    assert told[at - 1]["LBS"] == "3"
    assert "- published, line 50 of 002_d2b7a3a171180a61.txt: the same run" in text


def test_a_row_that_a_table_would_not_select_stands_there_when_it_was_run():
    alone = ran("004-gpt3-175b-dp64-8x8", oom="OOM at 79.1 GiB of 79.2 GiB")
    split = ran("004-gpt3-175b-pp8-dp2-tp4-8x8")
    told = rows(style("methods", run(alone, split)), "Meshes")
    at = next(index for index, row in enumerate(told) if row["not measured because"].startswith("OOM at"))
    assert told[at]["nodes x ranks"] == "64 a100"
    assert told[at + 1]["samples/s (all devices)"] == "OOM [X]"
    strong = rows(style("methods", run(ran("004-strong-gpt3-175b-fsdp-1x8"))), "Strong scaling: gpt3-175b")
    assert [row["nodes x ranks"] for row in strong][:2] == ["1 x 8 a100", "published: 8 a100 or h100 gpt3-175b"]
    assert len(strong) == 6


def test_why_a_published_run_was_skipped_stands_at_its_row():
    node = find("004-gpt2-xl-ddp-b32-2x8").case("a100")
    skips = {node: "skipped: 16 ranks on a host with 8 devices"}
    text = style("methods", run(ran("004-gpt2-xl-ddp-b32-1x8"), missing=skips))
    told = rows(text, "Weak scaling: gpt2-xl")
    why = {row["nodes x ranks"]: row["not measured because"] for row in told}
    assert why["published: 16 a100 or h100 gpt2-xl"] == f"{NOT_HERE}: 16 ranks on a host with 8 devices"
    assert why["published: 64 a100 or h100 gpt2-xl"] == NOT_HERE


def test_the_base_of_speed_ups_comes_first():
    """Before a series of more ranks whose name sorts before its own."""
    tiny = find("001-latte-tiny-ddp-b2-w1-1x2")
    pair = trained("test_published[cpu-001-latte-tiny-ddp-b2-w1-1x2]", 2, 1.0, platform="cpu", **tiny.parameters)
    alone = [
        trained(f"test_train[cpu-ws{ranks}-latte-tiny]", ranks, 1.0, platform="cpu", model="latte-tiny", strategy="ddp")
        for ranks in (1, 2)
    ]
    told = rows(style("latte", run(pair, *alone)), "DDP: latte-tiny")
    measured = [row for row in told if not row["nodes x ranks"].startswith("published")]
    assert [(row["nodes x ranks"], row["local batch"], row["speed-up"]) for row in measured] == [
        ("1 x 1 cpu", "1", "1 (base)"),
        ("1 x 2 cpu", "1", "2 vs 1 rank"),
        ("1 x 2 cpu", "2", ""),
    ]


def test_a_row_that_nobody_can_run_says_why():
    text = style("methods", run(ran("004-gpt3-175b-pp8-tp8-8x8")))
    assert "- line 428 has no case: tp 64 does not divide the 96 heads" in text
