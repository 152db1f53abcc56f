"""A whole pytest run under real launchers: one report, faults, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perfsuite.runtime.launchers import launcher_variables
from test_correctness.processes import gone, processes_with

ROOT = Path(__file__).parent.parent
PROJECT = """
import os, pathlib, signal, time
from perfsuite import world_sizes

def add_up(rank):
    import torch
    import torch.distributed as dist
    buffer = torch.ones(1024)
    return lambda: dist.all_reduce(buffer)

def dying(rank):
    def run():
        if rank.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)
    return run

def stuck(rank, file):
    pathlib.Path(f"{file}.{rank.rank}").touch()
    return lambda: time.sleep(3600)

@world_sizes(2)
def test_first(perf, ranks):
    assert perf(add_up, on=ranks).median_s > 0

@world_sizes(2)
def test_dying(perf, ranks):
    perf(dying, on=ranks)

@world_sizes(2)
def test_stuck(perf, ranks):
    perf(stuck, on=ranks, file=os.environ["STUCK"])

@world_sizes(1, 2, 3)
def test_last(perf, ranks):
    assert len(perf(add_up, on=ranks).measurement.ranks) == ranks.world_size
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "pytest")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "pytest")


@contextlib.contextmanager
def project(launcher: tuple[str, ...], directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A run of PROJECT under a launcher; at the end nothing of it may be left, in processes or in files."""
    (directory / "test_project.py").write_text(PROJECT)
    (directory / "tmp").mkdir()
    token = f"PERFSUITE_TEST_TOKEN={directory}"
    kept = {name: value for name, value in os.environ.items() if name not in launcher_variables(os.environ)}
    environ = {
        **kept,
        "PERFSUITE_TEST_TOKEN": str(directory),
        "PYTHONPATH": str(ROOT),
        "STUCK": str(directory / "stuck"),
        "TMPDIR": str(directory / "tmp"),
    }
    process = subprocess.Popen(
        [*launcher, "-p", "perfsuite.plugin", "-p", "no:cacheprovider", "--color=no", "--junitxml=junit.xml", *options],
        cwd=directory,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
        assert gone(processes_with(token))
    finally:
        for pid in {*processes_with(token), process.pid}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def verdicts(directory: Path) -> dict[str, str]:
    cases = ElementTree.parse(directory / "junit.xml").iter("testcase")
    return {case.attrib["name"]: (case[-1].attrib.get("message", "") if len(case) else "") for case in cases}


def until_stuck(directory: Path) -> None:
    until = time.monotonic() + 90
    while not all((directory / f"stuck.{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < until, "the case did not start"
        time.sleep(0.1)


def test_pytest_under_torchrun(tmp_path):
    with project(TORCHRUN, tmp_path, "-k", "not stuck") as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    assert output.count("test session starts") == 1
    assert "transport torchrun with 2 ranks" in output
    assert "1 failed, 3 passed, 1 skipped" in output
    messages = verdicts(tmp_path)
    failed = [message for name, message in messages.items() if "dying" in name]
    assert len(failed) == 1
    assert re.search("rank 1 on .* died: killed by SIGKILL", failed[0])
    assert "3 ranks, but torchrun gave 2" in output + str(messages)
    assert "Signal" not in output, "torchrun had to end somebody"


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_pytest_under_mpirun(tmp_path):
    with project(MPIRUN, tmp_path, "-k", "first or last") as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "transport openmpi with 2 ranks" in output
    assert "3 passed, 1 skipped" in output


def test_an_agent_lost_under_torchrun_is_named_in_a_finished_report(tmp_path):
    with project(TORCHRUN, tmp_path, "-k", "first or stuck or last") as run:
        until_stuck(tmp_path)
        (agent,) = processes_with(f"PERFSUITE_TEST_TOKEN={tmp_path}", "RANK=1")  # workers do not see that
        os.kill(agent, signal.SIGKILL)
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    assert re.search(rf"the agent of rank 1 on \S+ \(pid {agent}\) is lost", output)
    assert "1 failed, 1 passed" in output
    assert any("the agent of rank 1" in message for message in verdicts(tmp_path).values())


def test_a_killed_torchrun_leaves_nothing_running(tmp_path):
    with project(TORCHRUN, tmp_path, "-k", "stuck") as run:
        until_stuck(tmp_path)
        run.kill()
        run.wait(30)
        assert gone(processes_with(f"PERFSUITE_TEST_TOKEN={tmp_path}"))
        assert len(verdicts(tmp_path)) == 1
