"""The forkserver, the parent process of all rank workers of a host, and the main loop of a worker's process.

The forkserver imports torch once and forks a worker for every request, in milliseconds. For platforms that do not
support fork it starts a new interpreter instead. It is a session of its own, because launchers kill by process group.
It ends all its children when the *life pipe* closes: only the driver (or agent) holds the write end, so the pipe closes
however that process ends. Descendants of an ended worker become its children (:mod:`.orphans`) and are killed.

It is single-threaded and sends JSON datagrams over one socket. A request is a JSON text in a file in memory, because a
datagram is limited to the socket's buffer; its descriptor, and that of a worker's command socket, travel by SCM_RIGHTS.
Requests: ``{"start": id, "method": "fork"|"exec", "log": path, "stacks": path, "env": {...}}`` with a command socket,
``{"signal": number, "pids": [...]}``, ``{"preload": [names]}``. Messages: ``{"up": pid}``,
``{"started": id, "pid": pid}``, ``{"exited": pid, "text": "killed by SIGKILL"}``; the text may add the kernel's count
of processes killed for memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib.abc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from perfsuite.runtime import protocol
from perfsuite.runtime.transports.orphans import adopt_orphans, children

if TYPE_CHECKING:
    from perfsuite.platforms.host import Groups, OomKills

_PR_SET_PDEATHSIG = 1
_REQUEST = b"request"  # Datagram with the descriptors of a request.
BOOT = (
    "import sys; sys.path[:]=filter(None, sys.path); import json; a=json.loads(sys.argv[1]); "
    "sys.path[:]=a.pop('sys_path'); import {module} as m; m.{function}(**a)"
)
"""``python -c`` text that starts a module with the driver's ``sys.path``, installed or not.

``-c`` puts the working directory first on the path: it is removed, so that a ``json.py`` there is not imported.
"""


def boot_command(function: str, arguments: dict[str, Any]) -> list[str]:
    """Return the command that calls ``function`` (``module:name``) in a new interpreter with JSON keyword arguments."""
    module, _, name = function.partition(":")
    path = [entry or os.getcwd() for entry in sys.path]
    text = BOOT.format(module=module, function=name)
    return [sys.executable, "-c", text, json.dumps({"sys_path": path, **arguments})]


def send_request(control: socket.socket, request: dict[str, Any], *descriptors: int) -> bool:
    """Send the forkserver a request of any size, with these descriptors; return False if the forkserver has ended."""
    with os.fdopen(os.memfd_create("request"), "wb", buffering=0) as text:
        text.write(json.dumps(request).encode())
        try:
            socket.send_fds(control, [_REQUEST], [text.fileno(), *descriptors])
        except ConnectionError:
            return False
    return True


def _receive_request(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next request and its descriptors; None if the driver has ended."""
    data, descriptors, _, _ = socket.recv_fds(control, len(_REQUEST), 2)
    if not data:
        return None
    text, *others = descriptors
    with os.fdopen(text, "rb") as stream:
        stream.seek(0)  # the position is shared with the sender
        return json.load(stream), others


def main(*, control_fd: int, life_fd: int, preload: list[str]) -> NoReturn:
    """Serve until the life pipe closes."""
    server = _Server(socket.socket(fileno=control_fd), life_fd)
    _import(preload)
    server.send({"up": os.getpid()})
    server.serve()


def _import(names: list[str]) -> None:
    gc.disable()  # an import makes little garbage, but a collection takes a tenth of the time of torch's import
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a preload only saves time: a worker that needs the module reports the error
            traceback.print_exc()
            sys.meta_path.insert(0, _FailsAlike(name, error))
    # Collections in a worker then skip the preloaded objects: milliseconds instead of a tenth of a second. A collection
    # here would cost as much, before the first result, for a few thousand small objects.
    gc.freeze()
    gc.enable()


class _FailsAlike(importlib.abc.MetaPathFinder):
    """Makes every later import of a module fail for the reason of its first failure.

    Parts of such a module stay loaded, so that a second import would raise another error ("partially initialized
    module", "can only be initialized once per process").
    """

    def __init__(self, name: str, error: Exception) -> None:
        self._name = name
        self._reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == self._name:
            raise ImportError(self._reason, name=fullname)


class _Server:
    def __init__(self, control: socket.socket, life_fd: int) -> None:
        self.control = control
        self.life_fd = life_fd
        self.children: dict[int, OomKills] = {}  # Process id -> kills for memory before the worker began.
        self.killed: set[int] = set()  # Workers killed on the driver's request.
        self.groups: Groups | None = None  # Control groups of this process, read once.
        self.leaving = False
        adopt_orphans()
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the driver handles Ctrl-C
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, *_: object) -> None:
        self.leaving = True

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; the life pipe reports a driver that has ended."""
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(message).encode())

    def serve(self) -> NoReturn:
        """Wait for requests, ends of children and the end of the driver."""
        poll = select.poll()
        for fd in (self.control.fileno(), self.life_fd, self.wake_r):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        while not self.leaving:
            ready = {fd for fd, _ in poll.poll()}
            if self.life_fd in ready:
                break
            if self.wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_r, 4096)
            self._reap()
            if self.control.fileno() in ready and not self._request():
                break
        self._end_all()
        os._exit(0)

    def _end_all(self) -> None:
        """Kill all descendants: the children of a killed child become children of this process."""
        while sum(child.kill() for child in children()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def _request(self) -> bool:
        received = _receive_request(self.control)
        if received is None:
            return False
        request, descriptors = received
        if "start" in request:
            self._start(request, descriptors[0])
        elif "preload" in request:
            _import(request["preload"])
        else:
            for pid in request["pids"]:
                if pid in self.children:
                    self._signal(pid, request["signal"])
        return True

    def _start(self, request: dict[str, Any], command_fd: int) -> None:
        files = {"command_fd": command_fd, "life_fd": self.life_fd, "log": request["log"], "stacks": request["stacks"]}
        server, before = os.getpid(), self._oom_kills()
        pid = os.fork()
        if pid == 0:
            self._child(request, files, server)
        os.close(command_fd)
        self.children[pid] = before
        self.send({"started": request["start"], "pid": pid})

    def _child(self, request: dict[str, Any], files: dict[str, Any], server: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()  # a process group of its own, so that its children end with it
            adopt_orphans()  # daemons of a living worker stay its descendants
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # the server died before prctl
                os._exit(70)
            self.control.close()
            os.close(self.wake_r)
            os.close(self.wake_w)
            if request["method"] == "exec":
                for name in ("command_fd", "life_fd"):
                    os.set_inheritable(files[name], True)
                command = boot_command("perfsuite.runtime.transports.forkserver:become_worker", files)
                os.execve(command[0], command, {**os.environ, **request["env"]})
            os.environ.update(request["env"])
            become_worker(**files)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)

    def _signal(self, pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            self.killed.add(pid)
            _kill_group(pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self) -> None:
        """Report children that ended, and kill their descendants; the end of a descendant is another SIGCHLD."""
        exits = []
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                _kill_group(ended.si_pid)  # before reaping: the group id of a zombie leader is not reused
                exits.append(os.waitpid(ended.si_pid, 0))
        if exits:
            self._kill_orphans()
        for pid, status in exits:
            if pid in self.children:
                before, text = self.children.pop(pid), describe_status(status)
                if os.waitstatus_to_exitcode(status) == -signal.SIGKILL and pid not in self.killed:
                    reason = self._oom_kills().since(before)
                    text += f": {reason} since this rank's process began" if reason else ""
                self.killed.discard(pid)
                self.send({"exited": pid, "text": text})

    def _oom_kills(self) -> OomKills:
        from perfsuite.platforms.host import Host, own_groups, read_oom_kills  # imported when the first worker needs it

        host = Host()
        if self.groups is None:
            self.groups = own_groups(host, "memory")
        return read_oom_kills(host, self.groups)

    def _kill_orphans(self) -> None:
        """Kill descendants of ended workers: unlike helpers of preloaded modules they are in other sessions."""
        for child in children():
            if child.pid not in self.children and child.session != os.getpid():
                child.kill()


def describe_status(status: int) -> str:
    """Return ``killed by SIGKILL`` or ``exit code 3`` for a status of ``os.waitpid``."""
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # a child killed before its setsid has no group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def become_worker(*, command_fd: int, life_fd: int, log: str, stacks: str) -> NoReturn:
    """Execute the commands of a rank until the driver ends; never returns.

    ``command_fd`` is the socket of commands and answers, ``life_fd`` the read end of the life pipe. stdout and stderr
    are appended to the file ``log``, stack dumps to ``stacks``. :mod:`perfsuite.runtime.ranks.worker` has the commands;
    it is imported (with torch) only here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, args=(life_fd,), daemon=True).start()
    _redirect_output(log)
    dumps = open(stacks, "a")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(dumps)
    faulthandler.register(signal.SIGUSR1, dumps, all_threads=True)
    link = Connection(command_fd)
    from perfsuite.runtime.ranks.worker import Worker

    worker = Worker(send=lambda message: link.send_bytes(protocol.encode(message)))
    while True:
        try:
            command = protocol.decode(link.recv_bytes())
        except (EOFError, OSError):
            sys.stdout.flush()
            os._exit(0)  # no interpreter shutdown: an open process group could block it
        link.send_bytes(protocol.encode(worker.answer(command)))


def _end_with_driver(life_fd: int) -> None:
    os.read(life_fd, 1)  # no process writes: returns at end of file
    os.killpg(0, signal.SIGKILL)  # this worker and its own children


def _redirect_output(log: str) -> None:
    fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    os.close(null)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
