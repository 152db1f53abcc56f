"""The machine that benchmarks/device_session.py validates, and what its steps share."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.device_session import ROOT, Outcome
from perfsuite.base.errors import RanksFailed
from perfsuite.platforms import Machine, detect_machine, fingerprint, load_catalog
from perfsuite.record.result import Result
from perfsuite.record.workload import Budget, FunctionWorkload, Workload
from perfsuite.run.session import Case, PerfSession
from perfsuite.runtime.driver import Driver
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workloads.matmul import Matmul

_BUDGET = Budget(min_rounds=10, max_time_s=0.5, timeout_s=100.0)
_SMALL_BUDGET = Budget(min_rounds=3, max_rounds=3, max_time_s=0.001, warmup_time_s=0.001, timeout_s=100.0)
"""Virtual seconds cost real ones: a kernel of microseconds takes the host milliseconds."""


@dataclass(kw_only=True)
class Bench:
    """The machine and a session on it."""

    machine: Machine
    session: PerfSession
    state: Path
    arguments: tuple[str, ...]
    """For pytest: platform and backend."""

    @property
    def small(self) -> bool:
        """A simulated device or a CPU: sizes that a test can run."""
        return self.machine.family.simulated or self.machine.family.shareable

    def run(self, workload: Workload, ranks: int = 1, **changes: Any) -> Result:
        """One case."""
        budget = dataclasses.replace(_SMALL_BUDGET if self.small else _BUDGET, **changes)
        name = f"{workload}[{ranks}]"
        return self.session.run(
            Case(id=name, workload=workload, world_size=ranks, budget=budget, platform=self.machine.name)
        )


@contextmanager
def opened(platform: str | None, backend: str | None, state: Path) -> Iterator[Bench]:
    """A session on the accelerator found, or on ``platform``."""
    machine = detect_machine(load_catalog(), platform)
    machine.family.require_backend(backend)
    with tempfile.TemporaryDirectory() as logs:
        transport = LocalTransport(
            start_method=machine.family.start_method,
            preload=("torch", "torch.distributed", "perfsuite.runtime.ranks.worker"),
            log_directory=Path(logs),
        )
        driver = Driver(
            transport=transport,
            family=machine.family,
            rootpath=ROOT,
            device_count=1,
            backend=backend,
        )
        session = PerfSession(
            id="device-session",
            machine=machine,
            fingerprint=fingerprint(machine).key,
            open_driver=lambda: driver,
            read_environment=lambda worker: {"worker": dict(worker)},
        )
        given = {"--perf-platform": platform, "--perf-backend": backend}
        arguments = tuple(f"{name}={value}" for name, value in given.items() if value)
        try:
            yield Bench(machine=machine, session=session, state=state, arguments=arguments)
        finally:
            session.close()


def record(result: Result, name: str) -> float:
    """A number that the ranks recorded."""
    assert result.measurement is not None
    return next(each.value for each in result.measurement.records if each.name == name)


def told(result: Result, name: str) -> str:
    """A metric with its unit and its share of the peak."""
    metric = result.metric(name)
    if metric.value is None:
        return f"{name} unknown ({metric.note})"
    share = metric.share_of_peak
    beside = f" ({share:.1%} of the peak)" if share is not None else f" ({metric.note})" if metric.note else ""
    return f"{metric.value:.4g} {metric.unit}{beside}"


def impossible(result: Result) -> bool:
    """Whether a figure is above a published peak."""
    return any(
        (metric.share_of_peak or 0) > 1 and metric.peak.kind == "published" for metric in result.metrics if metric.peak
    )


def figures(bench: Bench, cases: list[tuple[Workload, str]]) -> Outcome:
    """One metric of each case; fails where one is above its peak."""
    lines, passed = [], True
    for workload, name in cases:
        result = bench.run(workload)
        passed &= not impossible(result)
        lines.append(f"{workload}: {told(result, name)}")
    return Outcome(passed=passed, lines=tuple(lines))


def outlived(bench: Bench, function: Callable[..., object], names: str) -> Outcome:
    """Whether a case of ``function`` fails in words that have ``names``, and the next one runs."""
    try:
        bench.run(FunctionWorkload(function=function), smoke=True)
        return Outcome(passed=False, lines=("the case did not fail",))
    except RanksFailed as error:
        said = str(error).splitlines()[0]
    after = bench.run(Matmul(m=256, k=256, n=256), smoke=True)
    lines = (f"told as: {said}", f"a product afterwards: {after.outcome}")
    return Outcome(passed=names in said and after.outcome == "smoke", lines=lines)
