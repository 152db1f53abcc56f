"""Authenticated connections between the driver and its agents.

One TCP connection per agent.  Both ends first prove that they know the launch's key (the standard library's HMAC
challenges, in both directions; the key itself never travels), then exchange frames of JSON.  Nothing is pickled, so a
stranger who got past the key could send commands but no code.  Frames are not encrypted.

Nobody hands the driver's port to the agents.  Both sides hash the run id and rank 0's address into the same few
candidates; the driver takes the first free one and the agents try them all.  A stranger who connects, or who listens on
a candidate, costs only a timeout: every handshake of the driver runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

from perfsuite.errors import LaunchError
from perfsuite.runtime import protocol
from perfsuite.runtime.transports.base import Message
from perfsuite.runtime.transports.launchers import Launch

PROTOCOL = 2
"""Version of the frames between driver and agents."""
MAX_FRAME_BYTES = 256 << 20
HANDSHAKE_S = 5.0
"""How long a stranger can hold a handshake, in both directions."""
_PORTS = range(20000, 32000)
"""Below the range from which Linux takes the ports of outgoing connections."""
_CANDIDATES = 8
_STALL_S = 30
"""A peer that takes or gives no byte for so long in the middle of a frame is gone."""
_RETRY_S = 0.1


class LinkLost(Exception):
    """The other end of a link is gone; the message says how that showed."""


def candidate_ports(launch: Launch) -> range:
    """Ports that the driver may listen on, in its order of preference.

    Consecutive, so that a firewall rule and an error message are short.
    """
    digest = hashlib.sha256(f"{launch.run_id}\0{launch.master_addr}".encode()).digest()
    first = _PORTS[int.from_bytes(digest[:8], "big") % (len(_PORTS) - _CANDIDATES)]
    return range(first, first + _CANDIDATES)


class Link:
    """One end of an authenticated connection."""

    def __init__(self, sock: socket.socket, *, may_stall: bool) -> None:
        """Take over ``sock``.  ``may_stall``: reads wait for ever, as an agent's reader thread wants it."""
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes sends nothing: these make its connection fail within half a minute instead of hours.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALL_S * 1000)
        _limit(sock, receive_s=0 if may_stall else _STALL_S, send_s=_STALL_S)
        self._connection: Connection = Connection(sock.detach())

    def fileno(self) -> int:
        """The descriptor, for ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def local_host(self) -> str:
        """The address of this end, without the prefix that an IPv4 address has on a listener for both families."""
        with socket.socket(fileno=os.dup(self.fileno())) as sock:
            return str(sock.getsockname()[0]).removeprefix("::ffff:")

    def readable(self, timeout_s: float) -> bool:
        """Whether a frame, or the end of the connection, comes within ``timeout_s``."""
        return bool(wait([self._connection], timeout_s))

    def send(self, frame: Message) -> None:
        """Write one frame; raises LinkLost."""
        try:
            self._connection.send_bytes(protocol.encode(frame))
        except OSError as problem:
            raise LinkLost(f"cannot send: {problem.strerror or problem}") from None

    def receive(self) -> Message:
        """Read one frame; raises LinkLost at the end of the connection, for half a frame and for anything but JSON."""
        try:
            return protocol.decode(self._connection.recv_bytes(MAX_FRAME_BYTES))
        except EOFError:
            raise LinkLost("its connection closed") from None
        except (OSError, ValueError) as problem:
            raise LinkLost(f"its connection broke: {problem}") from None

    def close(self) -> None:
        """Close the connection.  Idempotent."""
        with contextlib.suppress(OSError):
            self._connection.close()


class Door:
    """The driver's listening port: turns strangers away, hands in links of agents with what they say of themselves."""

    def __init__(self, launch: Launch, key: bytes) -> None:
        """Bind the first free candidate, on the loopback interface when all agents are on this host.

        Raises LaunchError when all candidates are in use.
        """
        self._key = key
        self._listener = _listen(launch)
        self.port: int = self._listener.getsockname()[1]
        self._arrivals: queue.SimpleQueue[tuple[Link, Message]] = queue.SimpleQueue()
        self.turned_away: list[str] = []
        """Why connections were refused, for the message about agents that did not come."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="perfsuite-door", daemon=True)
        self._thread.start()

    def next_arrival(self, timeout_s: float) -> tuple[Link, Message] | None:
        """The next authenticated link and its hello; None when none comes in time."""
        try:
            return self._arrivals.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop listening; connections that were not fetched are closed.  Idempotent."""
        self._closing.set()
        self._thread.join(HANDSHAKE_S)
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrivals.get_nowait()[0].close()

    def _accept(self) -> None:
        handshakes: dict[socket.socket, float] = {}
        with self._listener:
            while not self._closing.is_set():
                now = time.monotonic()
                handshakes = {sock: until for sock, until in handshakes.items() if sock.fileno() >= 0}
                for sock in [sock for sock, until in handshakes.items() if until < now]:
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)  # ends a stranger who drips bytes
                if not wait([self._listener], _RETRY_S):
                    continue
                with contextlib.suppress(OSError):  # gone before it was accepted
                    sock, _ = self._listener.accept()
                    handshakes[sock] = now + HANDSHAKE_S
                    threading.Thread(target=self._admit, args=(sock,), daemon=True).start()
        for sock in handshakes:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _admit(self, sock: socket.socket) -> None:
        try:
            _limit(sock, receive_s=HANDSHAKE_S, send_s=HANDSHAKE_S)
            with Connection(sock.dup().detach()) as connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                hello = protocol.decode(connection.recv_bytes(1 << 16))
            self._arrivals.put((Link(sock.dup(), may_stall=False), hello))
        except AuthenticationError:
            self.turned_away.append("another key")
        except (OSError, EOFError, ValueError, AssertionError):  # the assertion is the standard library's
            self.turned_away.append("no handshake")
        finally:
            sock.close()


def reach_driver(
    launch: Launch,
    find_key: Callable[[], bytes | None],
    hello: Message,
    *,
    farewell: Message,
    deadline_s: float,
    alive: Callable[[], bool],
) -> tuple[Link, Message]:
    """On an agent: a link to the driver and the driver's welcome, which comes once all agents are there.

    ``find_key`` is asked anew for every attempt, because the driver may not have offered its key yet.  ``farewell`` is
    the last word of an agent that is told to end while it waits for the welcome, which may be on its way.  Raises
    LaunchError when no driver took this agent in within ``deadline_s`` seconds, when the driver gave the launch up, or
    as soon as ``alive`` says that the launcher is gone.
    """
    until = time.monotonic() + deadline_s
    host = "127.0.0.1" if launch.single_host else launch.master_addr
    ports = candidate_ports(launch)
    last = "nobody listens"
    while time.monotonic() < until and alive():
        key = find_key()
        for port in ports if key is not None else ():
            assert key is not None
            try:
                link = _knock(host, port, key, hello)
                return link, _await_welcome(link, farewell, alive)
            except AuthenticationError:
                last = f"port {port} has another key"
            except ConnectionRefusedError:
                pass
            except (OSError, EOFError, ValueError, AssertionError, LinkLost) as problem:
                last = f"port {port}: {problem or 'no handshake'}"
        time.sleep(_RETRY_S)
    raise LaunchError(
        f"rank {launch.rank} found no driver on ports {ports[0]}-{ports[-1]} of {host} within {deadline_s:g} s ({last}"
        "): rank 0 must run the same command there; see its output, the address of rank 0 and the firewall"
    )


def _knock(host: str, port: int, key: bytes, hello: Message) -> Link:
    with socket.create_connection((host, port), timeout=HANDSHAKE_S) as sock:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("connected to itself")  # TCP allows it between equal ports of one host
        sock.setblocking(True)
        _limit(sock, receive_s=HANDSHAKE_S, send_s=HANDSHAKE_S)
        with Connection(sock.dup().detach()) as connection:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(protocol.encode(hello))
        return Link(sock.dup(), may_stall=True)


def _await_welcome(link: Link, farewell: Message, alive: Callable[[], bool]) -> Message:
    try:
        while not link.readable(1.0):
            if not alive():
                raise LinkLost("the launcher is gone")
        welcome = link.receive()
        if "refused" in welcome:
            raise LinkLost(f"refused: {welcome['refused']}")
        if "over" in welcome:
            raise LaunchError(f"the driver gave this launch up: {welcome['over']}")
    except (LinkLost, LaunchError):
        link.close()
        raise
    except SystemExit:
        with contextlib.suppress(LinkLost):
            link.send(farewell)
        raise
    return welcome


def _listen(launch: Launch) -> socket.socket:
    ports = candidate_ports(launch)
    for port in ports:
        with contextlib.suppress(OSError):
            if launch.single_host:
                return socket.create_server(("127.0.0.1", port), backlog=4096)
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
            return socket.create_server(("", port), backlog=4096)
    raise LaunchError(
        f"ports {ports[0]}-{ports[-1]} of this host are all in use: the driver of this launch needs one of them; "
        "see who listens with 'ss -ltnp', or launch again with another run id or master port"
    )


def _limit(sock: socket.socket, *, receive_s: float, send_s: float) -> None:
    """Kernel timeouts: unlike Python's they hold for reads and writes on the bare descriptor too."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
