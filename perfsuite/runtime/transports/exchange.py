"""Send and receive frames over links in a thread of their own, so that a busy process still sends signs of life.

Each end sends a *beat*, an empty frame, every BEAT_S seconds. The thread stops only if its process is stopped. All
reading and writing is in this one thread, where Python runs no signal handler: Ctrl-C cannot split a frame.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from perfsuite.runtime.failures import state_of
from perfsuite.runtime.transports.base import Message
from perfsuite.runtime.transports.wire import Link, LinkLost

LEAVING = "leaving"  # Field of the last message of an end that leaves, with its reason.
BEAT_S = 2.0
SILENCE_S = 10.0
"""An end that has sent nothing for so many seconds is stopped, hangs or cannot be reached.

With 8 ranks on two cores under a load of 21 the longest gap between two beats was 2.1 s.
"""
_LAST_ACK_AT = 56  # Offset in struct tcp_info of the milliseconds since the other kernel's last acknowledgement.
_TURN_S = 1.0
_OWN_SLEEP_S = 2 * _TURN_S  # A longer turn was delayed itself and counts as so many seconds of silence.


@dataclass(frozen=True, kw_only=True)
class Incoming:
    """A frame from an agent or the driver, or the loss of its link."""

    rank: int
    frame: Message | None  # None if its link is lost.
    reason: str = ""  # Symptom of the loss.


class Exchange:
    """Links by the rank at their other end. One thread calls :meth:`turn`, another one the other methods."""

    def __init__(self, links: Mapping[int, Link]) -> None:
        """Take ownership of the links: no other code reads or writes them."""
        self._links = dict(links)
        self._silent_s = dict.fromkeys(links, 0.0)
        self.lost: dict[int, str] = {}  # Reason of each lost link.
        self._arrivals: deque[Incoming] = deque()
        self._requests: deque[tuple[int, Message | None]] = deque()  # Frames to send; None closes the link.
        self._news_r, self._news_w = _bell()
        self._wake_r, self._wake_w = _bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        for rank, link in self._links.items():
            self._selector.register(link, selectors.EVENT_READ, rank)
        self._turned_s = self._beat_s = time.monotonic()

    # -- for the owner ------------------------------------------------------------------------------------------------

    @property
    def news(self) -> socket.socket:
        """Socket that is readable when :meth:`take` has something."""
        return self._news_r

    def send(self, rank: int, frame: Message) -> None:
        """Queue a frame; ignored if the link is lost."""
        if rank not in self.lost:
            self._requests.append((rank, frame))
            _ring(self._wake_w)

    def drop(self, rank: int, reason: str) -> None:
        """Close a link, and report the loss in :meth:`take`."""
        if rank not in self.lost:
            self._lose(rank, reason)
            self._requests.append((rank, None))
            _ring(self._wake_w)

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` has something, also if a signal interrupted an earlier call."""
        return bool(self._arrivals)

    def take(self) -> list[Incoming]:
        """Return the frames and losses since the last call."""
        _hush(self._news_r)
        arrivals = []
        while self._arrivals:
            arrivals.append(self._arrivals.popleft())
        return arrivals

    def wake(self) -> None:
        """End a waiting :meth:`turn`."""
        _ring(self._wake_w)

    @property
    def is_idle(self) -> bool:
        """Whether all queued frames have left this process."""
        return not self._requests and not any(link.has_outgoing for link in list(self._links.values()))

    # -- for the thread -----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Wait up to a second; receive, send, beat, and measure silence."""
        until_beat_s = self._beat_s + BEAT_S - time.monotonic()
        ready = self._selector.select(max(0.0, min(_TURN_S, until_beat_s)))
        now_s = time.monotonic()
        for rank in self._silent_s:
            self._silent_s[rank] += min(now_s - self._turned_s, _OWN_SLEEP_S)
        self._turned_s = now_s
        for key, events in ready:
            if key.data is None:
                _hush(self._wake_r)
            elif key.data in self._links:
                self._attend(key.data, events)
        self._carry_out_requests()
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            for rank in list(self._links):
                self._write(rank, None)

    def silent(self) -> dict[int, str]:
        """Return ranks that sent nothing for SILENCE_S seconds in which this thread listened, with a likely cause."""
        return {
            rank: f"it has sent nothing for {SILENCE_S:g} s: {_why_silent(self._links[rank].sock)}"
            for rank, silent_s in self._silent_s.items()
            if silent_s > SILENCE_S and rank in self._links
        }

    def close(self) -> None:
        """Close all links. No thread may call :meth:`turn` any more."""
        for rank in list(self._links):
            self._close(rank)
        self._selector.close()
        for end in (self._news_r, self._news_w, self._wake_r, self._wake_w):
            end.close()

    def _attend(self, rank: int, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._silent_s[rank] = 0.0
                for frame in self._links[rank].receive():
                    if LEAVING in frame:
                        raise LinkLost(frame[LEAVING])
                    self._arrivals.append(Incoming(rank=rank, frame=frame))
                    _ring(self._news_w)
            if events & selectors.EVENT_WRITE:
                self._links[rank].flush()
                self._await_room(rank)
        except LinkLost as lost:
            self._lose(rank, str(lost))
            self._close(rank)

    def _carry_out_requests(self) -> None:
        while self._requests:
            rank, frame = self._requests[0]
            if frame is None:
                self._close(rank)
            else:
                self._write(rank, frame)
            self._requests.popleft()  # after the write, so that is_idle is true only when all has left

    def _write(self, rank: int, frame: Message | None) -> None:
        link = self._links.get(rank)
        if link is None:
            return
        try:
            link.send(frame)
            self._await_room(rank)
        except LinkLost as lost:
            self._lose(rank, str(lost))
            self._close(rank)

    def _await_room(self, rank: int) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._links[rank].has_outgoing else 0)
        self._selector.modify(self._links[rank], events, rank)

    def _lose(self, rank: int, reason: str) -> None:
        if self.lost.setdefault(rank, reason) is reason:
            self._arrivals.append(Incoming(rank=rank, frame=None, reason=reason))
            _ring(self._news_w)

    def _close(self, rank: int) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            self._selector.unregister(link)
            link.close()


def _bell() -> tuple[socket.socket, socket.socket]:
    """Return two socket ends by which one thread wakes another."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


def _ring(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # full, so a wake-up is pending already; or closed
        end.send(b"x")


def _hush(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.recv(1 << 16)


def _why_silent(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        pid, *_ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"its process {state_of(pid).removeprefix('Process: ').strip() or 'is stopped or hangs'}"
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_AT + 4)
    last_ack_ms = struct.unpack_from("I", info, _LAST_ACK_AT)[0]
    if last_ack_ms < SILENCE_S * 1000 / 2:
        return "its host answers, so its process is stopped (SIGSTOP) or hangs"
    return "its host hangs or the network is cut"
