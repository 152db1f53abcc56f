"""What a pytest run with --perf-update stores, what it refuses, and when a new epoch begins."""

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from test_correctness.helpers.gated_repository import baseline_file
from test_correctness.helpers.scripted_driver import measurement


@pytest.fixture
def boots(monkeypatch):
    """Boots of the machine, of which the last is the present one."""
    boots = []
    monkeypatch.setattr("perfsuite.plugin.gating.boot_of", lambda host: boots[-1])
    return boots


@pytest.mark.extended
def test_a_gain_is_stored_beside_the_yardstick_until_a_second_session_of_the_machine_shows_it(stored, machine):
    machine.factors[2] = 0.8
    first = stored.run("--perf-update=improved")
    first.stdout.fnmatch_lines(
        [
            "*cpu-2*: improved; a second session of the machine confirms it and begins a new epoch",
            "*cpu-0*: not stored, its verdict is pass;*",
        ]
    )
    assert first.ret == 0


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


@pytest.mark.extended
def test_runs_stored_merge_after_merge_do_not_move_the_yardstick(stored, machine):
    codes = []
    for merge in range(1, 22):
        machine.factors[1] = 1.002**merge  # the newest twelve runs are never more than 1.5 % behind
        done = stored.run("--perf-gate", "--perf-update=append", "-k", "cpu-1")
        codes.append(done.ret)
    assert codes[:9] == [0] * 9
    done.stdout.fnmatch_lines(["REGRESSED +4.* % (* ms -> 10.4* ms)", "*not stored, REGRESSED +4*"])


def test_an_impossible_result_is_refused_by_name(repo):
    repo.driver.script = lambda job: dataclasses.replace(measurement(job), times_s=(0.01,) * 8)
    done = repo.run("--perf-update=append", "-k", "cpu-1")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(
        ["*cpu-1*: not stored, impossible: constant: all 8 samples are exactly 0.01 s*; an error of*"]
    )
    assert not Path("baselines").exists() or not list(Path("baselines").rglob("*.json"))


def test_a_suspicion_that_is_not_confirmed_is_stored_without_the_run_that_raised_it(stored, machine):
    machine.spells = {1: [1.1]}
    done = stored.run("--perf-update=append", "-k", "cpu-1")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["perfsuite: re-measurement: run 4 of 4: *cpu-1*", "*1 run of 1 case added"])
    (case,) = (case for case in json.loads(baseline_file().read_text())["benchmarks"] if "cpu-1" in case["name"])
    assert max(run["quantiles_s"][2] for run in case["runs"]) < 0.0105


def test_a_case_that_still_learns_is_stored_and_a_slowdown_is_said(repo, machine):
    first = repo.run("--perf-update=append", "-k", "cpu-1")
    first.stdout.fnmatch_lines(["baseline *: 1 run of 1 case added", "gate *compared 0 of 1 case with a baseline"])
    machine.factors[1] = 1.6
    done = repo.run("--perf-update=append", "-k", "cpu-1")
    assert done.ret == 0
    done.stdout.fnmatch_lines(["*1 run of 1 case added", "*cpu-1*: * % slower than the 1 run stored; stored*"])


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
    done = stored.run("--perf-gate")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*is a link to *outside.json, outside *baselines; *perf_baselines_links = true*"])
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
