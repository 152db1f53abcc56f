"""How an agent reaches the driver: the addresses on which the driver listens, and the connections that it accepts.

A launch on one host uses a unix socket in a private directory, which other users cannot reach; the key file names it.
Between hosts no process sends the driver's port to the agents: the launcher's own store would need torch here. Both
sides hash the run id and rank 0's address into the same few ports. The driver takes the first free one, and the agents
try all of them. Another program on such a port costs one attempt. A program that relays the handshake fails too: both
proofs cover the port that the agent dialled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.transports.base import Message
from perfsuite.runtime.transports.keys import Meeting
from perfsuite.runtime.transports.launchers import Launch
from perfsuite.runtime.transports.wire import (
    AgentHandshake,
    DriverHandshake,
    HandshakeRefused,
    Introduction,
    Link,
    LinkLost,
    SessionKeys,
)

HANDSHAKE_S = 5.0  # Time limit of a handshake, in both directions.
_PORTS = range(20000, 32000)  # Ports below the range that Linux uses for outgoing connections.
_CANDIDATES = 8
_BACKLOG = 4096
_AT_ONCE = 256  # Concurrent handshakes; further connections wait in the backlog.
_CROWDED_S = 0.2  # Time limit of a handshake while others wait in the backlog.
_RETRY_S = 0.1


def candidate_ports(launch: Launch) -> range:
    """Return the consecutive ports on which a driver of several hosts may listen, in its order of preference."""
    digest = hashlib.sha256(os.fsencode(f"{launch.run_id}\0{launch.master_addr}")).digest()
    first = _PORTS[int.from_bytes(digest[:8], "big") % (len(_PORTS) - _CANDIDATES)]
    return range(first, first + _CANDIDATES)


@dataclass(eq=False)
class _Visit:
    sock: socket.socket
    began_s: float
    handshake: DriverHandshake
    link: Link | None = None  # Link after the handshake; its first frame is the hello.


class Door:
    """The driver's listening socket: rejects unknown connections, returns links of agents with their hello."""

    def __init__(self, launch: Launch, meeting: Meeting) -> None:
        """Listen where the agents look. Raises LaunchError if that fails."""
        self._key = meeting.key
        self._listener, self.address = _listen(launch, meeting)  # ``address``: the path of the socket, or the port.
        self._introduction = _introduction(launch, self.address)
        self.turned_away: Counter[str] = Counter()  # Reasons of rejected connections, for error messages.
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._listening = False
        self._visits: list[_Visit] = []
        self._listen_while_there_is_room()

    def next_arrival(self, timeout_s: float) -> tuple[Link, Message] | None:
        """Return the next authenticated link and its hello; None if none comes in time."""
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
        """Stop listening and close connections that were not accepted. Idempotent."""
        for visit in list(self._visits):
            self._dismiss(visit, "")
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed before it was accepted
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
                raise HandshakeRefused("its hello names another rank than its proof")
        except HandshakeRefused as refused:
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
            raise HandshakeRefused("no handshake")
        reply = visit.handshake.feed(data)
        if reply and visit.sock.send(reply) != len(reply):  # a buffer has space for two short replies
            raise HandshakeRefused("no handshake")
        if visit.handshake.session is not None:
            visit.link = Link(visit.sock, *visit.handshake.session)

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
    """Return an agent's link to the driver and the driver's welcome, which comes after all agents have connected.

    ``find`` runs before every attempt, because the driver may start later. ``farewell`` makes the last message of an
    agent that ends while it waits for the welcome. Raises LaunchError if no driver accepts this agent within
    ``deadline_s`` seconds, if the driver gives up, or as soon as ``alive`` returns False (the launcher has ended).
    """
    until = time.monotonic() + deadline_s
    last = "no process listens there"
    while time.monotonic() < until and alive():
        meeting = find()
        addresses: Iterable[Path | int] = candidate_ports(launch) if not launch.single_host else ()
        if meeting is not None and launch.single_host:
            addresses = [meeting.socket]
        for address in addresses if meeting is not None else ():
            assert meeting is not None
            try:
                link = _knock(launch, address, meeting.key)
                return link, _introduce(link, hello, farewell, alive)
            except (ConnectionRefusedError, FileNotFoundError):
                pass
            except (socket.gaierror, UnicodeError):
                last = why_unresolved(launch) or last
            except (OSError, HandshakeRefused, LinkLost) as problem:
                place = f"port {address}" if isinstance(address, int) else str(address)
                last = f"{place}: {problem or 'no handshake'}"
        time.sleep(_RETRY_S)
    ports = candidate_ports(launch)
    if launch.single_host:
        where, see = "this host", "its output, and use the same TMPDIR"
    else:
        where = f"ports {ports[0]}-{ports[-1]} of {launch.master_addr}"
        see = "its output, the address of rank 0 and the firewall"
    raise LaunchError(
        f"rank {launch.rank} found no driver on {where} within {deadline_s:g} s ({last}): "
        f"rank 0 must run the same command there; check {see}"
    )


def why_unresolved(launch: Launch) -> str:
    """Return why the name of rank 0's host has no address here, with a remedy; empty if it has one."""
    if launch.single_host:
        return ""
    try:
        socket.getaddrinfo(launch.master_addr, None)
    except (OSError, UnicodeError) as problem:
        return (
            f"{socket.gethostname()} cannot resolve {launch.master_addr}, the host of rank 0 "
            f"({getattr(problem, 'strerror', None) or problem}): set MASTER_ADDR to an address that all hosts reach"
        )
    return ""


def _introduction(launch: Launch, address: Path | int) -> Introduction:
    return Introduction(run_id=launch.run_id, world_size=launch.world_size, address=str(address))


def _knock(launch: Launch, address: Path | int, key: bytes) -> Link:
    sock = _connect(launch, address)
    try:
        to_agent, to_driver = _prove(sock, AgentHandshake(key, _introduction(launch, address), launch.rank))
        return Link(sock, to_driver, to_agent)
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
        raise ConnectionRefusedError("connected to itself")  # TCP allows this between equal ports of one host
    return sock


def _prove(sock: socket.socket, handshake: AgentHandshake) -> SessionKeys:
    until = time.monotonic() + HANDSHAKE_S
    sock.sendall(handshake.opening)
    sock.sendall(handshake.prove(_read_exactly(sock, handshake.answer_bytes, until, "not this version of perfsuite")))
    proof = _read_exactly(sock, handshake.proof_bytes, until, "it has another key or serves another launch")
    return handshake.finish(proof)


def _read_exactly(sock: socket.socket, count: int, until: float, closed: str) -> bytes:
    """Return ``count`` bytes before ``until``; raise HandshakeRefused(``closed``) if the connection ends before."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until - time.monotonic()))
        try:
            more = sock.recv(count - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            raise HandshakeRefused(closed)
        data += more
    return data


def _introduce(
    link: Link, hello: Message, farewell: Callable[[SystemExit], Message], alive: Callable[[], bool]
) -> Message:
    try:
        link.send(hello)
        welcome = None
        while welcome is None:
            while not link.readable(1.0):
                if not alive():
                    raise LinkLost("the launcher has ended")
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
        "find the programs with 'ss -ltnp', or launch again with another run id or master port"
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
    """Yield a name of ``file`` of at most 107 bytes, the limit of a socket address."""
    directory = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{file.name}"
    finally:
        os.close(directory)
