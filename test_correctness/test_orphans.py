"""What a rank's code leaves behind, in sessions of its own and as daemons, ends with the rank's process, not before."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from perfsuite.base.errors import RanksFailed
from perfsuite.record.workload import Budget
from perfsuite.runtime import scratch
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.runtime.transports.orphans import MARK, ChildProcess, children
from test_correctness.helpers import orphans, processes, steps
from test_correctness.helpers.agents import started
from test_correctness.helpers.local_driver import driver_fixture, job, local_driver
from test_correctness.helpers.processes import processes_with

pytestmark = pytest.mark.usefixtures("cold")
SLEEPERS = 2
"""Processes that orphans.orphaning leaves behind and that stay the same: a session and a daemon, beside a chain."""
DRIVER = """
import sys, time
from perfsuite.runtime import scratch
from test_correctness.helpers.local_driver import local_driver
from test_correctness.test_orphans import leave
with local_driver(scratch.make_directory("run")[0], start_method="exec") as run:
    leave(run, sys.argv[1])
    print("left", flush=True)
    time.sleep(3600)
"""
COMPARISON = """
from pathlib import Path
from perfsuite.run import arms
arm = arms.Arm(name="base", root=Path.cwd())
arms.start(["sleep", "600"], arm, arms.arm_environment(arm)).communicate(timeout=600)
"""


def leave(driver, directory, **changes):
    driver.run(job(orphans.orphaning, token=str(directory), **changes))


def left(directory):
    return processes_with(f"PERFSUITE_TEST_TOKEN={directory}")


def gone(directory, within_s=60.0):
    until = time.monotonic() + within_s
    while left(directory) and time.monotonic() < until:
        time.sleep(0.05)
    return not left(directory)


driver = driver_fixture()


@pytest.fixture(autouse=True)
def nothing_outlives_its_test(tmp_path):
    yield
    for pid in left(tmp_path):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.extended
def test_they_live_as_long_as_their_worker_which_is_replaced_for_the_next_case(driver, tmp_path):
    leave(driver, tmp_path)
    assert len(left(tmp_path)) >= SLEEPERS, "the worker lives"
    driver.run(job(steps.add_up))
    assert gone(tmp_path)


@pytest.mark.extended
def test_those_of_a_hung_worker_end_with_it(driver, tmp_path):
    budget = Budget(min_rounds=3, max_time_s=0.05, timeout_s=1.5)
    with pytest.raises(RanksFailed, match="hung"):
        leave(driver, tmp_path, then="hang", budget=budget)
    assert gone(tmp_path)


@pytest.mark.extended
def test_those_of_a_killed_forkserver_are_ended_by_the_driver(driver, tmp_path):
    leave(driver, tmp_path, chained=False)  # whoever searches /proc may miss each link of a chain
    server = driver._transport._servers[0].process
    server.kill()
    server.wait()
    driver.run(job(steps.add_up))
    assert gone(tmp_path)


def test_nothing_is_left_once_the_run_is_closed(tmp_path):
    with local_driver(tmp_path) as driver:
        leave(driver, tmp_path)
    assert left(tmp_path) == []


def test_closing_does_the_work_of_a_killed_forkserver(tmp_path):
    transport = LocalTransport(start_method="fork", preload=(), log_directory=tmp_path)
    transport.start()
    server = transport._servers[0]
    marks = {MARK: server.mark, "PERFSUITE_TEST_TOKEN": str(tmp_path)}
    with subprocess.Popen(["sleep", "600"], start_new_session=True, env={**os.environ, **marks}):
        server.process.kill()
        transport.close()
    assert left(tmp_path) == []


KILLED_WHILE_ITS_WORKER_STARTS = """
import os, signal, socket, time
from perfsuite.runtime.transports import forkserver
control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
life, _ = os.pipe()
server = forkserver._Server(control, life)
forkserver.adopt_orphans = lambda: time.sleep(1.0)  # of the worker: its forkserver ends in the meantime
forkserver.become_worker = lambda files: time.sleep(600)
server._start({"start": 1, "method": "fork", "log": "", "stacks": "", "env": {}}, os.dup(0))
print(*server.children, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forkserver_that_is_killed_while_a_worker_starts_takes_it_along():
    with started(KILLED_WHILE_ITS_WORKER_STARTS, {**os.environ}) as process:
        worker = int(process.stdout.readline())
        assert -signal.SIGKILL == process.wait()
    try:
        assert processes.gone([worker])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_a_child_that_has_left_its_group_since_is_killed_all_the_same():
    ended = subprocess.Popen(["true"])
    ended.wait()
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    assert ChildProcess(pid=child.pid, group=ended.pid, session=child.pid).kill()
    assert -signal.SIGKILL == child.wait()


def test_an_arm_of_a_comparison_ends_with_its_run(tmp_path):
    with started(COMPARISON, {**os.environ, "PERFSUITE_TEST_TOKEN": str(tmp_path)}) as process:
        while process.poll() is None and len(left(tmp_path)) < 2:
            time.sleep(0.02)
        assert process.poll() is None
    assert gone(tmp_path)


@pytest.mark.extended
def test_a_killed_driver_leaves_nothing_running_and_its_files_to_the_next_start(tmp_path, monkeypatch):
    with started(DRIVER, {**os.environ, "TMPDIR": str(tmp_path)}, str(tmp_path)) as process:
        assert process.stdout.readline() == "left\n"
        assert len(left(tmp_path)) >= SLEEPERS
    assert gone(tmp_path)
    assert list(tmp_path.glob("perfsuite-run-*/rank0.log"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratch.clear()
    kept = {path.name.partition("_")[0] for path in tmp_path.iterdir()}
    assert kept <= {"torchinductor"}  # torch's cache of compiled kernels outlives every run


def test_a_thread_that_ends_while_its_children_are_read_hides_no_child(monkeypatch, tmp_path):
    lists = Path.glob
    if not list(lists(Path("/proc/self/task"), "*/children")):
        pytest.skip("this kernel keeps no lists of children")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [tmp_path / "ended", *lists(self, pattern)])
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            assert child.pid in {each.pid for each in children()}
        finally:
            child.kill()
