"""Under torchrun, mpirun or srun: if there are perf cases, process 0 is the driver and every other one serves a rank.

Every process collects first.  Without perf cases this module does nothing, and every process runs its own pytest.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import LaunchError
from perfsuite.plugin.options import runs_tests
from perfsuite.plugin.signals import is_command
from perfsuite.runtime.transports.launchers import Launch, detect_launch, launcher_variables

if TYPE_CHECKING:
    from perfsuite.platforms import Machine
    from perfsuite.runtime.transports.cluster import ClusterTransport
    from perfsuite.runtime.transports.local import OneSlot

PRELOAD = ("numpy.random", "torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
"""Modules that a forkserver imports once instead of every worker."""

launch_key = pytest.StashKey[Launch]()
"""The launch that this process belongs to; absent without a launcher."""
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Detect the launcher of this process; return the exit status of an agent to its caller."""
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers have the variables of their controller
        try:
            launch = detect_launch(os.environ)
        except LaunchError as problem:
            config.stash[problem_key] = problem
        else:
            if launch is not None:
                config.stash[launch_key] = launch
    try:
        return (yield)
    except _Served as served:
        return served.status


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
