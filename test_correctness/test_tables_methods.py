"""The tables of report 004 and of kernels out of fixed results."""

import dataclasses

from perfsuite.record.result import Metric, Work
from perfsuite.reports.tables.report import fitting_styles, report
from test_correctness.helpers.report_runs import gpt, kernel, llama, pipeline, rows, run, style, table


def test_weak_and_strong_scaling_are_told_apart():
    weak = [gpt("test_weak", ranks, time_s, micro_batch_size=32) for ranks, time_s in ((1, 1.0), (2, 1.25))]
    strong = [gpt("test_strong", ranks, time_s, global_batch_size=32) for ranks, time_s in ((1, 1.0), (2, 0.625))]
    text = style("methods", run(*weak, *strong))
    for title, batch, published in (
        ("Weak scaling: gpt2-xl", "64", ["97.7 [R]"]),
        ("Strong scaling: gpt2-xl", "32", []),
    ):
        told = rows(text, title)
        mine = [row for row in told if row["nodes x ranks"] == "1 x 2 a100"]
        assert [(batch, "1.6 vs 1 rank", "80")] == [
            (row["global batch"], row["speed-up"], row["efficiency %"]) for row in mine
        ]
        theirs = [row["efficiency %"] for row in told if row["nodes x ranks"].startswith("published: 2")]
        assert published == theirs


def test_options_have_a_column_where_any_case_has_some():
    plain = gpt("test_ddp", 2, 1.0)
    chosen = gpt(
        "test_overlap", 2, 1.25, options={"overlap": False, "bucket_mib": 1.23456}, accumulation=2, checkpointing="full"
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
    assert ["6"] == [row["most samples per rank"] for row in rows(text, "Largest local batch")]
    assert "Data parallel, DDP" not in text


def test_pipeline_tables_read_schedule_stages_and_bubble_from_results():
    cases = [pipeline("1F1B", 8, 0.28), pipeline("GPipe", 8, 0.3), pipeline("1F1B", 16, 0.16)]
    text = style("methods", run(*cases))
    assert [row[:3] + row[6:7] for row in table(text, "Pipeline schedules: gpt2-xl")[1:]] == [
        ["Naive", "4", "4", "56.2 [X]"],
        ["GPipe", "4", "8", "30"],
        ["GPipe", "4", "8", "35.1 [X]"],
        ["GPipe", "4", "16", "18.3 [X]"],
        ["1F1B", "4", "8", "28"],
        ["1F1B", "4", "8", "22.4 [X]"],
        ["1F1B", "4", "16", "16"],
        ["1F1B", "4", "16", "12.7 [X]"],
    ]
    stages = rows(text, "Number of stages: gpt2-xl")
    told = [row for row in stages if row["nodes x ranks"].startswith("published: 16 ")]
    names = ("stages", "devices per stage", "samples/s (all devices)", "bubble %", "peak GiB per device")
    assert [tuple(row[name] for name in names) for row in told] == [
        ("2", "8", "645 [X]", "28.5 [X]", "42 [X]"),
        ("4", "4", "823 [X]", "18.2 [X]", "22 [X]"),
        ("8", "2", "891 [X]", "12.4 [X]", "12 [X]"),
        ("16", "1", "734 [X]", "8.7 [X]", "7 [X]"),
    ]


def test_emulated_pipelines_have_tables_of_their_own_and_nothing_published_beside():
    plain = pipeline("1F1B", 8, 0.28)
    parameters = {"mesh": "pp4", "schedule": "1f1b", "num_micro_batches": 8}
    emulated = dataclasses.replace(plain, workload="perfsuite.workloads.x:EmulatedPipeline", parameters=parameters)
    _, *rows = table(style("methods", run(emulated)), "Pipeline schedules: emulated_pipeline")
    assert ["1 x 4 a100"] == [row[3] for row in rows]


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


def test_stage_counts_are_compared_on_the_same_devices():
    def cut(mesh, ranks):
        plain = pipeline("1f1b", 8, 0.2)
        stages = int(mesh[2])
        return dataclasses.replace(
            plain,
            case=f"t.py::test_stage_counts[a100-{mesh}]",
            world_size=ranks,
            parameters={**plain.parameters, "mesh": mesh, "strategy": "hybrid"},
            measurement=dataclasses.replace(
                plain.measurement,
                timeline=dataclasses.replace(
                    plain.measurement.timeline,
                    events=tuple(event for event in plain.measurement.timeline.events if event.stage < stages),
                ),
            ),
        )

    text = style("methods", run(cut("pp2", 2), cut("pp2-dp2", 4), cut("pp4", 4)))
    assert [("2", "2", "1 x 4 a100"), ("4", "1", "1 x 4 a100")] == [
        (row["stages"], row["devices per stage"], row["nodes x ranks"])
        for row in rows(text, "Number of stages: gpt2-xl")
        if "published" not in row["nodes x ranks"]
    ]


def test_series_stand_together_each_with_its_base_and_all_rows_told_apart():
    ddp = [gpt("test_ddp", ranks, 1.0, micro_batch_size=4) for ranks in (1, 2, 4)]
    weak = [gpt("test_weak", ranks, 1.0, micro_batch_size=4) for ranks in (1, 2, 4)]
    told = rows(style("methods", run(*ddp, *weak)), "Data parallel, DDP: gpt2-xl")
    measured = [row for row in told if "published" not in row["nodes x ranks"]]
    assert [row["case"] for row in measured] == ["test_ddp[gpt2-xl]"] * 3 + ["test_weak[gpt2-xl]"] * 3
    assert ["(base)" in row["speed-up"] for row in measured] == [True, False, False] * 2
    published = [(row["samples/s (all devices)"], row["not measured because"]) for row in told if row not in measured]
    assert [(f"{rate} [R]", "not measured here") for rate in (245, 478, 934, 1812)] == published
    assert [index for index, row in enumerate(told) if row not in measured] == [4, 6, 8, 9], "beside one series alone"


def test_a_model_of_13b_meets_its_rows_on_several_nodes():
    cases = [gpt("test_fsdp", ranks, 3.0, model="gpt3-13b", strategy="fsdp", hosts=ranks // 8) for ranks in (8, 16)]
    told = rows(style("methods", run(*cases)), "Data parallel, FSDP: gpt3-13b")
    assert [(row["nodes x ranks"], row["step s"], row["not measured because"]) for row in told] == [
        ("1 x 8 a100", "3", ""),
        ("published: 8 a100 gpt3-13b", "3.28 [R]", "not measured here"),
        ("2 x 8 a100", "3", ""),
        ("published: 16 a100 gpt3-13b", "1.72 [R]", "not measured here"),
        ("published: 32 a100 gpt3-13b", "0.91 [R]", "not measured here"),
    ]
