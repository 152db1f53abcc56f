"""The tables of the published reports out of fixed results: exact text, published figures with labels, empty cells."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.errors import ConfigurationError
from perfsuite.records import Metric, Timeline, TimelineEvent, Work
from perfsuite.reports.tables.case import from_result
from perfsuite.reports.tables.markdown import Grid, escape, markdown
from perfsuite.reports.tables.published import published_of
from perfsuite.reports.tables.report import fitting_styles, report
from perfsuite.reports.tables.styles import STYLES
from test_correctness.helpers.report_runs import latte, run, section, table, trained

GIB = 2**30
MEMORY = tuple(
    (f"{name}_bytes", gib * GIB)
    for name, gib in (
        ("weights", 3),
        ("gradients", 3),
        ("optimizer", 6),
        ("activations", 2.5),
        ("peak", 14.5),
        ("fragmentation", 0.5),
        ("final_device", 12),
        ("final_host", 10),
    )
)


def opensora(ranks, time_s, **changes):
    return trained(
        "test_opensora",
        ranks,
        time_s,
        **{
            "model": "opensora",
            "strategy": "fsdp",
            "builds": ("memory", "loss"),
            "records": (*MEMORY, ("final_loss", 0.25)),
            **changes,
        },
    )


def llama(ranks, time_s, **changes):
    loss = (("final_loss", 3.5), ("whole_device_bytes", 40 * GIB))
    return trained(
        "test_llama2",
        ranks,
        time_s,
        **{
            "model": "llama2-7b",
            "strategy": "fsdp",
            "micro_batch_size": 3,
            "dtype": "bf16",
            "builds": ("memory", "loss"),
            "records": (*MEMORY, *loss),
            **changes,
        },
    )


def gpt(name, ranks, time_s, **changes):
    return trained(name, ranks, time_s, **{"model": "gpt2-xl", "strategy": "ddp", "platform": "a100", **changes})


def style(name, *runs, base=None):
    return report(list(runs), [STYLES[name]], base)


# -- 000 ---------------------------------------------------------------------------------------------------------

OVERVIEW = """
| nodes x ranks               | model    | videos/s (all devices) | videos/s per device | tokens/s per device |     final loss |
| --------------------------- | -------- | ---------------------: | ------------------: | ------------------: | -------------: |
| 1 x 1 s4000                 | opensora |                      1 |                   1 |                4096 |           0.25 |
| published: 1 s4000 opensora | opensora |             0.645 [M?] |                     |          330.5 [M?] | 0.0001047 [M?] |
| 1 x 2 s4000                 | opensora |                    1.6 |                 0.8 |                3277 |           0.25 |
| published: 2 s4000 opensora | opensora |             0.833 [M?] |                     |          213.2 [M?] |   0.002377 [X] |

- published, lines 8, 9 of 000_7dc6157a632cc5f9.txt: the same run, as far as is stated
- [M?] videos/s (all devices), tokens/s per device, final loss; lines 8, 9: images/s/GPU is the aggregate N / step time; tokens/s/GPU = 512 / step time is per card as printed. Efficiency of the aggregate: 64.5, 66.5 and 39.2 % on 2, 4 and 8 cards
- [X] final loss; line 9: equal to 13 significant digits on 2 and on 4 cards
- as published: videos/s (all devices): aggregate over the cards, printed as per card; tokens/s per device: 512 tokens per image and step
"""  # noqa: E501 - tables are as wide as they are


def test_overview_of_report_000_to_the_letter():
    text = style("opensora", run(opensora(1, 1.0), opensora(2, 1.25)))
    assert OVERVIEW.splitlines()[1:] == section(text, "Overview")[1:-1]


def test_time_of_report_000_has_the_optimizer_inside_and_beside_backward():
    heads, measured, published = table(style("opensora", run(opensora(1, 1.0))), "Time")
    columns = dict(zip(heads, measured, strict=True))
    assert ("500", "400", "100") == tuple(
        columns[name] for name in ("backward + optimizer ms", "backward ms", "optimizer ms")
    )
    parts = ("data ms", "forward ms", "backward ms", "optimizer ms", "remainder ms")
    assert float(columns["step ms"]) == sum(float(columns[name]) for name in parts)
    assert dict(zip(heads, published, strict=True))["backward + optimizer ms"] == "910.2 [M?]"


def test_memory_of_report_000_is_in_gib():
    _, measured, published = table(style("opensora", run(opensora(1, 1.0))), "Memory per device")
    assert measured == ["1 x 1 s4000", "3", "3", "6", "2.5", "14.5", "0.5", "12", "10"]
    assert published[:4] == ["published: 1 s4000 opensora", "", "", "21.18 [M?]"]


def test_rows_of_report_000_with_and_without_encoders_are_told_apart():
    encoders = trained(
        "test_opensora_encoders",
        1,
        2.0,
        model="opensora",
        strategy="fsdp",
        overrides={"encoders": "t5xxl-sdvae"},
        builds=("memory",),
        records=MEMORY,
    )
    both = run(opensora(1, 1.0), encoders)
    for title in ("Overview", "Compute", "Time", "Memory per device"):
        heads, *rows = table(style("opensora", both), title)
        variants = [dict(zip(heads, row, strict=True))["variant"] for row in rows if row[0].startswith("1 x 1")]
        assert ["", "encoders=t5xxl-sdvae"] == sorted(variants)


def test_another_platform_and_model_say_why_they_are_not_compared():
    text = style("opensora", run(opensora(2, 1.0, model="opensora-tiny", platform="cpu")))
    assert (
        "- published, line 9 of 000_7dc6157a632cc5f9.txt: not comparable with the row above: "
        "platform s4000, not cpu; model opensora, not opensora-tiny"
    ) in section(text, "Overview")


def test_values_that_were_not_measured_are_empty_with_the_reason():
    text = style("opensora", run(opensora(1, 1.0, builds=(), records=())))
    assert "- empty: final loss: the case has no loss build" in section(text, "Overview")
    heads, measured, *_ = table(text, "Overview")
    assert dict(zip(heads, measured, strict=True))["final loss"] == ""
    (empty,) = [line for line in section(text, "Memory per device") if line.startswith("- empty")]
    assert empty.endswith(": the case has no memory build")


def test_a_build_that_ran_and_could_not_tell_is_not_called_missing():
    text = style("opensora", run(opensora(1, 1.0, records=MEMORY[:5], platform="cpu")))
    assert (
        "- empty: fragmentation GiB; final (device) GiB; final (host) GiB: the memory build does not tell it here"
        in section(text, "Memory per device")
    )


# -- cases without a measurement ---------------------------------------------------------------------------------


def test_skipped_failed_and_oom_rows_are_there_with_the_reason():
    case = "test_perf/test_it.py::test_latte[s4000-ws{}-latte-l]".format
    text = style(
        "latte",
        run(
            latte(1, 0.5),
            latte(2, 0.5, oom="OOM at 47.1 GiB of 48.0 GiB"),
            missing={case(4): "skipped: 4 ranks on a host with 2 devices", case(8): "failed: loss is | nan"},
        ),
    )
    heads, *rows = table(text, "DDP: latte-l")
    mine = [row for row in rows if not row[0].startswith("published")]
    assert [row[0] for row in mine] == ["1 x 1 s4000", "2 s4000", "1 x 4 s4000", "1 x 8 s4000"]
    assert [row[-1] for row in mine] == [
        "",
        "OOM at 47.1 GiB of 48.0 GiB",
        "skipped: 4 ranks on a host with 2 devices",
        r"failed: loss is \| nan",
    ]
    for row in mine[1:]:
        assert set(row[5:-1]) == {""}, "nothing is made up"
    batches = [heads.index(name) for name in ("local batch", "global batch")]
    assert [[row[at] for at in batches] for row in mine] == [["1", "1"], ["1", "2"], ["1", "4"], ["1", "8"]]


def test_a_fixed_global_batch_is_spread_over_the_ranks_of_a_skipped_case():
    skipped = "test_perf/test_it.py::test_strong[a100-ws4-gpt2-xl]"
    results = [gpt("test_strong", ranks, 1 / ranks, global_batch_size=32) for ranks in (1, 2)]
    heads, *rows = table(style("methods", run(*results, missing={skipped: "skipped: why"})), "Strong scaling: gpt2-xl")
    (row,) = [dict(zip(heads, row, strict=True)) for row in rows if row[1] == "1 x 4 a100"]
    assert ("8", "32", "") == (row["local batch"], row["global batch"], row["speed-up"])


def test_cases_without_a_sibling_are_listed_at_the_end_by_reason():
    gone = {f"t.py::test_gone[cpu-ws2-{name}]": "skipped: no | bf16" for name in "fedcba"}
    text = style("latte", run(latte(1, 0.5), missing={**gone, "t.py::test_bad[cpu-ws2]": "failed: bad luck"}))
    assert section(text, "Not measured") == [
        "",
        "- failed: bad luck: `t.py::test_bad[cpu-ws2]`",
        r"- skipped: no \| bf16: `t.py::test_gone[cpu-ws2-a]`, `t.py::test_gone[cpu-ws2-b]`, "
        "`t.py::test_gone[cpu-ws2-c]`, `t.py::test_gone[cpu-ws2-d]` and 2 more",
    ]


def test_a_smoke_run_measured_nothing():
    smoke = dataclasses.replace(latte(1, 0.5), outcome="smoke")
    assert from_result(smoke).values == {}
    with pytest.raises(ConfigurationError, match="nothing was measured"):
        style("latte", run(smoke))


# -- 001 ---------------------------------------------------------------------------------------------------------


def test_report_001_has_speed_up_over_the_smallest_and_published_rows_below_their_likes():
    heads, *rows = table(style("latte", run(latte(8, 1 / 1.5), latte(2, 1 / 3))), "DDP: latte-l")
    at = heads.index("speed-up")
    assert [(row[0], row[at]) for row in rows] == [
        ("1 x 2 s4000", "1 (base)"),
        ("1 x 8 s4000", "2 vs 2 ranks"),
        ("published: 1 x 8 rtx4090 latte-l", "3.98 [M]"),
        ("published: 1 x 8 rtx6000ada latte-l", "5.78 [M]"),
    ]


def test_the_cross_device_column_compares_the_same_run_alone():
    base = run(latte(1, 0.25, platform="rtx4090"), latte(8, 0.5, platform="rtx4090"), name="base.jsonl")
    mine = run(latte(1, 0.5), latte(8, 0.5, micro_batch_size=2), latte(16, 1.0, hosts=2))
    text = style("latte", mine, base=base)
    heads, *rows = table(text, "DDP: latte-l")
    at = heads.index("times rtx4090, same ranks")
    assert {row[0]: row[at] for row in rows if not row[0].startswith("published")} == {
        "1 x 1 rtx4090": "",
        "1 x 8 rtx4090": "",
        "1 x 1 s4000": "0.5",
        "1 x 8 s4000": "",
        "2 x 8 s4000": "",
    }
    assert (
        "- empty in 2 rows: times rtx4090, same ranks: rtx4090 has no run of this model, batch and number of ranks"
    ) in text
    beside = {row[0]: rows[index - 1][0] for index, row in enumerate(rows)}
    assert beside["published: 1 x 8 rtx4090 latte-l"] == "1 x 8 rtx4090"
    assert "- published, lines 23, 24 of 001_234c8261996940a4.txt: the same run, as far as is stated" in text
    assert "- base: base.jsonl, 2 measured cases on rtx4090 (rtx4090-test)" in text


def test_peaks_stand_before_report_001_with_the_published_one_that_is_not_dense():
    rows = table(style("latte", run(latte(1, 0.5))), "Peaks, dense TFLOPS per device")
    assert rows[1:] == [
        ["s4000", "25", "50", "100", "100"],
        ["published: 4090", "82.6 [M]", "", "330.3 [M?]", ""],
    ]


def test_a_speed_up_above_the_ranks_is_doubted_below_the_table():
    text = style("latte", run(latte(1, 1.0), latte(2, 0.5)))
    assert "- speed-up 4 on 2 times the ranks is above linear, look at the base: " in text
    assert "above linear" not in style("latte", run(latte(1, 1.0), latte(2, 1.0)))


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (run(latte(1, 1.0), name="b.jsonl"), "the base b.jsonl is of the same hardware as journal.jsonl"),
        (run(opensora(1, 1.0, platform="a100"), name="b.jsonl"), "no model in common with the results; its models: o"),
        (
            run(dataclasses.replace(latte(1, 1.0, platform="a100"), simulated=True), name="b.jsonl"),
            "journal.jsonl is of real devices and the base b.jsonl of simulated ones",
        ),
    ],
)
def test_a_base_that_cannot_be_compared_is_refused_by_name(base, said):
    with pytest.raises(ConfigurationError) as error:
        style("latte", run(latte(1, 0.5)), base=base)
    assert said in str(error.value)


# -- 002 ---------------------------------------------------------------------------------------------------------


def test_report_002_has_loss_and_memory_each_under_its_own_name():
    heads, measured, published = table(style("flagperf", run(llama(8, 10.0))), "Performance")
    mine, theirs = (dict(zip(heads, row, strict=True)) for row in (measured, published))
    assert ("3.5", "40", "48") == tuple(mine[name] for name in ("loss", "memory used GiB (whole device)", "of GiB"))
    assert ("3.2 [M?]", "44.2 [M?]") == (theirs["loss"], theirs["memory used GiB (whole device)"])
    assert mine["tokens/s per device"] == "1229"  # 3 x 4096 tokens in 10 s
    assert theirs["tokens/s per device"] == ""
    # PaLM: 6 N + 12 L H Q T = 6 x 6738415616 + 12 x 32 x 4096 x 4096 operations per token, of 100 TFLOPS
    assert float(mine["MFU % (PaLM)"]) == pytest.approx(1228.8 * (6 * 6738415616 + 12 * 32 * 4096 * 4096) / 1e12, 1e-3)


@settings(deadline=None, max_examples=25)
@given(local=st.integers(1, 5), steps=st.integers(1, 4), ranks=st.sampled_from([1, 2, 4, 8]))
def test_the_global_batch_is_the_product_that_its_heading_says(local, steps, ranks):
    case = llama(ranks, 1.0, micro_batch_size=local, accumulation=steps)
    heads, row = table(style("flagperf", run(case)), "Batch")
    told = dict(zip(heads, row, strict=True))
    names = ("LBS (local batch)", "GAS (accumulation)", "DP")
    assert [local, steps, ranks] == [int(told[name]) for name in names]
    assert local * steps * ranks == int(told["GBS = LBS x GAS x DP"])


def test_the_environment_stands_first_and_unknown_things_stay_out():
    environment = {
        "machine_model": "MCCX D800",
        "devices": ["S4000, 48.0 GiB"] * 8,
        "cpu": "Xeon",
        "memory_gib": "unknown",
        "os": "Ubuntu 20.04 LTS",
        "driver": {"musa": "2.2.0"},
        "packages": {"torch": "2.5"},
        "topology": "GPU0 X",
    }
    text = style("flagperf", run(dataclasses.replace(llama(8, 1.0), environment=environment)))
    assert table(text, "Hardware")[1:] == [
        ["machine", "MCCX D800"],
        ["accelerators", "8 x S4000, 48.0 GiB"],
        ["CPU", "Xeon"],
    ]
    assert ["musa", "2.2.0"] in table(text, "Software")
    assert "GPU0 X" in section(text, "Topology: s4000 (s4000-test)")


# -- 003 ---------------------------------------------------------------------------------------------------------


def test_report_003_pairs_by_layout_and_batch():
    case = gpt("test_grid", 8, 0.418, model="gpt-1536x16", platform="v100", micro_batch_size=2, builds=("memory",))
    heads, measured, *published = table(style("oneflow", run(case)), "Results")
    assert dict(zip(heads, measured, strict=True))["latency ms"] == "418"
    assert [dict(zip(heads, row, strict=True))["latency ms"] for row in published] == ["418 [M]", "417.9 [M]"]
    assert [dict(zip(heads, row, strict=True))["memory GiB (whole device)"] for row in published] == [
        "12.11 [M]",
        "12.11 [M]",
    ]


# -- 004 ---------------------------------------------------------------------------------------------------------


def test_weak_and_strong_scaling_are_told_apart():
    weak = [gpt("test_weak", ranks, time_s, micro_batch_size=32) for ranks, time_s in ((1, 1.0), (2, 1.25))]
    strong = [gpt("test_strong", ranks, time_s, global_batch_size=32) for ranks, time_s in ((1, 1.0), (2, 0.625))]
    text = style("methods", run(*weak, *strong))
    for title, batch, published in (
        ("Weak scaling: gpt2-xl", "64", ["97.7 [R]"]),
        ("Strong scaling: gpt2-xl", "32", []),
    ):
        heads, *rows = table(text, title)
        told = [dict(zip(heads, row, strict=True)) for row in rows]
        mine = [row for row in told if row["nodes x ranks"] == "1 x 2 a100"]
        assert [(batch, "1.6 vs 1 rank", "80 vs 1 rank")] == [
            (row["global batch"], row["speed-up"], row["efficiency %"]) for row in mine
        ]
        theirs = [row["efficiency %"] for row in told if row["nodes x ranks"].startswith("published: 2")]
        assert published == theirs


def test_options_have_a_column_where_any_case_has_some():
    plain = gpt("test_ddp", 2, 1.0)
    chosen = gpt(
        "test_overlap",
        2,
        1.25,
        options={"overlap": False, "bucket_mib": 1.23456},
        accumulation=2,
        checkpointing="full",
    )
    title = "Data parallel, DDP: gpt2-xl"
    assert "options" not in table(style("methods", run(plain)), title)[0]
    heads, *rows = table(style("methods", run(plain, chosen)), title)
    assert ["", "bucket_mib=1.235, overlap=False, accumulation=2, checkpointing=full"] == [
        row[heads.index("options")] for row in rows if not row[0].startswith("published")
    ]


def test_the_largest_batch_has_a_table_of_its_own():
    plain = gpt("test_largest", 1, 1.0, micro_batch_size=6)
    found = Metric(name="largest_local_batch_samples", value=6.0, unit="samples", better="higher")
    case = dataclasses.replace(plain, workload="perfsuite.workloads.x:LargestBatch", metrics=(*plain.metrics, found))
    text = style("methods", run(case))
    heads, row = table(text, "Largest local batch")
    assert "6" == dict(zip(heads, row, strict=True))["most samples per rank"]
    assert "Data parallel, DDP" not in text


def pipeline(schedule, micro_batches, bubble):
    events = tuple(
        TimelineEvent(kind="forward", rank=rank, stage=rank, micro_batch=micro, start_s=0.0, end_s=1.0)
        for rank in range(4)
        for micro in range(micro_batches)
    )
    plain = gpt("test_pp", 4, 1.0)
    timeline = Timeline(ranks=4, events=events, source="measured", schedule=schedule)
    ratio = Metric(name="bubble_ratio", value=bubble, unit="ratio", better="lower")
    return dataclasses.replace(
        plain,
        case=f"t.py::test_pp[a100-ws4-{schedule}-m{micro_batches}]",
        metrics=(*plain.metrics, ratio),
        measurement=dataclasses.replace(plain.measurement, timeline=timeline),
    )


def test_pipeline_tables_read_schedule_stages_and_bubble_from_results():
    cases = [pipeline("1F1B", 8, 0.28), pipeline("GPipe", 8, 0.3), pipeline("1F1B", 16, 0.16)]
    text = style("methods", run(*cases))
    assert [row[:3] + row[6:7] for row in table(text, "Pipeline schedules: gpt2-xl")[1:]] == [
        ["1F1B", "4", "8", "28"],
        ["1F1B", "4", "8", "22.4 [X]"],
        ["1F1B", "4", "16", "16"],
        ["1F1B", "4", "16", "12.7 [X]"],
        ["GPipe", "4", "8", "30"],
        ["GPipe", "4", "8", "35.1 [X]"],
    ]
    assert ["4", "1F1B", "", "published: 16 a100 or h100 gpt3-13b", "", "823 [X]", "18.2 [X]", "", "22 [X]"] in table(
        text, "Number of stages: gpt2-xl"
    )


def test_emulated_pipelines_have_tables_of_their_own_and_nothing_published_beside():
    plain = pipeline("1F1B", 8, 0.28)
    parameters = {"mesh": "pp4", "schedule": "1f1b", "num_micro_batches": 8}
    emulated = dataclasses.replace(plain, workload="perfsuite.workloads.x:EmulatedPipeline", parameters=parameters)
    _, *rows = table(style("methods", run(emulated)), "Pipeline schedules: emulated_pipeline")
    assert ["1 x 4 a100"] == [row[3] for row in rows]


def kernel(name, workload, ranks, parameters, work, **metrics):
    plain = gpt(name, ranks, 1e-3)
    return dataclasses.replace(
        plain,
        case=f"t.py::{name}[a100-ws{ranks}]",
        workload=f"perfsuite.workloads.x:{workload}",
        parameters=parameters,
        work=work,
        metrics=tuple(Metric(name=key, value=value, unit="", better="higher") for key, value in metrics.items()),
    )


def test_kernels_and_collectives_have_tables_of_their_own():
    product = kernel("a", "Matmul", 1, {"m": 8, "k": 4, "n": 2, "dtype": "bf16"}, Work(), tflops=251.5)
    stream = kernel("b", "HostDeviceCopy", 1, {"buffer_bytes": 1 << 20, "direction": "d2h"}, Work(), gb_per_s=26.1)
    summed = {"message_bytes": 1 << 20, "dtype": "fp32"}
    reduce = kernel("c", "AllReduce", 8, summed, Work(collective="all_reduce"), algbw_gb_per_s=1.0, busbw_gb_per_s=1.75)
    text = style("methods", run(product, stream, reduce))
    assert table(text, "Matrix products")[1] == ["1 x 1 a100", "8x4x2", "bf16", "251.5", "1"]
    assert table(text, "Memory bandwidth")[1] == ["1 x 1 a100", "host_device_copy d2h", "1MiB", "26.1", "1"]
    assert table(text, "Collectives")[1] == ["all_reduce", "1 x 8 a100", "1MiB", "fp32", "1000", "1", "1.75"]


def test_sizes_are_sorted_by_bytes_and_not_as_text():
    sizes = [1 << 30, 1 << 10, 1 << 24, 1 << 20]
    cases = [
        dataclasses.replace(
            kernel("c", "AllReduce", 8, {"message_bytes": size}, Work(collective="all_reduce"), busbw_gb_per_s=1.0),
            case=f"t.py::c[a100-ws8-{size}]",
        )
        for size in sizes
    ]
    rows = table(style("methods", run(*cases)), "Collectives")[1:]
    assert ["1KiB", "1MiB", "16MiB", "1GiB"] == [row[2] for row in rows]


def test_what_two_styles_have_in_common_is_printed_once():
    product = kernel("a", "Matmul", 1, {"m": 8, "k": 4, "n": 2, "dtype": "bf16"}, Work(), tflops=251.5)
    both = run(llama(8, 1.0), dataclasses.replace(product, environment={"cpu": "Xeon", "topology": "GPU0 X"}))
    styles = fitting_styles([both])
    assert ["flagperf", "methods"] == [each.name for each in styles]
    text = report([both], styles)
    for title in ("### Hardware", "### Matrix products", "GPU0 X"):
        assert 1 == text.splitlines().count(title)
    assert "### Matrix products" in style("methods", both)


# -- what is asked for, and what there is ------------------------------------------------------------------------


def test_styles_follow_from_what_was_measured():
    runs = [run(latte(1, 1.0), opensora(1, 1.0))]
    assert ["opensora", "latte"] == [each.name for each in fitting_styles(runs)]
    assert [] == list(fitting_styles([run()]))


def test_a_style_without_a_table_names_what_there_is_and_what_fits():
    with pytest.raises(ConfigurationError) as error:
        style("flagperf", run(latte(1, 1.0)))
    assert str(error.value) == (
        "style flagperf has no table for what journal.jsonl measured (latte-l); "
        "choose --style=latte, or run pytest test_perf -k llama2"
    )


def test_an_empty_run_says_so():
    with pytest.raises(ConfigurationError) as error:
        style("latte", run(name="empty.jsonl"))
    assert str(error.value) == (
        "empty.jsonl: nothing was measured, so there is nothing for a table; run pytest test_perf -k latte"
    )


def test_simulated_devices_are_stamped_and_compared_with_nothing_published():
    text = style("latte", run(dataclasses.replace(latte(8, 1.0, platform="rtx4090"), simulated=True)))
    assert "; the devices are simulated: no time here is a measurement" in text
    assert "the same run" not in text
    assert "not comparable with the row above: the devices here are simulated" in text


def test_the_same_case_of_two_runs_on_one_machine_counts_once_as_in_the_last():
    text = style("latte", run(latte(1, 1.0), name="old.jsonl"), run(latte(1, 0.5), name="new.jsonl"))
    heads, *rows = table(text, "DDP: latte-l")
    assert ["2"] == [row[heads.index("iter/s")] for row in rows if row[0] == "1 x 1 s4000"]


def test_a_case_that_a_later_run_skipped_stays_measured():
    case = "test_perf/test_it.py::test_latte[s4000-ws2-latte-l]"
    first = run(latte(1, 1.0), latte(2, 1.0), name="first.jsonl")
    later = run(latte(1, 0.5), missing={case: "skipped: no time"}, name="later.jsonl")
    text = style("latte", first, later)
    assert "no time" not in text
    heads, *rows = table(text, "DDP: latte-l")
    at = heads.index("iter/s")
    assert ["2", "1"] == [row[at] for row in rows if row[0].startswith("1 x") and "published" not in row[0]]


def test_cases_that_no_table_takes_make_no_style_fit():
    plain = kernel("mine", "step", 2, {}, Work(), latency_us=5.0)
    assert () == fitting_styles([run(plain)])


def test_every_published_table_that_a_style_names_exists():
    for each in STYLES.values():
        for spec in each.tables:
            assert {line.table for line in published_of(spec.published)} == set(spec.published), spec.title


def test_columns_of_a_table_are_told_apart_by_their_titles():
    for each in STYLES.values():
        for spec in each.tables:
            titles = [column.title for column in spec.columns]
            assert len(set(titles)) == len(titles), spec.title


CASES = (
    *(opensora(ranks, 1.0) for ranks in (1, 2)),
    *(latte(ranks, 1.0, builds=("memory",), records=MEMORY) for ranks in (1, 8)),
    latte(16, 1.0, oom="OOM at 1.0 GiB of 2.0 GiB"),
    *(llama(ranks, 1.0) for ranks in (2, 8)),
    *(gpt("test_weak", ranks, 1.0, micro_batch_size=2, builds=("exposed",)) for ranks in (1, 2, 4)),
    gpt("test_fsdp", 2, 1.0, strategy="fsdp", builds=("memory",), records=MEMORY),
    gpt("test_zero", 2, 1.0, strategy="zero_redundancy"),
    pipeline("1F1B", 8, 0.3),
    latte(8, 1.0, platform="cpu", model="latte-tiny", shared=True),
)


@settings(deadline=None, max_examples=40)
@given(chosen=st.sets(st.sampled_from(range(len(CASES)))), seed=st.integers(0, 1000))
def test_any_subset_of_results_gives_well_formed_tables_that_do_not_depend_on_their_order(chosen, seed):
    results = [CASES[index] for index in sorted(chosen)]
    shuffled = list(results)
    random.Random(seed).shuffle(shuffled)
    meaning = {"platform": "s4000", "fingerprint": "s4000-test"}
    runs, again = [run(*results, **meaning)], [run(*shuffled, **meaning)]
    styles = fitting_styles(runs)
    if not styles:
        assert not [result for result in results if result.outcome == "measured"]
        return
    text = report(runs, styles)
    assert text == report(again, styles)
    _require_well_formed(text)


def _require_well_formed(text):
    lines = text.splitlines()
    assert text.endswith("\n")
    assert not any(line != line.rstrip() for line in lines)
    for above, line, below in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if not line.startswith("|"):
            continue
        if not above.startswith("|"):
            assert above == "", "a table has an empty line above"
            assert set(below) <= set("|-: "), "the second line is the rule"
        else:
            assert len(line) == len(above), "columns are aligned"
            bars = [at for at, letter in enumerate(line) if letter == "|" and line[at - 1] != "\\"]
            assert bars == [at for at, letter in enumerate(above) if letter == "|" and above[at - 1] != "\\"]


@given(
    st.lists(
        st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8), min_size=2, max_size=2),
        max_size=4,
    )
)
def test_any_text_in_a_cell_stays_in_its_cell(rows):
    grid = Grid(title="T", columns=("a", "b"), rows=tuple(tuple(row) for row in rows))
    lines = markdown(grid)
    body = [line for line in lines if line.startswith("|")][2:]
    assert len(body) == len(rows)
    for line, row in zip(body, rows, strict=True):
        cells = [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        assert cells == [escape(cell).replace("\\|", "\0").strip() for cell in row]
