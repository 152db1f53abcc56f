"""The session that validates one device: its steps end within their limits, are kept, and are gone on with."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import device_session
from benchmarks.device_bench import Bench
from benchmarks.device_session import GATE_CASES, GATE_RUNS, LIMITS_S, ROOT, Outcome, go_through, page, run_step
from benchmarks.device_steps import STEPS, gate_cases, shared_device
from perfsuite.record.verdict import GateSettings
from test_correctness.helpers.processes import run_python
from test_correctness.helpers.simmusa_ranks import require_built

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
    assert f"| matmul | FAIL | 3 s | {LIMITS_S['matmul']:g} s |" in printed
    assert f"| gate | not run |  | {LIMITS_S['gate']:g} s |" in printed
    assert "## matmul: FAIL\n\n- ratio 1.2\n" in printed


def test_every_step_is_there_and_limits_follow_the_number_of_processes():
    assert list(LIMITS_S) == list(STEPS)
    assert sum(LIMITS_S.values()) <= 30 * 60
    assert LIMITS_S["gate"] == 2 * GATE_CASES * GATE_RUNS * (5.0 + 4.0)
    assert GATE_RUNS >= GateSettings().min_stored + 3


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
def test_all_steps_pass_on_a_simulated_device_that_is_as_strict_as_it_can_be(tmp_path, monkeypatch):
    require_built()
    page = (ROOT / "docs" / "contributing" / "simmusa.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```\n((?:export .*\n)+)(?:python -m simmusa.*\n)?python benchmarks/device_session", page)
    settings = dict(word.split("=", 1) for word in shlex.split(lines) if word != "export")
    for name, value in {**settings, "SIMMUSA_SHARED": str(tmp_path / "processes")}.items():
        monkeypatch.setenv(name, value)
    outcomes = go_through(LIMITS_S, tmp_path, ["--platform=simmusa", f"--state={tmp_path}"])
    assert {} == {name: outcome.lines for name, outcome in outcomes.items() if not outcome.passed}


def bench_of(name, **software):
    """A full-size machine whose ranks report these versions."""
    machine = SimpleNamespace(
        name=name,
        family=SimpleNamespace(simulated=False, shareable=False),
        natively=lambda dtype: dtype in ("bf16", "fp16"),
    )
    session = SimpleNamespace(driver=SimpleNamespace(environment=lambda: software))
    return Bench(machine=machine, session=session, state=Path(), arguments=())


def test_the_gates_step_names_its_cases_by_id_and_the_suite_has_them():
    ids = gate_cases(bench_of("h100"))
    command = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--perf-scale=full")
    done = run_python(*command, *ids, cwd=ROOT)
    assert ids == [line for line in done.stdout.splitlines() if "::" in line]


def test_two_ranks_on_one_device_say_which_nccl_they_need():
    outcome = shared_device(bench_of("h100", nccl="2.27.5"))
    assert not outcome.passed
    assert outcome.lines == (
        "two ranks on one device need NCCL 2.30 or newer, this one is 2.27.5; pass --backend gloo",
    )
