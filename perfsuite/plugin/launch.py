"""Under torchrun, mpirun or srun: with perf cases process 0 is the driver and every other one serves a rank.

Every process collects.  Only then is it known whether there are perf cases; without them nothing here does anything,
and every process runs its own pytest.
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
"""What a forkserver imports once instead of every worker."""

launch_key = pytest.StashKey[Launch]()
"""The launch that this process belongs to; absent without a launcher."""
transport_key: pytest.StashKey[ClusterTransport] = pytest.StashKey()
"""The transport of a launch, made for the first perf case; absent without a launcher."""
problem_key = pytest.StashKey[LaunchError]()
"""What is wrong with the launcher's environment; told only where there are perf cases."""
_held_key: pytest.StashKey[_Held] = pytest.StashKey()
_slot_key: pytest.StashKey[OneSlot] = pytest.StashKey()
_agent_key = pytest.StashKey[bool]()


class _Served(Exception):
    """An agent was dismissed: passes pytest's own end of a session, whose reports are the driver's."""

    def __init__(self, status: int) -> None:
        """``status`` is what ``pytest.main`` returns."""
        self.status = status
        super().__init__(status)


class _Held:
    """What pytest writes on another rank than 0 until it is known whether that rank reports; registered as a plugin."""

    def __init__(self, terminal: Any) -> None:
        self._writer = terminal._tw
        self._file, self._kept = self._writer._file, io.StringIO()
        self._writer._file = self._kept

    def give(self) -> None:
        """Write what was held, and hold nothing more.  Idempotent."""
        if self._writer._file is self._kept:
            self._writer._file = self._file
            self._writer.write(self._kept.getvalue(), flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        """Show an error inside pytest or a plugin, also in an agent."""
        self.give()


class _Leave:
    """Registered last, so that its wrapper is the outermost: no other plugin of an agent ends a session."""

    def __init__(self, status: int) -> None:
        self._status = status

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Iterator[None]:
        """Leave before any plugin writes its file or summary."""
        yield from self._now()

    def _now(self) -> Iterator[None]:
        raise _Served(self._status)


class _Driver:
    """Registered in the driver of a launch.

    All other tests run on rank 0 alone, without the launcher's variables.  A test that joins a process group then fails
    at once; with the variables it would wait for the other ranks.
    """

    def __init__(self, launcher: str, cases: Sequence[pytest.Item]) -> None:
        self._launcher = launcher
        self._cases = frozenset(cases)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Hide the launcher's variables from everything but perf cases."""
        hidden = {} if item in self._cases else {name: os.environ.pop(name) for name in launcher_variables(os.environ)}
        try:
            return (yield)
        finally:
            os.environ.update(hidden)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[Any]:
        """Say last what this process exits with: torchrun turns every code but 0 into 1."""
        returned = yield
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            code = int(session.exitstatus)
            reporter.write_line(f"perfsuite: the driver exits with {code}, whatever {self._launcher} says")
        return returned


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Find out whether a launcher started this process; give the caller of an agent its status."""
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
    """On other ranks than 0, hold back what pytest writes until collection has told who reports."""
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if is_other_rank(config) and hasattr(getattr(terminal, "_tw", None), "_file"):
        config.stash[_held_key] = held = _Held(terminal)
        config.pluginmanager.register(held, "perfsuite.held")


def is_other_rank(config: pytest.Config) -> bool:
    """Whether a launcher started this process, and its rank is not 0."""
    launch = config.stash.get(launch_key, None)
    return launch is not None and launch.rank != 0


def transport_of(config: pytest.Config, machine: Machine) -> ClusterTransport | None:
    """The transport of the launch, not yet gathered when first asked for; None without a launcher."""
    if transport_key not in config.stash and launch_key in config.stash:
        # Only a launch pays for importing what serves one: this plugin is loaded in every pytest run.
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
        # Called on every way out, last registered first: the agents have ended before the directory goes.
        config.add_cleanup(transport.close)
        config.stash[transport_key] = transport
    return config.stash.get(transport_key, None)


def device_names(machine: Machine) -> tuple[str, ...]:
    """Which devices this process sees, by number; empty where a device has no name of its own, as a CPU."""
    names = tuple(device.uuid for device in machine.devices)
    return names if all(names) else ()


def start_early(config: pytest.Config, machine: Machine) -> None:
    """On another rank than 0: have what its worker needs imported while pytest goes on collecting."""
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
    """Once it is known which tests will run: gather the agents, or become one; False for an agent.

    Raises UsageError where agents did not come.
    """
    config = session.config
    broken = session.testsfailed and not config.option.continue_on_collection_errors
    measures = cases and not config.getoption("benchmark_skip", False)
    if launch_key not in config.stash or not measures or broken:
        give_output(config)
        return True
    runs = runs_tests(config)
    if is_other_rank(config):
        config.stash[_agent_key] = runs  # where nothing will run rank 0 alone tells what there is
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
    """What this process has to say is its own: write what was held back."""
    if _held_key in config.stash and _agent_key not in config.stash:
        config.stash[_held_key].give()


def is_agent(config: pytest.Config) -> bool:
    """Whether this process serves a rank of a launch and runs no tests."""
    return config.stash.get(_agent_key, False)


def serve(session: pytest.Session, machine: Machine) -> None:
    """In an agent: serve the driver, then leave pytest with nothing written."""
    config = session.config
    from perfsuite.runtime.transports.agent import serve_agent

    slot = config.stash.get(_slot_key, None)
    status = serve_agent(config.stash[launch_key], slot=slot, stays=not is_command(), devices=device_names(machine))
    config.pluginmanager.register(_Leave(status), "perfsuite.leave")
    raise session.Failed("perfsuite: this process served a rank")  # the one end of a loop of which pytest says nothing
