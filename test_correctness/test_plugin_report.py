"""What people see: the header, the section at the end, progress, reports as pure functions of results."""

import dataclasses
import re
import shutil

import pytest

from perfsuite.base.units import format_bytes
from perfsuite.plugin.progress import Progress
from perfsuite.plugin.summary import paced
from perfsuite.record.result import Peak, Peaks, Work
from perfsuite.record.step import Arrival
from perfsuite.reports.layout import grid_lines
from perfsuite.reports.screen import outcomes
from perfsuite.reports.terminal import fit_collectives, fits_grid, metric_tables
from test_correctness.helpers.measurements import result_of
from test_correctness.helpers.report_runs import trained
from test_correctness.helpers.runs import remeasured
from test_correctness.helpers.scripted_driver import measured_on, measurement, repository

LINK = Peak(value=400.0, unit="GB/s", source="data sheet")


def collective(size, time_s, *, name="all_reduce", ranks=4, dtype="fp32"):
    return result_of(
        measured_on(ranks, (time_s,) * 5, arrival=Arrival(late_rank=2, lag_s=3e-6, iterations=20)),
        f"test_perf/test_collectives.py::test_{name}[s4000-ws{ranks}-{format_bytes(size)}-{dtype}]",
        parameters={"message_bytes": size, "dtype": dtype},
        platform="s4000",
        work=Work(collective=name, message_bytes=float(size), dtype=dtype),
        metrics=("latency_us", "algbw_gb_per_s", "busbw_gb_per_s"),
        peaks=Peaks(link=LINK),
    )


def swept(**changes):
    """Sizes of a collective that takes 20 us plus one second per 10 GB."""
    return [collective(size, 20e-6 + size / 10e9, **changes) for size in (1 << 10, 1 << 20, 1 << 30)]


def test_a_table_shows_time_metrics_share_and_ranks_in_120_columns():
    lines = metric_tables(swept(), verdicts={result.case: "pass" for result in swept()})
    assert lines[:2] == ["", "test_perf/test_collectives.py"]
    assert lines[2] == ("  in every row: ranks 4, spread slowest 3.0% r3, last by r2 3 us, samples 5 x 7, verdict pass")
    assert lines[3].split() == ["case", "median", "algbw", "busbw", "of"]
    assert lines[4].split() == ["GB/s", "GB/s", "peak"]
    assert re.split(r"\s{2,}", lines[6]) == [
        "test_all_reduce[s4000-ws4-1MiB-fp32]",
        "124.9 us",
        "8.398",
        "12.6",
        "3.1%",
    ]
    assert max(len(line) for line in lines) <= 120


def test_what_no_case_has_is_no_column():
    plain = [remeasured(result, arrival=None, ranks=()) for result in swept()]
    lines = metric_tables([dataclasses.replace(result, metrics=(), world_size=1) for result in plain])
    assert lines[2:4] == ["  in every row: ranks 1, samples 5 x 7", lines[3]]
    assert lines[3].split() == ["case", "median"]


def test_missing_shares_have_their_reason_once():
    results = [
        dataclasses.replace(result, metrics=(dataclasses.replace(result.metrics[2], peak=None, note="unknown device"),))
        for result in swept()
    ]
    lines = metric_tables(results)
    assert [line for line in lines if "unknown device" in line] == ["  busbw_gb_per_s: unknown device"]
    assert "of peak" not in lines[2]


def test_out_of_memory_stands_among_the_measured_cases():
    gone = dataclasses.replace(
        swept()[0], outcome="out_of_memory", detail="OOM at 44 GiB of 48 GiB", metrics=(), measurement=None
    )
    lines = metric_tables([swept()[1], gone])
    assert len([line for line in lines if line.startswith("case")]) == 1
    assert any("OOM at 44 GiB of 48 GiB" in line for line in lines)
    assert outcomes([swept()[1], gone]) == "1 measured, 1 out of memory"


def test_alpha_and_beta_are_fitted_per_collective_ranks_and_dtype():
    results = [*swept(), *swept(ranks=8), *swept(dtype="bf16"), *swept(name="broadcast")[:2]]
    fits = fit_collectives(results)
    assert [(fit.collective, fit.world_size, fit.dtype, fit.sizes) for fit in fits] == [
        ("all_reduce", 4, "fp32", 3),
        ("all_reduce", 8, "fp32", 3),
        ("all_reduce", 4, "bf16", 3),
    ]
    assert fits[0].fit.alpha_us == pytest.approx(20.0)
    assert fits[0].fit.beta_gb_per_s == pytest.approx(10.0)
    assert fits[0].busbw_limit_gb_per_s == pytest.approx(15.0)
    assert fits[1].busbw_limit_gb_per_s == pytest.approx(17.5)
    table = grid_lines([fits_grid(fit_collectives(results))])
    assert len(table) == 3 + 3
    assert table[3].split()[:3] == ["all_reduce", "4", "fp32"]
    assert max(len(line) for line in table) <= 120


def test_sizes_that_fit_no_line_say_why():
    results = [collective(size, 1e-3 / size) for size in (1, 2, 4)]
    (fit,) = fit_collectives(results)
    assert (fit.fit, fit.reason) == (None, "time does not grow with size, so there is no bandwidth to fit")
    assert fit.reason in grid_lines([fits_grid(fit_collectives(results))])[3]


def test_too_few_sizes_give_no_fit():
    assert grid_lines([fits_grid(fit_collectives(swept()[:2]))]) == []


SWEPT = """
@sizes(full=["1GiB"], small=["1KiB", "1MiB", "16MiB"])
@world_sizes(2)
def test_sum(perf, ranks, message_bytes, dtype):
    perf(Sum(message_bytes=message_bytes, dtype=dtype), on=ranks)

def test_product(perf):
    perf(Product(side=64))
"""


def test_the_section_of_a_run(pytester, monkeypatch):
    def script(job):
        size = job.workload.parameters().get("message_bytes", 0)
        return measurement(job, (1e-4 + size / 1e9,) * 5)

    found = repository(pytester, monkeypatch, SWEPT, script).run()
    found.assert_outcomes(passed=4)
    found.stdout.fnmatch_lines(
        [
            "perfsuite: 0.1.0, platform cpu (*), transport local, torch *, hardware cpu-*",
            "*= perfsuite: cpu (*) =*",
            "4 measured; hardware cpu-*",
            "test_it.py",
            "  in every row: ranks 2, spread slowest 1.0% r1, samples 5 x 7*",
            "case * median * algbw * busbw",
            "* MB/s * MB/s",
            "test_sum[[]cpu-ws2-1KiB-fp32[]] *",
            "  busbw_gb_per_s: no peak is published for a CPU*",
            "case * ranks * median * GFLOPS * of * samples*",
            "test_product[[]cpu[]] *",
            "t(S) = alpha + S / beta * ranks * dtype * alpha * beta * busbw * misfit * sizes",
            "* us * GB/s * limit",
            "all_reduce * 2 * fp32 * 100 * 1 * 3",
            "peak fp32 0.5 TFLOPS (measured here, best of probes at start and end: a larger product on 1 threads)",
            "clock perf_counter: resolution 0.05 us, reading it adds 0.1 us to a sample",
            "journal */.perfsuite/journal-*.jsonl",
        ]
    )


def test_a_machine_that_is_not_quiet_is_told(pytester, monkeypatch):
    def script(job):
        measured = measurement(job)
        shared = dataclasses.replace(measured.ranks[0], cpu_share=0.81)
        return dataclasses.replace(measured, ranks=(shared,), involuntary_switches=(1, 0, 0))

    found = repository(pytester, monkeypatch, SWEPT, script).run("-k", "product")
    folded = re.search(r"^warning: the machine is not quiet: .*(\n  .*)*", found.stdout.str(), re.MULTILINE)
    assert folded
    assert max(map(len, folded[0].splitlines())) <= 120
    line = " ".join(folded[0].split())
    assert line.endswith("1 of 1 case disturbed, e.g. test_it.py::test_product[cpu]: rank 0 got 81% of its core")


def test_a_directory_that_is_not_the_root_is_told(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, SWEPT)
    monkeypatch.chdir(pytester.mkdir("below"))
    found = repo.run("--rootdir=..", "..", "-k", "product")
    found.assert_outcomes(passed=1, deselected=3)
    found.stdout.fnmatch_lines(["perfsuite: warning: the current directory is not the root *"])


def test_progress_is_foretold_from_the_cases_that_ran():
    progress = Progress(total=80, started_at=100.0)
    assert progress.describe("test_it.py::test_x", 100.0) == "case 1 of 80, 0 s: test_it.py::test_x"
    assert not progress.is_long(105.0)
    progress.done = 20
    assert progress.left(140.0) == (120.0, "so far")
    assert progress.describe("x", 140.0) == "case 21 of 80, 40 s, about 2 min 0 s left (so far): x"
    assert progress.is_long(140.0)


def test_a_long_run_writes_few_lines_to_a_log_and_a_short_one_none(pytester, monkeypatch):
    tests = "".join(f"def test_{number}(perf):\n    perf(step, n={number})\n" for number in range(6))
    clock = [0.0]

    def script(job):
        clock[0] += 20.0
        return measurement(job)

    repo = repository(pytester, monkeypatch, tests, script)
    assert "case " not in repo.run().stdout.str().partition("= perfsuite: cpu")[0]
    shutil.rmtree(pytester.path / ".perfsuite")  # what cases took in this second foretells nothing of that clock
    monkeypatch.setattr("perfsuite.plugin.progress.time.monotonic", lambda: clock[0])
    found = repo.run()
    found.assert_outcomes(passed=6)
    found.stdout.fnmatch_lines(
        [
            "test_it.py ..",
            "perfsuite: case 3 of 6, 40 s, about 1 min 20 s left (so far): test_it.py::test_2[[]cpu[]]",
            "test_it.py ..",
            "perfsuite: case 5 of 6, 1 min 20 s, about 40 s left (so far): test_it.py::test_4[[]cpu[]]",
            "test_it.py ..*",
        ]
    )
    assert "case " not in repo.run("-q").stdout.str().partition("= perfsuite: cpu")[0]


def test_time_left_is_what_cases_took_the_last_time_and_says_so():
    progress = Progress(
        total=4, started_at=0.0, pending={"t.py::a[2]", "t.py::b[1]", "t.py::c[1]"}, expected_s={"t.py::b[1]": 200.0}
    )
    assert progress.left(0.0) == (600.0, "last run")
    progress.took_s["t.py::a[1]"] = 5.0
    progress.done = 1
    assert progress.left(10.0) == (200.0 + 5.0 + 10.0, "last run")
    progress.pending -= {"t.py::b[1]", "t.py::c[1]"}
    assert progress.left(10.0) == (5.0, "same test")
    assert "about 5 s left (same test): t.py::a[2]" in progress.describe("t.py::a[2]", 10.0)


def test_the_command_that_shows_a_run_again_is_quoted_for_the_shell(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, "def test_it(perf):\n    perf(step)\n")
    repo.run("--perf-journal=my run.jsonl").stdout.fnmatch_lines(
        ["next *perfsuite report 'my run.jsonl' --html run.html"]
    )


# -- a kernel that paces TCP: small messages of gloo scatter -----------------------------------------------------------


def sent(backend, ranks):
    return remeasured(trained("test_ddp", ranks, 1.0, model="gpt2", strategy="ddp"), backend=backend)


@pytest.mark.parametrize(
    ("control", "backend", "ranks", "told"),
    [
        ("bbr", "gloo", 2, True),
        ("bbr2", "gloo", 2, True),
        ("cubic", "gloo", 2, False),
        ("unknown", "gloo", 2, False),
        ("bbr", "nccl", 2, False),
        ("bbr", "gloo", 1, False),
        ("bbr", "gloo", 0, False),
    ],
)
def test_pacing_is_told_where_messages_went_by_it(control, backend, ranks, told):
    line = paced(control, [sent(backend, ranks)] if ranks else [])
    assert bool(line) == told
    assert not told or f"TCP uses {control}:" in line
