"""Handle signals in a run with perf cases: end all processes, complete journal and reports, print no traceback.

A run *collects*, *tests* and *ends*.  While it collects or tests, Ctrl-C raises KeyboardInterrupt as without perfsuite.
SIGTERM and SIGHUP (a closed terminal) fail the running case and leave time for all reports: torchrun sends SIGTERM to
all processes when one dies.  While the run ends, Ctrl-C only sets the exit status to 2.

Launchers, shells and users may send a signal several times.  A repetition within a second is ignored, except during a
test that is not a perf case: it may send signals to itself.  If no ranks are working, in a fixture or in such a test, a
second SIGTERM or SIGHUP kills the run.
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
        """Whether ranks work on a case, which a signal may interrupt."""
        self.plain = False
        """Whether a test other than a perf case runs, which may send signals to itself."""
        self.hurried = False
        """Whether a signal or a lost agent ended the run: a launcher may kill this process soon."""
        self._before: dict[int, Any] = {}
        self._last_s: dict[int, float] = {}
        """Time of the last signal of each kind."""
        self._stopped = False
        """Whether a SIGTERM or SIGHUP has stopped the run; a lost agent does not set it."""
        self._held = False
        self._pending = 0

    def install(self) -> None:
        """Handle signals until the end of the run; ignored signals stay ignored (nohup)."""
        if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._take)
        self._config.add_cleanup(self._restore)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals while a line of the journal is written."""
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
        self.phase = "over"
        if not self._last_s or not is_command():
            self._give_back()
        self._last_s = dict.fromkeys(self._last_s, time.monotonic())

    def _give_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._take:  # else another handler has replaced it
                signal.signal(number, before)

    def _leave_to_others(self, number: int) -> None:
        self._give_back()
        os.kill(os.getpid(), number)

    def _take(self, number: int, frame: object) -> None:
        __tracebackhide__ = True  # pytest prints the place of the interruption, not this handler
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
            self._leave_to_others(number)  # a test or a fixture is running and the user does not want to wait
        else:
            self.hurried = self._stopped = True
            session.shouldstop = session.shouldstop or f"perfsuite: stopped by {name}"  # keeps that of a lost agent
            if self.running:
                raise CaseStopped(name)
            if self.phase == "collects":
                raise pytest.exit.Exception(session.shouldstop, pytest.ExitCode.INTERRUPTED)


def is_command() -> bool:
    """Return whether this process is the command pytest and ends with the run; else a program called pytest.main."""
    frame: FrameType | None = sys._getframe()
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name if frame.f_globals.get("__name__") == "_pytest.config" else "")
        frame = frame.f_back
    calls = itertools.dropwhile(lambda name: name not in ("main", "_main"), names)  # of the innermost run
    return any(name.endswith("console_main") for name in itertools.takewhile(bool, calls))
