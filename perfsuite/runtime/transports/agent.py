"""What every process of a launch except rank 0 does: it serves the driver one slot.

An agent keeps its worker in a process of its own, never enters a collective and never imports torch, so it answers
while its worker hangs.  It ends with the driver's connection, with its parent (the launcher) and on SIGTERM, and its
worker ends with it.  Ctrl-C belongs to the driver.  It writes nothing to stdout; one line to stderr when it ends early.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from perfsuite.errors import LaunchError, RanksFailed
from perfsuite.runtime import scratch
from perfsuite.runtime.transports.base import Event, Message
from perfsuite.runtime.transports.keys import find_key
from perfsuite.runtime.transports.launchers import Launch, gathering_s
from perfsuite.runtime.transports.slot import OneSlot
from perfsuite.runtime.transports.star import GOT_SIGTERM, PATIENCE_S, greeting, say_waiting
from perfsuite.runtime.transports.wire import Link, LinkLost, reach_driver

DISMISSED = 0
ENDED_EARLY = 1
"""Exit status when the driver or the launcher is gone, or no driver was found."""
_WATCH_S = 1.0
_LAST_RESORT_S = 15.0
"""A main thread that has not left by then is stuck in a system call; the process ends without it."""


def serve_agent(
    launch: Launch,
    *,
    environ: Mapping[str, str] = os.environ,
    deadline_s: float | None = None,
    slot: OneSlot | None = None,
    stays: bool = False,
) -> int:
    """Serve until the driver dismisses this agent; returns the exit status of the process, 0 when dismissed.

    ``deadline_s`` is how long to look for the driver.  ``slot`` was made and started before, by one who closes it.
    A process that ``stays`` gets its signal handlers back; another one is about to end and ignores SIGTERM from here
    on, which launchers send to all when rank 0 has failed.
    """
    deadline_s = gathering_s(launch) if deadline_s is None else deadline_s
    link = None
    parent = os.getppid()
    leave_signals = _take_signals(stays)
    waiting = threading.Timer(
        PATIENCE_S, say_waiting, (launch, "rank 0 and those that it waits for", deadline_s, environ)
    )
    waiting.daemon = True
    waiting.start()
    try:
        link, welcome = reach_driver(
            launch,
            lambda: find_key(launch, environ),
            greeting(launch, socket.gethostname(), os.getpid()),
            farewell={"leaving": GOT_SIGTERM},
            deadline_s=deadline_s,
            alive=lambda: os.getppid() == parent,
        )
        waiting.cancel()
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the driver's from here on
        with _last_word(link), _log_directory(welcome) as logs:
            return _Agent(launch, link, welcome, logs, parent=parent, slot=slot).serve()
    except LaunchError as problem:
        print(f"perfsuite: {problem}", file=sys.stderr, flush=True)
        return ENDED_EARLY
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        waiting.cancel()
        leave_signals()
        if link is not None:
            link.close()


def _take_signals(stays: bool) -> Callable[[], None]:
    """SIGTERM ends the agent, and so does Ctrl-C until there is a driver; returns what to do with both at its end.

    Only the main thread can have handlers; in another one a signal does what it did before.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    after = {
        number: signal.getsignal(number) if stays else signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)
    }
    for number in after:
        signal.signal(number, _leave)

    def leave_signals() -> None:
        for number, handler in after.items():
            if handler is not None:  # one that Python did not set cannot be set by it
                signal.signal(number, handler)

    return leave_signals


def _leave(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # launchers send it more than once
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _last_word(link: Link) -> Iterator[None]:
    """An agent that is told to end before it serves says so too: the driver may have taken it in."""
    try:
        yield
    except SystemExit:
        with contextlib.suppress(LinkLost):
            link.send({"leaving": GOT_SIGTERM})
        raise


@contextlib.contextmanager
def _log_directory(welcome: Message) -> Any:
    """Beside the driver's logs when it is on this host, else in a place of this agent's that is removed at its end."""
    if welcome["log_directory"]:
        yield Path(welcome["log_directory"])
        return
    with scratch.directory("agent") as directory:
        yield directory


class _Agent:
    def __init__(
        self, launch: Launch, link: Link, welcome: Message, logs: Path, *, parent: int, slot: OneSlot | None
    ) -> None:
        self._rank = launch.rank
        self._link = link
        self._parent = parent
        self._slot = slot or OneSlot(
            start_method=welcome["start_method"],
            preload=tuple(welcome["preload"]),
            log_directory=logs,
            first_slot=launch.rank,
        )
        self._epoch = 0
        """Number of kills: tells the driver which events are of a worker that it has given up."""
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        self._dismissed = threading.Event()
        self._cause = ""
        """Why this agent ends early, where that is not by a SIGTERM from outside."""
        self._verbs: Mapping[str, Callable[[Message], Any]] = {
            "start": lambda _: self._slot.start(),
            "acquire": self._acquire,
            "send": lambda frame: self._slot.send(self._rank, frame["command"]),
            "dump": self._dump,
            "kill": self._kill,
            "log_tail": lambda frame: self._slot.log_tail(self._rank, frame["lines"]),
        }

    def serve(self) -> int:
        """Carry out commands and pass on events, until dismissed."""
        threading.Thread(target=self._watch, name="perfsuite-link", daemon=True).start()
        try:
            while not self._dismissed.is_set():
                ready = wait([self._wake_r, *self._slot.waitables()])
                if self._wake_r in ready:
                    os.read(self._wake_r, 1)
                    self._answer(self._inbox.get())
                for event in self._slot.poll(0.0):
                    self._tell(_as_frame(event, self._epoch))
        except SystemExit as ended:
            self._tell({"leaving": self._cause or GOT_SIGTERM})
            return ENDED_EARLY if self._cause else int(ended.code or 0)
        finally:
            self._slot.close()
            self._dismissed.set()  # whatever ended it: the watching thread has nothing to watch any more
        return DISMISSED

    def _answer(self, frame: Message) -> None:
        if frame["verb"] == "dismiss":
            self._dismissed.set()
            return
        try:
            value = self._verbs[frame["verb"]](frame)
            reply: Message = {"value": value}
        except (RanksFailed, OSError) as problem:  # OSError: a full disk, no more processes; the driver reports it
            reply = {"error": str(problem) or type(problem).__name__}
        if "id" in frame:
            self._tell({"reply": frame["id"], **reply})

    def _acquire(self, frame: Message) -> bool:
        return self._slot.acquire(1, fresh=frame["fresh"], env=frame["env"], deadline_s=frame["deadline_s"])

    def _dump(self, frame: Message) -> str:
        return self._slot.dump([self._rank], frame["deadline_s"]).get(self._rank, "")

    def _kill(self, frame: Message) -> None:
        self._slot.kill([self._rank])
        self._epoch = frame["epoch"]

    def _tell(self, frame: Message) -> None:
        with contextlib.suppress(LinkLost):  # the watching thread sees it too and ends this process
            self._link.send(frame)

    def _watch(self) -> None:
        """In a thread: take in frames; end this process when driver or launcher is gone, whatever it is doing."""
        cause = ""
        while not cause:
            try:
                if self._link.readable(_WATCH_S):
                    self._inbox.put(self._link.receive())
                    os.write(self._wake_w, b"x")
            except (LinkLost, OSError) as lost:  # OSError: this end was closed, after the last word
                cause = f"the driver is gone: {lost}"
            if os.getppid() != self._parent:
                cause = "its launcher is gone"
        if self._dismissed.is_set():
            return
        self._cause = cause
        print(f"perfsuite: agent of rank {self._rank} ends because {cause}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        self._dismissed.wait(_LAST_RESORT_S)
        os._exit(ENDED_EARLY)


def _as_frame(event: Event, epoch: int) -> Message:
    return {"event": event.kind, "message": event.message, "text": event.text, "epoch": epoch}
