"""How an agent comes to the driver: who listens where, and who is let in.

A launch on one host meets at a unix socket in a private directory: other users of the host cannot reach it, and the key
file names it.  Between hosts nobody hands the driver's port to the agents: the launcher's own store would need torch in
this process.  Both sides hash the run id and rank 0's address into the same few candidates.  The driver takes the first
free one and the agents try them all.  Another program on a candidate costs only an attempt, also one that passes the
handshake on to the driver's port: both proofs cover the port that the agent dialled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.transports.base import Message
from perfsuite.runtime.transports.keys import Meeting
from perfsuite.runtime.transports.launchers import Launch
from perfsuite.runtime.transports.wire import (
    AgentHandshake,
    DriverHandshake,
    Introduction,
    Link,
    LinkLost,
    Refused,
    SessionKeys,
)

HANDSHAKE_S = 5.0
"""How long a stranger can hold a handshake, in both directions."""
_PORTS = range(20000, 32000)
"""Below the range from which Linux takes the ports of outgoing connections."""
_CANDIDATES = 8
_BACKLOG = 4096
_AT_ONCE = 256
"""Handshakes at a time; further connections wait in the backlog."""
_CROWDED_S = 0.2
"""How long a handshake may take while others wait in the backlog."""
_RETRY_S = 0.1


def candidate_ports(launch: Launch) -> range:
    """Ports that the driver of a launch on several hosts may listen on, in its order of preference.

    Consecutive, so that a firewall rule and an error message are short.
    """
    digest = hashlib.sha256(os.fsencode(f"{launch.run_id}\0{launch.master_addr}")).digest()
    first = _PORTS[int.from_bytes(digest[:8], "big") % (len(_PORTS) - _CANDIDATES)]
    return range(first, first + _CANDIDATES)


@dataclass(eq=False)
class _Visit:
    """A connection that has not been let in yet."""

    sock: socket.socket
    began_s: float
    handshake: DriverHandshake
    link: Link | None = None
    """Once the handshake is done; its first frame is the hello."""


class Door:
    """The driver's listening socket: turns strangers away, hands in links of agents with what they say of themselves.

    Works while somebody waits in :meth:`next_arrival`; needs no thread.
    """

    def __init__(self, launch: Launch, meeting: Meeting) -> None:
        """Listen where the agents look.  Raises LaunchError when that cannot be."""
        self._key = meeting.key
        self._listener, address = _listen(launch, meeting)
        self.address = address
        """The path of the socket, or the port."""
        self._introduction = _introduction(launch, address)
        self.turned_away: Counter[str] = Counter()
        """Why connections were refused, for the message about agents that did not come."""
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._listening = False
        self._visits: list[_Visit] = []
        self._listen_while_there_is_room()

    def next_arrival(self, timeout_s: float) -> tuple[Link, Message] | None:
        """The next authenticated link and its hello; None when none comes in time."""
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            for key, _ in self._selector.select(max(0.0, min(left, _CROWDED_S))):
                if key.data is None:
                    self._accept()
                elif (arrived := self._hear(key.data)) is not None:
                    return arrived
            self._turn_slow_ones_away()
            self._listen_while_there_is_room()
            if left <= 0:
                return None

    def close(self) -> None:
        """Stop listening; connections that were not let in are closed.  Idempotent."""
        for visit in list(self._visits):
            self._dismiss(visit, "")
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone before it was accepted
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            visit = _Visit(sock, time.monotonic(), DriverHandshake(self._key, self._introduction))
            self._visits.append(visit)
            self._selector.register(sock, selectors.EVENT_READ, visit)
        self._listen_while_there_is_room()

    def _hear(self, visit: _Visit) -> tuple[Link, Message] | None:
        try:
            if visit.link is None:
                self._shake(visit)
                return None
            hello = visit.link.receive_one()
            if hello is None:
                return None
            if hello.get("rank") != visit.handshake.rank:
                raise Refused("another rank than it proved to be")
        except Refused as refused:
            self._dismiss(visit, str(refused))
        except (OSError, LinkLost):
            self._dismiss(visit, "no handshake")
        else:
            self._forget(visit)
            return visit.link, hello
        return None

    def _shake(self, visit: _Visit) -> None:
        data = visit.sock.recv(512)
        if not data:
            raise Refused("no handshake")
        reply = visit.handshake.feed(data)
        if reply and visit.sock.send(reply) != len(reply):  # at most two short replies: a buffer has room for them
            raise Refused("no handshake")
        session = visit.handshake.session
        if session is not None:
            visit.link = Link(visit.sock, session.to_agent, session.to_driver)

    def _turn_slow_ones_away(self) -> None:
        patience_s = HANDSHAKE_S if self._listening else _CROWDED_S
        now_s = time.monotonic()
        for visit in [visit for visit in self._visits if now_s - visit.began_s > patience_s]:
            self._dismiss(visit, "no handshake")

    def _listen_while_there_is_room(self) -> None:
        room = len(self._visits) < _AT_ONCE
        if room and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._listening and not room:
            self._selector.unregister(self._listener)
        self._listening = room

    def _forget(self, visit: _Visit) -> None:
        self._selector.unregister(visit.sock)
        self._visits.remove(visit)

    def _dismiss(self, visit: _Visit, reason: str) -> None:
        self._forget(visit)
        visit.sock.close()
        if reason:
            self.turned_away[reason] += 1


def reach_driver(
    launch: Launch,
    find: Callable[[], Meeting | None],
    hello: Message,
    *,
    farewell: Callable[[SystemExit], Message],
    deadline_s: float,
    alive: Callable[[], bool],
) -> tuple[Link, Message]:
    """On an agent: a link to the driver and the driver's welcome, which comes once all agents are there.

    ``find`` is asked anew for every attempt, because the driver may not be there yet.  ``farewell`` is the last word of
    an agent that is told to end while it waits for the welcome, which may be on its way.  Raises LaunchError when no
    driver took this agent in within ``deadline_s`` seconds, when the driver gave the launch up, or as soon as ``alive``
    says that the launcher is gone.
    """
    until = time.monotonic() + deadline_s
    last = "nobody listens"
    while time.monotonic() < until and alive():
        meeting = find()
        for address in _addresses(launch, meeting):
            assert meeting is not None
            try:
                link = _knock(launch, address, meeting.key)
                return link, _introduce(link, hello, farewell, alive)
            except (ConnectionRefusedError, FileNotFoundError):
                pass
            except (socket.gaierror, UnicodeError):
                last = why_unresolved(launch) or last
            except (OSError, Refused, LinkLost) as problem:
                last = f"{_where(address)}: {problem or 'no handshake'}"
        time.sleep(_RETRY_S)
    ports = candidate_ports(launch)
    if launch.single_host:
        where, see = "this host", "its output, and that TMPDIR is the same"
    else:
        where = f"ports {ports[0]}-{ports[-1]} of {launch.master_addr}"
        see = "its output, the address of rank 0 and the firewall"
    raise LaunchError(
        f"rank {launch.rank} found no driver on {where} within {deadline_s:g} s ({last}): "
        f"rank 0 must run the same command there; see {see}"
    )


def why_unresolved(launch: Launch) -> str:
    """Return why the name of rank 0's host has no address here, and what to do; empty where it has one."""
    if launch.single_host:
        return ""
    try:
        socket.getaddrinfo(launch.master_addr, None)
    except (OSError, UnicodeError) as problem:
        return (
            f"{socket.gethostname()} knows no address of {launch.master_addr}, the host of rank 0 "
            f"({getattr(problem, 'strerror', None) or problem}): set MASTER_ADDR to an address that all hosts reach"
        )
    return ""


def _addresses(launch: Launch, meeting: Meeting | None) -> Iterator[Path | int]:
    """Where the driver may listen: its socket, or its ports."""
    if meeting is not None and launch.single_host:
        yield meeting.socket
    elif meeting is not None:
        yield from candidate_ports(launch)


def _where(address: Path | int) -> str:
    return f"port {address}" if isinstance(address, int) else str(address)


def _introduction(launch: Launch, address: Path | int) -> Introduction:
    return Introduction(run_id=launch.run_id, world_size=launch.world_size, address=str(address))


def _knock(launch: Launch, address: Path | int, key: bytes) -> Link:
    sock = _connect(launch, address)
    try:
        session = _prove(sock, AgentHandshake(key, _introduction(launch, address), launch.rank))
        return Link(sock, session.to_driver, session.to_agent)
    except BaseException:
        sock.close()
        raise


def _connect(launch: Launch, address: Path | int) -> socket.socket:
    if isinstance(address, Path):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(HANDSHAKE_S)
            with _short_path(address) as path:
                sock.connect(path)
        except BaseException:
            sock.close()
            raise
        return sock
    sock = socket.create_connection((launch.master_addr, address), timeout=HANDSHAKE_S)
    if sock.getsockname() == sock.getpeername():
        sock.close()
        raise ConnectionRefusedError("connected to itself")  # TCP allows it between equal ports of one host
    return sock


def _prove(sock: socket.socket, handshake: AgentHandshake) -> SessionKeys:
    until = time.monotonic() + HANDSHAKE_S
    sock.sendall(handshake.opening)
    sock.sendall(handshake.prove(_read_exactly(sock, handshake.answer_bytes, until, "no perfsuite of this version")))
    proof = _read_exactly(sock, handshake.proof_bytes, until, "it has another key or serves another launch")
    return handshake.finish(proof)


def _read_exactly(sock: socket.socket, count: int, until: float, closed: str) -> bytes:
    """So many bytes, by then; Refused with ``closed`` where the connection ends before."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until - time.monotonic()))
        try:
            more = sock.recv(count - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            raise Refused(closed)
        data += more
    return data


def _introduce(
    link: Link, hello: Message, farewell: Callable[[SystemExit], Message], alive: Callable[[], bool]
) -> Message:
    """Say hello; returns the welcome."""
    try:
        link.send(hello)
        welcome = None
        while welcome is None:
            while not link.readable(1.0):
                if not alive():
                    raise LinkLost("the launcher is gone")
            welcome = link.receive_one()
        if "refused" in welcome:
            raise LinkLost(f"refused: {welcome['refused']}")
        if "over" in welcome:
            raise LaunchError(f"the driver gave this launch up: {welcome['over']}")
    except (LinkLost, LaunchError):
        link.close()
        raise
    except SystemExit as ended:
        with contextlib.suppress(LinkLost):
            link.send(farewell(ended))
        raise
    return welcome


def _listen(launch: Launch, meeting: Meeting) -> tuple[socket.socket, Path | int]:
    if launch.single_host:
        return _listen_privately(meeting.socket), meeting.socket
    ports = candidate_ports(launch)
    for port in ports:
        with contextlib.suppress(OSError):
            if socket.has_dualstack_ipv6():
                inet6 = socket.AF_INET6
                return socket.create_server(("", port), family=inet6, backlog=_BACKLOG, dualstack_ipv6=True), port
            return socket.create_server(("", port), backlog=_BACKLOG), port
    raise LaunchError(
        f"ports {ports[0]}-{ports[-1]} of this host are all in use: the driver of this launch needs one of them; "
        "see who listens with 'ss -ltnp', or launch again with another run id or master port"
    )


def _listen_privately(file: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_path(file) as path:
            listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as problem:
        listener.close()
        raise LaunchError(
            f"no socket can be made in {file.parent} ({problem.strerror or problem}): the processes of a launch meet "
            "there; set TMPDIR to a directory of a local file system, for all of them"
        ) from None
    return listener


@contextlib.contextmanager
def _short_path(file: Path) -> Iterator[str]:
    """A name of ``file`` of at most 107 bytes, which is what an address has room for."""
    directory = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{file.name}"
    finally:
        os.close(directory)
