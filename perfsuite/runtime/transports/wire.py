"""A connection between the driver and an agent: JSON frames that nobody can change on their way.

The protection is in :mod:`.frames`.  Nothing is pickled, so whoever has the key can send commands but no code.
"""

from __future__ import annotations

import socket
from collections import deque
from multiprocessing.connection import wait

from perfsuite.runtime import protocol
from perfsuite.runtime.transports.base import Message
from perfsuite.runtime.transports.frames import MAX_FRAME_BYTES, Opener, Sealer, Tampered

_GONE_S = 30
"""A host that acknowledges nothing for so long is gone."""
_CHUNK = 1 << 20


class LinkLost(Exception):
    """The other end of a link is gone; the message says how that showed."""


class Link:
    """One end of an authenticated connection.  Never blocks."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        """Take over ``sock``."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanishes sends nothing: its connection fails within half a minute instead of hours.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_S * 1000)
        self.sock = sock
        self._sealer = Sealer(send_key)
        self._opener = Opener(receive_key)
        self._outgoing: deque[bytes | memoryview] = deque()
        self._frames: deque[Message] = deque()

    @property
    def peer(self) -> str:
        """The address of the other end; ``this host`` for a unix socket."""
        if self.sock.family == socket.AF_UNIX:
            return "this host"
        return str(self.sock.getpeername()[0]).removeprefix("::ffff:")

    @property
    def has_outgoing(self) -> bool:
        """Part of what was sent has not left yet."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.sock.fileno()

    def local_host(self) -> str:
        """The address of this end, without the prefix that an IPv4 address has on a listener for both families."""
        if self.sock.family == socket.AF_UNIX:
            return "127.0.0.1"
        return str(self.sock.getsockname()[0]).removeprefix("::ffff:")

    def readable(self, timeout_s: float) -> bool:
        """Whether something, or the end of the connection, comes within ``timeout_s``."""
        return bool(self._frames) or bool(wait([self.sock], timeout_s))

    def send(self, frame: Message | None) -> None:
        """Send one frame, a beat for None; what does not leave at once leaves by :meth:`flush`.  Raises LinkLost."""
        payload = b"" if frame is None else protocol.encode(frame)
        if len(payload) > MAX_FRAME_BYTES:
            raise LinkLost(f"a frame of {len(payload) >> 20} MiB is longer than {MAX_FRAME_BYTES >> 20} MiB")
        self._outgoing.append(self._sealer.seal(payload))
        self.flush()

    def flush(self) -> None:
        """Hand to the kernel what it takes; raises LinkLost."""
        while self._outgoing:
            data = self._outgoing.popleft()  # a signal that comes with the end of the call must not send it twice
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except (BrokenPipeError, ConnectionResetError):  # shows in receive, after the other end's last words
                self._outgoing.clear()
                return
            except OSError as problem:
                raise LinkLost(f"its connection broke: {problem.strerror or problem}") from None
            if sent < len(data):
                self._outgoing.appendleft(memoryview(data)[sent:])
            if not sent:
                return

    def receive(self) -> list[Message]:
        """Frames that are there whole, beats left out.

        Raises LinkLost at the end of the connection, for half a frame at its end, for anything but JSON, and for a
        frame that is not the next one that the other end sent.
        """
        if not self._frames:
            self._read()
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def receive_one(self) -> Message | None:
        """The first frame that is there whole, as :meth:`receive`; later ones stay."""
        self._frames.extend(self.receive())
        return self._frames.popleft() if self._frames else None

    def close(self) -> None:
        """Close the connection.  Idempotent."""
        self.sock.close()

    def _read(self) -> None:
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionResetError:  # it ended with something unread
            data = b""
        except OSError as problem:
            raise LinkLost(f"its connection broke: {problem.strerror or problem}") from None
        if not data:
            raise LinkLost("its connection closed" + (" in the middle of a frame" if self._opener.amid else ""))
        self._opener.feed(data)
        try:
            self._frames.extend(protocol.decode(payload) for payload in self._opener.payloads() if payload)
        except Tampered:
            raise LinkLost(
                f"a frame from {self.peer} was changed on its way, or another program sits between the two"
            ) from None
        except (ValueError, RecursionError) as problem:
            raise LinkLost(f"its connection broke: {problem}") from None
