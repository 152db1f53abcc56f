"""A whole pytest run under real launchers: one report, faults, and nothing left behind."""

import os
import re
import shutil
import signal
import sys

import pytest

from test_correctness.helpers.processes import gone, processes_with, running, until_there
from test_correctness.helpers.scripted_driver import ROOT, junit

PROJECT = """
import os, pathlib, signal, time
from perfsuite import world_sizes

def add_up(rank):
    import torch
    import torch.distributed as dist
    ones = torch.ones(1024)
    dist.all_reduce(ones)
    assert ones.tolist() == [float(rank.world_size)] * 1024
    return lambda: dist.all_reduce(ones)

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
PATIENT_MPIRUN = ("mpirun", "--mca", "odls_base_sigkill_timeout", "5", *MPIRUN[1:])
"""Its second until SIGKILL is too short to hang a test on; it waits as long as it may, whoever has ended."""
IMITATION = """
import os, signal, subprocess, sys, time

def start(rank):
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 3, "LOCAL_SIZE": 3}
    ours = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in ranks.items()}
    environ = {**os.environ, **ours, "PMIX_NAMESPACE": str(os.getpid())}
    return subprocess.Popen([sys.executable, "-m", "pytest", *sys.argv[1:]], env=environ, start_new_session=True)

processes = [start(rank) for rank in range(3)]
while None in (codes := [process.poll() for process in processes]) and not any(codes):
    time.sleep(0.02)
for number in (signal.SIGCONT, signal.SIGTERM):
    for process in processes:
        process.send_signal(number)
until = time.monotonic() + 60
for process in processes:
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
sys.exit(max(abs(process.wait()) for process in processes))
"""
"""What mpirun does: when one process ends badly all others get SIGTERM, and SIGKILL (after a second) if they stay."""
LIKE_MPIRUN = (sys.executable, "-c", IMITATION)
NEEDS_MPIRUN = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")


def project(launcher, directory, *options, source=PROJECT, environ=None):
    """A run of ``source`` under a launcher; at the end nothing of it may be left, in processes or in files."""
    (directory / "test_project.py").write_text(source)
    (directory / "tmp").mkdir()
    given = {"PYTHONPATH": str(ROOT), "STUCK": str(directory / "stuck"), "TMPDIR": str(directory / "tmp")}
    plugins = ("-p", "perfsuite.plugin", "-p", "no:cacheprovider", "--color=no", "--junitxml=junit.xml")
    return running([*launcher, *plugins, *options], directory, **given, **(environ or {}))


def verdicts(directory):
    cases = junit(directory / "junit.xml")
    return {name: (case[-1].attrib.get("message", "") if len(case) else "") for name, case in cases.items()}


def until_stuck(directory, ranks=2):
    until_there(*(directory / f"stuck.{rank}" for rank in range(ranks)), within_s=90 * ranks / 2)


@pytest.mark.extended
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


@NEEDS_MPIRUN
def test_pytest_under_mpirun(tmp_path):
    with project(MPIRUN, tmp_path, "-k", "first or last") as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    assert "transport openmpi with 2 ranks" in output
    assert "3 passed, 1 skipped" in output


@pytest.mark.extended
@pytest.mark.parametrize(
    ("launcher", "rank_1"),
    [
        pytest.param(TORCHRUN, "RANK=1", id="torchrun"),
        pytest.param(LIKE_MPIRUN, "OMPI_COMM_WORLD_RANK=1", id="like-mpirun", marks=pytest.mark.slow),
        pytest.param(PATIENT_MPIRUN, "OMPI_COMM_WORLD_RANK=1", id="mpirun", marks=(NEEDS_MPIRUN, pytest.mark.slow)),
    ],
)
def test_a_lost_agent_is_named_in_a_finished_report(tmp_path, launcher, rank_1):
    with project(launcher, tmp_path, "-k", "first or stuck or last") as run:
        until_stuck(tmp_path)
        (agent,) = processes_with(f"PERFSUITE_TEST_TOKEN={tmp_path}", rank_1)  # workers do not see that
        os.kill(agent, signal.SIGKILL)
        output, _ = run.communicate(timeout=120)
    assert run.returncode != 0, output
    assert re.search(rf"the agent of rank 1 on \S+ \(pid {agent}\) is lost", output)
    if launcher is not PATIENT_MPIRUN:  # while it waits it does not read what the driver prints
        assert "1 failed, 1 passed" in output
    (message,) = filter(None, verdicts(tmp_path).values())
    assert "the agent of rank 1" in message
    assert "rank 2" not in message, "it was told to end, because rank 1 was lost"
    assert "more are lost" not in message


@pytest.mark.extended
def test_a_killed_torchrun_leaves_nothing_running(tmp_path):
    with project(TORCHRUN, tmp_path, "-k", "stuck") as run:
        until_stuck(tmp_path)
        run.kill()
        run.wait(30)
        assert gone(processes_with(f"PERFSUITE_TEST_TOKEN={tmp_path}"))
        assert len(verdicts(tmp_path)) == 1
