"""A connection between the driver and an agent: JSON frames that other programs cannot change, repeat, drop or reorder.

Both ends have the key of the launch. Each sends a nonce and proves the key by HMAC-SHA256. The proof covers the role,
both nonces, the protocol, the launch, the rank and the address that the agent dialled. So it is useless in another
launch, for another rank, in the other role, or through another program's port. Key and nonces give one key for each
direction. Each frame carries two tags: one of its number and length, one of its payload too. Payloads are not decoded,
and no memory is allocated for them, before their tags are checked.

TLS is not used: the standard library has pre-shared keys only from Python 3.13 on, and certificates need files on all
hosts. Frames are not encrypted: they hold commands, paths, log lines and declarations of cases, but no key.

Bytes of the messages, in order (lengths in brackets)::

    agent   opening  MAGIC, version (2), rank (4), nonce (32)
    driver  answer   MAGIC, version (2), nonce (32)
    agent   proof    HMAC (32); then the driver's proof
    both    frames   length (4), tag (16), payload, tag (32)

The agent proves first: a stranger who connects gets no data that depends on the key. Nothing is pickled, so the key
permits commands but no code.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait

from perfsuite.runtime import protocol
from perfsuite.runtime.transports.base import Message

PROTOCOL = 3  # Version of handshake and frames.
MAX_FRAME_BYTES = 256 << 20
_MAGIC = b"perfsuite"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_OPENING = struct.Struct(f">{len(_MAGIC)}sHI{_NONCE_BYTES}s")
_ANSWER = struct.Struct(f">{len(_MAGIC)}sH{_NONCE_BYTES}s")
_HEAD = struct.Struct(">I16s")
_NUMBERED = struct.Struct(">cQI")  # Prefix of a tagged text: kind of tag, number of the frame, length.
_TAG_BYTES = 32
_HEAD_TAG_BYTES = 16


class HandshakeRefused(Exception):
    """A handshake failed; the message is the reason."""


class Tampered(Exception):
    """A frame differs from the next frame of the other end."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """Facts on which both ends of a connection must agree, in addition to the key."""

    run_id: str
    world_size: int
    address: str  # The driver's address: the path of its socket, or its port as the agent dialled it.


SessionKeys = tuple[bytes, bytes]
"""Keys of the frames to the agent and to the driver of a connection."""


class _Transcript:
    """All facts of the handshake as both ends have them, under the key of the launch."""

    def __init__(self, key: bytes, launch: Introduction, rank: int, agent_nonce: bytes, driver_nonce: bytes) -> None:
        facts = [PROTOCOL, launch.run_id, launch.world_size, launch.address, rank]
        self._key = key
        self._facts = json.dumps([*facts, agent_nonce.hex(), driver_nonce.hex()]).encode()

    def proof(self, role: str) -> bytes:
        """Return the proof of one end that it has the key."""
        return self._derive(f"proof of the {role}")

    def session(self) -> SessionKeys:
        """Return a key for each direction."""
        return self._derive("frames to the agent"), self._derive("frames to the driver")

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._key, purpose.encode() + b"\0" + self._facts, "sha256")


class AgentHandshake:
    """The agent's side. Use :attr:`opening`, then :meth:`prove`, then :meth:`finish`."""

    answer_bytes = _ANSWER.size
    proof_bytes = _PROOF_BYTES

    def __init__(self, key: bytes, launch: Introduction, rank: int) -> None:
        self._key, self._launch, self._rank = key, launch, rank
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.opening = _OPENING.pack(_MAGIC, PROTOCOL, rank, self._nonce)

    def prove(self, answer: bytes) -> bytes:
        """Return the agent's proof for the driver's answer; raise HandshakeRefused for another program or version."""
        magic, version, nonce = _ANSWER.unpack(answer)
        if magic != _MAGIC:
            raise HandshakeRefused("another program, or a perfsuite of another version, listens there")
        if version != PROTOCOL:
            raise HandshakeRefused(
                f"the driver speaks protocol {version}, this agent {PROTOCOL}; install one perfsuite everywhere"
            )
        self._transcript = _Transcript(self._key, self._launch, self._rank, self._nonce, nonce)
        return self._transcript.proof("agent")

    def finish(self, proof: bytes) -> SessionKeys:
        """Return the keys of the connection; raise HandshakeRefused if the driver does not have the key."""
        if not hmac.compare_digest(proof, self._transcript.proof("driver")):
            raise HandshakeRefused("the driver has another key")
        return self._transcript.session()


class DriverHandshake:
    """The driver's side of one connection."""

    def __init__(self, key: bytes, launch: Introduction) -> None:
        self._key, self._launch = key, launch
        self._transcript: _Transcript | None = None
        self._heard = b""
        self.rank = -1  # Rank that the agent proved; -1 before.
        self.session: SessionKeys | None = None  # Keys of the connection, after the agent's proof.

    def feed(self, data: bytes) -> bytes:
        """Add received bytes and return the bytes to send. Raises HandshakeRefused."""
        self._heard += data
        reply = b""
        if self._transcript is None and len(self._heard) >= _OPENING.size:
            reply = self._answer(self._take(_OPENING.size))
        elif self._transcript is None and not _MAGIC.startswith(self._heard[: len(_MAGIC)]):
            raise HandshakeRefused("no handshake")
        if self._transcript is not None and len(self._heard) >= _PROOF_BYTES:
            if not hmac.compare_digest(self._take(_PROOF_BYTES), self._transcript.proof("agent")):
                raise HandshakeRefused("another key, launch or port")
            self.session = self._transcript.session()
            reply += self._transcript.proof("driver")
        if self._heard and (self.session or len(self._heard) >= _OPENING.size):
            raise HandshakeRefused("no handshake")  # an agent must wait for each answer
        return reply

    def _take(self, count: int) -> bytes:
        taken, self._heard = self._heard[:count], self._heard[count:]
        return taken

    def _answer(self, opening: bytes) -> bytes:
        magic, version, rank, agent_nonce = _OPENING.unpack(opening)
        if magic != _MAGIC:
            raise HandshakeRefused("no handshake")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        if version == PROTOCOL:
            self.rank = rank
            self._transcript = _Transcript(self._key, self._launch, rank, agent_nonce, nonce)
        return _ANSWER.pack(_MAGIC, PROTOCOL, nonce)  # also to another version: its agent then reports this one


class Sealer:
    """Makes frames from payloads, in one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the next frame."""
        number, self._number = self._number, self._number + 1
        return _head(self._key, number, len(payload)) + payload + _tag(self._key, number, payload)


class Opener:
    """Extracts payloads from frames, in one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._buffer = bytearray()
        self._length: int | None = None  # Length of the next payload, after its head was received and checked.

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def payloads(self) -> Iterator[bytes]:
        """Yield the payloads of complete frames; raise Tampered at a frame that is not the next one of the sender."""
        while (payload := self._next()) is not None:
            yield payload

    @property
    def amid(self) -> bool:
        """Whether the buffer holds part of a frame."""
        return self._length is not None or bool(self._buffer)

    def _next(self) -> bytes | None:
        if self._length is None:
            if len(self._buffer) < _HEAD.size:
                return None
            head = bytes(self._buffer[: _HEAD.size])
            length = int(_HEAD.unpack(head)[0])
            if not hmac.compare_digest(head, _head(self._key, self._number, length)):
                raise Tampered
            self._length = length
        end = _HEAD.size + self._length
        if len(self._buffer) < end + _TAG_BYTES:
            return None
        payload, tag = bytes(self._buffer[_HEAD.size : end]), bytes(self._buffer[end : end + _TAG_BYTES])
        if not hmac.compare_digest(tag, _tag(self._key, self._number, payload)):
            raise Tampered
        del self._buffer[: end + _TAG_BYTES]
        self._number += 1
        self._length = None
        return payload


def _head(key: bytes, number: int, length: int) -> bytes:
    return _HEAD.pack(length, hmac.digest(key, _NUMBERED.pack(b"h", number, length), "sha256")[:_HEAD_TAG_BYTES])


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _NUMBERED.pack(b"p", number, len(payload)) + payload, "sha256")


_GONE_S = 30  # A host that acknowledges nothing for so many seconds is lost.
_CHUNK = 1 << 20


class LinkLost(Exception):
    """The other end of a link is lost; the message names the symptom."""


class Link:
    """One end of an authenticated connection. It never blocks."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        """Take ownership of ``sock``."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanishes sends nothing: with these its connection fails within half a minute, not hours.
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
        """Address of the other end; ``this host`` for a unix socket."""
        if self.sock.family == socket.AF_UNIX:
            return "this host"
        return str(self.sock.getpeername()[0]).removeprefix("::ffff:")

    @property
    def has_outgoing(self) -> bool:
        """Whether part of the sent data is still in this process."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.sock.fileno()

    def local_host(self) -> str:
        """Return the address of this end, without the prefix that a dual-stack listener adds to IPv4 addresses."""
        if self.sock.family == socket.AF_UNIX:
            return "127.0.0.1"
        return str(self.sock.getsockname()[0]).removeprefix("::ffff:")

    def readable(self, timeout_s: float) -> bool:
        """Return whether data, or the end of the connection, comes within ``timeout_s``."""
        return bool(self._frames) or bool(wait([self.sock], timeout_s))

    def send(self, frame: Message | None) -> None:
        """Send one frame, or a beat for None; :meth:`flush` sends the part that does not fit. Raises LinkLost."""
        payload = b"" if frame is None else protocol.encode(frame)
        if len(payload) > MAX_FRAME_BYTES:
            raise LinkLost(f"a frame of {len(payload) >> 20} MiB is longer than {MAX_FRAME_BYTES >> 20} MiB")
        self._outgoing.append(self._sealer.seal(payload))
        self.flush()

    def flush(self) -> None:
        """Send as much as the kernel accepts; raise LinkLost."""
        while self._outgoing:
            data = self._outgoing.popleft()  # a signal during the call must not cause a second send
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            except (BrokenPipeError, ConnectionResetError):  # receive reports it, after the other end's last frames
                self._outgoing.clear()
                return
            except OSError as problem:
                raise LinkLost(f"its connection broke: {problem.strerror or problem}") from None
            if sent < len(data):
                self._outgoing.appendleft(memoryview(data)[sent:])
            if not sent:
                return

    def receive(self) -> list[Message]:
        """Return the complete frames without beats.

        Raises LinkLost at the end of the connection, for an incomplete frame, for a payload that is not JSON, and for a
        frame that is not the next one of the other end.
        """
        if not self._frames:
            self._read()
        frames = list(self._frames)
        self._frames.clear()
        return frames

    def receive_one(self) -> Message | None:
        """Return the first complete frame like :meth:`receive`; later frames stay."""
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
        except ConnectionResetError:  # the other end closed with unread data
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
                f"a frame from {self.peer} was changed on its way, or another program relays the connection"
            ) from None
        except (ValueError, RecursionError) as problem:
            raise LinkLost(f"its connection broke: {problem}") from None
