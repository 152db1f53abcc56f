"""Figures of other tools: every sample with what its source prints, conversions, and what is refused and why."""

import json
import re

import pytest

from perfsuite.base.errors import ImportFailed
from perfsuite.cli.exchange import doubts
from perfsuite.imports.formats import find_format, read_imported, write_imported
from perfsuite.imports.nccl_table import KINDS, factor
from perfsuite.platforms import load_catalog
from test_correctness.helpers.command_line import printed, refused
from test_correctness.helpers.import_samples import SAMPLES, read, written

NCCL = SAMPLES / "nccl-tests"
H100 = NCCL / "all_reduce-8xH100.log"
FILES = sorted(path for path in SAMPLES.glob("*/*"))


def read_sample(path):
    return read(path, collective="all_to_all" if "alltoall" in path.name else "")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_sample_is_recognised_and_each_figure_stands_in_its_line(path):
    imported = read_sample(path)
    assert imported.tool == path.parent.name
    assert imported.rows
    lines = path.read_text().replace("\r", "").split("\n")
    for row in imported.rows:
        found = json.dumps(row.printed).strip('"')
        at = lines[row.line - 1 : row.line + 20] if path.name == "constructed-v3.json" else lines[row.line - 1 :]
        assert any(found in line for line in (at if path.suffix == ".json" else at[:1])), row


@pytest.mark.parametrize("before", ["0: ", "[rank0]: ", "2024-03-11T10:26:41Z stdout F ", "node-3/0 | "])
def test_flagperf_s_pretraining_is_read_behind_what_launchers_print(tmp_path, before):
    plain = SAMPLES / "flagperf-pretraining/rank0.out.log"
    log = written(tmp_path, *(f"{before}{line}" for line in plain.read_text().splitlines()))
    assert [row.value for row in read(log).rows] == [row.value for row in read(plain).rows]


def test_flagperf_s_pretraining_says_how_it_counts():
    """Its MFU of 265 % has the batch twice: 4.030112 samples/s x 4096 x 3 / 8 tokens, 6 x 7e9 each, over 98e12."""
    found = {(row.name, row.metric): row for row in read("flagperf-pretraining/rank0.out.log").rows}
    tokens, mfu = found["epoch 1", "tokens_per_s_per_device"], found["epoch 1", "mfu_percent"]
    samples = found["step 100", "samples_per_s"]
    assert tokens.value == pytest.approx(samples.value * 4096 * 3 / 8)
    assert mfu.value == pytest.approx(100 * tokens.value * 6 * 7e9 / 98e12)
    assert (mfu.unit, mfu.settings["stated_peak_tflops"]) == ("percent", "98")
    for row in (tokens, mfu, found["epoch 1", "tokens_per_s"]):
        assert "a local batch above 1 is counted twice" in row.convention
    assert "42e9 operations a token over the stated peak" in mfu.convention
    assert samples.convention.startswith("deepspeed: of all devices")


OPERATOR = """[FlagPerf Result]Operation mm in flaggems at FP16:
[FlagPerf Result]FLOPS utilization: cputime=68.2%, kerneltime=70.1%
[FlagPerf Result]cputime=646.11 us, throughput=1547.724 op/s, equals to 212.72 TFLOPS
[FlagPerf Result]kerneltime=628.5 us, throughput=1591.09 op/s, equals to 218.68 TFLOPS
[FlagPerf Result]Correctness with CPU golden Reference: True
[FlagPerf Result]First time latency: no warmup=2311.2 us, warmup=12.1 us
"""


@pytest.mark.parametrize(
    ("change", "figures_of", "why"),
    [
        (("", ""), [646.11, 628.5, 218.68], ""),
        (("628.5 us", "62.5 us"), [646.11], "not the time of one operation"),
        (("Reference: True", "Reference: False"), [], "the result of mm in flaggems is wrong, so its 3 figures"),
        (("=646.11 us, throughput=1547.724", "=646.11 us, thr"), [628.5, 218.68], "the line was cut"),
    ],
)
def test_operators_of_flagperf_are_read(tmp_path, change, figures_of, why):
    """The lines of FlagPerf 1b5a030, operation/benchmarks/drivers/calculate.py; its own figures."""
    log = tmp_path / "operation.log.txt"
    log.write_text(OPERATOR.replace(*change) if change[0] else OPERATOR)
    found = read(log)
    assert figures_of == [row.value for row in found.rows]
    assert {("mm in flaggems", "fp16")} >= {(row.name, row.dtype) for row in found.rows}
    assert [bool(why)] * bool(why) == [why in one.why for one in found.refused]


@pytest.mark.parametrize("labels", [("", ""), ("node-1: ", "node-2: ")])
def test_nodes_of_flagperf_that_end_one_epoch_are_no_epochs(tmp_path, labels):
    """Local rank 0 of every node prints the end (FlagPerf 1193d60); it is below 0 without Megatron's time."""
    log = tmp_path / "job.log"
    head, *ends = (SAMPLES / "flagperf-pretraining/rank0.out.log").read_text().splitlines()[2:]
    lines = []
    for _ in range(2):
        lines += [f"{labels[0]}{head}", *(f"{label}{line}" for line in ends for label in sorted(set(labels)))]
        lines += [line for line in ends if not labels[0]]
    log.write_text("\n".join([*lines, f"{labels[1]}Tokens/p/s:  -6190.252032"]))
    found = read(log)
    assert ["epoch 1", "epoch 2"] == [row.name for row in found.rows if row.metric == "tokens_per_s_per_device"]
    assert ("2 epochs", "2 reports of other nodes for the same epochs left out") == found.notes[:2]
    assert ["below 0: this node prints no step time"] == [one.why.partition(";")[0] for one in found.refused]
    log.write_text("\n".join([*ends, *ends]))
    found = read(log)
    assert {"report 1", "report 2"} == {row.name for row in found.rows}
    assert "its reports may be of epochs, nodes or runs" in found.notes[-1]


def test_other_programs_of_flagperf_count_in_their_own_way(tmp_path):
    """Of 70e9 parameters under Megatron, of two stages with 2 and 6 operations, and of tokens that are of a step."""

    def read_lines(*lines):
        return read(written(tmp_path, *lines))

    megatron = read_lines("System tokens per second:  16000.0", "Tokens/p/s:  500.0", "MFU:  0.673")
    assert "2 or 6 operations per parameter and token over a peak that the log" in megatron.rows[2].convention
    stage = ("Tokens/p/s:  4000.0", "Theory TFLOPS:  312")
    llava = read_lines("Pretrain stage", *stage, "MFU:  0.3333", "Finetune stage", *stage, "MFU:  1.0")
    assert [("pretrain stage", "26e9"), ("finetune stage", "78e9")] == [
        (row.name, row.convention.split()[1]) for row in llava.rows if row.metric == "mfu_percent"
    ]
    tuned = read_lines("System tokens per second:  8192", "avg_iter_time(s): 1.9", "Tokens/p/s:  538.9", "MFU:  0.04")
    assert ([538.9, 4.0], 1) == ([row.value for row in tuned.rows], tuned.refused[0].line)


@pytest.mark.parametrize("path", sorted(NCCL.glob("*")), ids=lambda path: path.name)
def test_bandwidths_of_nccl_tests_are_those_printed(path):
    for row in read_sample(path).rows:
        assert float(row.printed) == pytest.approx(row.value, abs=0.0051, rel=1e-3)
        assert (row.ranks, row.dtype) == (8, "fp32")


def test_what_a_log_of_nccl_tests_says_beside_its_figures():
    newest = read(H100, platform="h200")
    last = newest.rows[-1]
    assert ("all_reduce", 17179869184.0, "in place") == (last.collective, last.message_bytes, last.settings["place"])
    assert (58, "h200") == (last.line, last.platform)
    rooted = read(NCCL / "reduce-8xA100-root-column.log")
    assert {"reduce"} == {row.collective for row in rooted.rows}
    old = read(NCCL / "all_reduce-8xA100-old-columns.log")
    assert "4 figures of size 0 left out: nothing was sent" in old.notes


def test_a_secret_of_the_environment_is_never_kept():
    rows = read(NCCL / "constructed-v3.json").rows
    assert {"place", "operation", "environment NCCL_ALGO", "nccl_version"} == set(rows[0].settings)
    assert "must-never-be-kept" not in repr(rows)


def as_json(tmp_path, **changes):
    plain = json.loads((NCCL / "constructed-v3.json").read_text())
    path = tmp_path / "j.json"
    path.write_text(json.dumps({**plain, **changes}, indent=1))
    return path, plain


def test_json_of_other_versions_is_read_by_its_fields(tmp_path):
    _, plain = as_json(tmp_path)
    results = [{**plain["results"][1], "out_of_place": None}]
    results[0]["in_place"] = {**results[0]["in_place"], "cpu_time": results[0]["in_place"].pop("time")}
    devices = plain["config"]["devices"] * 2
    path, _ = as_json(tmp_path, version=4, results=results, config={**plain["config"], "devices": devices, "ngpus": 4})
    rows = read(path).rows
    assert [8, 8, 8] == [row.ranks for row in rows]  # 2 processes x 1 thread x 4 devices
    path, _ = as_json(tmp_path, version=9, config={})
    with pytest.raises(ImportFailed, match="version 9 lacks a field"):
        read(path)


def test_rows_with_a_time_before_each_are_read(tmp_path):
    text = re.sub(r"(?m)^( +\d+ +\d+ +float)", r"2026-07-09 16:03:21 \1", H100.read_text())
    assert [row.value for row in read(H100).rows] == [row.value for row in read(written(tmp_path, text)).rows]


def changed(tmp_path, path, old, new, count=1):
    text = path.read_text()
    assert old in text
    target = tmp_path / path.name
    target.write_text(text.replace(old, new, count))
    return target


ROW = "1112.5  241.29  422.25      0   1113.4  241.09  421.91      0"


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        (H100, "(us)", "(ms)", r":26: the units below the columns' names are not us and GB/s, but ms"),
        (NCCL / "constructed-v3.json", '"end_time"', "", r":1: no JSON of -J .*: it is cut"),
        (NCCL / "alltoall-8xA100.log", "#", "#", r"fits all_gather and all_to_all; say which: --collective NAME"),
        (NCCL / "constructed-v3.json", '"time": 16.94', '"time": NaN', r":58: NaN is not a figure"),
        (SAMPLES / "deepspeed/comms-logger.txt", "(Gbps)", "", r":1: the unit of the rates"),
        (SAMPLES / "flagperf-pretraining/rank0.out.log", "6190.252032", "nan", r":5: Tokens/p/s is 'nan'"),
        (SAMPLES / "pytest-benchmark/0003.json", '"median"', '"midian"', "has no median"),
        (SAMPLES / "pytest-benchmark/0003.json", '"median": ', '"median": -', r"median_s is '-2.*', below 0 s"),
        (SAMPLES / "pytest-benchmark/0003.json", "{", f'{{"deep": {"[" * 100_000}', "nested too deep"),
        (NCCL / "constructed-v3.json", '"nthreads": 1', '"nthreads": 0', r":24: nthreads is '0', no whole number"),
    ],
)
def test_a_damaged_file_is_named_with_line_reason_and_remedy(tmp_path, path, old, new, says):
    count = -1 if old in {"#  Rank", "(us)", "(Gbps)"} else 1
    with pytest.raises(ImportFailed, match=says):
        read(changed(tmp_path, path, old, new, count), path.parent.name)


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        ("flagperf/computation-bf16.log.txt", "TFLOPS", "", {1: "computation-BF16: its unit is missing"}),
        (
            "flagperf/interconnect-intraserver.log.txt",
            "435.74",
            "400",
            {1: "line 2 says 429.50", 2: "400GiB/s is"},
        ),
        ("superbench/results-summary.jsonl", "}", "", {1: "the line is not a whole JSON object"}),
    ],
)
def test_a_damaged_line_costs_that_line(tmp_path, path, old, new, says):
    whole = read(SAMPLES / path)
    found = read(changed(tmp_path, SAMPLES / path, old, new))
    refused = {one.line: one.why for one in found.refused if one not in whole.refused}
    for line, why in says.items():
        assert why in refused[line]
    assert [row.value for row in found.rows] == [row.value for row in whole.rows if row.line not in says]


def test_rows_that_computed_the_wrong_thing_or_contradict_themselves_are_refused(tmp_path):
    wrong = changed(tmp_path, H100, ROW, ROW.replace("422.25      0", "422.25      7"))
    (refused,) = read(wrong).refused
    assert (52, True) == (refused.line, refused.why.startswith("7 values were wrong"))
    doubled = changed(tmp_path, H100, ROW, ROW.replace("241.29", "482.58"))
    (refused,) = read(doubled).refused
    assert "algbw 482.58 differs from size over time, 241.3 GB/s" in refused.why


def test_a_collective_that_does_not_fit_the_log_is_refused():
    with pytest.raises(ImportFailed, match=r"busbw / algbw is 1.750, that of broadcast 1.000 on 8 ranks; it may be"):
        read(H100, collective="broadcast")
    with pytest.raises(ImportFailed, match="'sum' is none of all_reduce"):
        read(H100, collective="sum")


def test_conversions():
    flagperf = read("flagperf/interconnect-intraserver.log.txt").rows
    assert [(233.935, "467.87GB/s", "busbw_gb_per_s")] == [(row.value, row.printed, row.metric) for row in flagperf]
    logger = read("deepspeed/comms-logger.txt").rows
    assert (1376.31 / 8, 678.86 * 2**20) == (logger[-1].value, logger[-1].message_bytes)
    assert 80.0 == logger[0].value  # 0.08 ms
    titan = read("torchtitan/all-ranks-2026-02.log")
    assert [10050.0, 10007.0] == [row.value for row in titan.rows if row.metric == "tokens_per_s_per_device"]
    assert "2 lines of other ranks for the same steps left out" in titan.notes


def test_flagperf_between_nodes_is_converted_only_with_the_ranks_of_a_node(tmp_path):
    path = written(tmp_path, *(f"[FlagPerf Result]Rank {rank}'s transfer-bandwidth=87.5GB/s" for rank in range(16)))
    refused = read(path)
    assert (0, 16) == (len(refused.rows), len(refused.refused))
    assert "--ranks-per-node" in refused.refused[0].why
    rows = read(path, ranks_per_node=8).rows
    assert rows[0].value == pytest.approx(87.5 / factor("all_reduce", 8) * factor("all_reduce", 16))


def test_units_that_a_file_does_not_say_are_not_guessed():
    imported = read("superbench/results-summary.jsonl")
    assert all("IB_write" in refused.text for refused in imported.refused)  # MB/s once, GB/s today
    assert imported.refused
    units = {row.name.partition("/")[0]: row.unit for row in imported.rows if "gemm" in row.name or "mem" in row.name}
    assert {"gemm-flops": "GFLOPS"} == units


def test_figures_of_one_run_have_one_name_and_those_of_a_failed_benchmark_are_refused(tmp_path):
    path = SAMPLES / "superbench/results-summary-v100.json"
    names = {row.metric: row.name for row in read(path).rows if "pytorch-bert-base/" in row.name}
    assert names["step_time_ms"] == names["samples_per_s_per_device"]
    assert {"note"} >= {severity for severity, *_ in doubts(read(path))}
    failed = changed(tmp_path, path, "{", '{"kernel-launch/return_code": 3, "bert_models/return_code": 0,')
    before, after = read(path), read(failed)
    launches = [row for row in before.rows if row.name.startswith("kernel-launch/")]
    assert len(launches) == len(before.rows) - len(after.rows) > 0
    told = [one for one in after.refused if "return code is 3: it failed" in one.why]
    assert [1, *(row.line for row in launches)] == [one.line for one in told]


def test_every_factor_is_that_of_nccl_tests():
    expected = {"all_reduce": 1.75, **dict.fromkeys(("broadcast", "reduce", "sendrecv"), 1.0)}
    assert {name: expected.get(name, 0.875) for name in KINDS} == {name: factor(name, 8) for name in KINDS}


def test_imported_figures_are_held_against_the_rules(tmp_path):
    h200 = load_catalog(()).models["h200"]
    (link,) = doubts(read(H100), h200)
    assert ("note", "above-link") == link[:2]
    assert doubts(read("megatron/megatron-deepspeed.log")) == ()
    titan = SAMPLES / "torchtitan/rank0-2025-07.log"
    found = doubts(read(changed(tmp_path, titan, "0.32%", "152.0%")))
    assert ("contradiction", "share-above-one") in [doubt[:2] for doubt in found]
    megatron = changed(tmp_path, SAMPLES / "megatron/megatron-deepspeed.log", "27.492", "54.984")
    assert "contradiction" in {severity for severity, *_ in doubts(read(megatron))}


def test_the_command_prints_and_writes_them(tmp_path, capsys):
    out = tmp_path / "imported.json"
    shown = printed(capsys, "import", H100, SAMPLES / "megatron/megatron-deepspeed.log", "--out", out)
    assert "192 figures; all_reduce on 8 ranks" in shown
    assert "and 180 more figures" in shown
    assert f"{out}: 212 figures" in shown
    assert (read(H100), read("megatron/megatron-deepspeed.log")) == read_imported(out)
    assert (read(H100),) == read_imported(H100)


@pytest.mark.parametrize(("key", "value"), [("value", -5.0), ("value", float("nan")), ("message_bytes", -1.0)])
def test_a_figure_that_no_import_writes_is_refused(tmp_path, key, value):
    path = tmp_path / "figures.json"
    write_imported(path, read_imported(H100))
    plain = json.loads(path.read_text())
    plain["files"][0]["rows"][0][key] = value
    path.write_text(json.dumps(plain))
    with pytest.raises(ImportFailed, match=r"figures.json: latency_us of .* which no import writes; import again"):
        read_imported(path)


def test_hostile_text_is_shown_as_text(tmp_path, capsys):
    path = changed(tmp_path, SAMPLES / "pytest-benchmark/0003.json", "tests/test_normal.py", "\\u001b[2J<script>")
    shown = printed(capsys, "import", path)
    assert r"\x1b[2J<script>" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nccl-tests",), "the file is missing"),
        (("absent.log",), "cannot be read"),
        ((__file__.replace("imports", "layers"),), "has an unknown format"),
        ((H100, "--platform=h2000"), "h2000"),
    ],
)
def test_wrong_usage_says_what_to_do(capsys, arguments, says):
    assert says in refused(capsys, "import", *arguments)


def test_a_format_that_is_misspelt_names_the_nearest():
    with pytest.raises(ImportFailed, match="did you mean megatron"):
        find_format("megatorn")
