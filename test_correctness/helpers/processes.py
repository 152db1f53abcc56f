"""Looking at processes from outside, for tests of what is left behind."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perfsuite.runtime.transports.launchers import launcher_variables


def unlaunched() -> dict[str, str]:
    """The environment without the variables of a launcher of the tests."""
    return {name: value for name, value in os.environ.items() if name not in launcher_variables(os.environ)}


def run_python(*arguments: object, cwd: Path, timeout_s: float = 300.0, **environ: str) -> subprocess.CompletedProcess:
    """This Python with these arguments and variables, as nobody's rank; its output and exit code."""
    command, pipes = [sys.executable, *map(str, arguments)], {"capture_output": True, "text": True}
    return subprocess.run(command, cwd=cwd, env={**unlaunched(), **environ}, timeout=timeout_s, check=False, **pipes)


@contextlib.contextmanager
def running(command: Sequence[str], directory: Path, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a directory as nobody's rank, its output in one stream; at the end nothing of it may be left."""
    token = f"PERFSUITE_TEST_TOKEN={directory}"
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**unlaunched(), "PERFSUITE_TEST_TOKEN": str(directory), **environ},
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


def until_there(*files: Path, within_s: float = 90.0) -> None:
    """Wait for files that ranks make."""
    until = time.monotonic() + within_s
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, "the case did not start"
        time.sleep(0.05)


def in_a_fork(look: Callable[[], Any]) -> Any:
    """The JSON of what ``look`` returns in a process without other threads, with which all that it changes ends."""
    reader, writer = os.pipe()
    gc.freeze()  # garbage may wait for a thread that the fork lacks (a frame of PyAV); libraries run code in os.fork
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.write(writer, json.dumps(look()).encode())
        os._exit(0)
    gc.unfreeze()
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
    found = [child for child, parent in parents.items() if parent == pid]
    for child in found:
        found.extend(grandchild for grandchild, parent in parents.items() if parent == child)
    return found


def gone(pids, within_s=20.0):
    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    until = time.monotonic() + within_s
    while time.monotonic() < until and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def processes_with(*variables: str) -> list[int]:
    """Processes that were started with these ``NAME=value`` in their environment."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if {variable.encode() for variable in variables} <= set(file.read_bytes().split(b"\0")):
                found.append(int(file.parent.name))
    return found


def listening_on(pid: int) -> dict[int, str]:
    """The ports that a process listens on, each with its address: ``0.0.0.0`` and ``::`` are all interfaces.

    None of one that has ended, also while it is looked at.
    """
    links: list[str] = []
    tables: list[str] = []
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(os.readlink(fd))
        tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    found = {}
    for table in tables:
        for line in table.splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:
                address, port = local.split(":")
                words = [struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8)]
                found[int(port, 16)] = str(ipaddress.ip_address(b"".join(words)))
    return found


def own_address() -> str | None:
    """An address of this machine that is not loopback; None when it has none.  Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return None
