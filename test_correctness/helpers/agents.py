"""Driver and agents with real processes; launches on "several hosts" are several hosts to perfsuite only."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perfsuite.runtime.driver import Driver
from perfsuite.runtime.transports import door, star
from perfsuite.runtime.transports.cluster import ClusterTransport
from perfsuite.runtime.transports.keys import Meeting
from perfsuite.runtime.transports.launchers import Launch, detect_launch
from test_correctness.helpers.local_driver import ROOT, driver_over
from test_correctness.helpers.processes import unlaunched

AGENT = """
import os, sys
from perfsuite.runtime.transports import agent
from perfsuite.runtime.transports.launchers import detect_launch
agent.PATIENCE_S = 60
sys.exit(agent.serve_agent(detect_launch(os.environ), deadline_s=60))
"""
"""Waits in silence for a driver that a busy machine starts slowly: tests compare all that it prints."""


def environ_of(rank: int, world_size: int, directory: Path, *, hosts: int = 1) -> dict[str, str]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    ours = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (world_size // hosts)),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size // hosts),
        "MASTER_ADDR": "127.0.0.1" if hosts == 1 else "127.0.0.2",
        "MASTER_PORT": str(port),
        "TMPDIR": str(directory),
    }
    return {**unlaunched(), **ours, **({"PERFSUITE_KEY": "a key for tests alone"} if hosts > 1 else {})}


def a_launch(rank: int = 0, world_size: int = 2, **changes: Any) -> Launch:
    """A process of a launch of its own on one host, unless ``changes`` say otherwise."""
    same = {
        "launcher": "env",
        "local_world_size": changes.get("local_world_size", world_size),
        "node_rank": 0,
        "master_addr": "127.0.0.1",
        "master_port": None,
        "run_id": uuid.uuid4().hex,
    }
    local_rank = rank % same["local_world_size"]
    return Launch(rank=rank, local_rank=local_rank, world_size=world_size, **{**same, **changes})


def an_agent(launch: Launch, rank: int) -> Launch:
    """Another process of the same launch."""
    return dataclasses.replace(launch, rank=rank, local_rank=rank % launch.local_world_size)


def reach(launch: Launch, meeting: Meeting, hello=None, *, deadline_s: float = 30.0, alive=lambda: True):
    """Have an agent look for its driver."""
    hello = hello or star.greeting(launch, "here", 1)
    return door.reach_driver(launch, lambda: meeting, hello, farewell=lambda _: {}, deadline_s=deadline_s, alive=alive)


@contextlib.contextmanager
def started(script: str, environ: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of this program, which is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclasses.dataclass
class Launched:
    transport: ClusterTransport
    agents: dict[int, subprocess.Popen[str]]
    directory: Path

    def driver(self) -> Driver:
        return driver_over(self.transport)


@contextlib.contextmanager
def launched(
    world_size: int, directory: Path, monkeypatch: pytest.MonkeyPatch, *, hosts: int = 1, preload=(), agent=(AGENT,)
) -> Iterator[Launched]:
    environ = environ_of(0, world_size, directory, hosts=hosts)
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    launch = detect_launch(environ)
    assert launch is not None
    with contextlib.ExitStack() as stack:
        others = {}
        for rank in range(1, world_size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % (world_size // hosts))}
            others[rank] = stack.enter_context(started(agent[0], {**environ, **own}, *agent[1:]))
        log_directory = directory / "logs"
        transport = ClusterTransport(
            launch, start_method="fork", preload=preload, log_directory=log_directory, deadline_s=60, environ=environ
        )
        stack.callback(transport.close)
        transport.gather()
        yield Launched(transport=transport, agents=others, directory=directory)
