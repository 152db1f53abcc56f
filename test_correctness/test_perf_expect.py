"""``--perf-expect`` and the acceptance run, as pytest runs them."""

import dataclasses
import itertools
from html import unescape

import pytest

from perfsuite.base.errors import UnsupportedCase
from perfsuite.cli.main import main
from perfsuite.metrics import derive, read_run
from perfsuite.metrics.pairs import name_of
from perfsuite.platforms import Machine, detect_machine, families, load_catalog
from perfsuite.plugin import suite
from perfsuite.plugin.expecting import slow_members
from perfsuite.record.result import Peaks, Result, Work
from perfsuite.record.step import SpanTotal
from perfsuite.reports.page import page
from perfsuite.reports.summary import markdown_summary
from test_correctness.helpers.measurements import measurement_of, rank_facts
from test_correctness.helpers.scripted_driver import measurement, repository

# -- --perf-expect -----------------------------------------------------------------------------------------------

TESTS = """
@sizes(full=[1024], small=[1024, 4096])
def test_sum(perf, message_bytes):
    perf(Sum(message_bytes=message_bytes))
"""
CPU_ROW = """
[[expectation]]
platform = "cpu"
workload = "Sum"
parameters = { message_bytes = 1024, dtype = "fp32" }
metric = "latency_us"
unit = "us"
kind = "own"
low = 500000.0
spread = 0.01
date = "2026"
source = "this site"
"""


@pytest.fixture
def repo(pytester, monkeypatch):
    (pytester.path / "own.toml").write_text(CPU_ROW)
    return repository(pytester, monkeypatch, TESTS)


def test_a_result_below_expectation_fails_its_case_and_the_run(repo, pytester):
    (pytester.path / "own.toml").write_text(CPU_ROW.replace("500000", "250000"))
    found = repo.run("--perf-expect=own.toml")
    assert pytest.ExitCode.TESTS_FAILED == found.ret
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(
        [
            "below expectation in all of 4 runs: latency_us: 100.0 % slower (69.3 standard deviations) than own row *",
            "*perfsuite expectations*",
            "question *best *expected *of low *verdict",
            "Sum fp32 1 rank * LOW",
            "verdict     FAIL: 1 of 1 judged result below expectation",
        ]
    )
    (end,) = [number for number, line in enumerate(found.outlines) if line.startswith("next  ")]
    assert found.outlines[end + 1].startswith("====")
    assert ["question"] == [line.split()[0] for line in found.outlines if line.startswith("question ")]


def test_a_run_in_which_nothing_is_judged_is_not_green(repo):
    found = repo.run("--perf-expect")
    assert pytest.ExitCode.USAGE_ERROR == found.ret
    found.stdout.fnmatch_lines(["verdict     FAIL: no result was judged by an expectation; add *"])
    assert pytest.ExitCode.OK == repo.run("--perf-allow-unjudged", "--perf-expect").ret


def test_a_case_that_failed_or_was_cut_withholds_pass(repo):
    found = repo.run("--perf-expect=own.toml", "--perf-time-budget=0.000001s")
    assert pytest.ExitCode.OK != found.ret
    found.stdout.fnmatch_lines(["*FAIL: the time budget left out * case*"])


def test_a_second_look_clears_a_transient(repo):
    """The first run is twice as slow; the first fresh run is not."""
    runs = []

    def script(job):
        runs.append(job)
        return measurement(job, (1.0, 1.0, 1.0) if len(runs) == 1 else (0.5, 0.5, 0.5))

    repo.driver.script = script
    found = repo.run("--perf-expect=own.toml")
    assert (pytest.ExitCode.OK, 3) == (found.ret, len(runs))
    assert [False, True, False] == [job.fresh for job in runs]
    found.stdout.fnmatch_lines(
        ["verdict     PASS: 1 judged*", "*test_sum*latency_us below expectation at first, not in look 1 of 3"]
    )


ACCEPTED = """
@acceptance(1024)
@sizes(full=[1024], small=[1024, 4096])
@world_sizes(2, 4)
@dtypes("fp32", "bf16")
def test_sum(perf, ranks, message_bytes, dtype):
    perf(Sum(message_bytes=message_bytes, dtype=dtype), on=ranks)

@acceptance()
def test_product(perf):
    perf(Product())

def test_other(perf):
    perf(step)
"""


def names(found):
    return [line.partition("::")[2] for line in found.outlines if "::" in line]


def accepted(pytester, monkeypatch, script=measurement):
    return repository(pytester, monkeypatch, "from perfsuite import acceptance\n" + ACCEPTED, script)


def test_the_acceptance_run_has_the_largest_world_size_and_the_named_size(pytester, monkeypatch):
    found = accepted(pytester, monkeypatch).run("-m", "acceptance", "--collect-only", "-q")
    assert ["test_sum[cpu-ws4-1KiB-fp32]", "test_product[cpu]"] == names(found)


def test_a_size_that_the_test_does_not_have_is_refused(pytester, monkeypatch):
    text = ACCEPTED.replace("acceptance(1024)", "acceptance(2048)")
    found = repository(pytester, monkeypatch, "from perfsuite import acceptance\n" + text).run()
    found.stdout.fnmatch_lines(["*@acceptance: sizes=[[]2048] is not among the sizes of @sizes; *"])


PRODUCT_ROW = (
    CPU_ROW.replace('"Sum"', '"Product"')
    .replace('{ message_bytes = 1024, dtype = "fp32" }', "{ side = 64 }")
    .replace('metric = "latency_us"\nunit = "us"', 'metric = "tflops"\nunit = "TFLOPS"')
    .replace("500000.0", "1e-6")
)


def test_a_skipped_acceptance_case_withholds_pass(pytester, monkeypatch):
    def script(job):
        if job.world_size > 1:
            raise UnsupportedCase("not here")
        return measurement(job)

    repo = accepted(pytester, monkeypatch, script)
    (pytester.path / "own.toml").write_text(PRODUCT_ROW)
    found = repo.run("-m", "acceptance", "--perf-expect=own.toml")
    found.assert_outcomes(passed=1, skipped=1, deselected=8)
    assert pytest.ExitCode.TESTS_FAILED == found.ret
    found.stdout.fnmatch_lines(
        [
            "verdict     FAIL: 1 acceptance case without a result, as *test_sum*cpu-ws4-1KiB-fp32*",
            "next        perfsuite fleet *",
        ]
    )


def test_devices_are_expected_by_the_row_in_the_acceptance_run_alone(pytester, monkeypatch):
    cpu, model = detect_machine(load_catalog(), "cpu"), load_catalog().find("h200")
    devices = tuple(dataclasses.replace(cpu.devices[0], index=index, reported_name="H200") for index in range(7))
    machine = Machine(family=families()["cpu"], model=model, devices=devices)
    monkeypatch.setattr(suite, "detect_machine", lambda *_: machine)
    repo = accepted(pytester, monkeypatch)
    found = repo.run("-m", "acceptance", "--perf-allow-unjudged", "--perf-expect")
    assert pytest.ExitCode.TESTS_FAILED == found.ret
    found.stdout.fnmatch_lines(["verdict     FAIL: 7 of 8 devices"])
    assert pytest.ExitCode.OK == repo.run("--perf-allow-unjudged", "--perf-expect").ret


def test_no_device_at_all_is_not_a_number(pytester, monkeypatch):
    found = accepted(pytester, monkeypatch).run("--perf-expect-devices=0")
    found.stderr.fnmatch_lines(["ERROR: --perf-expect-devices: 0 is not a number of devices; give at least 1"])


# -- devices and links that are slower than their like ------------------------------------------------------------


def on_devices(job, slow):
    """A measurement on a device for each rank, of which some take 20 % longer."""
    ranks = [
        rank_facts(rank, device=f"cuda:{rank}", median_s=0.5 * (1.2 if rank in slow else 1.0))
        for rank in range(job.world_size)
    ]
    return dataclasses.replace(measurement(job), ranks=tuple(ranks), aligned=True)


EVERYWHERE = """
@world_sizes(8)
def test_everywhere(perf, ranks):
    perf(Product(), on=ranks)
"""


def pairs_of(slow):
    """A result of eight devices whose kinds of links no tool told; pairs that ``slow`` says take twice as long."""
    spans = tuple(
        SpanTotal(name=name_of(pair, 8, both=False), time_s=0.0, count=1, slowest_rank=0, slowest_s=1.0 + slow(*pair))
        for pair in itertools.permutations(range(8), 2)
    )
    ranks = [rank_facts(rank, device=f"cuda:{rank}") for rank in range(8)]
    return Result(
        case="test_it[cpu-ws8]",
        workload="perfsuite.workloads.pairs:Pairs",
        parameters={},
        platform="cpu",
        world_size=8,
        outcome="measured",
        work=Work(collective="pairs", message_bytes=1e6),
        measurement=measurement_of([1.0], ranks, spans=spans),
    )


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        (lambda a, b: (a, b) == (2, 5), {"cuda:2 cuda:5"}),
        (lambda a, b: a == 6, {f"cuda:6 cuda:{other}" for other in (0, 1, 2, 3, 4, 5, 7)}),
        (lambda a, b: abs(a - b) >= 5, set()),
        (lambda a, b: False, set()),
    ],
    ids=["a link", "a device", "the topology", "nothing"],
)
def test_pairs_that_are_slow_by_topology_are_no_fault(slow, named):
    """Where the kinds of links are unknown, slow pairs are a fault if one device is in all of them."""
    assert named == set(slow_members(pairs_of(slow)))


# -- the same verdict everywhere ------------------------------------------------------------------------------------


def said_of(pytester, monkeypatch, capsys):
    """Show, the page, the report and a summary of the run that just ended, as texts."""
    (journal,) = (pytester.path / ".perfsuite").glob("journal-*.jsonl")
    monkeypatch.setattr(page, "renderer", lambda: None)
    run, html = read_run(journal), pytester.path / "page.html"
    said = {}
    for name, command in (("show", ["show"]), ("html", ["report", str(journal), "--html", str(html)])):
        assert main(command) == 0
        said[name] = capsys.readouterr().out
    said["html"] = html.read_text(encoding="utf-8")
    said["md"] = markdown_summary(run, ())
    return run, said


@pytest.mark.parametrize(
    "example",
    [
        (
            ["--perf-expect", "--perf-expect-devices=2"],
            [[3]],
            4,
            "FAIL: 1 of 2 devices; 1 result in which a device or link is slower than its like",
            "SLOW: cuda:3 takes 20 % longer in all of 4 runs: test_everywhere[cpu-ws8]",
        ),
        (
            ["--perf-expect", "--perf-expect-devices=1"],
            [[3], []],
            2,
            "PASS: 0 judged results, 1 not judged",
            "test_everywhere[cpu-ws8]: cuda:3 takes 20 % longer at first, not in look 1",
        ),
        (
            ["--perf-expect"],
            [[3, 6], [6]],
            4,
            "FAIL: 1 result in which a device or link is slower than its like",
            "SLOW: cuda:6 takes 20 % longer in all of 4 runs: test_everywhere[cpu-ws8]",
        ),
        (["--perf-expect=own.toml"], [[]], 1, "PASS: 1 judged result, 0 not judged", ""),
    ],
    ids=["slow and absent", "slow once", "one of two slow once", "good"],
)
def test_show_page_and_summary_have_the_verdict_of_the_screen(pytester, monkeypatch, capsys, example):
    """A device fails its case only where it is slower than the others in every look."""
    options, slow, runs, verdict, remark = example
    jobs = []

    def script(job):
        jobs.append(job)
        return on_devices(job, slow[min(len(jobs), len(slow)) - 1])

    row = PRODUCT_ROW.replace("date =", "ranks_per_node = 8\ndate =")
    (pytester.path / "own.toml").write_text(row)
    repo = repository(pytester, monkeypatch, EVERYWHERE, script)
    found = repo.run("--perf-allow-unjudged", *options)
    assert runs == len([job for job in jobs if job.world_size == 8])
    assert verdict.startswith("FAIL") == (found.ret == pytest.ExitCode.TESTS_FAILED)
    assert (found.stdout.str().count(f"\n{' ' * 12}SLOW") == 1) == remark.startswith("SLOW")
    screen = " ".join(found.stdout.str().split())
    run, said = said_of(pytester, monkeypatch, capsys)
    assert run.end.verdict.startswith(verdict)
    for text in (screen, *(" ".join(unescape(one).replace("\\", "").split()) for one in said.values())):
        assert verdict in text
        assert remark in text
    title = said["html"].partition("<title>")[2].partition("</title>")[0]
    assert title.startswith(verdict.partition(";")[0])


def test_an_interrupted_run_does_not_pass(pytester, monkeypatch, capsys):
    """Ctrl-C after the first of two cases: the run printed PASS for the judged one."""

    def script(job):
        if getattr(job.workload, "side", 0) == 128:
            pytest.exit("ended by the user")
        return measurement(job)

    (pytester.path / "own.toml").write_text(PRODUCT_ROW)
    tests = "def test_a(perf):\n    perf(Product())\n\ndef test_b(perf):\n    perf(Product(side=128))\n"
    found = repository(pytester, monkeypatch, tests, script).run("--perf-expect=own.toml")
    assert found.ret == pytest.ExitCode.INTERRUPTED
    found.stdout.fnmatch_lines(["verdict     FAIL: the run was interrupted*"])
    run, said = said_of(pytester, monkeypatch, capsys)
    assert run.was_interrupted
    assert all("FAIL: the run was interrupted" in text for text in said.values())


def test_a_test_that_fails_after_its_measurement_withholds_pass(pytester, monkeypatch):
    (pytester.path / "own.toml").write_text(PRODUCT_ROW)
    tests = "def test_a(perf):\n    perf(Product())\n    assert False\n"
    found = repository(pytester, monkeypatch, tests).run("--perf-expect=own.toml")
    found.stdout.fnmatch_lines(["verdict     FAIL: 1 case failed; *"])


# -- the soak ----------------------------------------------------------------------------------------------------

SOAK = """
import pytest
from perfsuite import acceptance
from perfsuite.workloads.matmul import Soak

@acceptance()
@pytest.mark.soak
def test_aaa_soak(perf):
    perf(Soak(m=64, k=64, n=64, seconds=7.0))

@acceptance()
def test_product(perf):
    perf(Product())
"""


def test_the_soak_is_last_and_only_in_runs_that_ask_for_it(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, SOAK)
    assert ["test_product[cpu]", "test_aaa_soak[cpu]"] == names(repo.run("-m", "acceptance", "--collect-only", "-q"))
    for plain in ((), ("-k", "cpu"), ("-m", "not slow"), ("-m", "acceptance", "-k", "not soak")):
        assert ["test_product[cpu]"] == names(repo.run("--collect-only", "-q", *plain))
    assert ["test_aaa_soak[cpu]"] == names(repo.run("--collect-only", "-q", "-k", "soak"))
    assert ["test_aaa_soak[cpu]"] == names(repo.run("--collect-only", "-q", "test_it.py::test_aaa_soak"))


@pytest.mark.parametrize("beside", ["", SOAK], ids=["alone", "beside perf cases"])
def test_tests_of_others_with_a_marker_soak_run_where_they_stand(pytester, monkeypatch, beside):
    theirs = "import pytest\n\n@pytest.mark.soak\ndef test_a():\n    pass\n\ndef test_b():\n    pass\n" + beside
    found = names(repository(pytester, monkeypatch, theirs).run("--collect-only", "-q"))
    assert ["test_a", "test_b"] == [name for name in found if "[" not in name]


@pytest.mark.parametrize(("asked", "seconds"), [((), 7.0), (("--perf-sustain=9s",), 9.0)])
def test_the_end_of_a_soak_is_compared_with_its_beginning(pytester, monkeypatch, asked, seconds):
    times_s = (0.010,) * 30 + (0.0125,) * 40
    repo = repository(pytester, monkeypatch, SOAK, lambda job: measurement(job, times_s, iterations=1000))
    found = repo.run("-m", "acceptance", "--perf-expect", "--perf-allow-unjudged", *asked)
    found.stdout.fnmatch_lines(["soak: the last minute has 80 % of the first one's rate: test_aaa_soak[[]cpu[]]"])
    soaks = [job.budget.sustain_s for job in repo.driver.jobs if type(job.workload).__name__ == "Soak"]
    assert [seconds] == soaks


@pytest.mark.parametrize(
    ("times_s", "iterations", "percent", "note"),
    [
        ((1.0,) * 60 + (2.0,) * 60, 1, 50.0, ""),
        ((1.0,) * 60, 1, 100.0, "of 20 s instead of a minute"),
        ((0.1,) * 10 + (0.2,) * 10, 10, 50.0, "of 10 s instead of a minute"),
        ((1.0,) * 5, 1, None, "it takes 6 samples to compare the end of a run with its beginning"),
    ],
)
def test_the_rate_of_the_last_minute(times_s, iterations, percent, note):
    (metric,) = derive(
        ["last_minute_percent"],
        work=Work(flops={"exact": 1.0}),
        measurement=measurement_of(times_s, [rank_facts()], iterations=iterations),
        peaks=Peaks(),
    )
    assert (pytest.approx(percent) if percent else None, note) == (metric.value, metric.note)
