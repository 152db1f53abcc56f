"""``--perf-trace`` in pytest runs: files per case, told before the run or at its end, and never a lost measurement."""

import errno
import os
from pathlib import Path

import pytest

from perfsuite.cli import main as cli
from perfsuite.record.journal import read_journal
from perfsuite.reports.timelines.files import file_stem
from perfsuite.schedules import make_schedule
from test_correctness.helpers.pipelines import METRICS, measured
from test_correctness.helpers.scripted_driver import measurement, repository

CASES = f"""
import pytest

@dataclass(frozen=True, kw_only=True)
class Step(Workload):
    schedule: str = "1f1b"
    metrics = {METRICS!r}
    def work(self, shape):
        return Work()
    def build(self, rank):
        raise AssertionError("no rank builds it in these tests")

@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_step(perf, schedule):
    perf(Step(schedule=schedule), on=4)

def test_plain(perf):
    perf(step)
"""
STEPS = ("test_it.py::test_step[cpu-1f1b]", "test_it.py::test_step[cpu-zbv]")


def pipeline_or_not(job):
    name = job.workload.parameters().get("schedule")
    timeline = measured(make_schedule(name, ranks=4, num_micro_batches=8)) if name else None
    return measurement(job, timeline=timeline)


@pytest.fixture
def repo(pytester, monkeypatch):
    return repository(pytester, monkeypatch, CASES, pipeline_or_not)


def files():
    return {path.name for path in Path("traces").iterdir()}


EXPECTED = {f"{file_stem(case)}{end}" for case in STEPS for end in (".trace.json", ".svg")} | {"index.html"}


def test_every_case_with_a_timeline_has_its_files_and_a_row(repo):
    done = repo.run("--perf-trace=traces")
    done.assert_outcomes(passed=3)
    assert files() == EXPECTED
    done.stdout.fnmatch_lines(
        [
            "test_it.py::test_step",
            "pipeline *bubble*",
            "cpu-1f1b *4  1  8 *4 3 2 1",
            "cpu-zbv *4  2  8 *8 7 6 5",
            "timelines of 2 cases in *traces",
        ]
    )


def test_without_the_option_nothing_is_written_and_the_section_is_there(repo):
    done = repo.run()
    assert not Path("traces").exists()
    done.stdout.fnmatch_lines(["cpu-1f1b *4  1  8 *"])
    done.stdout.no_fnmatch_line("*timelines of*")


def test_a_run_that_has_no_timeline_to_show_writes_none_and_says_so(repo):
    repo.run("--perf-trace=traces", "--collect-only")
    repo.run("--perf-trace=traces", "-k", "nothing_of_it")
    assert not Path("traces").exists()
    repo.run("--perf-trace=traces", "--benchmark-disable").assert_outcomes(passed=3)
    assert files() == set()
    done = repo.run("--perf-trace=traces", "-k", "plain")
    done.stdout.fnmatch_lines(["no timeline in *: no measured case recorded*"])
    assert files() == set()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "*--perf-trace: *file is not a folder; give a folder*"),
        ("file/deeper", "*--perf-trace: folder *file/deeper cannot be made: Not a directory; name another*"),
    ],
)
def test_a_folder_that_cannot_be_is_told_before_anything_is_measured(repo, path, message):
    Path("file").write_text("")
    done = repo.run(f"--perf-trace={path}")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([message])
    assert repo.driver.jobs == []


def test_a_read_only_folder_is_told_before_anything_is_measured(repo, monkeypatch):
    Path("traces").mkdir()
    open_file = os.open

    def read_only(path, *arguments, **options):  # the tests may run as root, whom no mode stops
        if str(path).startswith(str(Path("traces").resolve())):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", read_only)
    done = repo.run("--perf-trace=traces")
    monkeypatch.undo()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--perf-trace: folder *traces cannot be written to: Read-only file system; give*"])
    assert repo.driver.jobs == []


def fill_the_disk(monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)


def test_a_disk_that_fills_up_loses_no_measurement_and_the_journal_writes_it_later(repo, monkeypatch, capsys):
    Path(".perfsuite").mkdir()
    with monkeypatch.context() as patch:
        fill_the_disk(patch)
        done = repo.run("--perf-trace=traces", "--perf-journal=journal.jsonl")
    done.assert_outcomes(passed=3)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    assert files() == set()
    done.stdout.fnmatch_lines(
        [
            "no timeline in *traces: see below",
            f"perfsuite: error: --perf-trace: {STEPS[0].replace('[', '[[]')}: *.trace.json cannot be written: No space "
            "left on device; free some space *; the case was measured: perfsuite trace *journal.jsonl --out DIR *",
            "perfsuite: error: --perf-trace: *test_step[[]cpu-zbv[]]: *",
        ]
    )
    assert set(STEPS) < set(read_journal(Path("journal.jsonl")).results)
    assert cli.main(["trace", "journal.jsonl", "--out", "traces"]) == 0
    assert files() == EXPECTED - {"index.html"}
    assert "cpu-zbv" in capsys.readouterr().out


def test_a_case_that_its_test_finds_too_slow_is_drawn_all_the_same(pytester, monkeypatch):
    tests = CASES.replace("on=4)", "on=4)\n    assert schedule == 'zbv'")
    done = repository(pytester, monkeypatch, tests, pipeline_or_not).run("--perf-trace=traces")
    done.assert_outcomes(passed=2, failed=1)
    assert files() == EXPECTED


def test_cases_from_the_journal_are_drawn_too(repo):
    repo.run("--perf-journal=journal.jsonl")
    jobs = len(repo.driver.timed())
    done = repo.run("--perf-resume=journal.jsonl", "--perf-trace=traces")
    done.assert_outcomes(passed=3)
    assert len(repo.driver.timed()) == jobs
    assert files() == EXPECTED
    done.stdout.fnmatch_lines(["cpu-1f1b *4  1  8 *4 3 2 1"])


def test_under_the_gate_a_case_is_drawn_once_for_all_its_runs(repo):
    done = repo.run("--perf-trace=traces", "--perf-gate", "--perf-allow-ungated")
    done.assert_outcomes(passed=3)
    assert files() == EXPECTED
