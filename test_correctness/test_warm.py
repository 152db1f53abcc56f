"""Forkservers that tests copy from a template instead of starting them: like real ones, or real ones."""

import os
from pathlib import Path

import pytest

from perfsuite.plugin.launch import PRELOAD
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.runtime.transports.orphans import MARK
from test_correctness.helpers.processes import gone, processes_with


@pytest.fixture
def transport(tmp_path):
    transport = LocalTransport(start_method="fork", preload=PRELOAD, log_directory=tmp_path)
    yield transport
    transport.close()


def start(transport):
    """The forkserver's process, and every process of its mark."""
    transport.acquire(1, fresh=False, env={}, deadline_s=60)
    server = transport._servers[0]
    return server.process, processes_with(f"{MARK}={server.mark}")


def interpreters(pids):
    """Those that were started by ``python -c``, as a forkserver is."""
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1] == b"-c"]


@pytest.mark.extended
def test_a_copy_has_the_environment_asked_for_and_ends_with_its_stand_in(transport, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # as torch does in a process that imports its compiler
    stand_in, pids = start(transport)
    worker = transport._slots[0].pid
    assert {stand_in.pid, worker} < set(pids)
    assert interpreters(pids) == []
    stand_in.kill()
    assert gone(pids)


def test_a_copy_that_is_closed_ends_well(transport):
    stand_in, pids = start(transport)
    transport.close()
    assert stand_in.returncode == 0
    assert gone(pids)


def test_what_a_copy_cannot_have_is_started_anew(transport):
    transport._preload = ()
    before = os.umask(0o027)
    try:
        server, _ = start(transport)
    finally:
        os.umask(before)
    assert interpreters([server.pid]) == [server.pid]
