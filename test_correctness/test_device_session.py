"""The session that validates one device: its steps end within their limits, are kept, and are gone on with."""

from __future__ import annotations

import json

import pytest

from benchmarks import device_session
from benchmarks.device_session import LIMITS_S, Outcome, go_through, page, run_step
from test_correctness.helpers.simmusa_ranks import FAMILY, require_built

FINE = Outcome(passed=True, lines=("all is well",), seconds=1.0)


@pytest.fixture
def scripted(monkeypatch):
    """Steps that end as told, and the names of those that were run."""
    ran = []

    def install(outcomes):
        def pretend(name, arguments, limit_s):
            ran.append(name)
            found = outcomes[name]
            if isinstance(found, BaseException):
                raise found
            return found

        monkeypatch.setattr(device_session, "run_step", pretend)
        return ran

    return install


def test_a_session_goes_on_where_it_was_stopped_and_repeats_what_failed(tmp_path, scripted):
    failed = Outcome(passed=False, lines=("2 of 3",), seconds=2.0)
    ran = scripted({"environment": FINE, "matmul": failed, "memory": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        go_through(["environment", "matmul", "memory"], tmp_path, [])
    assert ["environment", "matmul", "memory"] == ran
    ran = scripted({"matmul": FINE, "memory": failed})
    outcomes = go_through(["environment", "matmul", "memory"], tmp_path, [])
    assert ["environment", "matmul", "memory", "matmul", "memory"] == ran
    assert {"environment": FINE, "matmul": FINE, "memory": failed} == outcomes


def test_the_page_has_every_step_with_its_limit(tmp_path):
    printed = page({"environment": FINE, "matmul": Outcome(passed=False, lines=("ratio 1.2",), seconds=3.4)}, "run")
    assert "`run`: 1 of 12 steps passed, 2 run, 4 s together." in printed
    assert "| environment | PASS | 1 s | 90 s |" in printed
    assert "| matmul | FAIL | 3 s | 240 s |" in printed
    assert "| gate | not run |  | 300 s |" in printed
    assert "## matmul: FAIL\n\n- ratio 1.2\n" in printed


def test_every_step_is_there():
    from benchmarks.device_steps import STEPS

    assert list(LIMITS_S) == list(STEPS)
    assert sum(LIMITS_S.values()) <= 30 * 60


def test_a_step_that_does_not_end_has_failed(tmp_path):
    outcome = run_step("environment", [f"--state={tmp_path}"], 0.01)
    assert not outcome.passed
    assert "not over within its limit of 0.01 s" == outcome.lines[0]


def test_a_step_that_dies_says_what_it_said(tmp_path):
    outcome = run_step("environment", ["--no-such-option"], 60.0)
    assert not outcome.passed
    assert "ended with exit code 2 and no answer" == outcome.lines[0]
    assert "unrecognized arguments: --no-such-option" in json.dumps(outcome.lines) or "required" in outcome.lines[-1]


@pytest.mark.slow
def test_all_steps_pass_on_a_simulated_device(tmp_path, monkeypatch):
    require_built()
    monkeypatch.setenv("PERFSUITE_FAMILIES", FAMILY)
    outcomes = go_through(LIMITS_S, tmp_path, ["--platform=simmusa", f"--state={tmp_path}"])
    assert {} == {name: outcome.lines for name, outcome in outcomes.items() if not outcome.passed}
