"""Pytest runs with --perf-update: what they store and refuse; level and change: drift, environment, whole suites."""

import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.history.git import revision_of, stamp
from perfsuite.plugin import verdict_reports
from perfsuite.run.gatekeeper import Gatekeeper
from test_correctness.helpers.gated_repository import ScriptedArms, baseline_file, commit_all
from test_correctness.helpers.scripted_driver import junit, measurement


@pytest.fixture
def boots(monkeypatch):
    """Boots of the machine, of which the last is the present one."""
    boots = []
    monkeypatch.setattr("perfsuite.plugin.gating.boot_of", lambda host: boots[-1])
    return boots


def test_an_update_measures_a_suspect_again_and_refuses_a_slower_case(stored, machine):
    machine.factors[1] = 2.04
    done = stored.run("--perf-update=append")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines(
        [
            "perfsuite: re-measurement: run 4 of 4: *cpu-1*",
            "*2 runs of 2 cases added",
            "*cpu-1*: not stored, REGRESSED +10* % (* ms -> * ms); if that is meant: --perf-accept=all *",
        ]
    )


def test_a_slower_case_that_is_accepted_is_gated_from_the_next_session_on(stored, machine):
    machine.factors[1] = 2.04
    accepted = stored.run("--perf-accept=all", "--perf-reason=wider blocks", "-k", "cpu-1")
    accepted.stdout.fnmatch_lines(["*cpu-1*: its older runs were replaced"])
    assert accepted.ret == 0
    done = stored.run("--perf-gate", "-k", "cpu-1")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["gate *gated 1 of 1 case: 1 *"])


def test_an_impossible_result_fails_without_any_baseline_and_is_refused_by_name(repo):
    repo.driver.script = lambda job: dataclasses.replace(measurement(job), times_s=(0.01,) * 8)
    done = repo.run("--perf-gate", "--perf-allow-ungated", "--perf-update=append")
    done.assert_outcomes(failed=3)
    done.stdout.fnmatch_lines(
        [
            "*IMPOSSIBLE*constant: all 8 samples are exactly 0.01 s*",
            "*cpu-1*: not stored, impossible: constant: all 8 samples are exactly 0.01 s*; an error of*",
        ]
    )
    assert not Path("baselines").exists() or not list(Path("baselines").rglob("*.json"))


def test_a_suspicion_that_is_not_confirmed_is_stored_without_the_run_that_raised_it(stored, machine):
    machine.spells = {1: [1.1]}
    done = stored.run("--perf-update=append", "-k", "cpu-1")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["perfsuite: re-measurement: run 4 of 4: *cpu-1*", "*1 run of 1 case added"])
    (case,) = (case for case in json.loads(baseline_file().read_text())["benchmarks"] if "cpu-1" in case["name"])
    assert max(run["quantiles_s"][2] for run in case["runs"]) < 0.0105


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--perf-update=append", "error: the update stored nothing"),
        ("--perf-history=h.jsonl", "nothing was added to the history"),
    ],
)
def test_an_update_that_stores_nothing_fails(repo, pytester, option, problem):
    pytester.makepyfile("import pytest\n\n@pytest.mark.skip\ndef test_skipped(perf):\n    perf(step)\n")
    done = repo.run(option, "test_an_update_that_stores_nothing_fails.py")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines([f"*{problem}: no case was measured*"])


def test_a_baseline_that_links_out_of_its_folder_is_refused_unless_allowed(stored):
    outside = shutil.move(baseline_file(), "outside.json")
    store_path = Path("baselines/cpu") / json.loads(Path(outside).read_text())["perfsuite"]["fingerprint"]
    store_path.with_suffix(".json").symlink_to(Path(outside).absolute())
    says = "*is a link to *outside.json, outside *baselines; *perf_baselines_links = true*"
    stored.refuses("--perf-gate", says=says)
    stored.run("--perf-gate", "-o", "perf_baselines_links=true").assert_outcomes(passed=3)


@pytest.mark.extended
def test_a_gain_is_the_new_yardstick_once_a_second_session_of_the_machine_shows_it(stored, machine, boots):
    machine.factors[2] = 0.8
    boots.append("one")
    stored.run("--perf-update=append")
    stored.run("--perf-update=append").stdout.fnmatch_lines(["*cpu-2*: improved; a second session of the machine*"])
    boots.append("another")
    stored.run("--perf-update=append").stdout.fnmatch_lines(
        [
            "*cpu-2*: its older runs were replaced",
            "*cpu-2*: improved in two sessions of the machine: a new epoch begins",
        ]
    )
    assert baseline_file().read_text().count('"kind":"improved"') == 1
    machine.factors[2] = 1.0
    done = stored.run("--perf-gate")
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["*cpu-2*+2* %*"])


@pytest.mark.parametrize("verbosity", [[], ["-qq"], ["--no-summary"]], ids=" ".join)
def test_a_baseline_that_cannot_be_written_is_a_line_at_every_verbosity(stored, monkeypatch, verbosity):
    before = baseline_file().read_bytes()
    real = os.replace

    def full(source, target):
        if str(target).endswith(".json") and "baselines" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    found = stored.run("--perf-update=append", *verbosity)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    told = [line for line in found.outlines if "cannot be written: No space left on device" in line]
    assert [re.sub(r".*error: .*/baselines", "", line) for line in told] == [
        f"/{'/'.join(baseline_file().parts[-2:])} cannot be written: No space left on device; the file is unchanged"
    ]
    assert baseline_file().read_bytes() == before


def torch_of(repo, monkeypatch, version):
    monkeypatch.setattr(type(repo.driver), "environment", lambda driver: {"torch": version})


@pytest.mark.extended
def test_another_environment_fails_by_its_name_until_it_is_accepted(stored, machine, monkeypatch):
    torch_of(stored, monkeypatch, "2.99")
    stored.run("--perf-gate").assert_outcomes(passed=3)  # it differs and nothing is slower
    machine.factors[1] = 1.2
    failed = stored.run("--perf-gate", "-k", "cpu-1")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        [
            "ENVIRONMENT +* % (* ms -> 1* ms)",
            "  *different from the stored runs: worker.torch 2.99, stored scripted",
            "  if that is meant: --perf-accept=environment --perf-reason=TEXT",
        ]
    )
    accepted = stored.run("--perf-gate", "--perf-accept=environment", "--perf-reason=torch 2.99", "-k", "cpu-1")
    accepted.assert_outcomes(passed=1)
    assert '"kind":"environment"' in baseline_file().read_text()
    stored.run("--perf-gate", "--perf-update=append", "-k", "cpu-1", "--perf-allow-ungated").assert_outcomes(passed=1)
    stored.run("--perf-gate", "-k", "cpu-1").assert_outcomes(passed=1)


@pytest.mark.extended
def test_a_suite_that_is_slower_fails_the_session_in_one_line(stored, machine):
    machine.factors = dict.fromkeys(range(3), 1.5)
    done = stored.run("--perf-gate", "--perf-fail-on=drifted", "--perf-summary=summary.md", "--junitxml=j.xml")
    done.assert_outcomes(passed=3, failed=1)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    failed = [name for name, case in junit("j.xml").items() if case.find("failure") is not None]
    assert (len(junit("j.xml")), failed) == (4, ["the suite as a whole"])
    done.stdout.fnmatch_lines(["SUITE DRIFTED: the suite is * % slower than stored *3 of 3 cases by more than 3 %*"])
    assert "SUITE DRIFTED" in Path("summary.md").read_text()
    looked = stored.run()
    assert looked.ret == pytest.ExitCode.OK
    looked.stdout.fnmatch_lines(["suite drifted: the suite is *"])


def test_a_run_that_is_refused_before_its_tests_begin_leaves_no_work_tree(stored):
    commit_all("base")
    refused = stored.run("--perf-gate", "--perf-against=HEAD", "--perf-summary=test_it.py/summary.md")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    listed = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1


IMPATIENT = """
import os, signal

def pytest_runtest_logreport(report):
    if report.when == "call" and "cpu-0" in report.nodeid:
        os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_while_reports_are_handed_out_loses_none(stored):
    with Path("conftest.py").open("a") as conftest:
        conftest.write(IMPATIENT)
    with pytest.raises(KeyboardInterrupt):
        stored.run("--perf-gate", "--junitxml=j.xml")
    assert list(junit("j.xml")) == [f"test_case[cpu-{number}]" for number in range(3)]


def test_ctrl_c_while_runs_are_stored_does_not_report_the_suite_twice(stored, machine, monkeypatch):
    def interrupted(*arguments, **others):
        raise KeyboardInterrupt

    machine.factors = dict.fromkeys(range(3), 1.5)
    monkeypatch.setattr(Gatekeeper, "update", interrupted)
    arguments = ("--perf-gate", "--perf-fail-on=drifted", "--perf-update=append", "--junitxml=j.xml")
    with pytest.raises(KeyboardInterrupt):
        stored.run(*arguments)
    assert Path("j.xml").read_text().count('name="the suite as a whole"') == 1


@pytest.mark.extended
def test_the_user_says_which_verdicts_fail(stored, machine):
    machine.factors[1] = 1.2
    assert stored.run("--perf-gate", "--perf-fail-on=impossible").ret == 0
    machine.factors.clear()
    machine.spells[0] = [1.06, *[1.0, 1.06] * 6]
    done = stored.run("--perf-gate", "--perf-fail-on=default,inconclusive", "-k", "cpu-0")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["inconclusive *", "* not decided: 1 of 1 case; slowdowns of the median up to *"])
    machine.spells[0] = [1.06, *[1.0, 1.06] * 6]
    green = stored.run("--perf-gate", "-q", "-k", "cpu-0")
    green.assert_outcomes(passed=1)
    assert "test_it.py::test_case[cpu-0]" in green.stdout.str().partition("not decided: 1 of 1 case")[2]


class TestAnchor:
    """The commit that the stored runs name is a third arm."""

    @pytest.fixture
    def arms(self, repo, machine, monkeypatch):
        commit_all("stored")
        for _ in range(5):
            repo.run("--perf-update=append", "-k", "cpu-1")
        commit_all("slow since")
        machine.factors[1] = 1.1
        arms = ScriptedArms(machine, monkeypatch)
        arms.factors["base"] = 1.1
        return arms

    @pytest.mark.extended
    def test_it_shows_that_the_code_drifted(self, repo, arms):
        timed = [
            "--perf-pin=cores",
            "--perf-warmup=1s",
            "--perf-sustain=2s",
            "--perf-cache-flush",
            "--perf-world-sizes=1",
        ]
        done = repo.run("--perf-gate", "--perf-against=HEAD", "-k", "cpu-1", *timed)
        done.assert_outcomes(failed=1)
        assert set(timed) <= set(arms.arguments), "what changes a time is the same in every arm"
        commit = subprocess.run(["git", "rev-parse", "HEAD~1"], capture_output=True, text=True, check=True).stdout[:10]
        done.stdout.fnmatch_lines(
            [
                "DRIFTED +* % (* ms -> 11* ms)",
                f"  stored at {commit}: 5 runs of 5 sessions",
                f"  against {commit} +* %*6 pairs)",
                "  not slower than the base by more than the tolerance, slower than*: the code drifted",
                f"  next: perfsuite ab --a {commit} -- 'test_it.py::test_case?cpu-1?'",
            ]
        )
        assert arms.names.count(f"stored commit ({commit})") == 6

    @pytest.mark.extended
    @pytest.mark.parametrize("failure", ["arm", "tree"])
    def test_where_it_cannot_run_that_is_said(self, repo, arms, monkeypatch, failure):
        arms.factors["stored commit"] = None
        original = verdict_reports.arm_of

        def arm_of(root, revision, name):
            if failure == "tree" and name.startswith("stored"):
                raise ConfigurationError(f"revision {revision!r} is not a commit of here")
            return original(root, revision, name)

        monkeypatch.setattr(verdict_reports, "arm_of", arm_of)
        done = repo.run("--perf-gate", "--perf-against=HEAD", "-k", "cpu-1")
        done.assert_outcomes(failed=1)
        said = "is not a commit of here; *" if failure == "tree" else "was not measured: its pytest*"
        done.stdout.fnmatch_lines([f"*(unattributed)*the stored commit was not run: *{said}"])


def test_a_commit_with_changes_is_no_anchor(pytester):
    pytester.makepyfile(test_it="x = 1")
    assert stamp(revision_of(pytester.path, pytester.path / "baselines")) == ""
    commit_all("first")
    clean = stamp(revision_of(pytester.path, pytester.path / "baselines"))
    assert len(clean) == 40
    pytester.makepyfile(test_it="x = 2")
    assert stamp(revision_of(pytester.path, pytester.path / "baselines")) == f"{clean}-dirty"
    assert stamp(revision_of(pytester.path, pytester.path / "test_it.py")) == clean
    assert stamp(revision_of(pytester.path, pytester.path.parent / "elsewhere")) == f"{clean}-dirty"
