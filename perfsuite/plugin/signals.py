"""Signals that end a run with perf cases: processes end, journal and reports are whole, no traceback is printed.

A run *collects*, *tests* and *ends*.  While it collects or tests, Ctrl-C raises KeyboardInterrupt as without perfsuite.
SIGTERM and SIGHUP (the terminal was closed) fail the case that runs and leave time for all reports: torchrun sends
SIGTERM to everybody when one process dies.  While the run ends, Ctrl-C only makes its exit status 2.

Launchers, shells and impatient people send a signal several times.  A repetition within a second is dropped, except
while a test runs that is no perf case: it may send itself signals.  While no ranks are at work, in a fixture or in such
a test, a second SIGTERM or SIGHUP kills the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

import pytest

from perfsuite.base.errors import CaseStopped

_BURST_S = 1.0


class Signals:
    """The handlers of one pytest run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.phase: Literal["collects", "tests", "ends", "over"] = "collects"
        self.running = False
        """Whether ranks are at work on a case, which a signal may interrupt."""
        self.plain = False
        """Whether a test runs that is no perf case and may send itself signals."""
        self.hurried = False
        """A signal or a lost agent ended the run: a launcher is about to kill this process too."""
        self._before: dict[int, Any] = {}
        self._last_s: dict[int, float] = {}
        """When each signal came last; empty while none came."""
        self._stopped = False
        """Whether a SIGTERM or SIGHUP has asked the run to stop; a lost agent is no such signal."""
        self._held = False
        self._pending = 0

    def install(self) -> None:
        """From here to the end of the run signals are handled here; those that are ignored stay so (nohup)."""
        if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._take)
        self._config.add_cleanup(self._restore)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While a line of the journal is written, a signal waits."""
        __tracebackhide__ = True
        if self._held:
            yield
            return
        self._held = True
        try:
            yield
        finally:
            self._held = False
            number, self._pending = self._pending, 0
            if number:
                self._act(number)

    def _restore(self) -> None:
        """Where the process is about to end, after a signal only once the burst is over."""
        self.phase = "over"
        if not self._last_s or not is_command():
            self._give_back()
        self._last_s = dict.fromkeys(self._last_s, time.monotonic())

    def _give_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:  # else somebody else handles it since
                signal.signal(number, before)

    def _leave_to_others(self, number: int) -> None:
        self._give_back()
        os.kill(os.getpid(), number)

    def _take(self, number: int, frame: object) -> None:
        __tracebackhide__ = True  # pytest says where the run was, not that a handler raised
        now_s = time.monotonic()
        in_burst = any(now_s - last_s < _BURST_S for last_s in self._last_s.values())
        self._last_s[number] = now_s
        if in_burst and not self.plain:
            return
        if self.phase == "over":
            self._leave_to_others(number)
        elif self._held:
            self._pending = number
        else:
            self._act(number)

    def _act(self, number: int) -> None:
        __tracebackhide__ = True
        session: Any = self._config.pluginmanager.get_plugin("session")
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.phase != "ends":
            before = self._before[number]
            if callable(before):  # Python's own raises KeyboardInterrupt
                before(number, sys._getframe())
        elif number == signal.SIGINT:
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        elif self._stopped and self.phase == "tests" and not self.running:
            self._leave_to_others(number)  # a test or a fixture goes on, and somebody does not want to wait
        else:
            self.hurried = self._stopped = True
            session.shouldstop = session.shouldstop or f"perfsuite: stopped by {name}"  # a lost agent comes first
            if self.running:
                raise CaseStopped(name)
            if self.phase == "collects":
                raise pytest.exit.Exception(session.shouldstop, pytest.ExitCode.INTERRUPTED)


def is_command() -> bool:
    """Whether this process is pytest's own and ends with the run; else a program called ``pytest.main``."""
    frame: FrameType | None = sys._getframe()
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name if frame.f_globals.get("__name__") == "_pytest.config" else "")
        frame = frame.f_back
    calls = itertools.dropwhile(lambda name: name not in ("main", "_main"), names)  # of the innermost run
    return any(name.endswith("console_main") for name in itertools.takewhile(bool, calls))
