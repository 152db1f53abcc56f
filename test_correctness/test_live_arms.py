"""Arms that stay alive between turns: real processes on a scripted clock."""

import contextlib
import os
import signal
import tempfile
from pathlib import Path

import pytest

from benchmarks.scripted_clock import VARIABLES
from perfsuite.run import arms
from perfsuite.run.arms import Arm, ArmFailed, LiveArm

ROOT = Path(__file__).parent.parent
OPTIONS = ("--perf-platform=scripted", "--benchmark-max-time=0.05")
CASES = """
import pytest
from benchmarks.scripted_clock import NOW_NS

def step(rank, number):
    def iteration():
        NOW_NS[0] += 1_000_000 * (1 + number)
    return iteration

@pytest.mark.parametrize("number", range(2))
def test_step(perf, number):
    perf(step, number=number)

def test_skipped(perf):
    pytest.skip("not today")
"""
NODES = [f"test_step.py::test_step[scripted-{number}]" for number in range(2)]


@pytest.fixture
def arm(tmp_path, monkeypatch):
    """An arm of a repository with two cases and one that is skipped."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["perfsuite.plugin"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_step.py").write_text(CASES)
    return Arm(name="base", root=tmp_path)


@pytest.mark.extended
def test_an_arm_is_started_once_and_measures_turn_by_turn(arm):
    skipped = "test_step.py::test_skipped[scripted]"
    with contextlib.closing(LiveArm(arm, OPTIONS, [*NODES, skipped])) as live:
        live.start(600)
        turns = [live.measure(nodes, 600) for nodes in (NODES, NODES[1:], [NODES[1], NODES[0]])]
        with pytest.raises(ArmFailed, match="base measured no case: not today"):
            live.measure([skipped], 600)
        assert live.serves(NODES)
        assert not live.serves(["test_other.py::test"])
    assert [sorted(turn) for turn in turns] == [NODES, NODES[1:], NODES]
    assert [round(turn[NODES[1]].median_s, 4) for turn in turns] == [0.002] * 3
    started = {turn[NODES[1]].started_at for turn in turns}
    assert len({id(turn[NODES[1]]) for turn in turns}) == 3
    assert started
    assert all(turn[NODES[1]].measurement.process == "fresh" for turn in turns)
    assert live._child.poll() is not None


@pytest.mark.extended
def test_an_arm_that_cannot_collect_its_cases_says_why(arm):
    live = LiveArm(arm, OPTIONS, ["test_step.py::nowhere"])
    with pytest.raises(ArmFailed, match=r"(?s)^base was not measured: its pytest ended with exit code 4; .*nowhere"):
        live.start(600)
    assert live._child.poll() is not None


@pytest.mark.parametrize("failing", ["pytest_arguments", "arm_environment", "start"])
def test_an_arm_that_cannot_start_leaves_no_descriptor_and_no_directory(tmp_path, monkeypatch, failing):
    def fail(*_):
        raise OSError("cannot")

    monkeypatch.setattr(arms, failing, fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="cannot"):
        LiveArm(Arm(name="base", root=tmp_path), OPTIONS, NODES).start(600)
    assert os.listdir("/proc/self/fd") == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
def test_an_arm_that_is_gone_is_not_asked_again(arm):
    with contextlib.closing(LiveArm(arm, OPTIONS, NODES)) as live:
        live.start(600)
        os.killpg(live._child.pid, signal.SIGKILL)
        with pytest.raises(ArmFailed, match="its pytest ended with exit code -9"):
            live.measure(NODES, 600)
        assert not live.serves(NODES)


@pytest.mark.extended
def test_an_arm_that_hangs_has_ended_before_anything_else_is_measured(arm):
    (arm.root / "test_step.py").write_text("import time\n\ndef test_hangs(perf):\n    time.sleep(600)\n")
    with contextlib.closing(LiveArm(arm, OPTIONS, ["test_step.py::test_hangs[scripted]"])) as live:
        live.start(600)
        with pytest.raises(ArmFailed, match="base did not end within 2 s"):
            live.measure(["test_step.py::test_hangs[scripted]"], 2)
        assert live._child.poll() is not None
