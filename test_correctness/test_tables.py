"""The tables of reports 000 to 003 out of fixed results: exact text, published figures with labels, empty cells."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ConfigurationError
from test_correctness.helpers.report_runs import (
    MEMORY,
    gpt,
    latte,
    llama,
    opensora,
    rows,
    run,
    section,
    style,
    table,
    trained,
)

OVERVIEW = """
| nodes x ranks               | model    | videos/s (all devices) | videos/s per device | tokens/s per device |     final loss | loss after steps | not measured because |
| --------------------------- | -------- | ---------------------: | ------------------: | ------------------: | -------------: | ---------------: | -------------------- |
| 1 x 1 s4000                 | opensora |                      1 |                   1 |                4096 |           0.25 |               20 |                      |
| published: 1 s4000 opensora | opensora |             0.645 [M?] |                     |          330.5 [M?] | 0.0001047 [M?] |                  | not measured here    |
| 1 x 2 s4000                 | opensora |                    1.6 |                 0.8 |                3277 |           0.25 |               20 |                      |
| published: 2 s4000 opensora | opensora |             0.833 [M?] |                     |          213.2 [M?] |   0.002377 [X] |                  | not measured here    |
| published: 4 s4000 opensora | opensora |             1.717 [M?] |                     |          219.7 [M?] |   0.002377 [X] |                  | not measured here    |
| published: 8 s4000 opensora | opensora |             2.025 [M?] |                     |          129.6 [M?] |   0.01097 [M?] |                  | not measured here    |

- published, lines 8, 9 of 000_7dc6157a632cc5f9.txt: not comparable with the row above: checkpointing full (ours), not none; clip 1.0 (ours), not none; data video (ours), not synthetic; dataset_samples 704 (ours), unset here; dtype bf16 (ours), not fp32; ema fp32 (ours), not none; encoders t5xxl-sdvae (ours), not none; logs True (ours), not False; num_workers 4 (ours), unset here; sequence_length 512 (ours), not 4096; strategy zero2 (ours), not fsdp
- [M?] videos/s (all devices), tokens/s per device, final loss; lines 8, 9, 10, 11: images/s/GPU is the aggregate N / step time; tokens/s/GPU = 512 / step time is per card as printed. Efficiency of the aggregate: 64.5, 66.5 and 39.2 % on 2, 4 and 8 cards
- [X] final loss; lines 9, 10: equal to 13 significant digits on 2 and on 4 cards
- as published: videos/s (all devices): aggregate over the cards, printed as per card; tokens/s per device: 512 tokens per image and step
- pytest test_perf -k NAME runs those not measured here: 000-opensora-1x1 (line 8), 000-opensora-1x2 (line 9), 000-opensora-1x4 (line 10), 000-opensora-1x8 (line 11)
"""  # noqa: E501 - tables are as wide as they are


def test_overview_of_report_000_to_the_letter():
    text = style("opensora", run(opensora(1, 1.0), opensora(2, 1.25)))
    assert OVERVIEW.splitlines()[1:] == section(text, "Overview")[1:-1]


def test_time_of_report_000_has_the_optimizer_inside_and_beside_backward():
    columns, published, *_ = rows(style("opensora", run(opensora(1, 1.0))), "Time")
    assert columns["backward + optimizer ms"] == "500"
    parts = ("data ms", "forward ms", "backward ms", "optimizer ms", "remainder ms")
    assert float(columns["step ms"]) == sum(float(columns[name]) for name in parts)
    assert published["backward + optimizer ms"] == "910.2 [M?]"


def test_memory_of_report_000_is_in_gib():
    _, measured, published, *_ = table(style("opensora", run(opensora(1, 1.0))), "Memory per device")
    assert measured[:-1] == ["1 x 1 s4000", "3", "3", "6", "2.5", "14.5", "0.5", "12", "10"]
    assert published[:4] == ["published: 1 s4000 opensora", "", "", "21.18 [M?]"]


def test_rows_of_report_000_with_and_without_encoders_are_told_apart():
    encoders = opensora(1, 2.0, program={"encoders": "t5xxl-sdvae"})
    both = run(opensora(1, 1.0), dataclasses.replace(encoders, case="t.py::test_encoders[s4000-ws1]"))
    for title in ("Overview", "Compute", "Time", "Memory per device"):
        told = rows(style("opensora", both), title)
        variants = [row["variant"] for row in told if row["nodes x ranks"].startswith("1 x 1")]
        assert ["", "encoders=t5xxl-sdvae"] == sorted(variants)


def test_another_platform_and_model_say_why_they_are_not_compared():
    text = style("opensora", run(opensora(2, 1.0, model="opensora-tiny", platform="cpu")))
    why = "not comparable with the measured row: platform s4000, not cpu; model opensora, not opensora-tiny"
    assert f"- published, line 9 of 000_7dc6157a632cc5f9.txt: {why}" in section(text, "Overview")


def test_values_that_were_not_measured_are_empty_with_the_reason():
    text = style("opensora", run(opensora(1, 1.0, builds=(), records=())))
    assert "- empty: final loss: the case has no loss build" in section(text, "Overview")
    assert rows(text, "Overview")[0]["final loss"] == ""
    (empty,) = [line for line in section(text, "Memory per device") if line.startswith("- empty")]
    assert empty.endswith(": the case has no memory build")


def test_a_build_that_ran_and_could_not_tell_is_not_called_missing():
    text = style("opensora", run(opensora(1, 1.0, records=MEMORY[:5], platform="cpu")))
    missing = "fragmentation GiB; final (device) GiB; final (host) GiB"
    assert f"- empty: {missing}: the memory build does not report it here" in section(text, "Memory per device")


def test_report_001_has_speed_up_over_the_smallest_and_rows_of_other_hardware_after_the_measured_ones():
    """Golden journals have all published rows of the report."""
    told = rows(style("latte", run(latte(8, 1 / 1.5), latte(2, 1 / 3))), "DDP: latte-l")
    assert [(row["nodes x ranks"], row["speed-up"]) for row in told[:4]] == [
        ("1 x 2 s4000", "1 (base)"),
        ("1 x 8 s4000", "2 vs 2 ranks"),
        ("published: 1 x 1 rtx4090 latte-l", "1 [M]"),
        ("published: 1 x 8 rtx4090 latte-l", "3.98 [M]"),
    ]
    assert [row["not measured because"].endswith("not measured here") for row in told] == [
        row["nodes x ranks"].startswith("published") for row in told
    ], "no case of these rows was run"


def test_a_model_that_was_not_measured_keeps_its_published_table():
    told = rows(style("latte", run(latte(8, 0.66))), "DDP: latte-xl")
    assert len(told) == 5
    assert [(row["iter/s"], row["not measured because"]) for row in told[:2]] == [
        ("", "no figure, as published; not measured here"),
        ("0.83 [M]", "not measured here"),
    ]
    small = style("latte", run(latte(8, 0.66, model="latte-tiny")))
    assert "DDP: latte-xl" not in small, "there all rows stand in the one table"
    assert sum("latte-xl" in row[0] for row in table(small, "DDP: latte-tiny")) == 5


def test_the_cross_device_column_compares_the_same_run_alone():
    base = run(latte(1, 0.25, platform="rtx4090"), latte(8, 0.5, platform="rtx4090"), name="base.jsonl")
    mine = run(latte(1, 0.5), latte(8, 0.5, micro_batch_size=2), latte(16, 1.0, hosts=2))
    text = style("latte", mine, base=base)
    heads, *found = table(text, "DDP: latte-l")
    at = heads.index("times rtx4090, same ranks")
    assert {"1 x 1 s4000": "0.5"} == {row[0]: row[at] for row in found if row[at] and "published" not in row[0]}
    assert (
        "- empty in 2 rows: times rtx4090, same ranks: rtx4090 has no run of this model, batch and number of ranks"
    ) in text
    names = [row[0] for row in found]
    assert names[names.index("published: 1 x 8 rtx4090 latte-l") - 1] == "1 x 8 rtx4090"
    told = "- published, lines 23, 24 of 001_234c8261996940a4.txt: not comparable with the row above: clip 0.1"
    assert told in text, "the platform is the same"
    assert "- base: base.jsonl, 2 measured cases on rtx4090 (rtx4090-test)" in text


def test_peaks_stand_before_report_001():
    told = table(style("latte", run(latte(1, 0.5))), "Peaks, dense TFLOPS per device")
    assert ["s4000", "25", "50", "100", "100", ""] in told


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


def test_report_002_has_loss_and_memory_each_under_its_own_name():
    mine, theirs = rows(style("flagperf", run(llama(8, 10.0))), "Performance")
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
    (told,) = rows(style("flagperf", run(case)), "Batch")
    names = ("LBS (local batch)", "GAS (accumulation)", "DP")
    assert [local, steps, ranks] == [int(told[name]) for name in names]
    assert local * steps * ranks == int(told["GBS = LBS x GAS x DP"])


def test_the_environment_stands_first_and_unknown_things_stay_out():
    environment = {
        "machine_model": "MCCX D800",
        "devices": ["S4000, 48.0 GiB"] * 8,
        "cpu": "Xeon",
        "memory_gib": "unknown",
        "driver": {"musa_toolkits": "4.3.5"},
        "topology": "GPU0 X",
    }
    text = style("flagperf", run(dataclasses.replace(llama(8, 1.0), environment=environment)))
    assert table(text, "Hardware") == [
        ["", "s4000 (s4000-test)", "published: 002"],
        ["machine", "MCCX D800", "MCCX D800"],
        ["accelerators", "8 x S4000, 48.0 GiB", "S4000"],
        ["CPU", "Xeon", "Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz"],
        ["network", "", "InfiniBand，2x200Gb/s"],
    ]
    software = table(text, "Software")
    assert ["musa_toolkits", "4.3.5", "1.4.0+git4e25703"] in software
    assert ["mublas", "", "1.1.0+gite484aa2"] in software
    assert "GPU0 X" in section(text, "Topology: s4000 (s4000-test)")
    assert "Topology: published" not in text


def on_oneflows_cards(**environment):
    case = gpt("test_grid[v100-DP_8x1x1_16_1536x16]", 8, 0.4, model="gpt-1536x16", platform="v100")
    return dataclasses.replace(case, environment=environment)


def test_the_topology_of_report_003_stands_beside_the_measured_one():
    text = style("oneflow", run(on_oneflows_cards(cpu="Xeon", topology="GPU0 X")))
    assert text.index("### Topology: v100") < text.index("### Topology: published, 003") < text.index("### Cases")
    matrix = [line.split() for line in section(text, "Topology: published, 003")[2:-2]]
    assert ["GPU3", "NV2", "NV1", "NV2", "X", "SYS", "SYS", "SYS", "NV1", "PIX", "0-11,24-35"] == matrix[4]
    assert len(matrix) == 10
    hardware = table(text, "Hardware")
    assert ["network", "", "InfiniBand 100 Gb/sec (4X EDR)"] in hardware
    assert ["hosts", "", "4"] in hardware
    assert "ResNet50" not in text


def test_report_003_pairs_by_layout_and_batch():
    name = "test_grid[v100-DP_8x1x1_16_1536x16]"
    case = gpt(name, 8, 0.418, model="gpt-1536x16", platform="v100", micro_batch_size=2, builds=("memory",))
    told = rows(style("oneflow", run(case)), "Results")
    assert len([row for row in told if row["not measured because"] == "not measured here"]) == 18
    (at,) = (index for index, row in enumerate(told) if not row["not measured because"])
    measured, below = told[at : at + 2]
    assert ("418", "418 [M]") == (measured["latency ms"], below["latency ms"])
    assert below["memory MiB (whole card)"] == "12404 [M]"


def test_latte_under_another_strategy_does_not_stand_under_ddp():
    spread = trained("test_deepspeed", 8, 0.6, model="latte-l", strategy="zero2")
    text = style("latte", run(latte(8, 0.5), spread))
    assert [row[0] for row in table(text, "DDP: latte-l")[1:] if "published" not in row[0]] == ["1 x 8 s4000"]
    assert [row[:2] for row in table(text, "DeepSpeed and others: latte-l")[1:]] == [["zero2", "1 x 8 s4000"]]


def test_the_report_of_oneflow_has_its_cases_alone():
    other = gpt("test_mine", 8, 0.4, model="gpt-1536x16", platform="v100")
    named = gpt("test_oneflow[v100-DP_8x1x1_16_1536x16]", 8, 0.4, model="gpt-1536x16", platform="v100")
    told = rows(style("oneflow", run(other, named)), "Results")
    assert ["DP_8x1x1_16_1536x16"] == [row["case"] for row in told if "published" not in row["nodes x ranks"]]
