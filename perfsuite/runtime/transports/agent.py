"""The process of every rank of a launch except rank 0: an agent that serves one slot for the driver.

An agent keeps its worker in a process of its own, enters no collective and does not import torch. So it answers while
its worker hangs. It ends with the driver's connection, with its parent (the launcher) and on SIGTERM, and its worker
ends with it. Only the driver handles Ctrl-C. It writes nothing to stdout, and one line to stderr if it ends early.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from perfsuite.base.errors import LaunchError, RanksFailed
from perfsuite.runtime import scratch
from perfsuite.runtime.transports.base import Message
from perfsuite.runtime.transports.door import reach_driver
from perfsuite.runtime.transports.exchange import LEAVING, Exchange
from perfsuite.runtime.transports.keys import find_meeting
from perfsuite.runtime.transports.launchers import Launch, gathering_s
from perfsuite.runtime.transports.local import OneSlot
from perfsuite.runtime.transports.star import GOT_SIGNAL, PATIENCE_S, greeting, say_waiting
from perfsuite.runtime.transports.wire import Link, LinkLost

DISMISSED = 0
ENDED_EARLY = 1  # Exit status if the driver or the launcher has ended, or no driver was found.
_DRIVER = 0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAST_WORDS_S = 2.0
_LAST_RESORT_S = 15.0  # After this time a main thread hangs in a system call; the process ends.


def serve_agent(
    launch: Launch,
    *,
    environ: Mapping[str, str] = os.environ,
    deadline_s: float | None = None,
    slot: OneSlot | None = None,
    stays: bool = False,
    devices: Sequence[str] = (),
) -> int:
    """Serve until the driver dismisses this agent; return the exit status of the process, 0 when dismissed.

    ``deadline_s`` limits the search for the driver, ``devices`` are visible to this process. The caller has started
    ``slot`` and closes it. A process that ``stays`` gets its signal handlers back; another one ends next and ignores
    SIGTERM from here on, which launchers send to all processes when rank 0 has failed.
    """
    deadline_s = gathering_s(launch) if deadline_s is None else deadline_s
    link = None
    parent = os.getppid()
    leave_signals = _take_signals(stays)
    whom = "rank 0 and all other ranks"
    waiting = threading.Timer(PATIENCE_S, say_waiting, (launch, whom, deadline_s, environ))
    waiting.daemon = True
    waiting.start()
    try:
        link, welcome = reach_driver(
            launch,
            lambda: find_meeting(launch, environ),
            greeting(launch, socket.gethostname(), os.getpid(), devices),
            farewell=_farewell,
            deadline_s=deadline_s,
            alive=lambda: os.getppid() == parent,
        )
        waiting.cancel()
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on the driver handles it
        with _log_directory(welcome) as logs:
            return _Agent(launch, link, welcome, logs, parent=parent, slot=slot).serve()
    except LaunchError as problem:
        print(f"perfsuite: {problem}", file=sys.stderr, flush=True)
        return ENDED_EARLY
    except SystemExit as ended:
        if link is not None:  # a signal ended it before it serves: the driver may have accepted it
            with contextlib.suppress(LinkLost):
                link.send(_farewell(ended))
        return int(ended.code or 0)
    finally:
        waiting.cancel()
        leave_signals()
        if link is not None:
            link.close()


def _take_signals(stays: bool) -> Callable[[], None]:
    """Make SIGTERM, SIGHUP and early Ctrl-C end the agent (main thread only); return the function that undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, _leave)

    def leave_signals() -> None:
        for number, handler in before.items():
            if handler is not None:  # Python cannot set a handler that other code set
                signal.signal(number, handler if stays else signal.SIG_IGN)

    return leave_signals


def _leave(number: int, _: object) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # launchers repeat signals
    raise SystemExit(128 + number)


def _farewell(ended: SystemExit) -> Message:
    """Return the last message of an agent that a signal ends."""
    return {LEAVING: f"{GOT_SIGNAL}{signal.Signals(int(ended.code or 0) - 128).name}"}


@contextlib.contextmanager
def _log_directory(welcome: Message) -> Any:
    """Yield the driver's log directory if it is on this host, else a temporary one."""
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
        self._exchange = Exchange({_DRIVER: link})
        self._parent = parent
        self._slot = slot or OneSlot(
            start_method=welcome["start_method"],
            preload=tuple(welcome["preload"]),
            log_directory=logs,
            first_slot=launch.rank,
        )
        self._epoch = 0  # Number of kills, by which the driver recognises events of workers that were killed.
        self._ending = threading.Event()
        self._over = threading.Event()  # All messages are sent: the thread that serves the link ends.
        self._cause = ""  # Reason for an early end, unless a SIGTERM from outside caused it.
        self._verbs: Mapping[str, Callable[[Message], Any]] = {
            "start": lambda _: self._slot.start(),
            "acquire": lambda frame: self._slot.acquire(
                1, fresh=frame["fresh"], env=frame["env"], deadline_s=frame["deadline_s"]
            ),
            "send": lambda frame: self._slot.send(self._rank, frame["command"]),
            "dump": lambda frame: self._slot.dump([self._rank], frame["deadline_s"]).get(self._rank, ""),
            "kill": self._kill,
            "log_tail": lambda frame: self._slot.log_tail(self._rank, frame["lines"]),
        }

    def serve(self) -> int:
        """Execute commands and send events until dismissed."""
        watching = threading.Thread(target=self._watch, name="perfsuite-link", daemon=True)
        watching.start()
        try:
            while not self._ending.is_set():
                wait([self._exchange.news, *self._slot.waitables()])
                for arrival in self._exchange.take():
                    if arrival.frame is not None:
                        self._answer(arrival.frame)
                for event in self._slot.poll(0.0):
                    fields = {"message": event.message, "text": event.text, "epoch": self._epoch}
                    self._send({"event": event.kind, **fields})
        except SystemExit as ended:
            cause = self._cause
            self._ending.set()  # the driver closes the link after a farewell: this is not a cause of the end
            self._send({LEAVING: cause} if cause else _farewell(ended))
            return ENDED_EARLY if cause else int(ended.code or 0)
        finally:
            self._slot.close()
            self._await_sent()
            self._over.set()
            self._exchange.wake()
            watching.join(_LAST_WORDS_S)
            if not watching.is_alive():
                self._exchange.close()
        return DISMISSED

    def _answer(self, frame: Message) -> None:
        if frame["verb"] == "dismiss":
            self._ending.set()
            return
        try:
            value = self._verbs[frame["verb"]](frame)
            reply: Message = {"value": value}
        except (RanksFailed, OSError) as problem:  # OSError: a full disk, no more processes; the driver reports it
            reply = {"error": str(problem) or type(problem).__name__}
        if "id" in frame:
            self._send({"reply": frame["id"], **reply})

    def _kill(self, frame: Message) -> None:
        self._slot.kill([self._rank])
        self._epoch = frame["epoch"]

    def _send(self, frame: Message) -> None:
        self._exchange.send(_DRIVER, frame)

    def _await_sent(self) -> None:
        until = time.monotonic() + _LAST_WORDS_S
        while not self._exchange.is_idle and not self._exchange.lost and time.monotonic() < until:
            time.sleep(0.01)

    def _watch(self) -> None:
        """In a thread: serve the link; end this process when the driver or the launcher has ended."""
        silent = cause = ""
        while not cause and not self._over.is_set():
            try:
                self._exchange.turn()
            except Exception as problem:  # without this thread the end of the driver would stay unnoticed
                self._exchange.drop(_DRIVER, f"its link cannot be served: {problem!r}")
            before, silent = silent, self._exchange.silent().get(_DRIVER, "")
            if silent and not before:  # for example after Ctrl-Z; a host that fails causes a lost connection
                self._say(f"waits for the driver: {silent}")
            if _DRIVER in self._exchange.lost:
                cause = f"the driver is gone: {self._exchange.lost[_DRIVER]}"
            elif os.getppid() != self._parent:
                cause = "its launcher is gone"
        if self._ending.is_set() or self._over.is_set():
            return
        self._cause = cause
        self._say(f"ends because {cause}")
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + _LAST_RESORT_S
        while time.monotonic() < until and not self._exchange.lost and not self._over.is_set():
            self._exchange.turn()  # send the last messages
        if not self._over.wait(max(0.0, until - time.monotonic())):
            os._exit(ENDED_EARLY)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # stderr may be closed
            print(f"perfsuite: agent of rank {self._rank} {text}", file=sys.stderr, flush=True)
