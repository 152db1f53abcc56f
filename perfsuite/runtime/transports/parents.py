"""The driver's side of a forkserver and of its workers."""

from __future__ import annotations

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
from perfsuite.runtime.transports.forkserver import boot_command, send_request
from perfsuite.runtime.transports.launchers import launcher_variables
from perfsuite.runtime.transports.orphans import MARK, end_marked

LOG = "forkserver.log"
_END_S = 10.0  # Time limit for a forkserver to end all its descendants, and for the driver to end them instead.


@dataclass(kw_only=True)
class Child:
    """One worker process, as the driver sees it."""

    slot: int
    link: Connection
    log: Path
    stacks: Path
    env: dict[str, str]
    pid: int = 0
    used: bool = False  # Whether it ran a case before.
    log_start: int = 0  # Size of the log when the current case began.
    doomed: bool = False  # Killed before the forkserver reported its start.
    ended: str = ""
    reported: bool = False


class ForkServer:
    """One forkserver process: it starts workers, sends them signals and reports how each of them ended."""

    def __init__(self, logs: Path, preload: Iterable[str]) -> None:
        """Start it and return before its imports are done."""
        self.control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life_r, self._life_w = os.pipe()
        self.mark = secrets.token_hex(8)  # Value of MARK in the environment of all its descendants.
        self._preloaded = tuple(preload)
        arguments = {"control_fd": child_end.fileno(), "life_fd": life_r, "preload": self._preloaded}
        command = boot_command("perfsuite.runtime.transports.forkserver:main", arguments)
        try:
            with (logs / LOG).open("ab") as log:
                self.process = subprocess.Popen(
                    [*shlex.split(os.environ.get(WRAPPER, "")), *command],
                    pass_fds=(child_end.fileno(), life_r),
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**worker_environment(), MARK: self.mark},
                )
        except BaseException:
            self.let_go()
            raise
        finally:
            child_end.close()
            os.close(life_r)
        self.is_up = False  # Whether its imports are done.
        self._requests = 0
        self._children: dict[int, Child] = {}  # By pid; before the start by the negative request id.

    def start(self, child: Child, method: str, command: socket.socket, preload: Iterable[str]) -> bool:
        """Request a worker with ``command`` and these modules; return False if the forkserver has ended.

        The import happens now, while the caller waits for the worker, and not during the measurement of a case.
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
        self._preloaded += new
        imported = not new or send_request(self.control, {"preload": new})
        return imported and send_request(self.control, request, command.fileno())

    def signal(self, children: Iterable[Child], number: int) -> None:
        """Send a signal to those of these workers that it started; ignore a forkserver that has ended."""
        pids = [child.pid for child in children if self._children.get(child.pid) is child]
        if pids:
            send_request(self.control, {"signal": int(number), "pids": pids})

    def listen(self) -> bool:
        """Process all its messages; return False if it has ended."""
        while wait([self.control], 0):
            data = _next_message(self.control)
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
        """End it if it lives, and report the end of its children: they die with the forkserver."""
        self.let_go()
        self.await_end()
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        when = "" if self.is_up else f" while it imported {', '.join(self._preloaded)}"
        for child in self._children.values():
            child.ended = f"its parent, the forkserver, {how}{when}"

    def let_go(self) -> None:
        """Make it end all its children and itself."""
        os.close(self._life_w)
        self.control.close()

    def await_end(self) -> None:
        """After :meth:`let_go`: wait until it and all its descendants have ended."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it hangs in an import; its children watch the same pipe
            self.process.kill()
        if self.process.wait(5) != 0:  # it was killed: end the descendants that it could not end
            end_marked(self.mark, _END_S)


def worker_environment() -> dict[str, str]:
    """Return the driver's environment without the launcher's variables and the thread settings of perfsuite."""
    hidden = {*launcher_variables(os.environ), "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "TORCH_GLOO_LAZY_INIT": "1", **compiler_variables()}


def _next_message(control: socket.socket) -> bytes:
    """Return the next message of the forkserver; empty if it has ended and all messages are read."""
    try:
        return control.recv(1 << 20)
    except ConnectionResetError:  # raised once, before its last messages, if it ended with an unread request
        return control.recv(1 << 20)
