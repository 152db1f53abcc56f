"""Under torchrun, mpirun or srun: if there are perf cases, process 0 is the driver and every other one serves a rank.

Every process collects first. Without perf cases every process runs its own pytest. The driver also handles the signals
of a run (:class:`Signals`).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import pytest

from perfsuite.base.errors import CaseStopped, LaunchError
from perfsuite.plugin.options import runs_tests
from perfsuite.runtime.transports.launchers import Launch, detect_launch, launcher_variables, telling_variables

if TYPE_CHECKING:
    from perfsuite.platforms import Machine
    from perfsuite.runtime.transports.cluster import ClusterTransport
    from perfsuite.runtime.transports.local import OneSlot


_BURST_S = 1.0


class Signals:
    """The handlers of one pytest run with perf cases; they end all processes, complete the reports, print no traceback.

    A run *collects*, *tests* and *ends*. While it collects or tests, Ctrl-C raises KeyboardInterrupt as without
    perfsuite. SIGTERM and SIGHUP (a closed terminal) fail the running case and leave time for all reports: torchrun
    sends SIGTERM to all processes when one dies. While the run ends, Ctrl-C only sets the exit status to 2.

    Launchers, shells and users may send a signal several times. A repetition within a second is ignored, except during
    a test that is not a perf case: it may send signals to itself. If no ranks are working, in a fixture or in such a
    test, a second SIGTERM or SIGHUP kills the run.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.phase: Literal["collects", "tests", "ends", "over"] = "collects"
        self.running = False  # Whether ranks work on a case, which a signal may interrupt.
        self.plain = False  # Whether a test other than a perf case runs, which may send signals to itself.
        self.hurried = False  # Whether a signal or a lost agent ended the run: a launcher may kill this process soon.
        self._before: dict[int, Any] = {}
        self._last_s: dict[int, float] = {}  # Time of the last signal of each kind.
        self._stopped = False  # Whether a SIGTERM or SIGHUP has stopped the run; a lost agent does not set it.
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


PRELOAD = ("numpy.random", "torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
"""Modules that a forkserver imports once instead of every worker."""

launch_key = pytest.StashKey[Launch]()  # The launch that this process belongs to; absent without a launcher.
transport_key: pytest.StashKey[ClusterTransport] = pytest.StashKey()
"""The transport of a launch, made for the first perf case; absent without a launcher."""
problem_key = pytest.StashKey[LaunchError]()
"""The error in the launcher's environment; raised only if there are perf cases."""
_held_key: pytest.StashKey[_Held] = pytest.StashKey()
_slot_key: pytest.StashKey[OneSlot] = pytest.StashKey()
_agent_key = pytest.StashKey[bool]()


class _Served(Exception):
    """Ends an agent without pytest's own end of a session: the driver writes the reports."""

    def __init__(self, status: int) -> None:
        """Keep the return value of ``pytest.main``."""
        self.status = status
        super().__init__(status)


class _Held:
    """Buffers pytest's output on a rank other than 0 until it is clear whether that rank reports."""

    def __init__(self, terminal: Any) -> None:
        self._writer = terminal._tw
        self._file, self._kept = self._writer._file, io.StringIO()
        self._writer._file = self._kept

    def give(self) -> None:
        """Write the buffer, and buffer nothing more; a second call does nothing."""
        if self._writer._file is self._kept:
            self._writer._file = self._file
            self._writer.write(self._kept.getvalue(), flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        """Print the buffer before an error inside pytest or a plugin, also in an agent."""
        self.give()


class _Leave:
    """Ends an agent; registered last, so that its wrapper is the outermost and no other plugin ends the session."""

    def __init__(self, status: int) -> None:
        self._status = status

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Leave before any plugin writes its file or summary."""
        yield from self._now()

    def _now(self) -> Iterator[None]:
        raise _Served(self._status)


class _Driver:
    """Runs all other tests on rank 0 only, without the launcher's variables; registered in the driver of a launch.

    A test that joins a process group then fails at once; with the variables it would wait for the other ranks.
    """

    def __init__(self, launcher: str, cases: Sequence[pytest.Item]) -> None:
        self._launcher = launcher
        self._cases = frozenset(cases)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Hide the launcher's variables from tests other than perf cases."""
        hidden = {} if item in self._cases else {name: os.environ.pop(name) for name in launcher_variables(os.environ)}
        try:
            return (yield)
        finally:
            os.environ.update(hidden)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[Any]:
        """Print the exit code of this process as the last line: torchrun turns every code but 0 into 1."""
        returned = yield
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            code = int(session.exitstatus)
            reporter.write_line(f"perfsuite: the driver exits with {code}; {self._launcher} may exit with another code")
        return returned


def return_status(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register the wrapper of an agent in a launch: elsewhere it would add a frame to the tracebacks of errors."""
    if telling_variables(os.environ):
        pluginmanager.register(_Agent(), "perfsuite.agent")


class _Agent:
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_cmdline_main(self) -> Generator[None, Any, Any]:
        """Return the exit status of an agent to its caller."""
        try:
            return (yield)
        except _Served as served:
            return served.status


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Detect the launcher of this process."""
    if hasattr(config, "workerinput"):  # pytest-xdist's workers have the variables of their controller
        return
    try:
        launch = detect_launch(os.environ)
    except LaunchError as problem:
        config.stash[problem_key] = problem
    else:
        if launch is not None:
            config.stash[launch_key] = launch


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Buffer pytest's output on ranks other than 0 until the collection has finished."""
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if is_other_rank(config) and hasattr(getattr(terminal, "_tw", None), "_file"):
        config.stash[_held_key] = held = _Held(terminal)
        config.pluginmanager.register(held, "perfsuite.held")


def is_other_rank(config: pytest.Config) -> bool:
    """Return whether a launcher started this process with a rank other than 0."""
    launch = config.stash.get(launch_key, None)
    return launch is not None and launch.rank != 0


def transport_of(config: pytest.Config, machine: Machine) -> ClusterTransport | None:
    """Return the transport of the launch, at first before its agents have joined; None without a launcher."""
    if transport_key not in config.stash and launch_key in config.stash:
        # Imported only in a launch: this plugin is loaded in every pytest run.
        from perfsuite.runtime.scratch import make_directory
        from perfsuite.runtime.transports.cluster import ClusterTransport

        logs, remove_logs = make_directory("run")
        config.add_cleanup(remove_logs)
        transport = ClusterTransport(
            config.stash[launch_key],
            start_method=machine.family.start_method,
            preload=PRELOAD,
            log_directory=logs,
            devices=device_names(machine),
        )
        # pytest calls the last registered cleanup first: the agents end before the directory is removed.
        config.add_cleanup(transport.close)
        config.stash[transport_key] = transport
    return config.stash.get(transport_key, None)


def device_names(machine: Machine) -> tuple[str, ...]:
    """Return the names of the devices that this process sees; empty if a device has no unique name, such as a CPU."""
    names = tuple(device.uuid for device in machine.devices)
    return names if all(names) else ()


def start_early(config: pytest.Config, machine: Machine) -> None:
    """Import the modules of the worker while pytest collects, on a rank other than 0."""
    if _slot_key in config.stash:
        return
    from perfsuite.runtime.scratch import make_directory
    from perfsuite.runtime.transports.local import OneSlot

    logs, remove_logs = make_directory("agent")
    config.add_cleanup(remove_logs)
    slot = OneSlot(
        start_method=machine.family.start_method,
        preload=PRELOAD,
        log_directory=logs,
        first_slot=config.stash[launch_key].rank,
    )
    config.add_cleanup(slot.close)
    config.stash[_slot_key] = slot
    slot.start()


def take_part(session: pytest.Session, cases: Sequence[pytest.Item]) -> bool:
    """Wait for the agents, or become one, after the collection; return False for an agent.

    Raises UsageError if agents are missing.
    """
    config = session.config
    broken = session.testsfailed and not config.option.continue_on_collection_errors
    measures = cases and not config.getoption("benchmark_skip", False)
    if launch_key not in config.stash or not measures or broken:
        give_output(config)
        return True
    runs = runs_tests(config)
    if is_other_rank(config):
        config.stash[_agent_key] = runs  # if nothing will run, only rank 0 prints the tests
        return not runs
    transport = config.stash.get(transport_key, None)
    if runs and transport is not None:
        try:
            transport.gather()
        except LaunchError as problem:
            raise pytest.UsageError(str(problem)) from None
        config.pluginmanager.register(_Driver(transport.name, cases), "perfsuite.driver")
    return True


def give_output(config: pytest.Config) -> None:
    """Write the buffered output unless this process is an agent."""
    if _held_key in config.stash and _agent_key not in config.stash:
        config.stash[_held_key].give()


def is_agent(config: pytest.Config) -> bool:
    """Return whether this process serves a rank of a launch and runs no tests."""
    return config.stash.get(_agent_key, False)


def serve(session: pytest.Session, machine: Machine) -> None:
    """Serve the driver in an agent, then leave pytest without any output."""
    config = session.config
    from perfsuite.runtime.transports.agent import serve_agent

    slot = config.stash.get(_slot_key, None)
    status = serve_agent(config.stash[launch_key], slot=slot, stays=not is_command(), devices=device_names(machine))
    config.pluginmanager.register(_Leave(status), "perfsuite.leave")
    raise session.Failed("perfsuite: this process served a rank")  # the one exception that pytest does not print
