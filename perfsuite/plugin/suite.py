"""State of one pytest run.  Nothing happens before a perf case is collected."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform as python_platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import perfsuite
from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.base.masking import masked_words
from perfsuite.history.git import revision_of
from perfsuite.metrics import read_run
from perfsuite.platforms import (
    Catalog,
    DeviceModel,
    Family,
    Machine,
    detect_machine,
    families,
    fingerprint,
    load_catalog,
    read_environment,
    why_absent,
)
from perfsuite.platforms.detection import too_few_devices
from perfsuite.platforms.environment import installed_torch, require_importable_torch, require_torch
from perfsuite.platforms.host import boot_of
from perfsuite.platforms.quiet import HostLoad, read_host_load
from perfsuite.plugin import collisions, launch, published
from perfsuite.plugin.gate_options import gate_options_key
from perfsuite.plugin.launch import Signals
from perfsuite.plugin.options import Settings, bare_compare_key, file_of, runs_tests, settings_key, timed_options
from perfsuite.plugin.sweep import LaunchSizes
from perfsuite.record.journal_writer import JournalWriter, other_places, usable_folder
from perfsuite.record.own_metrics import OwnMetric, registered
from perfsuite.record.run import Header, Revision
from perfsuite.run.session import PerfSession, new_session_id
from perfsuite.runtime import own_tree, scratch
from perfsuite.runtime.scratch import make_directory

if TYPE_CHECKING:
    from perfsuite.runtime.driver import Driver
    from perfsuite.runtime.transports.base import Transport
    from perfsuite.runtime.transports.cluster import ClusterTransport

LOST_AGENT_S = 2.0  # Seconds to wait for the loss of an agent: torchrun stops the other processes 0.1 s after one died.


class Suite:
    """State of one pytest run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.settings: Settings = config.stash[settings_key]
        self.session: PerfSession | None = None  # Created when the first perf test is collected.
        self.problem: PerfsuiteError | None = config.stash.get(launch.problem_key, None)
        """Why no perf case can run; becomes a usage error after the collection."""
        self.first_case_at: float | None = None  # Start of the first perf case, on the monotonic clock.
        self.load_before: HostLoad | None = None  # Load of this host before the first case.
        self.asked = False  # Whether any perf test was collected; without one a problem is not reported.
        self.left_out = 0  # Number of deselected extended cases.
        self.opened = False  # Whether this run measures and has a journal.
        self.journal_elsewhere = ""
        """The place of a journal outside of the root directory and the reason; empty if it is inside."""
        self.started_at = ""  # UTC, ISO 8601.
        self.unusable: tuple[int, str] | None = None
        """Fewest ranks with which a case found a device that torch cannot use, and its message."""
        self.verdicts: dict[str, str] = {}  # Verdict of each judged case in one word, by node id.
        self.naming = False  # Whether a perf test is being parametrized; ids of its dataclasses and dtypes are names.
        self.place = os.getpid(), threading.get_ident()  # The process and the thread in which pytest runs the tests.
        self.signals = Signals(config)
        self._remove_logs: Callable[[], None] = lambda: None

    @property
    def projects(self) -> bool:
        """Whether cases that cannot run here are projected."""
        return collisions.option(self.config, "perf_project") is not None

    # -- platforms and devices -----------------------------------------------------------------------------------

    @functools.cached_property
    def catalog(self) -> Catalog:
        """All platforms, with those of the user."""
        return load_catalog(self.settings.platform_files)

    @functools.cached_property
    def machine(self) -> Machine:
        """The device family of this run with its detected devices."""
        return detect_machine(self.catalog, self.settings.platform)

    @functools.cached_property
    def platforms(self) -> tuple[DeviceModel, ...]:
        """The session's platform, then those in the command line.

        --perf-published adds the platforms of its reports if the session's platform has small sizes only.
        """
        own, words = self.machine.model, self.named
        if (self.settings.scale or self.machine.scale) == "small":
            words |= published.platforms(self.config)
        return (own, *(model for name, model in self.catalog.models.items() if name in words and name != own.name))

    @functools.cached_property
    def named(self) -> frozenset[str]:
        """Platforms whose names are words of -k, -m or a node id of the command line."""
        config = self.config
        node_ids = [part for arg in config.args for part in arg.partition("[")[2:]]
        text = " ".join([config.getoption("keyword") or "", config.getoption("markexpr") or "", *node_ids])
        words = set(re.findall(r"[a-z0-9_]+", text.lower()))
        return frozenset(name for name in self.catalog.models if name.lower() in words)

    @functools.cached_property
    def cluster(self) -> ClusterTransport | None:
        """The launcher's transport; None without a launcher."""
        return launch.transport_of(self.config, self.machine)

    @functools.cached_property
    def transport(self) -> Transport:
        """The transport to the rank processes: the launcher's, else that of this host."""
        if self.cluster is not None:
            return self.cluster
        from perfsuite.runtime.transports.local import LocalTransport  # imported only if something runs

        logs, self._remove_logs = make_directory("run")
        return LocalTransport(start_method=self.machine.family.start_method, preload=launch.PRELOAD, log_directory=logs)

    def own_processes(self) -> frozenset[int]:
        """Return the process ids of this process and of agents on this host; all other processes of the run descend."""
        return frozenset({os.getpid(), *(self.cluster.agents_here() if self.cluster is not None else ())})

    @functools.cached_property
    def revision(self) -> Revision:
        """The revision of the measured code."""
        written = (self.config.stash[gate_options_key].folder, file_of("perf_history", self.config))
        return revision_of(self.config.rootpath, *filter(None, written))

    @functools.cached_property
    def versions(self) -> Mapping[str, str]:
        """Versions of Python and the packages, from package metadata: torch is not imported."""
        versions = {"python": python_platform.python_version(), "perfsuite": perfsuite.__version__}
        for package in ("torch", "pytest", "pytest-benchmark"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = "not installed"
        return versions

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line of pytest, without secrets."""
        return masked_words(map(str, self.config.invocation_params.args))

    @functools.cached_property
    def _families(self) -> Mapping[str, Family]:
        return families()

    def launch_sizes(self, model: DeviceModel) -> LaunchSizes:
        """Return the world sizes for sweeps on a platform: of the option, of the launch or of this host."""
        if self.settings.world_sizes or model.name != self.machine.name:
            node = model.devices_per_node
            return LaunchSizes(asked=self.settings.world_sizes, whole=int(node.value) if node else 0)
        if self.cluster is not None:
            capacity = self.cluster.capacity or 0
            return LaunchSizes(capacity=capacity, whole=capacity)
        capacity = 0 if self.machine.family.shareable else self.machine.device_count
        return LaunchSizes(capacity=capacity, whole=0 if self.machine.simulated else capacity)

    def hosts_of(self, world_size: int) -> int:
        """Return the number of hosts of the first ``world_size`` ranks, after the agents have joined."""
        cluster = self.cluster
        return len({cluster.place(rank).host for rank in range(world_size)}) if cluster is not None else 1

    @functools.cached_property
    def absent(self) -> frozenset[str]:
        """Reasons why platforms of the command line are not on this machine."""
        return frozenset(filter(None, map(self._why_absent, self.platforms)))

    def _why_absent(self, model: DeviceModel) -> str:
        return why_absent(model.name, machine=self.machine, catalog=self.catalog, families=self._families)

    def why_not(self, model: DeviceModel, world_size: int) -> str:
        """Return why a case for this platform and number of ranks is skipped; empty if it can run."""
        absent = self._why_absent(model)
        if absent or model.name != self.machine.name:
            return absent
        cluster = self.cluster
        if cluster is not None and cluster.capacity is not None and world_size > cluster.capacity:
            return (
                f"{world_size} ranks, but {cluster.name} gave {cluster.capacity}; start at least {world_size}, "
                "or set fewer by --perf-world-sizes"
            )
        if self.unusable is not None and world_size >= self.unusable[0]:
            return self.unusable[1]
        if self.machine.family.shareable or self.settings.oversubscribe:
            return ""
        on_host = min(world_size, cluster.place(0).local_world_size if cluster else world_size)
        count = self.machine.device_count
        if cluster and launch.device_names(self.machine):  # each agent reports its devices when it joins
            count = cluster.devices_here(count) or on_host
        return too_few_devices(on_host, count) if on_host > count else ""

    # -- the phases of a run -------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        """Detect the machine and create the session, once; return False and set :attr:`problem` on failure."""
        if self.session is None and self.problem is None:
            try:
                self._make_session()
            except PerfsuiteError as problem:
                self.problem = problem
        return self.problem is None

    def _make_session(self) -> None:
        machine = self.machine
        require_torch(machine.family, installed_torch())
        machine.family.require_backend(self.settings.backend)
        _ = self.platforms  # find a damaged platform file now, not during the collection
        if own_tree.VARIABLE not in os.environ:  # an arm already has it
            gate, option = self.config.stash[gate_options_key], self.config.getoption
            compares = option("benchmark_compare", None) or option("benchmark_compare_fail", None)
            # The code of another checkout would be wrong evidence for a run that gates, stores or compares.
            judges = bool(gate.gate or gate.update or compares or self.config.stash[bare_compare_key])
            os.environ.update(own_tree.session_variable(self.config.rootpath, exclusive=judges))  # for rank processes
            self.config.add_cleanup(functools.partial(os.environ.__delitem__, own_tree.VARIABLE))
        self.session = PerfSession(
            id=new_session_id(),
            machine=machine,
            fingerprint=fingerprint(machine).key,
            open_driver=self._open_driver,
            read_environment=lambda worker: read_environment(
                machine, declared=self.catalog.declared, options=timed_options(self.settings), worker=worker
            ).to_json(),
        )

    @functools.cached_property
    def own_metrics(self) -> Sequence[OwnMetric]:
        """The metrics that conftest.py files and plugins register.  Raises InvalidParameter for invalid ones."""
        return registered(self.config.hook.pytest_perfsuite_metrics(config=self.config))

    def _open_driver(self) -> Driver:
        from perfsuite.runtime.driver import Driver  # imported only if something runs

        require_importable_torch()
        return Driver(
            transport=self.transport,
            family=self.machine.family,
            rootpath=self.config.rootpath,
            device_count=self.machine.device_count,
            pin=self.settings.pin,
            backend=self.settings.backend,
            metrics=lambda: self.own_metrics,
        )

    def start_workers(self) -> None:
        """Start rank processes while pytest collects, unless this run will not use them."""
        option = self.config.getoption
        idle = option("benchmark_skip", False) or hasattr(self.config, "workerinput")
        if self.session is not None and runs_tests(self.config) and not idle:
            with contextlib.suppress(ConfigurationError):  # the first case raises it again; all may be skipped
                if launch.is_other_rank(self.config):
                    launch.start_early(self.config, self.machine)
                else:
                    self.session.start()

    def open(self) -> None:
        """Read the journal to resume and open the new one, in a run with perf cases.  Raises PerfsuiteError."""
        if self.problem is not None:
            raise self.problem
        session = self.session
        if session is None or not runs_tests(self.config):
            return
        _ = self.own_metrics  # raises for an invalid one before anything is measured
        if self.settings.resume:
            session.resume(read_run(self.settings.resume))
        self.opened = True
        self.started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        header = Header(
            session=session.id,
            fingerprint=session.fingerprint,
            platform=self.machine.name,
            started_at=self.started_at,
            versions=self.versions,
            revision=self.revision,
            arguments=self.arguments,
            host=self.machine.family.host.read("proc/sys/kernel/hostname") or "",
            boot=boot_of(self.machine.family.host),
        )
        root, path = self.config.rootpath, self.settings.journal
        with self.signals.held():
            if path is None:
                folder, why_not = usable_folder(root, self.config.invocation_params.dir)
                path = folder / f"journal-{session.id}.jsonl"
                self.journal_elsewhere = f"the journal of this run is {path}: {why_not}" if why_not else ""
            session.journal = JournalWriter(
                path,
                header,
                functools.partial(other_places, root, path),
                self.signals.held,
                keeps_always=self.settings.journal is not None,
            )

    @contextlib.contextmanager
    def running_case(self) -> Iterator[None]:
        """Mark the time in which ranks work on a case and a signal may interrupt it."""
        if self.first_case_at is None:
            self.first_case_at = time.monotonic()
            self.load_before = read_host_load(self.machine.family.host, self.own_processes())
        self.signals.running = True
        try:
            yield
        finally:
            self.signals.running = False

    def budget_left_s(self) -> float | None:
        """Return the remaining seconds of --perf-time-budget; None without the option."""
        if self.settings.time_budget_s is None or self.first_case_at is None:
            return self.settings.time_budget_s
        return self.settings.time_budget_s - (time.monotonic() - self.first_case_at)

    def lost_agents(self) -> str:
        """Return a sentence about lost agents; waits for it, because a launcher's signal may come first."""
        return self.cluster.await_loss(LOST_AGENT_S) if self.cluster else ""

    def close(self) -> None:
        """End every process that the run started; a second call does nothing."""
        try:
            if self.session is not None:
                self.session.close()
        finally:
            self._remove_logs()

    # -- header and warnings -------------------------------------------------------------------------------------

    def header(self) -> list[str]:
        """Return a line with versions, platform and hardware, and a line per warning."""
        machine, cluster = self.machine, self.cluster
        ranks = f" with {cluster.capacity} ranks" if cluster else ""
        transport = f"{cluster.name if cluster else 'local'}{ranks}"
        hardware = self.session.fingerprint if self.session else "unknown"
        line = (
            f"perfsuite: {perfsuite.__version__}, platform {machine}, transport {transport}, "
            f"torch {self.versions['torch']}, hardware {hardware}"
        )
        left_out = f"perfsuite: {self.left_out} extended cases left out; -m extended runs them"
        lines = [line, left_out] if self.left_out else [line]
        return lines + [f"perfsuite: warning: {warning}" for warning in self.warnings()]

    def warnings(self) -> list[str]:
        """Return warnings about conditions that change the meaning of the results."""
        # A CPU's peaks are measured when needed, so the remark about missing ones is left out.
        cpu = self.machine.family.name == "cpu"
        lines = [remark for remark in self.machine.remarks() if not (cpu and remark == self.machine.unknown)]
        if Path.cwd() != self.config.rootpath:
            lines.append(
                f"the current directory is not the root {self.config.rootpath}: pytest-benchmark stores its files here"
            )
        lines += collisions.lines(self.config)
        if self.machine.simulated:
            lines.append("the devices are simulated: no time here is a measurement")
        lines += scratch.remarks()
        if self.settings.budget.smoke:
            lines.append("pytest-benchmark is off: every case is built, checked and run once, and nothing is measured")
        return lines
