"""Failures, skips, judgements, budgets and signals, as pytest and its reports show them."""

import os
import signal

import pytest

from perfsuite.base.errors import AgentLost, ExpectedFailure, OutOfMemory, RanksFailed, UnsupportedCase
from test_correctness.helpers.scripted_driver import Launched, junit, measurement, repository

THREE = "".join(f"def test_{name}(perf):\n    perf(step, name={name!r})\n" for name in ("first", "second", "third"))


def failing(error, name="second"):
    """A script in which the case of this name raises ``error``."""

    def script(job):
        if job.workload.parameters().get("name") == name:
            raise error
        return measurement(job)

    return script


def test_a_failed_case_shows_its_message_and_the_logs_of_its_ranks(pytester, monkeypatch):
    error = RanksFailed("rank 1 on here died: killed by SIGKILL (2 ranks)\n--- rank 1 on here died")
    repo = repository(pytester, monkeypatch, THREE, failing(error))
    found = repo.run("--junitxml=junit.xml")
    found.assert_outcomes(passed=2, failed=1)
    logs = (line for rank in (0, 1) for line in (f"*- log of rank {rank} -*", f"log line of rank {rank}"))
    found.stdout.fnmatch_lines([*str(error).splitlines(), *logs])
    found.stdout.fnmatch_lines(["FAILED test_it.py::test_second[[]cpu] - Failed: rank 1 on here died: killed by *"])
    assert "perfsuite/plugin" not in found.stdout.str()
    assert "direct cause" not in found.stdout.str()
    (failure,) = junit("junit.xml")["test_second[cpu]"].findall("failure")
    assert failure.attrib["message"].startswith("Failed: rank 1 on here died: killed by SIGKILL (2 ranks)")


def test_a_case_that_this_machine_cannot_run_is_skipped_at_its_own_place(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, THREE, failing(UnsupportedCase("torch has no such thing here")))
    found = repo.run("-rs")
    found.assert_outcomes(passed=2, skipped=1)
    found.stdout.fnmatch_lines(["SKIPPED [[]1] test_it.py:28: torch has no such thing here"])


def test_what_a_rank_expects_to_fail_is_expected_of_the_test(pytester, monkeypatch):
    error = ExpectedFailure("rank 1 on here expected to fail: known since long")
    repo = repository(pytester, monkeypatch, THREE, failing(error))
    found = repo.run("-rx")
    assert found.parseoutcomes() == {"passed": 2, "xfailed": 1}
    found.stdout.fnmatch_lines(["2 measured, 1 xfailed*"])
    found.stdout.fnmatch_lines(["XFAIL test_it.py::test_second[[]cpu] - *rank 1 on here expected to fail: known *"])
    assert repo.run("--runxfail").parseoutcomes() == {"passed": 2, "failed": 1}


def test_out_of_memory_is_a_result(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, THREE, failing(OutOfMemory("OOM at 44.2 GiB of 48 GiB")))
    found = repo.run("--junitxml=junit.xml", "-W", "error")
    found.assert_outcomes(passed=3)
    found.stdout.fnmatch_lines(["2 measured, 1 out of memory*", "test_second*OOM at 44.2 GiB of 48 GiB*"])
    properties = junit("junit.xml")["test_second[cpu]"].findall("properties/property")
    assert [each.attrib for each in properties] == [{"name": "outcome", "value": "out_of_memory"}]


def test_a_lost_agent_fails_its_case_and_ends_the_run(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, THREE, failing(AgentLost("the agent of rank 3 on node7 is lost")))
    found = repo.run("--junitxml=junit.xml")
    found.assert_outcomes(passed=1, failed=1)
    assert found.ret != 0
    found.stdout.fnmatch_lines(["1 measured*", "*perfsuite: the agent of rank 3 on node7 is lost*"])
    assert set(junit("junit.xml")) == {"test_first[cpu]", "test_second[cpu]"}
    assert repo.driver.closed >= 1


def test_an_expected_failure_is_one(pytester, monkeypatch):
    tests = "import pytest\npytestmark = pytest.mark.xfail(strict=True)\n" + THREE
    error = RanksFailed("rank 0 on here hung")
    found = repository(pytester, monkeypatch, tests, failing(error)).run("-k", "second")
    assert found.parseoutcomes() == {"xfailed": 1, "deselected": 2}


def test_metrics_are_junit_properties(pytester, monkeypatch):
    tests = "@world_sizes(2)\ndef test_sum(perf, ranks):\n    perf(Sum(message_bytes=1 << 30), on=ranks)\n"
    repository(pytester, monkeypatch, tests).run("--junitxml=junit.xml").assert_outcomes(passed=1)
    properties = {
        each.attrib["name"]: each.attrib["value"] for each in junit("junit.xml")["test_sum[cpu-ws2]"].iter("property")
    }
    assert properties == {
        "latency_us": "500000.0",
        "algbw_gb_per_s": str((1 << 30) / 0.5 / 1e9),
        "busbw_gb_per_s": str((1 << 30) / 0.5 / 1e9),
    }


JUDGE = """
from perfsuite.plugin.hooks import Judgement

def pytest_perfsuite_judge(item, result):
    if "third" in result.case:
        return None
    slow = "second" in result.case
    return Judgement(verdict="slow" if slow else "fine", failure="0.5 s is too slow" if slow else "")
"""


def test_whoever_judges_a_case_can_fail_it(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, THREE, conftest=JUDGE)
    found = repo.run("--junitxml=junit.xml", "--benchmark-json=out.json")
    found.assert_outcomes(passed=2, failed=1)
    rows = ["test_first[[]cpu] * fine", "test_second[[]cpu] * slow", "test_third[[]cpu] * 500 ms"]
    found.stdout.fnmatch_lines(["0.5 s is too slow", "case * verdict", *rows])
    verdicts = [each.attrib["value"] for each in junit("junit.xml")["test_second[cpu]"].iter("property")]
    assert "slow" in verdicts
    assert "test_second" not in pytester.path.joinpath("out.json").read_text()
    repo.run("--benchmark-disable").assert_outcomes(passed=3)  # what was not measured is not judged


@pytest.mark.parametrize(("raises", "outcome"), [("", "failed"), ("(raises=VerdictFailed)", "xfailed")])
def test_a_judgement_is_expected_only_where_it_is_named(pytester, monkeypatch, raises, outcome):
    marked = f"import pytest\nfrom perfsuite import VerdictFailed\npytestmark = pytest.mark.xfail{raises}\n"
    found = repository(pytester, monkeypatch, marked + THREE, conftest=JUDGE).run()
    assert found.parseoutcomes() == {outcome: 1, "xpassed": 2}


def test_the_time_budget_skips_what_remains(pytester, monkeypatch):
    def script(job):
        if job.workload.parameters()["name"] == "second":
            clock[0] += 100.0
        return measurement(job)

    clock = [1000.0]
    monkeypatch.setattr("perfsuite.plugin.suite.time.monotonic", lambda: clock[0])
    found = repository(pytester, monkeypatch, THREE, script).run("-rs", "--perf-time-budget=90s")
    found.assert_outcomes(passed=2, skipped=1)
    assert found.ret == 0
    found.stdout.fnmatch_lines(
        ["SKIPPED * test_it.py:*: --perf-time-budget of 90 s is used up; go on by --perf-resume=*.jsonl"]
    )


def test_under_xdist_measured_cases_are_left_out_and_smoke_runs_are_not(pytester, monkeypatch):
    class Worker:
        @pytest.hookimpl(tryfirst=True)
        def pytest_configure(self, config):
            config.workerinput, config.workeroutput = {"workerid": "gw0"}, said

    said = {}
    repo = repository(pytester, monkeypatch, THREE)
    run = pytester.inline_run("-k", "first", plugins=[Worker()])
    assert run.getfailures() == []
    assert (repo.driver.jobs, said) == ([], {"perfsuite_left_out": 1})
    pytester.inline_run("-k", "first", "--benchmark-disable", plugins=[Worker()]).assertoutcome(passed=1)


@pytest.mark.parametrize("option", ["--perf-gate", "--perf-update=append", "--perf-runs=3", "--perf-expect"])
def test_what_measures_for_the_record_is_not_dealt_out(pytester, monkeypatch, option):
    pytest.importorskip("xdist")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    run = repository(pytester, monkeypatch, THREE).run("-n2", option)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(["ERROR: --perf-*: cases are not measured while *leave -n out, or add -n0"])


def test_the_controller_says_what_was_left_out_and_how_to_run_it(pytester, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(test_both="def test_perf(perf):\n    assert False\n\ndef test_plain():\n    pass\n")
    run = pytester.runpytest_subprocess("-n1", "-p", "no:hypothesispytest")
    run.assert_outcomes(passed=1)
    run.stdout.fnmatch_lines(["perfsuite: 1 perf case left out; to measure them without other tests: pytest * -n0"])


@pytest.mark.parametrize("how", ["SIGTERM", "a lost agent", "at its leisure"])
def test_a_run_that_a_launcher_is_about_to_kill_writes_its_reports_before_it_waits_for_anybody(
    pytester, monkeypatch, how
):
    written = []

    def script(job):
        if how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        if how == "a lost agent":
            raise AgentLost("the agent of rank 1 on node7 is lost")
        return measurement(job)

    repo = repository(pytester, monkeypatch, THREE, script)
    monkeypatch.setattr(repo.driver, "close", lambda: written.append(pytester.path.joinpath("junit.xml").exists()))
    repo.run("--junitxml=junit.xml")
    assert written[0] == (how != "at its leisure")


def test_a_launchers_sigterm_does_not_hide_the_agent_whose_loss_it_follows(pytester, monkeypatch):
    def script(job):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    repository(pytester, monkeypatch, THREE, script)
    launched = Launched(2, loss="the agent of rank 1 on node7 is lost")
    run = pytester.inline_run("-k", "first", plugins=[launched])
    (report,) = run.getfailures()
    message = "stopped by SIGTERM while this case was running; the agent of rank 1 on node7 is lost"
    assert str(report.longrepr) == message


def test_sigterm_while_the_reports_are_written_waits_for_them(pytester, monkeypatch):
    late = """
import os, signal

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    os.kill(os.getpid(), signal.SIGTERM)
"""
    repo = repository(pytester, monkeypatch, THREE, conftest=late)
    repo.run("--junitxml=junit.xml", "--benchmark-json=out.json").assert_outcomes(passed=3)
    assert len(junit("junit.xml")) == 3
    assert "test_third" in pytester.path.joinpath("out.json").read_text()
