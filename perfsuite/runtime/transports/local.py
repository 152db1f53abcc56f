"""Workers on this host: the transport of a plain ``pytest`` run, and of an agent for its slot."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, get_args

from perfsuite.base.errors import ConfigurationError, RanksFailed
from perfsuite.base.text import LOG_BYTES
from perfsuite.runtime import protocol
from perfsuite.runtime.failures import core_time_of, is_whole, state_of
from perfsuite.runtime.ranks.placement import allowed_cores
from perfsuite.runtime.transports.base import WRAPPER, Event, Message, Place, Transport
from perfsuite.runtime.transports.parents import LOG, Child, ForkServer

StartMethod = Literal["fork", "exec"]  # Start of a rank's process: fork of one with torch, or new interpreter.
STORE = -1  # Slot of the process that serves the TCPStore and has no rank.
_STACK_POLL_S = 0.02
_LAYOUTS = 8  # Largest number of memory layouts; later ranks reuse one, as they hardly share a core with its rank.
_KILLED_S = 20.0  # Time limit for killed workers to end: a driver needs a second or more to free a context of 70 GiB.
_AHEAD = 2  # Forkservers that start before the first case; a case with more ranks starts more.


class LocalTransport(Transport):
    """Any number of slots on this host; workers are children of forkservers that preload torch.

    Forks of one process share a memory layout, unlike the new interpreters of a user's ranks. Where processes take
    turns on a core, this makes messages faster than for a user (by a tenth at 64 KiB: docs truth). So each slot has
    its own forkserver, up to the number of cores.
    """

    name = "local"
    capacity = None
    layouts = _LAYOUTS  # Largest number of forkservers.

    def __init__(
        self, *, start_method: StartMethod, preload: tuple[str, ...], log_directory: Path, first_slot: int = 0
    ) -> None:
        """``first_slot`` is the number of the only slot if an agent serves one rank of a launch.

        Raises ConfigurationError for an invalid ``start_method``, which a user's platform may declare.
        """
        if start_method not in get_args(StartMethod):
            raise ConfigurationError(
                f"start_method={start_method!r} is not valid; choose {' or '.join(get_args(StartMethod))}"
            )
        self._method = start_method
        self._preload = preload if start_method == "fork" else ()
        self._logs = log_directory
        self._first = first_slot
        # One wrapper output (for example an nsys profile) has to cover all workers.
        alike = start_method == "exec" or WRAPPER in os.environ
        self._layouts = 1 if alike else max(1, min(self.layouts, len(allowed_cores())))
        self._servers: dict[int, ForkServer] = {}
        self._slots: dict[int, Child] = {}
        self._doomed: list[Child] = []  # Killed workers whose end is not confirmed.
        self._store = ("", 0)
        self._closed = False

    def start(self) -> None:
        """Start forkservers without waiting: they import torch meanwhile."""
        for number in range(min(_AHEAD, self._layouts)):
            self._server(number)

    def preload(self, modules: tuple[str, ...]) -> None:
        """Add modules that a forkserver imports before it starts the next worker."""
        if self._method == "fork":
            self._preload += tuple(name for name in modules if name not in self._preload)

    def place(self, slot: int) -> Place:
        """Return the place of ``slot`` on this host."""
        rank, cores = slot - self._first, allowed_cores()
        return Place(slot=slot, host=socket.gethostname(), local_rank=rank, local_world_size=0, cores=cores)

    def acquire(self, count: int, *, fresh: bool, env: Mapping[str, str], deadline_s: float) -> bool:
        """See :meth:`Transport.acquire`; the first slot is ``first_slot``."""
        until = time.monotonic() + deadline_s
        slots = range(self._first, self._first + count)
        self._look(0.0)
        self._await_ends(slots, until)
        stale = [slot for slot in slots if self._is_stale(slot, fresh, env)]
        self.kill(stale)
        self._await_killed(until)
        for slot in stale:
            self._slots[slot] = self._start_child(slot, dict(env))
        self._await_started(slots, until)
        self._await_imports(until)
        for slot in slots:
            child = self._slots[slot]
            child.used = True
            child.log_start = _size(child.log)
        return bool(stale)

    def open_store(self, deadline_s: float, host: str = "127.0.0.1") -> tuple[str, int]:
        """Serve a TCPStore on one address in a child without a rank, so that it survives every rank."""
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
                self._await_ends([STORE], until)
                break
            self._look(0.0)
        if child.ended:
            raise RanksFailed(f"no rank process can run here, the first ended with {_end_of(child)}\n{_tail(child)}")
        raise RanksFailed(f"the process that serves the rendezvous store gave no answer in time\n{_tail(child)}")

    def send(self, slot: int, command: Message) -> None:
        """See :meth:`Transport.send`."""
        child = self._slots[slot]
        with contextlib.suppress(OSError):  # a dead worker causes an exit event
            child.link.send_bytes(protocol.encode(command))

    def poll(self, timeout_s: float) -> list[Event]:
        """See :meth:`Transport.poll`."""
        ranks = [child for slot, child in self._slots.items() if slot != STORE and not child.reported]
        self._look(timeout_s, [child.link for child in ranks])
        return [event for child in ranks if (event := _next_event(child)) is not None]

    def dump(self, slots: Iterable[int], deadline_s: float) -> dict[int, str]:
        """See :meth:`Transport.dump`; uses SIGUSR1 and faulthandler."""
        children = {slot: self._slots[slot] for slot in slots if not self._slots[slot].ended}
        before = {slot: _size(child.stacks) for slot, child in children.items()}
        self._signal(children.values(), signal.SIGUSR1)
        until = time.monotonic() + deadline_s
        dumps = dict.fromkeys(children, "")
        while not all(map(is_whole, dumps.values())) and time.monotonic() < until:
            time.sleep(_STACK_POLL_S)
            dumps = {slot: _read_from(child.stacks, before[slot]) for slot, child in children.items()}
        pids = {slot: child.pid for slot, child in children.items()}
        return {slot: core_time_of(pids[slot]) + dump if dump else state_of(pids[slot]) for slot, dump in dumps.items()}

    def kill(self, slots: Iterable[int]) -> None:
        """See :meth:`Transport.kill`."""
        children = [self._slots.pop(slot) for slot in list(slots) if slot in self._slots]
        self._signal([child for child in children if not child.ended], signal.SIGKILL)
        for child in children:
            child.doomed = True
            child.link.close()
        self._doomed += [child for child in children if not child.ended]

    def log_tail(self, slot: int, lines: int = 20) -> str:
        """See :meth:`Transport.log_tail`; returns lines written since the current case began."""
        child = self._slots.get(slot)
        return "" if child is None else _tail(child, lines)

    def close(self) -> None:
        """See :meth:`Transport.close`. A forkserver kills its remaining children before it ends."""
        self._closed = True
        for child in self._slots.values():
            child.link.close()
        self._slots.clear()
        servers = list(self._servers.values())
        self._servers.clear()
        for server in servers:
            server.let_go()
        for server in servers:
            server.await_end()

    def _server(self, number: int) -> ForkServer:
        server = self._servers.get(number)
        if server is None:
            self._logs.mkdir(parents=True, exist_ok=True)
            server = self._servers[number] = ForkServer(self._logs, self._preload)
        return server

    def _start_child(self, slot: int, env: dict[str, str]) -> Child:
        assert not self._closed, "a closed transport starts no workers"
        number = 0 if slot == STORE else (slot - self._first) % self._layouts
        server = self._server(number)
        driver_end, worker_end = socket.socketpair()
        name = "store" if slot == STORE else f"rank{slot}"
        log, stacks = self._logs / f"{name}.log", self._logs / f"{name}.stacks"
        child = Child(slot=slot, link=Connection(driver_end.detach()), log=log, stacks=stacks, env=env)
        child.log_start = _size(log)
        try:
            started = server.start(child, "exec" if env else self._method, worker_end, () if env else self._preload)
        finally:
            worker_end.close()
        if not started:
            self._lose_server(number)
        return child

    def _is_stale(self, slot: int, fresh: bool, env: Mapping[str, str]) -> bool:
        child = self._slots.get(slot)
        return child is None or bool(child.ended) or child.env != dict(env) or (fresh and child.used)

    def _await_ends(self, slots: Iterable[int], until: float) -> None:
        """Wait for the forkservers' reports about workers whose connection has ended."""
        children = [self._slots[slot] for slot in slots if slot in self._slots]
        gone = [child for child in children if child.pid and not child.ended and _has_hung_up(child.link)]
        while any(not child.ended for child in gone) and (left := until - time.monotonic()) > 0:
            self._look(min(0.5, left))

    def _await_killed(self, until: float) -> None:
        """Wait, at most _KILLED_S, until the kernel has freed all resources of killed workers and their devices."""
        until = min(until, time.monotonic() + _KILLED_S)
        while any(not child.ended for child in self._doomed) and (left := until - time.monotonic()) > 0:
            self._look(min(0.5, left))
        self._doomed.clear()

    def _await_started(self, slots: Iterable[int], until: float) -> None:
        waiting = {slot for slot in slots if not self._slots[slot].pid}
        while waiting:
            self._look(min(0.5, max(0.0, until - time.monotonic())))
            failed = [slot for slot in waiting if self._slots[slot].ended]
            if failed or time.monotonic() > until:
                slot = min(failed or waiting)
                cause = self._slots[slot].ended or "the forkserver gave no answer in time"
                tail = _read_from(self._logs / LOG, 0)[-2000:]
                self.kill(list(waiting))
                raise RanksFailed(f"rank {slot} did not start: {cause}{_raised_in(tail)}\n{tail}")
            waiting = {slot for slot in waiting if not self._slots[slot].pid}

    def _await_imports(self, until: float) -> None:
        """Wait until no forkserver imports: an import would disturb the measurement."""
        while not all(server.is_up for server in self._servers.values()) and (left := until - time.monotonic()) > 0:
            self._look(min(0.5, left))

    def _signal(self, children: Iterable[Child], number: int) -> None:
        children = list(children)
        for server in self._servers.values():
            server.signal(children, number)

    def _look(self, timeout_s: float, links: list[Connection] | None = None) -> None:
        controls: list[Any] = [server.control for server in self._servers.values()]
        ready = wait([*controls, *(links or [])], timeout_s) if controls else []
        for number, server in list(self._servers.items()):
            if server.control in ready and not server.listen():
                self._lose_server(number)

    def _lose_server(self, number: int) -> None:
        """Drop a forkserver that died, with its children. The next worker starts a new one."""
        self._servers.pop(number).lose()


def _has_hung_up(link: Connection) -> bool:
    """Return whether the other end is closed; earlier messages may still be readable."""
    poller = select.poll()
    poller.register(link.fileno(), 0)
    return any(event & select.POLLHUP for _, event in poller.poll(0))


def _next_event(child: Child) -> Event | None:
    """Return the worker's next message, or its end after all messages were read."""
    try:
        if child.link.poll(0):
            return Event(slot=child.slot, kind="message", message=protocol.decode(child.link.recv_bytes()))
    except (EOFError, OSError):
        pass  # closed: the forkserver will report how the worker ended
    if not child.ended:
        return None
    child.reported = True
    return Event(slot=child.slot, kind="exit", text=_end_of(child))


def _end_of(child: Child) -> str:
    return child.ended + (_raised_in(_tail(child)) if child.ended.startswith("exit code") else "")


def _raised_in(log: str) -> str:
    r"""Return the last exception of a log after a colon; empty if there is none.

    >>> _raised_in('  File "x.py", line 1\nImportError: libcudnn.so.9: cannot open\nsecond line')
    ': ImportError: libcudnn.so.9: cannot open'
    """
    raised = re.findall(r"^(?:\w+\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)\b.*", log, re.MULTILINE)
    return f": {raised[-1]}" if raised else ""


def _tail(child: Child, lines: int = 20) -> str:
    skipped = max(0, _size(child.log) - child.log_start - LOG_BYTES)
    tail = _read_from(child.log, child.log_start + skipped).splitlines()[-lines:]
    remark = [f"[... {skipped:,} bytes before this left out ...]"] if skipped and len(tail) < lines else []
    return "\n".join([*remark, *tail])


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _read_from(file: Path, start: int) -> str:
    if not file.exists():
        return ""
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read().decode(errors="replace")


class OneSlot(LocalTransport):
    """A :class:`LocalTransport` with a single slot whose owner also waits for network connections."""

    layouts = 1

    def waitables(self) -> list[Connection | socket.socket]:
        """Return the objects for ``multiprocessing.connection.wait``: if one is ready, ``poll(0)`` may have events."""
        controls = [server.control for server in self._servers.values()]
        links = [child.link for child in self._slots.values() if child.slot == self._first and not child.reported]
        return [*controls, *links] if controls else []
