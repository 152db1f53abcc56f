"""Logs of training programs: runs told apart, conventions, what is not computed, and lines that were cut or mixed."""

from __future__ import annotations

import contextlib
import functools
import gzip
import re
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfsuite.base.errors import ImportFailed
from perfsuite.cli import main as cli
from perfsuite.cli.exchange import doubts
from test_correctness.helpers.import_samples import SAMPLES, damaged, read, written

TRAINING = (
    *("torchtitan", "megatron", "gpt-neox", "primus", "latte", "libai", "oneflow", "deepspeed"),
    *("nanotron", "maxtext", "nanogpt", "nanochat", "internevo", "composer", "transformers"),
)


def values(imported, metric):
    return [row.value for row in imported.rows if row.metric == metric]


def lines_of(name):
    return (SAMPLES / name).read_text().splitlines()


def test_a_run_that_began_again_keeps_its_figures_and_names_the_line():
    resumed = read("megatron/resume.log")
    assert [5361.6, 5470.7, 9361.6, 9470.7, 9411.0] == values(resumed, "step_time_ms")
    assert "line 5: step 71 follows step 72: run 2 begins" in resumed.notes
    assert ["step 71 run 1", "step 71 run 2"] == [row.name for row in resumed.rows if row.settings["step"] == "71"][::3]
    assert {"2"} == {row.settings["run"] for row in resumed.rows if row.line > 4}
    second = read("megatron/resume.log", run=2)
    assert [9361.6, 9470.7, 9411.0] == values(second, "step_time_ms")
    with pytest.raises(ImportFailed, match="the log has no run 3"):
        read("megatron/resume.log", run=3)
    assert () == doubts(resumed)  # losses of the second run repeat those of the first


def titan(step, *, rank="", time="10:00:00,000", tps="7,034"):
    return f"{rank}2025-06-04 {time} - root - INFO - step: {step}  loss:  3.1  tps: {tps}  mfu: 41.19%"


@pytest.mark.parametrize(
    ("lines", "runs"),
    [
        ([titan(1), titan(1), titan(2), titan(1)], 1),  # a rank whose line came late
        ([titan(1), titan(2, time="10:00:09,000"), titan(1, time="10:05:00,000")], 2),
        ([titan(10), titan(10, time="10:05:00,000")], 2),  # one report a run
        ([titan(10), titan(10, time="10:00:08,000"), titan(20, time="10:00:02,000")], 1),  # clocks without a label
        ([titan(1, time="10:05:00,000"), titan(2)], 2),  # time goes back
        ([titan(1, rank="[rank0]:"), titan(1, rank="[rank1]:", time="10:00:40,000")], 1),  # clocks of two hosts
        ([titan(step, rank=f"[rank{rank}]:") for rank in (0, 1) for step in (1, 2)], 1),  # one rank after the other
        ([line.partition("INFO - ")[2] for line in (titan(1), titan(1), titan(2), titan(2))], 1),
        ([line.partition("INFO - ")[2] for line in (titan(1), titan(2), titan(1), titan(2))], 2),
        ([f"[rank0]:{titan(1).partition('INFO - ')[2]}", f"[rank0]:{titan(1, tps='90').partition('INFO - ')[2]}"], 2),
    ],
)
def test_ranks_and_runs_are_told_apart_by_step_time_and_rank(tmp_path, lines, runs):
    imported = read(written(tmp_path, *lines))
    assert runs == len({row.settings.get("run", "1") for row in imported.rows})
    assert runs - 1 == sum("begins" in note for note in imported.notes)


def test_lines_of_validation_are_no_steps():
    imported = read("torchtitan/validate-2025-12.log")
    assert [12.4153, 12.3984, 12.1] == values(imported, "loss")
    assert (15, "1 line of another phase (validate) left out") == (len(imported.rows), imported.notes[0])


def test_nanogpts_evaluation_costs_nothing(tmp_path):
    """nanoGPT issue 178: the line stands below a step, and has two losses."""
    lines = [
        *lines_of("nanogpt/iterations.log"),
        "step 250: train loss 1.5440, val loss 1.7220",
        "saving checkpoint to out",
    ]
    imported = read(written(tmp_path, *lines))
    assert ((), values(read("nanogpt/iterations.log"), "loss")) == (imported.refused, values(imported, "loss"))


def test_a_rank_without_the_last_stage_has_no_loss_and_zeros_are_not_computed():
    imported = read("torchtitan/pipeline-ranks.log")
    assert [(11.731, 4)] == [(row.value, row.line) for row in imported.rows if row.metric == "loss"]
    assert [0.9, 1.81] == values(imported, "tflops_per_device")
    notes = "; ".join(imported.notes)
    for said in (
        "loss -1.0000: a rank without the last pipeline stage prints no loss; left out 3 times, first in line 1",
        "tflops_per_device 0.00: not computed, or less than the digits show; left out 1 time, first in line 5",
    ):
        assert said in notes


def test_nan_costs_its_figure(capsys):
    imported = read("torchtitan/nan-loss.log")
    assert 9 == len(imported.rows)
    assert [(2, "loss is nan, no finite number")] == [(one.line, one.why) for one in imported.refused]
    assert cli.main(["import", str(SAMPLES / "torchtitan/nan-loss.log")]) == 1
    assert "refused, line 2" in capsys.readouterr().out


def test_negative_timers_cost_their_figures():
    imported = read("deepspeed/flops-profiler-negative.txt")
    assert [9340.0, 11.88, 158.64] == [row.value for row in imported.rows]
    assert [8, 9, 11, 12] == [one.line for one in imported.refused]
    assert all("below 0" in one.why for one in imported.refused)


@pytest.mark.parametrize(
    ("name", "metric", "value", "convention"),
    [
        ("megatron/megatron-lm-mixtral.log", "tflops_per_device", 243.6, "model FLOPs: 3 x forward, without recomp"),
        ("megatron/megatron-deepspeed.log", "tflops_per_device", 147.61, "3 x forward, 4 x where activations are"),
        ("megatron/megatron-deepspeed-tgs.log", "tokens_per_s_per_device", 1146.733, "of one device"),
        ("gpt-neox/rank0.log", "tflops_per_device", 150.3, "gpt-neox: 3 x forward, 4 x where activations are"),
        ("gpt-neox/rank0.log", "samples_per_s", 51.234, "of all devices"),
        ("gpt-neox/rank0.log", "micro_forward_ms", 4958.39, "of one micro-batch"),
        ("primus/rank-7.log", "step_time_ms", 13100.0, "last iteration"),
        ("primus/rank-7.log", "mean_step_time_ms", 13240.9, "mean of recent iterations"),
        ("primus/rank-7.log", "tokens_per_s_per_device", 10005.5, "last iteration"),
        ("primus/both-shapes-26.5.log", "mean_tokens_per_s_per_device", 22288.1, "harmonic mean of recent"),
        ("primus/both-shapes-26.5.log", "mean_tflops_per_device", 1162.8, "mean of recent iterations"),
        ("torchtitan/wps-2024-12.log", "tokens_per_s_per_device", 48512.0, "of one device"),
        ("torchtitan/colours-without-esc.log", "tokens_per_s_per_device", 12345.0, "of one device"),
        ("torchtitan/fork-with-total.log", "tokens_per_s_per_device", 52142.0, "of one device"),
        ("megatron/megatron-bridge.log", "tflops_per_device", 62.4, "megatron-bridge: model FLOPs: 3 x forward"),
        ("latte/latte.log", "steps_per_s", 1.52, "mean since the last report"),
        ("libai/events-2022.log", "step_time_ms", pytest.approx(417.9), "printed in s"),
        ("libai/events-2022.log", "samples_per_s", 38.28, "of all devices"),
        ("libai/events-2023.log", "step_time_ms", pytest.approx(4289.3), "printed in s"),
        ("oneflow/gpt-table.log", "step_time_ms", pytest.approx(417.95), "printed in s"),
        ("oneflow/gpt-table.log", "memory_used_gib", 12404 / 1024, "printed in MiB"),
        ("oneflow/gpt-normal.log", "samples_per_s", 127.80213, "of all devices"),
        ("deepspeed/flops-profiler-small.txt", "tflops_per_device", pytest.approx(692e-6), "an assumed 3 x forward"),
        ("deepspeed/wall-clock.txt", "forward_ms", 5073.58, "of all micro-batches of a step"),
        ("deepspeed/wall-clock.txt", "backward_allreduce_ms", 1321.04, "of all micro-batches of a step"),
        ("deepspeed/wall-clock.txt", "samples_per_s", 25.704280480541442, "of all devices, last step"),
        ("deepspeed/wall-clock.txt", "mean_samples_per_s", 25.025771473496132, "mean since the second step"),
        ("deepspeed/wall-clock.txt", "peak_allocated_memory_gib", 38.49, "printed as GB"),
    ],
)
def test_every_figure_has_the_convention_of_its_program(name, metric, value, convention):
    found = next(row for row in read(name).rows if row.metric == metric)
    assert value == found.value
    assert convention in found.convention


def test_seconds_and_the_factor_of_a_formula_are_read(tmp_path):
    line = lines_of("megatron/megatron-deepspeed.log")[0].replace("(ms): 76015.3", "(s): 76.02")
    assert [76020.0] == values(read(written(tmp_path, line)), "step_time_ms")
    lines = [line.replace("= 2 *", "= 3 *").replace("= 3 * fwd flops per GPU / (fwd", "= 4 * fwd flops per GPU / (fwd")
             for line in lines_of("deepspeed/flops-profiler.txt")]  # fmt: skip
    lines = [line.replace("per GPU", "per device").replace("TFLOPS", "TFLOPs") for line in lines]
    found = {row.metric: row.convention for row in read(written(tmp_path, *lines)).rows}
    assert "3 x forward" in found["backward_tflops_per_device"]
    assert "4 x forward" in found["tflops_per_device"]


def test_nemos_iterations_and_megatrons_own_timers(tmp_path):
    nemo = "Training epoch 0, iteration 120/149 | reduced_train_loss: 1.233 | train_step_timing in s: 0.03146 |"
    imported = read(written(tmp_path, nemo))
    assert ([1.233], [pytest.approx(31.46)]) == (values(imported, "loss"), values(imported, "step_time_ms"))
    timers = "time (ms) | forward: 2181.55 | backward: 4000.10 | backward-clip-grad: 3.20 | optimizer: 12.30"
    imported = read(written(tmp_path, *lines_of("gpt-neox/rank0.log"), timers))
    assert 13 == len(imported.rows)
    assert "not imported: timer forward, timer backward, timer backward-clip-grad, timer optimizer" in imported.notes


def test_nemos_progress_bar(tmp_path):
    """The bar counts the steps: its global_step has three digits."""
    bar = "Epoch 0: :   3%|X  | {0}/301500 [1:42:42<55:37:46, v_num=0-56, reduced_train_loss={1}, global_step=9e+3, "
    bar += "consumed_samples=6.3e+5, train_step_timing in s={2}, val_loss=7.040]"
    lines = bar.format(9000, "nan.0", 0.615) + "\r" + bar.format(9001, "3.090", 0.625)
    imported = read(written(tmp_path, lines))
    assert "megatron" == imported.tool
    found = [(row.name, row.metric, row.value) for row in imported.rows]
    assert [("step 9000", "step_time_ms", 615.0), ("step 9001", "loss", 3.09)] == found[:2]
    assert [("step 9001", "step_time_ms", 625.0)] == found[2:]
    assert ["loss is nan, no finite number"] == [one.why for one in imported.refused]
    assert "not imported: consumed_samples, val_loss" in imported.notes
    old = "Epoch 0:   1%|  | 795/77225 [9:07:58<878:01:48, 41.36s/it, loss=3.1, v_num=, reduced_train_loss=3.090]"
    assert [(3.09, "loss")] == [(row.value, row.metric) for row in read(written(tmp_path, old)).rows]


def test_times_of_skipped_iterations_are_said(tmp_path):
    line = " iteration {0}/ 9 | elapsed time per iteration (ms): 7{0}.0 | number of skipped iterations: {1} |"
    path = written(tmp_path, line.format(10, " 10"), line.format(20, "  0"), line.format(30, "  2"))
    said = "2 lines with skipped iterations, whose times have no optimizer: the first at iteration 10"
    assert said in read(path).notes


def test_a_count_of_tokens_with_points_between_thousands_is_refused(tmp_path):
    line = "step:  {}  loss: 10.2  memory: 21.55GiB(22.7%)  tps: {}  tflops: 200.55  mfu: 20.1%"
    steps = ((1, "12,345"), (2, "12.345"), (3, "1.012.345"))
    imported = read(written(tmp_path, *(line.format(step, tps) for step, tps in steps)))
    assert values(imported, "tokens_per_s_per_device") == [12345]
    assert [refused.line for refused in imported.refused] == [2, 3]


def foreign_forms(number):
    yield from (number.replace(".", separator) for separator in (",", " ", "\u00a0", "\u2019"))
    forms = ("1.{}", "1 {}", "{} 5", "{}k", "{}e", "({})", "{}\u00d710\u00b3")
    yield from (form.format(number) for form in forms)


@pytest.mark.parametrize("name", TRAINING)
def test_no_foreign_form_of_a_number_gives_another_figure(name, tmp_path):
    """Commas, blanks, suffixes and powers of other countries and editors: the figure is the same, or refused."""
    path, tried = tmp_path / "log", 0
    for sample in sorted(SAMPLES.glob(f"{name}/*.*")):
        if sample.suffix == ".json":
            continue
        lines, whole = sample.read_text().split("\n"), read(sample)
        kinds = {(row.metric, row.convention): row for row in whole.rows if re.fullmatch(r"\d+\.\d+", row.printed)}
        for row in kinds.values():
            for form in foreign_forms(row.printed):
                changed = lines[row.line - 1].replace(row.printed, form)
                path.write_text("\n".join([*lines[: row.line - 1], changed, *lines[row.line :]]))
                try:
                    found = read(path, row.tool).rows
                except ImportFailed:
                    continue
                same = [one for one in found if (one.line, one.name, one.metric) == (row.line, row.name, row.metric)]
                assert {one.value for one in same if one.convention == row.convention} <= {row.value}, (form, changed)
                tried += 1
    assert tried


def test_a_suffix_in_another_case_costs_its_figure(tmp_path):
    lines = lines_of("nanotron/iterations.log")
    at = next(number for number, line in enumerate(lines) if "tokens_per_sec_per_gpu: " in line)
    lines[at] = re.sub(r"(tokens_per_sec_per_gpu: [\d.]+)K", r"\1k", lines[at])
    imported = read(written(tmp_path, *lines))
    assert at + 1 in [refused.line for refused in imported.refused]


def test_numbers_without_a_meaning_are_listed():
    notes = "; ".join(read("primus/rank-7.log").notes)
    for name in ("consumed samples", "hip mem usage", "learning rate", "loss scale", "grad norm", "nan iterations"):
        assert name in notes
    fork = read("torchtitan/fork-with-total.log")
    assert "not imported: memory in percent, lr, it/s, im/s" in fork.notes
    assert (12, [3.09] * 3) == (len(fork.rows), values(fork, "mfu_percent"))


def test_rows_of_the_communication_logger():
    imported = read("deepspeed/comms-logger-0B.txt")
    assert 10 == len(imported.rows)
    assert ("2 rows of 0 B left out: nothing was sent", ()) == (imported.notes[1], imported.refused)
    busbw = {row.name: (row.value, row.collective) for row in imported.rows if row.metric == "busbw_gb_per_s"}
    assert (pytest.approx(11.46, abs=0.005), "broadcast") == busbw["broadcast 1.45 GB"]
    assert (55.54 / 8, "all_gather") == busbw["all_gather_into_tensor 50.0 MB"]
    straggler = read("deepspeed/comms-logger-straggler.txt")
    assert (2, "1 row of stragglers left out: no rates") == (len(straggler.rows), straggler.notes[1])
    debug = read("deepspeed/comms-logger-debug.txt")
    assert ["broadcast", "reduce_scatter"] == list(dict.fromkeys(row.collective for row in debug.rows))
    assert 6 == len(debug.rows)


def test_the_size_of_a_part_is_not_that_of_an_all_gather(tmp_path):
    """DeepSpeed prints what one rank gives since 2025; its throughput counts what all give."""
    text = "\n".join(lines_of("deepspeed/comms-logger-0B.txt"))
    changed = text.replace("63.47", "507.76").replace("55.54", "444.29")
    for log, size in ((text, 50.0 * 2**20), (changed, None)):
        found = {row.name: row.message_bytes for row in read(written(tmp_path, log)).rows}
        assert size == found["all_gather_into_tensor 50.0 MB"]


def test_a_name_that_was_cut_is_not_another_collective(tmp_path):
    lines = [line.replace("reduce_scatter_tensor", "reduce") for line in lines_of("deepspeed/comms-logger.txt")]
    imported = read(written(tmp_path, *lines))
    assert {"broadcast"} == {row.collective for row in imported.rows}
    assert "busbw of reduce is its throughput, but 1376.31 is not 1468.06" in imported.refused[0].why


def test_rates_of_reduce_scatter_that_count_every_rank_are_refused(tmp_path):
    """DeepSpeed multiplied its size, which is of all ranks, by the ranks: from 2023 to 2026."""
    text = (SAMPLES / "deepspeed/comms-logger.txt").read_text()
    lines = text.replace("1468.06", "9403.36").replace("1376.31", "8815.65").splitlines()
    imported = read(written(tmp_path, *lines))
    assert {"broadcast"} == {row.collective for row in imported.rows}
    assert ["its rates count 16 times its size, once per rank"] == [one.why[:48] for one in imported.refused]


def test_deepspeeds_lines_in_the_log_of_megatron_are_read_with_it():
    imported = read("megatron/megatron-deepspeed-tgs.log")
    rows = [row for row in imported.rows if row.name.startswith("step ")]
    assert [53.753, 52.815] == [row.value for row in rows if row.metric == "samples_per_s"]
    assert {"global step 199", "global step 200"} == {row.name for row in imported.rows if row.name.startswith("g")}
    assert len(imported.rows) == len({(row.name, row.metric) for row in imported.rows})
    assert () == doubts(imported)


def test_deepspeeds_lines_in_another_log_are_said(tmp_path):
    lines = [*lines_of("latte/latte.log"), *lines_of("deepspeed/wall-clock.txt")]
    path = written(tmp_path, *lines)
    imported = read(path)
    assert ("latte", f"DeepSpeed's own lines: perfsuite import deepspeed {path}") == (imported.tool, imported.notes[-1])
    assert 14 == len(read(path, "deepspeed").rows)


@pytest.mark.parametrize(
    ("name", "old", "new", "line", "says"),
    [
        ("torchtitan/rank0-2025-07.log", "30,768", "nan", 1, "tokens_per_s_per_device is nan, no finite"),
        ("torchtitan/rank0-2025-07.log", "30,768  tflops: 3.15  mfu: 0.32%", "30", 1, "tps is '30': the line was cut"),
        ("torchtitan/rank0-2025-07.log", "30,768", "30,7INFO done68", 1, "another line was printed into it"),
        ("torchtitan/rank0-2025-07.log", "step:  3", "ep:  3", 1, "it does not say its step"),
        ("megatron/megatron-deepspeed.log", "76015.3 |", "76 INFO: 3 ok015.3 |", 1, "another line was printed into it"),
        ("megatron/megatron-deepspeed.log", "iteration        1/", "ation        1/", 1, "it does not say its step"),
        ("megatron/megatron-deepspeed.log", "| lm loss", "|\n lm loss", 2, "it does not say its step"),
        ("deepspeed/flops-profiler.txt", "76.67 ms", "76.67", 19, "the unit is ''"),
        ("deepspeed/flops-profiler.txt", f"size:{' ' * 51}1", "size: 0", 10, "world size is '0', not a whole"),
        ("deepspeed/flops-profiler.txt", "433.07", "43", 26, "world size x batch / iter latency is 433.1"),
        ("deepspeed/comms-logger.txt", "1376.31", "1376.3", 6, "the row was cut"),
        ("deepspeed/wall-clock.txt", "10995.77 | backward_inner: 9674.66", "10", 3, "backward is '10': the line"),
        ("oneflow/gpt-table.log", "| 38.28153", "", 7, "the row does not have the 6 columns"),
        ("latte/latte.log", "Sec: 1.52", "Sec: 1.5", 2, "train steps/sec is '1.5': the line was cut"),
    ],
)  # fmt: skip
def test_a_damaged_line_costs_that_line(tmp_path, name, old, new, line, says):  # noqa: PLR0917
    text = (SAMPLES / name).read_text()
    assert old in text
    path = tmp_path / Path(name).name
    path.write_text(text.replace(old, new, 1))
    imported = read(path, Path(name).parent.name)
    assert imported.rows
    assert says in next(one.why for one in imported.refused if one.line == line)


def test_a_log_of_windows_is_read_and_a_compressed_one_refused(tmp_path):
    path, text = tmp_path / "log.txt", (SAMPLES / "megatron/resume.log").read_text()
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-16"))
    assert values(read("megatron/resume.log"), "loss") == values(read(path), "loss")
    path.write_bytes(gzip.compress(text.encode()))
    with pytest.raises(ImportFailed, match="it is compressed; unpack it first"):
        read(path)


def test_the_rest_of_a_wrapped_line_is_refused(tmp_path):
    line = lines_of("megatron/megatron-deepspeed.log")[0]
    at = line.index("| samples per second")
    read_whole = read(written(tmp_path, line))
    wrapped = read(written(tmp_path, line[:at], line[at:], "samples per second: 3.2 |"))
    assert [2] == [refused.line for refused in wrapped.refused]
    assert "the line was cut or wrapped" in wrapped.refused[0].why
    lost = {row.metric for row in read_whole.rows} - {row.metric for row in wrapped.rows}
    assert lost == {"samples_per_s", "tflops_per_device"}


def test_a_log_without_any_figure_is_refused_with_the_reason(tmp_path):
    path = written(tmp_path, "step: 1  loss: 3.1INFO 4  tps: 7")
    with pytest.raises(ImportFailed, match=r":1: loss is '3.1INFO 4': the line was cut.*; no line has a figure"):
        read(path, "torchtitan")


@pytest.mark.parametrize("name", ["megatron/resume.log", "torchtitan/nan-loss.log", "deepspeed/comms-logger.txt"])
@pytest.mark.parametrize("long", ["a" * 300_000, "1" * 300_000 + "x", "a: 1 " * 60_000, " " * 300_000 + "x"])
def test_a_line_of_any_length_is_left_out(tmp_path, name, long):
    lines = lines_of(name)
    imported = read(written(tmp_path, *lines, long, f"step: 1  loss: 3.1  {long}  mfu: 1.00%"))
    assert [row.value for row in read(name).rows] == [row.value for row in imported.rows]


@pytest.mark.parametrize(
    ("name", "figures_of"),
    [
        ("nanotron/iterations.log", {"step_time_ms": [1940, 1910], "tokens_per_s_per_device": [33_800, 34_300]}),
        ("maxtext/completed-steps.log", {"step_time_ms": [3214, 3209], "tflops_per_device": [214.607, 214.941]}),
        ("nanogpt/iterations.log", {"step_time_ms": [41230.17, 271.36, 270.88], "mfu_percent": [38.55, 38.56]}),
        ("nanochat/base-train.log", {"step_time_ms": [501.27, 499.9], "tokens_per_s": [1_045_920, 1_048_786]}),
        ("internevo/record.log", {"tokens_per_s_per_device": [4050.25, 4058.09], "loss": [8.125, 7.9375]}),
        ("composer/console.log", {"tflops_per_device": [pytest.approx(301.924, rel=1e-5)], "mfu_percent": [30.53]}),
        ("transformers/console.log", {"samples_per_s": [62.806], "steps_per_s": [0.981], "loss": [1.7312]}),
    ],
)
def test_programs_are_read_in_the_units_of_perfsuite(name, figures_of):
    imported = read(name)
    assert figures_of == {metric: values(imported, metric) for metric in figures_of}
    assert () == imported.refused


def test_samples_of_the_profiler_are_not_those_of_ranks_that_share_them(tmp_path):
    """DeepSpeed multiplies the micro-batch by all ranks, and divides by the time of all micro-batches."""
    text = (SAMPLES / "deepspeed/flops-profiler.txt").read_text().replace("433.07", "3464.56")
    text = re.sub(r"(world size: +)1\b", r"\g<1>8", text)
    shared = read(written(tmp_path, *text.splitlines()))
    assert ["it counts the samples of 8 ranks, of which 8 share each sample"] == [one.why for one in shared.refused]
    assert ([], [184.73]) == (values(shared, "samples_per_s"), values(shared, "step_time_ms"))
    assert "latencies are of all micro-batches of a step, FLOPs and samples of one" in shared.notes
    text = re.sub(r"(data parallel size: +)1\b", r"\g<1>8", text)
    assert [3464.56] == values(read(written(tmp_path, *text.splitlines())), "samples_per_s")


SUMMARY = "{{'train_runtime': {}, 'train_samples_per_second': {}, 'train_steps_per_second': 0.334, "
SUMMARY += "'train_tokens_per_second': 2737.984, 'train_loss': 2.8478, 'num_input_tokens_seen': 19660800}}"
"""Transformers 4.57 on 24 devices: the tokens of one device, as tokens seen over time and 24."""


def test_summaries_of_ranks_are_one_training(tmp_path):
    """Of 16 ranks in an experiment of BigScience one printed 3.664, the others 3.663."""
    ranks = [SUMMARY.format(273.01, 3.663), "100%|#| 4/4 [04:33<00:00]", SUMMARY.format(272.94, 3.664)]
    imported = read(written(tmp_path, *ranks, SUMMARY.format(273.0, 3.663)))
    assert ({"training 1"}, [3.663]) == ({row.name for row in imported.rows}, values(imported, "samples_per_s"))
    step = "{'loss': 2.7, 'epoch': 1.0}"
    imported = read(written(tmp_path, *ranks, step, SUMMARY.format(272.0, 3.676)))
    rates = {row.name: row.value for row in imported.rows if row.metric == "samples_per_s"}
    assert {"training 1": 3.663, "training 2": 3.676} == rates


def test_tokens_of_a_summary_are_of_one_device_and_those_of_a_step_are_no_summary(tmp_path):
    step = "{'loss': 2.6, 'num_input_tokens_seen': 19660800, 'train_runtime': 2.0, 'train_tokens_per_second': 78016.8}"
    imported = read(written(tmp_path, step, SUMMARY.format(299.2, 8.021)))
    assert {"training 1"} == {row.name for row in imported.rows}
    assert ([2737.984], []) == (values(imported, "tokens_per_s_per_device"), values(imported, "tokens_per_s"))


def test_samples_per_second_without_steps_may_be_steps(tmp_path):
    old = ["  train_runtime            = 0:03:18.28", "  train_samples_per_second =      5.043"]
    with pytest.raises(ImportFailed, match="may be that figure, as transformers before 4"):
        read(written(tmp_path, *old))


@pytest.mark.parametrize(
    ("lines", "tool", "figures_of"),
    [
        (["tflops=63.27010,step=0,loss=11.634403,tgs (tokens/gpu/second)=1424.64,lr=4.0e-07,micro_num=4"],
         "internevo", {"tflops_per_device": [63.2701], "loss": [11.634403], "tokens_per_s_per_device": [1424.64]}),
        (["step 00042 (14.0%) | loss: 4.123456 | lrm: 0.04 | dt: 118ms | tok/sec: 4,429 | mfu: 41.2% | epoch: 1"],
         "nanochat", {"step_time_ms": [118], "tokens_per_s": [4429], "mfu_percent": [41.2]}),
        (["step 00007/21400 (0.03%) | loss: 9.102311 | dt: 501.27ms | tok/sec: 1,045,920 | bf16_mfu: 48.1 | epoch: 1"],
         "nanochat", {"step_time_ms": [501.27], "mfu_percent": [48.1]}),
        (["Step Time : 14.26s GPU utilization: 58.2TFLOP/s/GPU", "Step Time : 9.78s GPU utilization: 52.1 TFLOP/s/GPU"],
         "megatron", {"step_time_ms": [14260, 9780], "tflops_per_device": [58.2, 52.1]}),
        ([" iteration 10/ 99 | elapsed time per iteration (ms): 140.6 | lm-loss: 1.005022E+01 | grad norm: 2.199 |"],
         "megatron", {"step_time_ms": [140.6], "loss": [10.05022]}),
    ],
)  # fmt: skip
def test_forms_of_other_versions_are_read(tmp_path, lines, tool, figures_of):
    imported = read(written(tmp_path, *lines))
    assert (tool, ()) == (imported.tool, imported.refused)
    assert figures_of == {metric: pytest.approx(values(imported, metric)) for metric in figures_of}


def test_the_batch_of_nanotron_may_be_of_tokens(tmp_path):
    """Since 2025 it prints tokens as global_batch_size; before that it printed samples."""
    imported = read("nanotron/iterations.log")
    assert {"step"} == {name for row in imported.rows for name in row.settings}
    assert any("global_batch_size" in note for note in imported.notes)


def test_figures_of_a_batch_whose_line_was_cut_are_refused(tmp_path):
    head = ["         Train loss/train/total: 8.4213", "         Train throughput/tokens_per_sec: 20082.8418"]
    imported = read(written(tmp_path, *head, *lines_of("composer/console.log")))
    assert [(1, "2 figures from here on")] == [(one.line, one.text) for one in imported.refused]
    assert len(read("composer/console.log").rows) == len(imported.rows)


def test_an_epoch_of_nemo_begins_no_run(tmp_path):
    line = "Training epoch {}, iteration {}/1 | global_step: {} | reduced_train_loss: 11.03 | consumed_samples: 9"
    lines = [line.format(step // 2, step % 2, step) for step in range(4)]
    imported = read(written(tmp_path, *lines))
    assert ["step 0", "step 1", "step 2", "step 3"] == [row.name for row in imported.rows if row.metric == "loss"]


def test_a_second_epoch_in_nemos_progress_bar_begins_no_run(tmp_path):
    """A bar without a length, as SageMaker's SDK has it; ``^M`` is a carriage return in a copied text."""
    bar = "Epoch {}: : {} [00:04,  4.36s/it, v_num=d3c7, reduced_train_loss=0.674, global_step={}.000, batch_time=4.4]"
    places = [(0, "1it"), (0, "2/2"), (1, "1it"), (1, "2/2"), (0, "1it")]
    lines = [bar.format(epoch, at, step) for step, (epoch, at) in enumerate(places)]
    imported = read(written(tmp_path, "^M".join(lines[:3]), lines[3]))
    assert ["step 1", "step 2", "epoch 1 step 1", "epoch 1 step 2"] == [row.name for row in imported.rows]
    assert "1" == imported.rows[-1].settings["epoch"]
    again = read(written(tmp_path, *lines))
    assert "line 5: step 1 follows step 2 of epoch 1: run 2 begins" in again.notes


def test_deepspeed_before_0_8_counts_micro_steps(tmp_path):
    """DeepSpeed issues 255 and 1825: 50 counts in 15 s at 13.2 samples/s are micro-steps of 4 samples."""
    lines = ["[INFO 2020-06-08 05:26:19] 0/2650, SamplesPerSec=13.19749106827976"]
    lines.append(
        "[2022-08-29 06:59:41,193] [INFO] [timer.py:198:stop] 0/2700, CurrSamplesPerSec=227.4509, MemAllocated=1GB"
    )
    found = read(written(tmp_path, *lines)).rows
    assert ["micro-step 2650", "micro-step 2700", "micro-step 2700"] == [row.name for row in found]


def pipeline(seconds_each, times, *, every=1, first=""):
    """Lines of the pipeline engine and the time stamps above them."""
    lines = [first]
    for at, (time, rate) in enumerate(times, start=1):
        clock = f"15:{int(at * seconds_each) // 60:02}:{int(at * seconds_each) % 60:02},000"
        lines.append(
            f"[2025-09-04 {clock}] [INFO] [logging.py:107:log_dist] [Rank 0] step={at * every}, skipped=0, lr=[1]"
        )
        lines.append(f"steps: {at * every} loss: 0.06{at}4 lm loss: 0.0500 iter time (s): {time} samples/sec: {rate}")
    return lines


@pytest.mark.parametrize(
    ("lines", "read_times", "says"),
    [
        # diffusion-pipe issue 410: 531 s a step, as the stamps say
        (pipeline(537, [("531.283", "0.008"), ("533.063", "0.008")]), [531283, 533063], ""),
        (pipeline(9, [("0.936", "136.706")] * 2), [936, 936], ""),  # 8 s between them for a checkpoint
        (pipeline(9, [("936.12", "136.706"), ("0.936", "136.706")]), [936], "iter time (s) is '936.12'"),
        (pipeline(1, [("936.120", "0.137")] * 3), [], "0.6.2 and 0.6.3 print milliseconds"),
        (pipeline(9.5, [("0.095", "2694.737")] * 3, every=10), [], "over the 10 steps since the last report; the"),
        (pipeline(9.5, [("0.940", "272.340")] * 3, every=10), [940] * 3, ""),
        (pipeline(99, [("98.962", "0.027")]), [], "time x rate is 2.67, not a whole batch"),
        (pipeline(2, [("5.000", "0.800")] * 2), [], "2.5 times those of the time stamps: lines of another log"),
        (
            pipeline(0, [("0.095", "2694.737")] * 2, every=10, first="DeepSpeed info: version=0.5.4, git-hash=unknown"),
            [],
            "prints the time of one step over the 10 steps",
        ),
        (
            pipeline(0, [("936.120", "0.137")], first="[Rank 0] DeepSpeed info: version=0.6.3+1, git-hash=unknown"),
            [],
            "DeepSpeed 0.6.2 and 0.6.3 print milliseconds",
        ),
    ],
)  # fmt: skip
def test_times_of_the_pipeline_engine_agree_with_rate_version_and_time_stamps(tmp_path, lines, read_times, says):
    imported = read(written(tmp_path, *lines))
    assert ("deepspeed", read_times) == (imported.tool, values(imported, "step_time_ms"))
    assert bool(says) == bool(imported.refused)
    assert all(says in one.why for one in imported.refused[:1])
    assert sum(line.startswith("steps") for line in lines) == len(values(imported, "loss"))
    note = "neither version nor time stamps confirm iter time (s), which some versions print wrongly"
    assert len(read_times) < 2 or note not in imported.notes
    bare = [line for line in lines if line.startswith("steps")]
    assert says.startswith("iter") or note in read(written(tmp_path, *bare)).notes


@pytest.mark.parametrize(("tps", "said"), [("7,034", 0), ("6,900", 0), ("4,100", 1)])
def test_two_programs_in_one_log_are_said(tmp_path, tps, said):
    imported = read(written(tmp_path, titan(1), titan(1, tps=tps)))
    assert said == sum("differs by up to 72%: two programs" in note for note in imported.notes)


def figures(imported):
    """What must be right of a figure, with samples per second of the profiler to the 1 % that they are checked to."""
    return {
        (
            row.metric, row.unit, row.convention, row.settings.get("step"), row.collective, row.message_bytes,
            f"{row.value:.9g}" if "profiled" not in row.name or "samples" not in row.metric else f"{row.value:.1e}",
        )
        for row in imported.rows
    }  # fmt: skip


def figures_of_lines(sample, path, known):
    """What a sample gives, and what each of its lines gives alone: of ranks that print one step any may count."""
    found = figures(read(sample))
    for line in sample.read_text().splitlines():
        path.write_text(line)
        with contextlib.suppress(ImportFailed):
            found |= figures(read(path, known))
    return found


WAYS = ("lost", "end cut", "begin cut", "doubled", "doubled in a line", "prefixed otherwise")
WAYS += ("inside", "split", "split before", "apart")


@functools.cache
def samples(name, folder):
    """Lines of each sample of a format, and its figures."""
    paths = sorted((SAMPLES / name).iterdir())
    return [(path.read_text().split("\n"), figures_of_lines(path, folder / "line.txt", name)) for path in paths]


@pytest.mark.extended
@pytest.mark.parametrize("name", TRAINING)
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_no_damaged_line_gives_a_wrong_figure(name, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    lines, right = data.draw(st.sampled_from(samples(name, folder)))
    way, text = damaged(data.draw, lines, WAYS)
    # Rows whose name is lost follow the name above.
    assume(way != "lost" or not any("Comm. Op" in line for line in lines))
    try:
        imported = read(written(folder, text), name)
    except ImportFailed:
        return  # no other line of the sample has a figure
    assert set() == figures(imported) - right
    assert all(row.convention and (row.unit or row.metric == "loss") for row in imported.rows)
