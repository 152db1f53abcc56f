"""A check that had nothing to check is not green, and says in one line what kept it from checking."""

import dataclasses
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.backtest.leave_one_out import Backtested
from perfsuite.baselines import store
from perfsuite.cli import main as cli
from perfsuite.record.journal import read_journal
from perfsuite.record.journal_writer import JournalWriter
from perfsuite.record.run import Revision
from test_correctness.helpers import hostile
from test_correctness.helpers.histories import session, written
from test_correctness.helpers.runs import HEADER
from test_correctness.helpers.scripted_driver import repository
from test_correctness.helpers.stored_files import HARDWARE, offer, run_of


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files that hold nothing that a command could check."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty.jsonl").write_text("")
    JournalWriter(Path("header.jsonl"), HEADER)
    written(Path("one.jsonl"), session(1))
    apart = [dataclasses.replace(session(number), revision=Revision(commit="c", dirty=True)) for number in range(9)]
    written(Path("dirty.jsonl"), *apart)
    Path("head.csv").write_text("gpus,step (ms)\n")
    Path("rows.csv").write_text("gpus,step (ms)\n8,10\n")
    Path("long.csv").write_text(f"gpus,step (ms)\n8,{'1' * 200_000}\n")
    Path("none.json").write_text('{"perfsuite_imported": 1, "files": []}')
    Path("empty.toml").write_text("# no row\n")
    hostile.journal(Path("full.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("history show empty.jsonl --fail-on slower", "nothing was searched in empty.jsonl: a change needs 6 sessions"),
        ("history show one.jsonl --fail-on 3%", "and no case has more than 1; add sessions"),
        ("history show dirty.jsonl --fail-on any", "and no case has more than 0; add sessions"),
        ("fleet full.jsonl --nodes 0", "--nodes 0 expects no node; give at least 1"),
        ("baselines verify folder", "no baseline file in folder; a run with --perf-update=append stores one"),
        ("baselines verify folder --json", "no baseline file in folder"),
        ("baselines show folder", "no baseline file in folder"),
        ("audit head.csv --roles 'step (ms)=latency' gpus=devices", "head.csv: no row to audit"),
        ("checklist header.jsonl", "header.jsonl: nothing was measured, so nothing can be answered"),
        ("report header.jsonl", "header.jsonl: no report has a table for these results"),
        ("export --format json header.jsonl", "header.jsonl: nothing was measured"),
        ("history add header.jsonl", "header.jsonl: nothing was measured"),
        ("calibrate header.jsonl", "none of the results has times"),
        ("report full.jsonl --imported none.json", "none.json: it has no figure; import again"),
        ("report full.jsonl --history empty.jsonl", "--history: empty.jsonl has no session"),
        ("report full.jsonl --platform-file empty.toml", "platform file empty.toml has no table; a file has"),
        ("audit long.csv --roles gpus=devices", "long.csv is not CSV: field larger than field limit"),
        ("fleet full.jsonl --group long.csv", "--group long.csv is not CSV: field larger than field limit"),
    ],
)
def test_a_command_with_nothing_to_check_says_so_and_fails(files, capsys, arguments, says):
    assert cli.main(shlex.split(arguments)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("history show one.jsonl", "1 session"),
        ("history list empty.jsonl", "0 sessions"),
        ("baselines list folder", "no baseline file in folder"),
        ("show header.jsonl", "no cases"),
        ("audit rows.csv --roles 'step (ms)=latency' gpus=devices", "nothing found"),
    ],
)
def test_a_command_that_gives_no_verdict_plainly_says_that_there_is_nothing(files, capsys, arguments, says):
    assert cli.main(shlex.split(arguments)) == 0
    assert says in capsys.readouterr().out


def test_a_history_that_was_searched_is_green(files, capsys):
    pytest.importorskip("ruptures")
    written(Path("long.jsonl"), *(session(number) for number in range(8)))
    assert cli.main(["history", "show", "long.jsonl", "--fail-on", "slower"]) == 0
    subprocess.run(["git", "init", "-q", "-b", "main"], check=True)
    subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "--allow-empty", "-m", "x"], check=True
    )
    assert cli.main(["history", "show", "long.jsonl", "--since", "HEAD", "--fail-on", "slower"]) == 4
    assert "no session has a commit after HEAD" in capsys.readouterr().err


def test_cases_of_no_name_in_a_baseline_are_told(tmp_path, monkeypatch, capsys):
    offer(tmp_path, run_of("s0", 1))
    assert cli.main(["baselines", "show", str(store.path_of(tmp_path, HARDWARE)), "--case", "nowhere"]) == 0
    assert "no case whose id contains 'nowhere'" in capsys.readouterr().out


def test_a_back_test_without_a_row_is_not_within_its_budget():
    fields = {field.name: () for field in dataclasses.fields(Backtested)}
    assert not Backtested(**{**fields, "budget": (1.0, 2.0, 3.0)}).within_budget


# -- the gate ------------------------------------------------------------------------------------------------------


def ends_red(done, says):
    """The run measured, and compared nothing."""
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stdout.fnmatch_lines([f"*error: --perf-gate*none of 3 cases was compared: {says}*"])


def test_a_gate_says_how_many_runs_are_stored(repo):
    for _ in range(2):
        repo.run("--perf-update=append")
    repo.refuses("--perf-gate", says="*none of 3 cases has 5 stored runs in *; 2 at most, of 3 cases; store some with*")


def test_a_gate_whose_stored_runs_are_of_other_parameters_says_so(stored):
    test = Path("test_it.py")
    test.write_text(
        test.read_text().replace("number=number", "number=number, wide=True").replace("rank, ", "rank, wide=0, ")
    )
    done = stored.run("--perf-gate")
    ends_red(done, "3 not-comparable (wide=True, stored *); store")
    assert "5 stored runs" not in done.stdout.str()


@pytest.mark.parametrize("marker", ['skip(reason="no")', 'xfail(run=False, reason="no")'])
def test_a_gate_whose_cases_were_all_skipped_is_not_green(stored, marker):
    test = Path("test_it.py")
    test.write_text(test.read_text().replace("@pytest.mark.param", f"@pytest.mark.{marker}\n@pytest.mark.param"))
    ends_red(stored.run("--perf-gate"), "3 not measured (skipped, failed or interrupted)")
    assert stored.run("--perf-gate", "--perf-allow-ungated").ret == 0


def test_a_gate_whose_cases_come_from_a_journal_is_not_green(stored):
    stored.run("--perf-journal=first.jsonl")
    ends_red(stored.run("--perf-gate", "--perf-resume=first.jsonl"), "3 taken from a journal")


def test_a_gate_on_the_command_line_without_a_perf_case_is_a_usage_error(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, "\ndef test_plain():\n    pass\n\ndef test_perf(perf):\n    perf(step)\n")
    repo.refuses("--perf-gate", "-k", "plain", says="--perf-gate: no selected test is a perf case*")
    assert repo.run("--perf-gate", "-k", "nothing").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert repo.run("--perf-gate", "-k", "plain", "--perf-allow-ungated").ret == 0
    assert repo.run("--perf-gate", "-k", "plain", "--collect-only").ret == 0
    ini = Path("tox.ini")
    ini.write_text(ini.read_text().replace("addopts = ", "addopts = --perf-gate "))
    assert repo.run("-k", "plain").ret == 0  # a setting for the runs that have perf cases


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--perf-expect", "nothing would be judged; select perf cases, leave --perf-expect out, or add"),
        ("--perf-update=append", "nothing would be stored; select perf cases, or leave --perf-update out"),
        ("--perf-history=h.jsonl", "nothing would be written; select perf cases, or leave --perf-history out"),
        ("--perf-html=page.html", "nothing would be written"),
        ("--perf-report=report.md", "nothing would be written"),
        ("--perf-summary=s.md", "nothing would be written"),
        ("--perf-trace=traces", "nothing would be written"),
        ("--perf-journal=j.jsonl", "nothing would be written"),
        ("--perf-expect-devices=1", "nothing would be checked"),
        ("--perf-project", "nothing would be projected"),
    ],
)
def test_a_check_or_a_file_on_the_command_line_without_a_perf_case_is_a_usage_error(pytester, option, says):
    pytester.makepyfile("def test_plain():\n    pass\n")
    done = pytester.runpytest_inprocess(option)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*{option.partition('=')[0]}: no selected test is a perf case, so {says}*"])
    if option == "--perf-expect":
        done = pytester.runpytest_inprocess(option, "--collect-only")
        assert done.ret == 0
        done.stdout.fnmatch_lines([f"perfsuite: {option}: this command runs no test, so nothing is *"])
        assert pytester.runpytest_inprocess(option, "--perf-allow-unjudged").ret == 0
        pytester.makeini(f"[pytest]\naddopts = {option}")
        assert pytester.runpytest_inprocess().ret == 0


@pytest.mark.parametrize("option", ["--setup-plan", "--fixtures", "--fixtures-per-test"])
def test_a_command_without_tests_says_that_no_file_is_written(pytester, option):
    pytester.makepyfile("def test_perf(perf):\n    pass\n")
    done = pytester.runpytest_inprocess(option, "--perf-html=page.html", "--perf-journal=j.jsonl")
    lines = [f"perfsuite: {name}: this command runs no test, so nothing is written" for name in ("--perf-html", "*")]
    done.stdout.fnmatch_lines(lines)
    assert (done.ret, Path("page.html").exists(), Path("j.jsonl").exists()) == (0, False, False)


def test_a_journal_on_the_command_line_is_kept_without_a_case_and_a_missing_report_is_named(pytester):
    pytester.makepyfile("def test_perf(perf):\n    pass\n")
    done = pytester.runpytest_inprocess("--setup-only", "--perf-journal=j.jsonl", "--perf-report=r.md")
    done.stdout.fnmatch_lines(["report */r.md was not written: no report has a table for these results*"])
    assert read_journal(Path("j.jsonl")).end.exit_status == 0


@pytest.mark.parametrize("option", ["--perf-expect", "--perf-history=h.jsonl"])
def test_cases_that_are_run_once_without_timing_are_no_check(pytester, option):
    pytester.makepyfile("def test_perf(perf):\n    perf(lambda: None)\n")
    done = pytester.runpytest_inprocess(option, "--benchmark-disable")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--benchmark-disable measures nothing, but * expectations or a history need *"])


def test_a_summary_of_skipped_cases_replaces_the_one_of_an_earlier_run(pytester):
    pytester.makepyfile("import pytest\n\n@pytest.mark.skip(reason='no')\ndef test_perf(perf):\n    pass\n")
    Path("summary.md").write_text("of an earlier run")
    assert pytester.runpytest_inprocess("--perf-summary=summary.md").ret == 0
    assert Path("summary.md").read_text().startswith("**perfsuite**: 1 skipped")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[expectations]]\nplatform = 'cpu'\n", "line 1: [[]expectations] is unknown; a file has"),
        ("[environment]\nnetwork_class = 'x'\n", "rows.toml has no [[][[]expectation]] row; add one"),
        ("", "rows.toml has no table; a file has"),
        (None, "--perf-expect: *rows.toml is not a file; give a TOML file of rows"),
    ],
)
def test_a_file_of_expectations_without_a_row_and_one_that_is_not_there_are_refused(pytester, monkeypatch, text, says):
    repo = repository(pytester, monkeypatch, "\ndef test_perf(perf):\n    perf(step)\n")
    if text is not None:
        Path("rows.toml").write_text(text)
    repo.refuses("--perf-expect=rows.toml", says=f"*{says}*")


def test_a_run_that_projects_nothing_says_so(pytester, monkeypatch):
    repo = repository(pytester, monkeypatch, "\ndef test_perf(perf):\n    perf(step)\n")
    done = repo.run("--perf-project")
    done.stdout.fnmatch_lines(["--perf-project: nothing is projected; only training steps are projected"])
    assert done.ret == 0
