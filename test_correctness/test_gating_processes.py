"""The gate in whole pytest runs with real rank processes, on a device whose clock the case moves: no load decides."""

import contextlib
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.gate_history import STEP_S, Repository, story, switched_out
from benchmarks.scripted_clock import VARIABLES
from perfsuite.base.git import git
from perfsuite.record.journal import read_journal
from test_correctness.helpers.processes import processes_with, running

ROOT = Path(__file__).parent.parent
REAL = """
    import os
    import random

    import pytest
    from benchmarks.scripted_clock import NOW_NS

    def lasting(rank, number=0):
        slow = float(os.environ.get("SLOW", "1")) if number == 1 else 1.0
        run_ns = 20e6 * slow * random.uniform(0.998, 1.002)  # bounded: no draw is far from the others

        def step():
            NOW_NS[0] += round(run_ns * random.uniform(0.998, 1.002))

        return step

    @pytest.mark.parametrize("number", range(2))
    def test_lasting(perf, number):
        perf(lasting, number=number)
"""


@pytest.mark.extended
def test_a_real_case_slowed_twofold_is_caught(pytester, pytestconfig, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    options = "--benchmark-max-time=0.1 --perf-platform=scripted -p no:hypothesispytest -p no:cacheprovider"
    pytester.makeini(f"[pytest]\naddopts = {options}\n")
    pytester.makeconftest('pytest_plugins = ["perfsuite.plugin"]')
    pytester.makepyfile(test_suite=textwrap.dedent(REAL))
    pytester.runpytest_subprocess("--perf-update=append", "--perf-runs=6").assert_outcomes(passed=2)
    pytester.runpytest_subprocess("--perf-gate").assert_outcomes(passed=2)
    monkeypatch.setenv("SLOW", "2")
    slowed = pytester.runpytest_subprocess("--perf-gate")
    slowed.assert_outcomes(passed=1, failed=1)
    slowed.stdout.fnmatch_lines(["REGRESSED *test_lasting[[]scripted-1[]]*"])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A repository of five commits, each in the baseline."""
    return Repository.stored(tmp_path_factory.mktemp("stored") / "repository")


@pytest.mark.slow
def test_small_slow_merges_go_red_and_name_the_drift_and_a_setting_of_both_arms_is_an_environment(stored, tmp_path):
    quiet, setting, first, second = story(stored.copied(tmp_path / "here"), step=0.02, merges=3)
    assert [0, 1, 0, 1] == [page.code for page in (quiet, setting, first, second)]
    assert re.search(r"^ENVIRONMENT \+(9|10)", setting.text, re.MULTILINE)
    assert "different from the stored runs: variables.TORCH_DISTRIBUTED_DEBUG INFO, stored absent" in setting.text
    assert re.search(r"^DRIFTED \+[34]", second.text, re.MULTILINE)
    assert "not slower than the base by more than the tolerance, slower than" in second.text
    assert "next: perfsuite ab --a " in second.text


@pytest.mark.slow
def test_a_case_without_clean_samples_fails_where_its_report_cannot_wait(tmp_path):
    page = switched_out(Repository.stored(tmp_path / "here", "counted"))
    assert page.code == 1
    assert re.search(r"^REGRESSED \+(99|100)", page.text, re.MULTILINE)
    assert "unconfirmed: no clean samples, slower even against its yardstick" in page.text


def has_arms(token):
    """Whether an arm is alive: its pytest has PERFSUITE_TURNS."""
    with contextlib.suppress(OSError):
        return any(b"PERFSUITE_TURNS=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_with(token))
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_signal_while_the_gate_settles_leaves_verdicts_and_nothing_else(stored, tmp_path, number, name):
    repository = stored.copied(tmp_path / "repository")
    repository.commit(1.5 * STEP_S, "slow")
    options = ["-q", "--perf-platform=scripted", "--benchmark-max-time=0.3", "--perf-gate", "--perf-against=HEAD~1"]
    command = [sys.executable, "-m", "pytest", *options, f"--perf-journal={tmp_path}/j.jsonl"]
    with running(command, repository.root, PYTHONPATH=str(ROOT), **VARIABLES) as child:
        while not has_arms(f"PERFSUITE_TEST_TOKEN={repository.root}"):
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(number)
        time.sleep(1.5)
        child.send_signal(number)  # somebody is impatient
        output, _ = child.communicate(timeout=120)
    assert child.returncode == pytest.ExitCode.INTERRUPTED
    assert len(git(repository.root, "worktree", "list").splitlines()) == 1
    (verdict,) = read_journal(tmp_path / "j.jsonl").gate.verdicts
    assert verdict.name == "inconclusive"
    assert verdict.reasons[0] == f"the gate was interrupted by {name} before it was decided"
    assert f"the gate was interrupted by {name}" in output
