"""FlagPerf and SuperBench: statuses are not figures, conventions are by source, and a bad line costs that line."""

import functools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ImportFailed
from perfsuite.cli.exchange import doubts
from perfsuite.imports.formats import find_format
from perfsuite.imports.row import Source
from perfsuite.platforms import load_catalog
from test_correctness.helpers import import_samples
from test_correctness.helpers.import_samples import SAMPLES, damaged, written

UNITLESS = {"final_loss", "accuracy"}


def read(tmp_path, text, name="flagperf"):
    return import_samples.read(written(tmp_path, text), name)


def superbench(tmp_path, *nodes):
    return read(tmp_path, "".join(f"{json.dumps(node)}\n" for node in nodes), "superbench")


def values(imported):
    return {row.name: (row.value, row.unit) for row in imported.rows}


def test_a_return_code_of_a_rank_is_not_a_figure_and_refuses_those_of_its_rank(tmp_path):
    sample = json.loads((SAMPLES / "superbench/rank-return-codes.jsonl").read_text())
    good = superbench(tmp_path, sample)
    assert len(good.rows) == 8
    assert {"event_time", "wall_time", "h2d_bw", "d2h_bw"} == {row.name[:-20].partition("/")[2] for row in good.rows}
    assert "4 values left out: a status, a count, a setting or of the monitor" in good.notes
    failed = superbench(tmp_path, {**sample, "mem-bw/return_code:1": 33, "mem-bw/sum_bw": 52.2, "mem-bw/h2d_bw": 26.1})
    kept = [(row.name, row.settings["rank"]) for row in failed.rows if row.name.startswith("mem-bw")]
    assert [("mem-bw/h2d_bw on sb-validation-01", "0"), ("mem-bw/d2h_bw on sb-validation-01", "0")] == kept
    texts = [refused.text.removesuffix(" on sb-validation-01") for refused in failed.refused]
    assert ["mem-bw:1", "mem-bw/h2d_bw:1", "mem-bw/d2h_bw:1", "mem-bw/sum_bw", "mem-bw/h2d_bw"] == texts
    assert all("return code is 33" in refused.why for refused in failed.refused)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu-burn/time", 300),
        ("gpu-burn/gpu_0_pass", 1),
        ("gpu-burn/abort", 0),
        ("cpu-stream/threads", 24),
        ("cublas-function/name_a_correctness:0", 1),
        ("cublas-function/name_a_error_rate:0", 0.001),
        ("tcp-connectivity/host_failed_count", 2),
        ("tcp-connectivity/host_success_rate", 0.98),
        ("disk-benchmark/nvme0n1_rand_read_bs", 4096),
        ("kernel-launch:again/3/return_code:7", 0),
        ("monitor/gpu_temperature:0", 61),
    ],
)
def test_statuses_counts_and_settings_are_counted_but_not_imported(tmp_path, key, value):
    found = superbench(tmp_path, {"node": "a", "mem-bw/h2d_bw:0": 26.1, key: value})
    assert {"mem-bw/h2d_bw on a": (26.1, "GB/s")} == values(found)
    assert not found.refused
    assert "1 value left out: a status, a count, a setting or of the monitor" in found.notes


@pytest.mark.parametrize(
    ("key", "value", "figure"),
    [
        ("cpu-hpl/tests_pass", 0, "cpu-hpl/throughput"),
        ("cublas-function/name_a_correctness:0", 0, "cublas-function/name_a_time:0"),
        ("model-benchmarks:x/pytorch-gpt2/return_code", None, "model-benchmarks:x/pytorch-gpt2/fp16_train_step_time"),
        ("nccl-bw:nvlink/return_code", 2, "nccl-bw:nvlink/allreduce_1024_busbw"),
        ("mem-bw/0/return_code:1", -1, "mem-bw/0/h2d_bw:1"),
    ],
)
def test_a_status_of_a_failed_run_refuses_its_figures(tmp_path, key, value, figure):
    found = superbench(tmp_path, {"node": "a", key: value, figure: 9.5, "mem-bw/1/h2d_bw:1": 26.1})
    assert ["mem-bw/1/h2d_bw on a"] == [row.name for row in found.rows]
    assert any(refused.text.startswith(figure) and "it failed" in refused.why for refused in found.refused)


def test_names_since_0_4_and_annotated_ones(tmp_path):
    found = import_samples.read("superbench/current-names.jsonl")
    assert (11, 0) == (len(found.rows), len(found.refused))
    by_name = {(row.name.removesuffix(" on node-a"), row.metric): row for row in found.rows}
    run = "model-benchmarks:stress/pytorch-gpt2-large/fp16_train"
    assert (381.4, "ms") == (by_name[run, "step_time_ms"].value, by_name[run, "step_time_ms"].unit)
    rate = by_name[run, "samples_per_s_per_device"]
    assert (41.8, "samples/s", True) == (rate.value, rate.unit, "of one GPU" in rate.convention)
    for kind in ("default", "nvlink"):
        bus = by_name[f"nccl-bw:{kind}/allreduce_8589934592", "busbw_gb_per_s"]
        assert ("all_reduce", 8589934592.0, 235.05) == (bus.collective, bus.message_bytes, bus.value)


def test_units_that_differ_between_versions_are_refused(tmp_path):
    """cpu-memory-bw-latency: GB/s until 0.6, MB/s later; nvbandwidth: ns in its output, us in the documentation."""
    old = {"cpu-memory-bw-latency/mem_max_bandwidth_all_reads_bw": 264.5}
    latency = {"nvbandwidth/device_latency_sum_lat": 772.58}
    found = superbench(tmp_path, {"node": "a", **old, **latency, "mem-bw/h2d_bw": 26})
    assert ["mem-bw/h2d_bw on a"] == [row.name for row in found.rows]
    assert all("not known" in refused.why for refused in found.refused)
    assert len(found.refused) == 2


def test_a_mean_over_machines_is_not_called_one_node(tmp_path):
    mean = {"kernel-launch/event_time": 0.0057, "gpu-sm-copy-bw/dtoh:0": 4.29, "nccl-bw:default/allreduce_8_time": 35.1}
    found = superbench(tmp_path, mean)
    assert ("no ranks and no node: a mean over many machines, not a run",) == found.notes
    (notes,) = superbench(tmp_path, {"kernel-launch/event_time:0": 0.0057}).notes
    assert notes == "no node is named: one machine, or a mean over machines rank by rank"
    assert ("2 nodes",) == superbench(tmp_path, *({"node": name, "mem-bw/h2d_bw:0": 26.1} for name in "ab")).notes


def test_one_bad_line_costs_that_line(tmp_path):
    good = json.dumps({"node": "a", "mem-bw/h2d_bw:0": 26.1, "mem-bw/d2h_bw:0": float("nan"), "mem-bw/d2d_bw": -1})
    text = f"INFO starts\n{good}\n{good[:60]}\n[1,0]<stdout>: {good.replace('26.1', '24.2')}\n{good}\n"
    found = read(tmp_path, text, "superbench")
    assert [(2, 26.1), (4, 24.2)] == [(row.line, row.value) for row in found.rows]
    assert ["", "2"] == [row.settings.get("run", "") for row in found.rows]
    reasons = {refused.line: refused.why for refused in found.refused}
    assert "not a whole JSON object" in reasons[3]
    assert ["below 0 GB/s" in reasons[4], sum("not a finite" in refused.why for refused in found.refused)] == [True, 2]
    assert {"1 line left out: not JSON", "1 line left out: repeats another line"} <= set(found.notes)
    pretty = '{\n "mem-bw/h2d_bw:0": 26.1,\n "mem-bw/d2h_bw:0": 2\n "mem-bw/d2h_bw:1": 26.3\n}\n'
    assert [2, 4] == [row.line for row in read(tmp_path, pretty, "superbench").rows]


def test_several_objects_in_an_array_or_one_after_the_other_stay_apart(tmp_path):
    nodes = [{"node": name, "mem-bw/h2d_bw:0": value} for name, value in (("a", 26.1), ("b", 24.2))]
    expected = {"mem-bw/h2d_bw on a": (26.1, "GB/s"), "mem-bw/h2d_bw on b": (24.2, "GB/s")}
    indented = "\n".join(json.dumps(node, indent=1) for node in nodes)
    lines = []
    for text in (json.dumps(nodes), json.dumps(nodes, indent=1), indented, indented.replace(",", ",\nINFO", 1)):
        found = read(tmp_path, text, "superbench")
        assert expected == values(found)
        assert not found.refused
        lines.append([row.line for row in found.rows])
    assert [[1, 1], [4, 8], [3, 7], [4, 8]] == lines


def test_a_diagnosis_is_not_read_as_results(tmp_path):
    """Its values are ratios to a baseline: 15.8 would be read as 15.8 ms."""
    ratios = {"kernel-launch/event_overhead:0": 15.7785, "kernel-launch/return_code": 0}
    for keys in ({"diagnosis/category": "KernelLaunch", "index": "a"}, {"Defective Details": "event", "Category": "x"}):
        with pytest.raises(ImportFailed, match="ratios to a baseline"):
            superbench(tmp_path, {**keys, **ratios})


def test_a_nested_object_is_not_unfolded(tmp_path):
    plain = json.dumps({"mem-bw/h2d_bw:0": 26.1, "other": {"mem-bw/d2h_bw:0": 1.5}}, indent=1)
    found = read(tmp_path, plain, "superbench")
    assert {"mem-bw/h2d_bw": (26.1, "GB/s")} == values(found)
    assert ["other"] == [refused.text for refused in found.refused]


def test_a_key_with_two_values_is_refused(tmp_path):
    found = read(tmp_path, '{"mem-bw/h2d_bw:0": 26.1, "mem-bw/h2d_bw:0": 13.0, "mem-bw/d2h_bw:0": 26.3}', "superbench")
    assert ["mem-bw/d2h_bw"] == [row.name for row in found.rows]
    assert "26.1 and 13.0" in found.refused[0].why


def test_a_toolkit_without_ranks_is_halved_where_algbw_says_how_it_counts(tmp_path):
    found = import_samples.read("flagperf/toolkit-intraserver.log.txt")
    algbw, busbw = found.rows
    assert (13.98, "algbw_gb_per_s", "all_reduce") == (algbw.value, algbw.metric, algbw.collective)
    assert (24.465, "busbw_gb_per_s", 8) == (pytest.approx(busbw.value), busbw.metric, busbw.ranks)
    assert busbw.value == pytest.approx(1.75 * algbw.value, rel=1e-3)
    assert "doubled" in busbw.convention
    assert not found.refused
    wrong = read(tmp_path, "[FlagPerf Result]a-algbw=10.00GB/s\n[FlagPerf Result]MPI_x-algbw=10.00GB/s\n"
                           "[FlagPerf Result]MPI_x-bandwidth=90.00GB/s\n")  # fmt: skip
    assert "not twice the busbw" in wrong.refused[0].why


@pytest.mark.parametrize(
    "line",
    [
        "interconnect-MPI_intraserver-bandwidth=325.2 GB/s",
        "interconnect-MPI_interserver-bandwidth=85.4 GB/s",
        "interconnect-MPI_intraserver-bandwidth=48.93GB/s",  # the P2P toolkits of mthreads and nvidia print this name
    ],
)
def test_a_collective_of_a_toolkit_without_algbw_is_refused(tmp_path, line):
    found = read(tmp_path, f"[FlagPerf Result]{line}\n")
    assert not found.rows
    assert "the log does not say which" in found.refused[0].why


@pytest.mark.parametrize(
    ("line", "value", "unit", "says"),
    [
        ("Rank 0's main_memory-capacity=50.93GB", 47.432, "GiB", ""),
        ("main_memory-capacity=64 GB", 64.0, "GiB", "its GB are 2^30 bytes"),
        (" main_memory-capacity=65536 MiB", 64.0, "GiB", ""),
        ("main_memory-capacity=47.43GiB", 47.43, "GiB", ""),
        ("computation-BF16=88.500000 TFLOPS", 88.5, "TFLOPS", ""),
        ("computation-FP32=88.500000 TFLOPS", 88.5, "TFLOPS", "the FP16 toolkit of MTT S4000 prints this name"),
        ("computation-FP16=97.1TFlops", 97.1, "TFLOPS", ""),
        (" computation-INT8=170.1 TFLOPS", 170.1, "TOPS", "printed as TFLOPS"),
        (" interconnect-h2d bandwidth=24.1 GB/s", 24.1, "GB/s", "host to device"),
        ("transfer-bandwidth=24.10GB/s", 24.1, "GB/s", "doubled by the toolkit of dcu"),
        ("main_memory-bandwidth=610.20GiB/s", 655.197, "GB/s", "bytes read and bytes written"),
        ("main_memory-bandwidth=610.2 GB/s", 610.2, "GB/s", "as the vendor's tool counts"),
        (" main_memory-bandwidth = 610.2 GB/s", 610.2, "GB/s", "as the vendor's tool counts"),
        ("inferconnect-P2P_intraserver-bandwidth=46.1GB/s", 46.1, "GB/s", "one direction, or both added"),
        ("interconnect-P2P_interserver=25 GB/s", 25.0, "GB/s", "one direction, or both added"),
        (" c2c global latency=840 ns", 0.84, "us", ""),
        ("power-full_load(core-power)=211.5 W", 211.5, "W", ""),
    ],
)
def test_toolkits_are_read_each_in_its_convention(tmp_path, line, value, unit, says):
    (row,) = read(tmp_path, f"[FlagPerf Result]{line}\n").rows
    assert (pytest.approx(value, rel=1e-4), unit) == (row.value, row.unit)
    assert row.convention.startswith("flagperf")
    assert says in row.convention


@pytest.mark.parametrize(
    "line",
    [
        "Rank 0's computation-BF16=259.2",
        "Rank 0's computation-BF16=259.2TFL",
        "Rank 0's computation-BF16=25 INFO 9.2TFLOPS",
        "Rank 0's INFO computation-BF16=259.2TFLOPS",
        "Rank 0's computation-BF16=259.2TFLOPSINFO",
        "Rank 0's computation-BF16=0.0TFLOPS",
        "Rank 0's computation-BF16=-3TFLOPS",
        "Rank 0's computation-BF16=nanTFLOPS",
        "Rank 0's interconnect-MPI_intraserver-bandwidth=467.87GB",  # cut before /s
        "Rank 0's main_memory-capacity=47.43GiB/s",
        "Rank 0's unheard-of=47.43GB/s",
        "computation-FP8= TFLOPS",
        " programmable_op_perf: sigmoid_rvv=2853us, sigmoid_ct_=12us",
        "Rank 0 BI-V150 has 2 chips and overall GPU computation-BF16=518.4TFLOPS",
        "Rank 0 BI-V150 output bidirectional bandwidth and interconnect-MPI_interserver-bandwidth=10.2GB/s",
    ],
)
def test_a_damaged_result_is_refused_and_the_others_are_read(tmp_path, line):
    found = read(tmp_path, f"[FlagPerf Result]{line}\n[FlagPerf Result]Rank 0's computation-TF32=120.1TFLOPS\n")
    assert {"computation-TF32": (120.1, "TFLOPS")} == values(found)
    (refused,) = found.refused
    assert refused.line == 1
    assert line.strip()[:60] in refused.text


def test_ranks_that_share_a_line_and_runs_that_share_a_log(tmp_path):
    one, two = "[FlagPerf Result]Rank 0's computation-BF16=259.2TFLOPS", "[FlagPerf Result]Rank 1's computation-BF16=2"
    found = read(tmp_path, f"{one}{two}\n{one}\n{one.replace('259.2', '251.7')}\n")
    assert {"computation-BF16": (259.2, "TFLOPS"), "computation-BF16, run 2": (251.7, "TFLOPS")} == values(found)
    assert ["1 repeated line left out"] == list(found.notes)
    assert [1] == [refused.line for refused in found.refused]


def test_figures_are_compared_with_the_peak_of_their_own_dtype(tmp_path):
    h100 = load_catalog(()).models["h100"]
    fp8 = read(tmp_path, "[FlagPerf Result]Rank 0's computation-FP8=1402.0TFLOPS\n")
    assert ("fp8", ()) == (fp8.rows[0].dtype, doubts(fp8, h100))
    fp32 = read(tmp_path, "[FlagPerf Result]Rank 0's computation-FP32=402.0TFLOPS\n")
    assert ["above-peak"] == [rule for _, rule, _ in doubts(fp32, h100)]


FINISHED = {
    "training_images_per_second": 4132.9, "throughput(ips)_raw": 4101.0, "throuhgput(ips)_pure_compute": 4400.5,
    "num_trained_samples": 8000000, "global_steps": 700, "final_acc1": 76.1, "final_loss": 1.9,
    "raw_train_time": 19881.1, "pure_training_computing_time": 0.0, "converged": True,
}  # fmt: skip


def finished(tmp_path, **changes):
    event = {"event": "FINISHED", "value": {**FINISHED, **changes}, "metadata": {"rank": 0}}
    return read(tmp_path, f"0: [PerfLog] {json.dumps(event)}\n")


def test_every_number_of_finished_is_read_or_named(tmp_path):
    found = finished(tmp_path)
    metrics = {row.name.removeprefix("training "): (row.value, row.metric) for row in found.rows}
    assert metrics == {
        "training_images_per_second": (4132.9, "images_per_s"),
        "throughput(ips)_raw": (4101.0, "samples_per_s"),
        "throuhgput(ips)_pure_compute": (4400.5, "samples_per_s"),
        "final_loss": (1.9, "final_loss"),
        "raw_train_time": (19881.1, "time_s"),
    }
    (note,) = found.notes
    for name in ("num_trained_samples", "global_steps", "final_acc1", "pure_training_computing_time (0.0)"):
        assert name in note
    for changes, metric in (
        ({"training_tokens_per_second": 9e5}, "tokens_per_s"),  # Transformer counts tokens in throughput(ips)
        ({"num_trained_samples": None}, "samples_per_s"),
    ):
        rows = finished(tmp_path, **changes).rows
        assert metric in [row.metric for row in rows if row.name == "training throughput(ips)_raw"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -3.0, "fast"])
def test_a_bad_value_of_finished_costs_that_value(tmp_path, value):
    found = finished(tmp_path, training_images_per_second=value)
    assert "training training_images_per_second" not in values(found)
    assert (19881.1, "s") == values(found)["training raw_train_time"]
    assert ["training_images_per_second"] == [refused.text.partition(":")[0] for refused in found.refused]


def test_a_cut_event_is_refused_and_a_second_run_is_told_apart(tmp_path):
    event = json.dumps({"event": "FINISHED", "value": {"e2e_time": 12.5}, "metadata": {"rank": 0}})
    text = f"[PerfLog] {event[:40]}\n[PerfLog] {event}[PerfLog] {event}\n[PerfLog] {event.replace('12.5', '13.5')}\n"
    found = read(tmp_path, text)
    assert {"training e2e_time": (12.5, "s"), "training e2e_time, run 2": (13.5, "s")} == values(found)
    assert [1] == [refused.line for refused in found.refused]
    assert "1 repeated event left out" in found.notes


def test_a_log_without_results_says_so(tmp_path):
    with pytest.raises(ImportFailed, match="the run did not end"):
        read(tmp_path, '[PerfLog] {"event": "STEP_END", "value": {"loss": 2.6}}\n')


WAYS = ("lost", "end cut", "doubled", "doubled in a line", "prefixed otherwise")
WAYS += ("before", "inside", "joined behind", "apart")


@functools.cache
def sample_files(form):
    files = sorted((SAMPLES / form).glob("*"))
    return [(path.read_text().splitlines(), import_samples.read(path).rows) for path in files]


def is_one_of(row, rows):
    """Whether a figure is one of the sample: a line that lost its rank may have that of any rank."""
    return any(
        (row.name, row.metric, row.unit, row.convention) == (other.name, other.metric, other.unit, other.convention)
        and row.settings.get("rank") in (None, other.settings.get("rank"))
        and math.isclose(row.value, other.value, rel_tol=1e-3)  # GiB/s for GB/s, both rounded
        for other in rows
    )


@pytest.mark.extended
@pytest.mark.parametrize("form", ["superbench", "flagperf"])
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_line_gives_a_wrong_figure(form, data):
    lines, right = data.draw(st.sampled_from(sample_files(form)))
    source = Source(path=Path("damaged"), text=damaged(data.draw, lines, WAYS)[1], tool=form)
    try:
        rows = find_format(form).read(source).rows
    except ImportFailed:
        rows = ()
    for row in rows:
        assert row.unit or row.metric in UNITLESS
        assert row.convention
        assert is_one_of(row, right), row
