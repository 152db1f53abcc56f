"""Another program between driver and agent: it takes the agents' connections and passes on what both ends say."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

HANDSHAKE = {"to driver": (47, 32), "to agent": (43, 32)}
"""Lengths of the messages that each side sends first."""
Change = Callable[[bytes], list[bytes]]
"""What is passed on in place of one frame to the agent."""


def frames_of(sock: socket.socket) -> Iterator[bytes]:
    """Frames as they come: a length, a tag, the payload, a tag."""
    while head := _exactly(sock, 20):
        (length,) = struct.unpack(">I", head[:4])
        yield head + _exactly(sock, length + 32)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(count - len(data))):
        data += more
    return data if len(data) == count else b""


class Relay:
    """Listens on ``address``; passes the handshake on to the driver, and then frames, those to the agent changed."""

    def __init__(self, address: tuple[str, int], driver: tuple[str, int], change: Change) -> None:
        self._listener = socket.create_server(address)
        self._driver = driver
        self._change = change
        self.passed: list[bytes] = []
        """Frames that the agent was sent."""
        self.met = 0
        """Connections whose handshake went through."""
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._run(self._serve)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                agent, _ = self._listener.accept()
                self._sockets.append(agent)
                driver = socket.create_connection(self._driver)
                self._sockets.append(driver)
                self._run(self._pass_on, agent, driver, "to driver", lambda frame: [frame])
                self._run(self._pass_on, driver, agent, "to agent", self._change)

    def _pass_on(self, source: socket.socket, target: socket.socket, direction: str, change: Change) -> None:
        with contextlib.suppress(OSError):
            for length in HANDSHAKE[direction]:
                message = _exactly(source, length)
                self.met += (direction, len(message)) == ("to agent", HANDSHAKE["to agent"][-1])
                target.sendall(message)
                if not message:
                    return target.shutdown(socket.SHUT_WR)
            for frame in frames_of(source):
                for each in change(frame):
                    if direction == "to agent":
                        self.passed.append(each)
                    target.sendall(each)
            target.shutdown(socket.SHUT_WR)
