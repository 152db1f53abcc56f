"""The driver's side of a forkserver, and of the workers that it started."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from perfsuite.runtime.scratch import compiler_variables
from perfsuite.runtime.transports.base import WRAPPER
from perfsuite.runtime.transports.forkserver import boot_command
from perfsuite.runtime.transports.launchers import launcher_variables
from perfsuite.runtime.transports.orphans import MARK, end_marked

LOG = "forkserver.log"
_END_S = 10.0
"""For a forkserver to end all its descendants, and for the driver to do so in its place."""


@dataclass(kw_only=True)
class Child:
    """One worker process, as the driver knows it."""

    slot: int
    link: Connection
    log: Path
    stacks: Path
    env: dict[str, str]
    pid: int = 0
    used: bool = False
    """It has been acquired for a case before."""
    log_start: int = 0
    """Size of the log when the current case began."""
    doomed: bool = False
    """Killed before the forkserver said that it had started."""
    ended: str = ""
    reported: bool = False


class ForkServer:
    """One forkserver process: it starts workers, passes signals on and says how each of them ended."""

    def __init__(self, logs: Path, preload: Iterable[str]) -> None:
        """Start it, without waiting until it has imported."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life_r, self._life_w = os.pipe()
        self.mark = secrets.token_hex(8)
        """Value of MARK in the environment of all that descends from it."""
        self._preloaded = tuple(preload)
        arguments = {"control_fd": theirs.fileno(), "life_fd": life_r, "preload": self._preloaded}
        command = boot_command("perfsuite.runtime.transports.forkserver:main", arguments)
        with (logs / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                [*shlex.split(os.environ.get(WRAPPER, "")), *command],
                pass_fds=(theirs.fileno(), life_r),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**worker_environment(), MARK: self.mark},
            )
        theirs.close()
        os.close(life_r)
        self.control = ours
        self.is_up = False
        """It has imported what it preloads."""
        self._requests = 0
        self._children: dict[int, Child] = {}
        """By request id, negative, until started, then by pid."""

    def start(self, child: Child, method: str, command: socket.socket, preload: Iterable[str]) -> bool:
        """Ask for a worker that has ``command`` and these modules; False where the forkserver is gone.

        It imports only now, when the one who asked waits for the worker: not beside a case that is measured.
        """
        new = tuple(name for name in preload if name not in self._preloaded)
        self._requests += 1
        self._children[-self._requests] = child
        request = {
            "start": self._requests,
            "method": method,
            "log": str(child.log),
            "stacks": str(child.stacks),
            "env": child.env,
        }
        try:
            if new:
                self._preloaded += new
                self.control.send(json.dumps({"preload": new}).encode())
            socket.send_fds(self.control, [json.dumps(request).encode()], [command.fileno()])
        except OSError:
            return False
        return True

    def signal(self, children: Iterable[Child], number: int) -> None:
        """Send a signal to those of these workers that are its own; nothing where it is gone."""
        pids = [child.pid for child in children if self._children.get(child.pid) is child]
        if pids:
            with contextlib.suppress(OSError):
                self.control.send(json.dumps({"signal": int(number), "pids": pids}).encode())

    def listen(self) -> bool:
        """Take in all that it has said; False once it is gone."""
        while wait([self.control], 0):
            data = _heard(self.control)
            if not data:
                return False
            self._take(json.loads(data))
        return True

    def _take(self, message: Mapping[str, Any]) -> None:
        if "up" in message:
            self.is_up = True
        elif "started" in message:
            child = self._children.pop(-message["started"])
            child.pid = message["pid"]
            self._children[child.pid] = child
            if child.doomed:
                self.signal([child], signal.SIGKILL)
        elif "exited" in message:
            child = self._children.pop(message["exited"])
            child.ended = message["text"]

    def lose(self) -> None:
        """It died: so did its children."""
        code = self.process.wait(5)
        self.let_go()
        self._end_in_its_place()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        when = "" if self.is_up else f" while it imported {', '.join(self._preloaded)}"
        for child in self._children.values():
            child.ended = f"its parent, the forkserver, {how}{when}"

    def let_go(self) -> None:
        """It ends all its children and itself."""
        os.close(self._life_w)
        self.control.close()

    def await_end(self) -> None:
        """After :meth:`let_go`: returns once it and all that descends from it have ended."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # stuck in a preload: its children watch the same pipe
            self.process.kill()
        self._end_in_its_place()

    def _end_in_its_place(self) -> None:
        """Once its end is certain: what it would have ended itself, had it not been killed."""
        if self.process.wait(5) != 0:
            end_marked(self.mark, _END_S)


def worker_environment() -> dict[str, str]:
    """The driver's environment without the launcher's variables and thread settings, which perfsuite sets itself."""
    hidden = {*launcher_variables(os.environ), "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "TORCH_GLOO_LAZY_INIT": "1", **compiler_variables()}


def _heard(control: socket.socket) -> bytes:
    """The next message of the forkserver; nothing once it is gone and all that it said has been read."""
    try:
        return control.recv(1 << 20)
    except ConnectionResetError:  # it ended with a request unread: told once, before what it had said itself
        return control.recv(1 << 20)
