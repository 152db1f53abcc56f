"""Under torchrun, mpirun or srun: process 0 goes on as the driver, every other one serves a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest

from perfsuite.errors import ConfigurationError, LaunchError
from perfsuite.plugin.options import runs_tests
from perfsuite.runtime.transports.launchers import detect_launch

if TYPE_CHECKING:
    from perfsuite.runtime.transports.cluster import ClusterTransport

PRELOAD = ("numpy", "torch", "torch.distributed", "perfsuite.runtime.ranks.worker")
"""What a forkserver imports once instead of every worker."""

transport_key: pytest.StashKey[ClusterTransport] = pytest.StashKey()
"""The transport of a launch, in the process of rank 0; absent without a launcher."""
problem_key = pytest.StashKey[LaunchError]()
"""What is wrong with the launcher's environment; told only where there are perf cases."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Become the driver or an agent before anything is collected; see docs/clusters.md.

    Whoever wants another plugin's pytest under torchrun switches this one off by ``-p no:perfsuite.plugin``.
    """
    try:
        launch = detect_launch(os.environ)
    except LaunchError as problem:
        config.stash[problem_key] = problem
        return None
    if launch is None:
        return None
    # Only a launch pays for importing what serves one: this plugin is loaded in every pytest run.
    from perfsuite.runtime.scratch import make_directory
    from perfsuite.runtime.transports.agent import serve_agent
    from perfsuite.runtime.transports.cluster import ClusterTransport

    runs = runs_tests(config)
    if launch.rank != 0:
        return serve_agent(launch) if runs else 0
    if runs:
        logs, remove_logs = make_directory("run")
        config.add_cleanup(remove_logs)
        transport = ClusterTransport(launch, start_method=_start_method(config), preload=PRELOAD, log_directory=logs)
        # Called on every way out, last registered first: the agents have ended before the directory goes.
        config.add_cleanup(transport.close)
        try:
            transport.gather()
        except LaunchError as problem:
            raise pytest.UsageError(str(problem)) from None
        config.stash[transport_key] = transport
    return None


def _start_method(config: pytest.Config) -> Literal["fork", "exec"]:
    """How rank processes of this machine's family start; what is wrong with the options is said after collection."""
    from perfsuite.platforms import detect_machine, load_catalog

    try:
        catalog = load_catalog(config.getini("perf_platforms"))
        return detect_machine(catalog, config.getoption("perf_platform")).family.start_method
    except ConfigurationError:
        return "fork"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[Any]:
    """Under a launcher, say last what this process exits with: torchrun turns every code but 0 into 1."""
    returned = yield
    transport = session.config.stash.get(transport_key, None)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if transport is not None and reporter is not None:
        reporter.write_line(
            f"perfsuite: the driver exits with {int(session.exitstatus)}, whatever {transport.name} says"
        )
    return returned
