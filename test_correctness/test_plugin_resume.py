"""Journals of real runs of pytest: resumed, damaged, without room."""

import contextlib
import errno
import json
import os
import signal
import time

import pytest
from _pytest.pytester import LineMatcher

from perfsuite.base.errors import RanksFailed
from perfsuite.record.journal import read_journal
from test_correctness.helpers.scripted_driver import junit, measurement, repository

THREE = "".join(f"def test_{name}(perf):\n    perf(step, name={name!r})\n" for name in ("first", "second", "third"))


@pytest.fixture
def repo(pytester, monkeypatch):
    return repository(pytester, monkeypatch, THREE)


def names(repo):
    return [job.workload.parameters()["name"] for job in repo.driver.jobs]


def test_a_run_leaves_a_journal_and_says_where(repo, pytester):
    found = repo.run()
    (path,) = pytester.path.glob(".perfsuite/journal-*.jsonl")
    found.stdout.fnmatch_lines([f"journal {path}"])
    journal = read_journal(path)
    assert list(journal.results) == [f"test_it.py::test_{name}[cpu]" for name in ("first", "second", "third")]
    assert set(journal.versions) == {"python", "perfsuite", "torch", "pytest", "pytest-benchmark"}
    assert pytester.path.joinpath(".perfsuite/.gitignore").read_text() == "*\n"


def test_a_resumed_run_reports_finished_cases_and_runs_the_others(repo, pytester):
    def script(job):
        if job.workload.parameters()["name"] == "second":
            raise RanksFailed("rank 0 died")
        return measurement(job, (3.0, 3.0))

    repo.driver.script = script
    repo.run("--perf-journal=one.jsonl").assert_outcomes(passed=2, failed=1)
    repo.driver.jobs.clear()
    repo.driver.script = measurement
    arguments = ["--perf-resume=one.jsonl", "--perf-journal=two.jsonl", "--benchmark-json=out.json"]
    found = repo.run(*arguments)
    found.assert_outcomes(passed=3)
    assert names(repo) == ["second"]
    found.stdout.fnmatch_lines(
        [
            "1 measured, 2 from the journal*",
            "test_first[[]cpu[]] [*] * 3 s *",
            "test_second[[]cpu[]] * 500 ms *",
            "* from the journal of the run that this one resumes",
        ]
    )
    stored = json.loads(pytester.path.joinpath("out.json").read_text())
    assert {each["name"]: each["stats"]["median"] for each in stored["benchmarks"]} == {
        "test_first[cpu]": 3.0,
        "test_second[cpu]": 0.5,
        "test_third[cpu]": 3.0,
    }
    assert len(read_journal(pytester.path / "two.jsonl").results) == 3


@pytest.mark.parametrize(
    ("number", "stopped"), [(signal.SIGTERM, "second"), (signal.SIGINT, "second"), (signal.SIGINT, "first")]
)
def test_an_interrupted_run_finishes_its_reports_and_is_gone_on_with(repo, pytester, capsys, number, stopped):
    def script(job):
        if job.workload.parameters()["name"] == stopped:
            os.kill(os.getpid(), number)
            time.sleep(60)
        return measurement(job)

    before, arguments = signal.getsignal(signal.SIGTERM), ("--junitxml=junit.xml", "--benchmark-json=out.json", "-q")
    repo.driver.script = script
    with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else contextlib.nullcontext():
        assert repo.run("--perf-journal=one.jsonl", *arguments).ret == pytest.ExitCode.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
    assert repo.driver.closed >= 1
    printed = LineMatcher(capsys.readouterr().out.splitlines())
    counts = "1 interrupted*" if stopped == "first" else "1 measured, 1 interrupted*"
    printed.fnmatch_lines(
        ["*= perfsuite: *", counts, "journal * one.jsonl", "next * add --perf-resume=one.jsonl to the same command"]
    )
    journal = read_journal(pytester.path / "one.jsonl")
    assert list(journal.results) == ["test_it.py::test_first[cpu]"] * (stopped == "second")
    assert journal.interrupted == {f"test_it.py::test_{stopped}[cpu]": number.name}
    if stopped == "second":
        assert "test_first" in pytester.path.joinpath("out.json").read_text()
    if number == signal.SIGTERM:
        told = ["stopped by SIGTERM while this case was running", "*perfsuite: stopped by SIGTERM*"]
        printed.fnmatch_lines_random(told)
        assert list(junit("junit.xml")) == ["test_first[cpu]", "test_second[cpu]"]
    repo.driver.jobs.clear()
    repo.driver.script = measurement
    repo.run("--perf-resume=one.jsonl").assert_outcomes(passed=3)
    assert names(repo) == ["first", "second", "third"][journal.results != {} :]


def test_a_case_whose_parameters_changed_is_run_again(repo, pytester):
    repo.run("--perf-journal=one.jsonl")
    repo.driver.jobs.clear()
    test_file = pytester.path / "test_it.py"
    test_file.write_text(test_file.read_text().replace("name='second'", "name='other'"))
    repo.run("--perf-resume=one.jsonl").assert_outcomes(passed=3)
    assert names(repo) == ["other"]


def test_a_smoke_run_is_no_measurement_to_resume_from(repo):
    repo.run("--perf-journal=one.jsonl", "--benchmark-disable")
    repo.run("--perf-resume=one.jsonl", "-k", "first").assert_outcomes(passed=1, deselected=2)
    assert names(repo) == ["first", "second", "third", "first"]


def test_other_hardware_and_damage_are_one_line(repo, pytester):
    repo.run("--perf-journal=one.jsonl")
    path = pytester.path / "one.jsonl"
    text = path.read_text()
    header = json.loads(text.partition("\n")[0])
    header["header"]["fingerprint"] = "cpu-elsewhere"
    path.write_text(json.dumps(header) + "\n")
    resumed = "--perf-resume=one.jsonl"
    repo.refuses(resumed, says="journal */one.jsonl was measured on cpu-elsewhere, this machine is cpu-*")
    path.write_text(text.replace('"result"', '"resul"'))
    repo.refuses(resumed, says="journal */one.jsonl, line 3: 'resul' is not a line of a journal*")


def test_a_full_disk_loses_cases_of_the_journal_alone_and_fails_the_run(repo, pytester, monkeypatch):
    synced = []
    monkeypatch.setattr("perfsuite.plugin.suite.other_places", lambda root, path: iter(()))

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) > 2:  # the header, and the first case with its environment
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        found = repo.run("--benchmark-json=out.json", "--junitxml=out.xml", "--perf-journal=j.jsonl")
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    said = [line for line in found.outlines if line.startswith("perfsuite: error: ")]
    assert said == [
        f"perfsuite: error: journal: 1 of 3 cases kept in {pytester.path}/j.jsonl, 2 lost: No space left on device"
    ]
    assert "Traceback" not in found.stdout.str()
    assert len(json.loads(pytester.path.joinpath("out.json").read_text())["benchmarks"]) == 3
    assert 'tests="3"' in pytester.path.joinpath("out.xml").read_text()
    assert list(read_journal(pytester.path / "j.jsonl").results) == ["test_it.py::test_first[cpu]"]
