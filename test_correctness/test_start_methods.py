"""How the local transport starts ranks: under a wrapper, with memory of their own, as forks and as interpreters."""

import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError
from perfsuite.runtime.transports import local
from perfsuite.runtime.transports.base import WRAPPER
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.runtime.transports.parents import ForkServer
from test_correctness.helpers import steps
from test_correctness.helpers.local_driver import job, local_driver
from test_correctness.helpers.processes import gone, processes_with

pytestmark = pytest.mark.usefixtures("cold")


def opened(logs, *, start_method="fork", preload=()):
    """A transport that is closed at the end."""
    return closing(LocalTransport(start_method=start_method, preload=preload, log_directory=logs))


def test_a_wrapper_starts_the_workers_is_in_the_record_and_closing_leaves_no_process(tmp_path, monkeypatch):
    variable = f"PERFSUITE_TEST=by a wrapper of {os.getpid()}"  # another run of the tests may go on beside this one
    monkeypatch.setenv(WRAPPER, f"env '{variable}'")
    with local_driver(tmp_path, "torch") as driver:
        driver.run(job(steps.add_up, 2))
        assert driver.environment()["wrapper"] == f"env '{variable}'"
        servers = [server.process.pid for server in driver._transport._servers.values()]
        pids = [*servers, *(child.pid for child in driver._transport._slots.values())]
        assert set(pids) == set(processes_with(variable))
        driver.close()
    assert gone(pids, within_s=10.0)


@pytest.mark.skipif(
    Path("/proc/sys/kernel/randomize_va_space").read_text().strip() == "0", reason="no address is random here"
)
def test_ranks_that_share_few_cores_have_their_memory_laid_out_apart_as_a_users_have(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "allowed_cores", lambda: (0, 1))
    with opened(tmp_path, preload=("wave",)) as transport:
        transport.start()
        transport.acquire(3, fresh=False, env={}, deadline_s=60)
        assert all(server.is_up for server in transport._servers.values())  # none imports beside a case
        places = [where_libc_is(transport._slots[rank].pid) for rank in range(3)]
    assert places[0] != places[1]
    assert places[0] == places[2]


def where_libc_is(pid):
    """The address of the C library itself: libcrypto and others may be loaded by one of two forks alone."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split("-")[0] for line in maps if re.search(r"/libc(\.so|-)", line))


def test_an_unknown_way_to_start_ranks_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="start_method='spawn' is not valid; choose fork or exec"):
        LocalTransport(start_method="spawn", preload=(), log_directory=tmp_path)


def test_an_interpreter_of_its_own_starts_with_the_environment_asked_for(tmp_path):
    with opened(tmp_path, start_method="exec") as transport:
        assert transport.acquire(1, fresh=False, env={"PERFSUITE_TEST": "1"}, deadline_s=60)
        pid = transport._slots[0].pid
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        deadline = time.monotonic() + 30
        while b"PERFSUITE_TEST=1" not in environment and time.monotonic() < deadline:  # before its exec it is a fork
            time.sleep(0.05)
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"PERFSUITE_TEST=1" in environment
        assert not transport.acquire(1, fresh=False, env={"PERFSUITE_TEST": "1"}, deadline_s=60)
        assert transport.acquire(1, fresh=False, env={}, deadline_s=60)
    assert gone([pid], within_s=10.0)


def test_a_killed_worker_has_ended_before_the_next_one_of_its_slot_starts(tmp_path, monkeypatch):
    transport = LocalTransport(start_method="fork", preload=(), log_directory=tmp_path)
    at_once, start, alive = ForkServer.signal, transport._start_child, []

    def late(server, children, number):
        threading.Timer(0.3, at_once, (server, list(children), number)).start()

    def starts(slot, env):
        alive.extend(pid for pid in seen if not gone([pid], within_s=0.0))
        return start(slot, env)

    try:
        transport.acquire(2, fresh=False, env={}, deadline_s=60)
        seen = [child.pid for child in transport._slots.values()]
        monkeypatch.setattr(ForkServer, "signal", late)
        monkeypatch.setattr(transport, "_start_child", starts)
        transport.acquire(2, fresh=True, env={}, deadline_s=60)
        assert set(seen).isdisjoint(child.pid for child in transport._slots.values())
        transport.kill([0])
        seen = [next(iter(transport._doomed)).pid]
        transport.acquire(2, fresh=False, env={}, deadline_s=60)
    finally:
        monkeypatch.undo()
        transport.close()
    assert [] == alive


@pytest.mark.extended
def test_a_request_may_be_larger_than_the_buffer_of_a_socket(tmp_path):
    env = {f"PERFSUITE_TEST_{number}": str(number) * 100_000 for number in range(5)}
    with opened(tmp_path) as transport:
        transport.acquire(1, fresh=False, env=env, deadline_s=60)
        transport.send(0, {"verb": "unknown"})
        while not (events := transport.poll(1.0)):
            pass  # its interpreter starts
        assert events[0].kind == "message", events
        pids = processes_with(*(f"{name}={value}" for name, value in env.items()))
        assert transport._slots[0].pid in pids


def test_a_forkserver_that_is_given_up_alive_is_ended(tmp_path):
    with opened(tmp_path) as transport:
        transport.acquire(1, fresh=False, env={}, deadline_s=60)
        pids, child = [transport._servers[0].process.pid, transport._slots[0].pid], transport._slots[0]
        transport._lose_server(0)
        assert gone(pids, within_s=10.0)
        assert child.ended == "its parent, the forkserver, ended with exit code 0"


def test_a_forkserver_that_cannot_start_leaves_no_descriptor(tmp_path, monkeypatch):
    monkeypatch.setenv(WRAPPER, str(tmp_path / "nothing"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        ForkServer(tmp_path, ())
    assert os.listdir("/proc/self/fd") == before
