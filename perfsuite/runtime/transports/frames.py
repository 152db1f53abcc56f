"""Frames between driver and agents that nobody can change, repeat, drop, reorder or add: the handshake and the codec.

Both ends know the key of the launch.  Each sends a nonce, and proves by HMAC-SHA256 that it knows the key.  The proof
covers the role, both nonces, the protocol, the launch, the rank and the address that the agent dialled.  So a proof is
of no use in another launch, for another rank, in the other role, or through another program's port.  Key and nonces
give one key for each direction.  Each frame carries two tags: one of its number and length, one of its payload too.
Nothing of a payload is decoded, and no memory is taken for it, before its tags are right.

Why not TLS: with a pre-shared key the standard library has it from Python 3.13 on.  Certificates would need files on
all hosts.  Frames are not encrypted: they hold commands, paths, log lines and what a case declares, no key.

======================  ==================================================  =====
message                 bytes                                               from
======================  ==================================================  =====
opening                 MAGIC, version (2), rank (4), nonce (32)            agent
answer                  MAGIC, version (2), nonce (32)                      driver
proof                   HMAC (32)                                           agent
proof                   HMAC (32)                                           driver
frame, in any number    length (4), tag (16), payload, tag (32)             both
======================  ==================================================  =====

The agent proves first: a stranger who connects learns nothing that depends on the key.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass

PROTOCOL = 3
"""Version of handshake and frames."""
MAX_FRAME_BYTES = 256 << 20
_MAGIC = b"perfsuite"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_OPENING = struct.Struct(f">{len(_MAGIC)}sHI{_NONCE_BYTES}s")
_ANSWER = struct.Struct(f">{len(_MAGIC)}sH{_NONCE_BYTES}s")
_HEAD = struct.Struct(">I16s")
_NUMBERED = struct.Struct(">cQI")
"""What the tags are of, before the payload: kind of tag, number of the frame, length."""
_TAG_BYTES = 32
_HEAD_TAG_BYTES = 16


class Refused(Exception):
    """A handshake failed; the message says why."""


class Tampered(Exception):
    """A frame is not what the other end sent next."""


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What both ends of a connection must agree on, beside the key."""

    run_id: str
    world_size: int
    address: str
    """Where the driver listens: the path of its socket, or its port as the agent dialled it."""


@dataclass(frozen=True, kw_only=True)
class SessionKeys:
    """Keys of one connection."""

    to_agent: bytes
    to_driver: bytes


class _Transcript:
    """What the handshake said, as both ends saw it, under the key of the launch."""

    def __init__(self, key: bytes, launch: Introduction, rank: int, agent_nonce: bytes, driver_nonce: bytes) -> None:
        said = [PROTOCOL, launch.run_id, launch.world_size, launch.address, rank, agent_nonce.hex(), driver_nonce.hex()]
        self._key = key
        self._said = json.dumps(said).encode()

    def proof(self, role: str) -> bytes:
        """The proof of one end that it knows the key."""
        return self._derive(f"proof of the {role}")

    def session(self) -> SessionKeys:
        """A key per direction."""
        return SessionKeys(to_agent=self._derive("frames to the agent"), to_driver=self._derive("frames to the driver"))

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._key, purpose.encode() + b"\0" + self._said, "sha256")


class AgentHandshake:
    """The agent's side: :attr:`opening`, then :meth:`prove`, then :meth:`finish`."""

    answer_bytes = _ANSWER.size
    proof_bytes = _PROOF_BYTES

    def __init__(self, key: bytes, launch: Introduction, rank: int) -> None:
        self._key, self._launch, self._rank = key, launch, rank
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.opening = _OPENING.pack(_MAGIC, PROTOCOL, rank, self._nonce)

    def prove(self, answer: bytes) -> bytes:
        """The agent's proof, for the driver's answer; raises Refused for another program or version."""
        magic, version, nonce = _ANSWER.unpack(answer)
        if magic != _MAGIC:
            raise Refused("another program, or a perfsuite of another version, listens there")
        if version != PROTOCOL:
            raise Refused(
                f"the driver speaks protocol {version}, this agent {PROTOCOL}; install one perfsuite everywhere"
            )
        self._transcript = _Transcript(self._key, self._launch, self._rank, self._nonce, nonce)
        return self._transcript.proof("agent")

    def finish(self, proof: bytes) -> SessionKeys:
        """The keys of the connection; raises Refused when the driver does not know the key."""
        if not hmac.compare_digest(proof, self._transcript.proof("driver")):
            raise Refused("the driver does not know the key")
        return self._transcript.session()


class DriverHandshake:
    """The driver's side of one connection, fed with bytes as they come."""

    def __init__(self, key: bytes, launch: Introduction) -> None:
        self._key, self._launch = key, launch
        self._transcript: _Transcript | None = None
        self._heard = b""
        self.rank = -1
        """The rank that the agent proved to be; -1 before."""
        self.session: SessionKeys | None = None
        """None until the agent has proved that it knows the key."""

    def feed(self, data: bytes) -> bytes:
        """Take in what came; returns what to send.  Raises Refused."""
        self._heard += data
        reply = b""
        if self._transcript is None and len(self._heard) >= _OPENING.size:
            reply = self._answer(self._take(_OPENING.size))
        elif self._transcript is None and not _MAGIC.startswith(self._heard[: len(_MAGIC)]):
            raise Refused("no handshake")
        if self._transcript is not None and len(self._heard) >= _PROOF_BYTES:
            if not hmac.compare_digest(self._take(_PROOF_BYTES), self._transcript.proof("agent")):
                raise Refused("another key, launch or port")
            self.session = self._transcript.session()
            reply += self._transcript.proof("driver")
        if self._heard and (self.session or len(self._heard) >= _OPENING.size):
            raise Refused("no handshake")  # an agent waits for each answer
        return reply

    def _take(self, count: int) -> bytes:
        taken, self._heard = self._heard[:count], self._heard[count:]
        return taken

    def _answer(self, opening: bytes) -> bytes:
        magic, version, rank, agent_nonce = _OPENING.unpack(opening)
        if magic != _MAGIC:
            raise Refused("no handshake")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        if version == PROTOCOL:
            self.rank = rank
            self._transcript = _Transcript(self._key, self._launch, rank, agent_nonce, nonce)
        return _ANSWER.pack(_MAGIC, PROTOCOL, nonce)  # to another version too: its agent says which one this is


class Sealer:
    """Makes frames of payloads, in one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, payload: bytes) -> bytes:
        """The next frame."""
        number, self._number = self._number, self._number + 1
        return _head(self._key, number, len(payload)) + payload + _tag(self._key, number, payload)


class Opener:
    """Takes frames apart, in one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._buffer = bytearray()
        self._length: int | None = None
        """Of the payload that comes next, once its head is there and right."""

    def feed(self, data: bytes) -> None:
        """Take in bytes as they came."""
        self._buffer += data

    def payloads(self) -> Iterator[bytes]:
        """Payloads of the frames that are there whole; raises Tampered at the first that is not the next one sent."""
        while (payload := self._next()) is not None:
            yield payload

    @property
    def amid(self) -> bool:
        """Part of a frame is there."""
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
