"""Workers on this host: the transport of a plain ``pytest`` run, and what an agent uses for its slot."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, get_args

from perfsuite.errors import ConfigurationError, RanksFailed
from perfsuite.runtime import protocol
from perfsuite.runtime.cut import LOG_BYTES
from perfsuite.runtime.ranks.placement import allowed_cores
from perfsuite.runtime.stacks import is_whole, state_of
from perfsuite.runtime.transports.base import WRAPPER, Event, Message, Place, Transport
from perfsuite.runtime.transports.forkserver import boot_command
from perfsuite.runtime.transports.launchers import launcher_variables
from perfsuite.runtime.transports.orphans import MARK, end_marked

StartMethod = Literal["fork", "exec"]
"""How a rank's process begins: as a copy of one that has torch, or as a new interpreter."""
STORE = -1
"""The slot of the process that serves the TCPStore and has no rank."""
_STACK_POLL_S = 0.02
_END_S = 10.0
"""For a forkserver to end all its descendants, and for the driver to do so in its place."""


@dataclass(kw_only=True)
class _Child:
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


@dataclass(kw_only=True)
class _ForkServer:
    """Driver's side of one forkserver process."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    life_w: int
    mark: str
    """Value of MARK in the environment of all that descends from it."""
    children: dict[int, _Child] = field(default_factory=dict)
    """By request id until started, then by pid."""

    def end_in_its_place(self) -> None:
        """Once its end is certain: what it would have ended itself, had it not been killed."""
        if self.process.wait(5) != 0:
            end_marked(self.mark, _END_S)


class LocalTransport(Transport):
    """As many slots on this host as a case asks for; workers are children of a forkserver that preloads torch."""

    name = "local"
    capacity = None

    def __init__(
        self,
        *,
        start_method: StartMethod,
        preload: tuple[str, ...],
        log_directory: Path,
        first_slot: int = 0,
    ) -> None:
        """``first_slot`` is the number of the only slot when an agent serves one rank of a launch.

        Raises ConfigurationError for another ``start_method``, which a platform of the user's own may declare.
        """
        if start_method not in get_args(StartMethod):
            raise ConfigurationError(
                f"start_method={start_method!r} is no way to start ranks; choose {' or '.join(get_args(StartMethod))}"
            )
        self._method = start_method
        self._preload = preload if start_method == "fork" else ()
        self._logs = log_directory
        self._first = first_slot
        self._server: _ForkServer | None = None
        self._slots: dict[int, _Child] = {}
        self._store = ("", 0)
        self._requests = 0
        self._closed = False

    def start(self) -> None:
        """Start the forkserver without waiting for it: it imports torch while the caller goes on."""
        if self._server is None:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._server = self._start_server()

    def preload(self, modules: tuple[str, ...]) -> None:
        """Tell the forkserver; it imports them before it starts the next worker."""
        new = tuple(name for name in modules if name not in self._preload)
        if self._method != "fork" or not new:
            return
        self._preload += new
        if self._server is None:
            self.start()
            return
        with contextlib.suppress(OSError):  # a dead server is noticed by whoever needs it
            self._server.control.send(json.dumps({"preload": new}).encode())

    def place(self, slot: int) -> Place:
        """Every slot is on this host."""
        return Place(
            slot=slot,
            host=socket.gethostname(),
            local_rank=slot - self._first,
            local_world_size=0,
            cores=allowed_cores(),
        )

    def acquire(self, count: int, *, fresh: bool, env: Mapping[str, str], deadline_s: float) -> bool:
        """See :meth:`Transport.acquire`; slots are ``first_slot`` onwards."""
        until = time.monotonic() + deadline_s
        slots = range(self._first, self._first + count)
        self._look(0.0)
        self._await_ends(slots, until)
        stale = [slot for slot in slots if self._is_stale(slot, fresh, env)]
        self.kill(stale)
        for slot in stale:
            self._slots[slot] = self._start_child(slot, dict(env))
        self._await_started(slots, until)
        for slot in slots:
            child = self._slots[slot]
            child.used = True
            child.log_start = _size(child.log)
        return bool(stale)

    def open_store(self, deadline_s: float, host: str = "127.0.0.1") -> tuple[str, int]:
        """A TCPStore served on one address by a child without a rank, so that it survives every rank."""
        child = self._slots.get(STORE)
        if child is not None and not child.ended and self._store[1]:
            return self._store
        until = time.monotonic() + deadline_s
        self.kill([STORE])
        child = self._slots[STORE] = self._start_child(STORE, {})
        self._await_started([STORE], until)
        self.send(STORE, {"verb": "store", "host": host})
        while time.monotonic() < until:
            if child.link.poll(min(0.5, max(0.0, until - time.monotonic()))):
                with contextlib.suppress(EOFError, OSError):
                    answer = protocol.decode(child.link.recv_bytes())
                    if "done" in answer:
                        self._store = (host, answer["done"]["port"])
                        return self._store
                    why = answer["error"]["message"].removeprefix("CaseError: ")
                    raise RanksFailed(f"the rendezvous store cannot be served: {why}")
                break
            self._look(0.0)
        raise RanksFailed(
            f"the process that serves the rendezvous store did not answer: {child.ended or 'no answer in time'}\n"
            + self.log_tail(STORE)
        )

    def send(self, slot: int, command: Message) -> None:
        """See :meth:`Transport.send`."""
        child = self._slots[slot]
        with contextlib.suppress(OSError):  # a dead worker: its exit event says so
            child.link.send_bytes(protocol.encode(command))

    def poll(self, timeout_s: float) -> list[Event]:
        """See :meth:`Transport.poll`."""
        ranks = [child for slot, child in self._slots.items() if slot != STORE and not child.reported]
        self._look(timeout_s, [child.link for child in ranks])
        return [event for child in ranks if (event := _next_event(child)) is not None]

    def dump(self, slots: Iterable[int], deadline_s: float) -> dict[int, str]:
        """See :meth:`Transport.dump`; by SIGUSR1 and faulthandler, so it works inside C++ waits."""
        children = {slot: self._slots[slot] for slot in slots if not self._slots[slot].ended}
        before = {slot: _size(child.stacks) for slot, child in children.items()}
        self._signal(children.values(), signal.SIGUSR1)
        until = time.monotonic() + deadline_s
        dumps = dict.fromkeys(children, "")
        while not all(map(is_whole, dumps.values())) and time.monotonic() < until:
            time.sleep(_STACK_POLL_S)
            dumps = {slot: _read_from(child.stacks, before[slot]) for slot, child in children.items()}
        return {slot: dump or state_of(children[slot].pid) for slot, dump in dumps.items()}

    def kill(self, slots: Iterable[int]) -> None:
        """See :meth:`Transport.kill`."""
        children = [self._slots.pop(slot) for slot in list(slots) if slot in self._slots]
        self._signal([child for child in children if not child.ended], signal.SIGKILL)
        for child in children:
            child.doomed = True
            child.link.close()

    def log_tail(self, slot: int, lines: int = 20) -> str:
        """The last lines of what the worker wrote since the current case began."""
        child = self._slots.get(slot)
        if child is None:
            return ""
        skipped = max(0, _size(child.log) - child.log_start - LOG_BYTES)
        tail = _read_from(child.log, child.log_start + skipped).splitlines()[-lines:]
        remark = [f"[... {skipped:,} bytes before this left out ...]"] if skipped and len(tail) < lines else []
        return "\n".join([*remark, *tail])

    def close(self) -> None:
        """See :meth:`Transport.close`.  The forkserver kills what is left of its children before it ends."""
        self._closed = True
        server, self._server = self._server, None
        if server is None:
            return
        for child in self._slots.values():
            child.link.close()
        self._slots.clear()
        os.close(server.life_w)
        server.control.close()
        try:
            server.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # stuck in a preload: its children watch the same pipe
            server.process.kill()
        server.end_in_its_place()

    # -- the forkserver ------------------------------------------------------------------------------------------

    def _start_server(self) -> _ForkServer:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life_r, life_w = os.pipe()
        mark = secrets.token_hex(8)
        arguments = {"control_fd": theirs.fileno(), "life_fd": life_r, "preload": list(self._preload)}
        command = boot_command("perfsuite.runtime.transports.forkserver:main", arguments)
        with (self._logs / "forkserver.log").open("ab") as log:
            process = subprocess.Popen(
                [*shlex.split(os.environ.get(WRAPPER, "")), *command],
                pass_fds=(theirs.fileno(), life_r),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**worker_environment(), MARK: mark},
            )
        theirs.close()
        os.close(life_r)
        return _ForkServer(process=process, control=ours, life_w=life_w, mark=mark)

    def _start_child(self, slot: int, env: dict[str, str]) -> _Child:
        assert not self._closed, "a closed transport starts no workers"
        self.start()
        assert self._server is not None
        ours, theirs = socket.socketpair()
        name = "store" if slot == STORE else f"rank{slot}"
        log, stacks = self._logs / f"{name}.log", self._logs / f"{name}.stacks"
        child = _Child(slot=slot, link=Connection(ours.detach()), log=log, stacks=stacks, env=env)
        child.log_start = _size(log)
        self._requests += 1
        request = {
            "start": self._requests,
            "method": "exec" if env else self._method,
            "log": str(log),
            "stacks": str(stacks),
            "env": env,
        }
        self._server.children[-self._requests] = child
        try:
            socket.send_fds(self._server.control, [json.dumps(request).encode()], [theirs.fileno()])
        except OSError:
            self._lose_server()
        finally:
            theirs.close()
        return child

    def _is_stale(self, slot: int, fresh: bool, env: Mapping[str, str]) -> bool:
        child = self._slots.get(slot)
        return child is None or bool(child.ended) or child.env != dict(env) or (fresh and child.used)

    def _await_ends(self, slots: Iterable[int], until: float) -> None:
        """Hear of every worker that has hung up how it ended: the forkserver may not have said so yet."""
        children = [self._slots[slot] for slot in slots if slot in self._slots]
        gone = [child for child in children if child.pid and not child.ended and _has_hung_up(child.link)]
        while any(not child.ended for child in gone) and (left := until - time.monotonic()) > 0:
            self._look(min(0.5, left))

    def _await_started(self, slots: Iterable[int], until: float) -> None:
        waiting = {slot for slot in slots if not self._slots[slot].pid}
        while waiting:
            self._look(min(0.5, max(0.0, until - time.monotonic())))
            failed = [slot for slot in waiting if self._slots[slot].ended]
            if failed or time.monotonic() > until:
                slot = min(failed or waiting)
                cause = self._slots[slot].ended or "the forkserver gave no answer in time"
                tail = _read_from(self._logs / "forkserver.log", 0)[-2000:]
                self.kill(list(waiting))
                raise RanksFailed(f"rank {slot} did not start: {cause}\n{tail}")
            waiting = {slot for slot in waiting if not self._slots[slot].pid}

    def _signal(self, children: Iterable[_Child], number: int) -> None:
        pids = [child.pid for child in children if child.pid]
        if pids and self._server is not None:
            with contextlib.suppress(OSError):
                self._server.control.send(json.dumps({"signal": int(number), "pids": pids}).encode())

    def _look(self, timeout_s: float, links: list[Connection] | None = None) -> None:
        """Take in what the forkserver says; wait up to ``timeout_s`` for it or for a worker's frame."""
        if self._server is None:
            return
        control = self._server.control
        ready: list[Any] = wait([control, *(links or [])], timeout_s)
        while control in ready:
            data = _heard(control)
            if not data:
                self._lose_server()
                return
            self._take(json.loads(data))
            ready = wait([control], 0)

    def _take(self, message: dict[str, Any]) -> None:
        assert self._server is not None
        if "started" in message:
            child = self._server.children.pop(-message["started"])
            child.pid = message["pid"]
            self._server.children[child.pid] = child
            if child.doomed:
                self._signal([child], signal.SIGKILL)
        elif "exited" in message:
            child = self._server.children.pop(message["exited"])
            child.ended = message["text"]

    def _lose_server(self) -> None:
        """The forkserver died: so did its children.  The next worker starts a new one."""
        server, self._server = self._server, None
        assert server is not None
        code = server.process.wait(5)
        os.close(server.life_w)
        server.control.close()
        server.end_in_its_place()
        for child in server.children.values():
            child.ended = f"its parent, the forkserver, ended with exit code {code}"


def worker_environment() -> dict[str, str]:
    """The driver's environment without the launcher's variables and thread settings, which perfsuite sets itself."""
    hidden = {*launcher_variables(os.environ), "OMP_NUM_THREADS", "PYTEST_CURRENT_TEST"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "TORCH_GLOO_LAZY_INIT": "1"}


def _heard(control: socket.socket) -> bytes:
    """The next message of the forkserver; nothing once it is gone and all that it said has been read."""
    try:
        return control.recv(1 << 20)
    except ConnectionResetError:  # it ended with a request unread: told once, before what it had said itself
        return control.recv(1 << 20)


def _has_hung_up(link: Connection) -> bool:
    """Whether nobody holds the other end any more; what was said before may still be there to read."""
    poller = select.poll()
    poller.register(link.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def _next_event(child: _Child) -> Event | None:
    """What the worker said, or its end once nothing of what it said is left to read."""
    try:
        if child.link.poll(0):
            return Event(slot=child.slot, kind="message", message=protocol.decode(child.link.recv_bytes()))
    except (EOFError, OSError):
        pass  # closed: the forkserver is about to say how the worker ended
    if not child.ended:
        return None
    child.reported = True
    return Event(slot=child.slot, kind="exit", text=child.ended)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read_from(file: Path, start: int) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace")
