"""A driver without processes for tests of the plugin, and the repository of somebody who uses it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from perfsuite.plugin import gating, launch
from perfsuite.plugin.suite import Suite
from perfsuite.record.result import ClockFacts, Measurement, Record
from perfsuite.record.workload import Budget, FunctionWorkload
from perfsuite.runtime.driver import Job
from perfsuite.workloads.peak_probe import PeakProbe
from test_correctness.helpers.measurements import measurement_of, rank_facts

ROOT = Path(__file__).parents[2]
PROBED = tuple(
    Record(name=name, value=value, unit="TFLOPS", reduce="only")
    for name, value in (("a product on 1 threads", 0.25), ("a larger product on 1 threads", 0.5))
)
CLOCK = ClockFacts(name="perf_counter", resolution_s=5e-8, cost_s=1e-7)

WORKLOADS = """
from dataclasses import dataclass
from perfsuite import Step, Work, Workload, dtypes, sizes, world_sizes

@dataclass(frozen=True, kw_only=True)
class Product(Workload):
    side: int = 64
    dtype: str = "fp32"
    metrics = ("tflops",)
    def work(self, shape):
        return Work(flops={"exact": 2.0 * self.side**3}, dtype=self.dtype)
    def build(self, rank):
        raise AssertionError("no rank builds it in these tests")

@dataclass(frozen=True, kw_only=True)
class Sum(Workload):
    message_bytes: int = 1024
    dtype: str = "fp32"
    metrics = ("latency_us", "algbw_gb_per_s", "busbw_gb_per_s")
    def work(self, shape):
        return Work(collective="all_reduce", message_bytes=float(self.message_bytes), dtype=self.dtype)
    def build(self, rank):
        raise AssertionError("no rank builds it in these tests")

def step(rank, **parameters):
    return lambda: None
"""
"""What the test files of :func:`repository` begin with."""


def measurement(job: Job, times_s: Sequence[float] = (0.5, 0.25, 1.0), **changes: Any) -> Measurement:
    """What ranks would report; rank r is r percent slower than rank 0, and probes of peaks find PROBED."""
    if job.budget.smoke:
        times_s = times_s[:1]
    ranks = [rank_facts(rank, median_s=0.5 * (1 + rank / 100), min_s=0.25, max_s=1.0) for rank in range(job.world_size)]
    told = {
        "iterations": 7,
        "clock": CLOCK,
        "process": "fresh" if job.fresh else "reused",
        "smoke": job.budget.smoke,
        "records": PROBED if isinstance(job.workload, PeakProbe) else (),
    }
    return measurement_of(times_s, ranks, **{**told, **changes})


def measured_on(ranks: int, times_s: Sequence[float] = (0.5, 0.25, 1.0), **changes: Any) -> Measurement:
    """The same of any job on so many ranks."""
    job = Job(workload=FunctionWorkload(function=measured_on), world_size=ranks, budget=Budget())
    return measurement(job, times_s, **changes)


class ScriptedDriver:
    """Does what ``script`` says for every job and keeps the jobs."""

    capacity = None

    def __init__(self, script: Callable[[Job], Measurement] = measurement) -> None:
        self.script = script
        self.jobs: list[Job] = []
        self.started = self.closed = 0

    def start(self) -> None:
        self.started += 1

    def run(self, job: Job) -> Measurement:
        self.jobs.append(job)
        return self.script(job)

    def environment(self) -> dict[str, Any]:
        return {"torch": "scripted"}

    def log_tails(self) -> dict[int, str]:
        return {0: "log line of rank 0", 1: "log line of rank 1"}

    def close(self) -> None:
        self.closed += 1

    def timed(self) -> list[Job]:
        """The jobs of cases, without those that measure peaks."""
        return [job for job in self.jobs if not type(job.workload).__module__.startswith("perfsuite")]


class Launched:
    """A launch by torchrun with so many ranks, as the plugin sees its transport; itself a plugin that starts it."""

    name = "torchrun"

    def __init__(self, capacity: int, *, loss: str = "") -> None:
        self.capacity = capacity
        self._loss = loss

    def pytest_configure(self, config: pytest.Config) -> None:
        """The run is one of this launch."""
        config.stash[launch.transport_key] = self

    def agents_here(self) -> frozenset[int]:
        """None: the ranks are scripted."""
        return frozenset()

    def await_loss(self, timeout_s: float) -> str:
        """What became of the agents."""
        return self._loss


def ids(found: pytest.RunResult) -> list[str]:
    """The names of cases that a run printed a line for, each after its file."""
    return [line.partition("::")[2] for line in found.outlines if "::" in line]


def junit(file: Path | str) -> dict[str, ElementTree.Element]:
    """The cases of a JUnit file by their names."""
    return {case.get("name", ""): case for case in ElementTree.parse(file).iter("testcase")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repository:
    """Somebody's repository whose cases a scripted driver runs, inside this process."""

    pytester: pytest.Pytester
    driver: ScriptedDriver

    def run(self, *arguments: str) -> pytest.RunResult:
        """pytest in it; a table of at most 120 columns, no colours, no cache."""
        return self.pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)

    def refuses(self, *arguments: str, says: str) -> None:
        """The run ends with one line of error before anything is measured."""
        before = len(self.driver.jobs)
        found = self.run(*arguments)
        assert found.ret == pytest.ExitCode.USAGE_ERROR
        assert len([line for line in found.errlines if line]) == 1
        found.stderr.fnmatch_lines([f"ERROR: {says}"])
        assert len(self.driver.jobs) == before


def repository(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    tests: str,
    script: Callable[[Job], Measurement] = measurement,
    conftest: str = "",
) -> Repository:
    """A repository with a conftest.py that loads the plugin and a ``test_it.py`` of WORKLOADS and ``tests``.

    The terminal shows all tables unless an option says otherwise.  Every run is one after another boot: a session of
    the machine of its own.
    """
    driver = ScriptedDriver(script)
    boots = itertools.count()
    monkeypatch.setattr(gating, "boot_of", lambda host: f"boot{next(boots)}")
    monkeypatch.setattr(Suite, "_open_driver", lambda suite: driver)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("GITHUB_ACTIONS", "CI"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(f'import pytest\npytest_plugins = ["perfsuite.plugin"]\n{conftest}')
    pytester.makeini(
        "[pytest]\naddopts = --import-mode=importlib --strict-markers -p no:hypothesispytest\nperf_show = tables\n"
    )
    pytester.makepyfile(test_it=WORKLOADS + tests)
    return Repository(pytester=pytester, driver=driver)
