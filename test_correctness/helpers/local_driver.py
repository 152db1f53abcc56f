"""Drivers of forked ranks on this host's CPU, as most tests of ranks need one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perfsuite.base.mesh import MeshShape
from perfsuite.platforms import families
from perfsuite.record.result import Measurement
from perfsuite.record.workload import Budget, FunctionWorkload, Workload
from perfsuite.runtime.driver import Driver, Job
from perfsuite.runtime.transports.local import LocalTransport
from perfsuite.workloads.training.parity import TrainParity

ROOT = Path(__file__).parents[2]
WORKER = "perfsuite.runtime.ranks.worker"
FSDP, COMPILER, PIPELINING = "torch.distributed.fsdp", "torch._dynamo", "torch.distributed.pipelining"
PRELOAD = ("torch", "torch.distributed", WORKER)
ONCE = Budget(smoke=True, timeout_s=300.0)
QUICK = Budget(min_rounds=3, max_time_s=0.05, warmup_time_s=0.02, timeout_s=60.0)


def driver_over(transport, family: str = "cpu") -> Driver:
    return Driver(transport=transport, family=families()[family], rootpath=ROOT, device_count=1)


@contextmanager
def local_driver(logs: Path, *preload: str, start_method: str = "fork", family: str = "cpu") -> Iterator[Driver]:
    """A driver whose ranks start after these imports; their logs go into ``logs``. It is closed at the end."""
    transport = LocalTransport(start_method=start_method, preload=preload or PRELOAD, log_directory=logs)
    driver = driver_over(transport, family)
    try:
        yield driver
    finally:
        driver.close()


def driver_fixture(*preload: str, cold: bool = False):
    """Return a fixture ``driver`` of a module: one driver for all of its tests, whose ranks import ``preload`` once.

    ``cold``: its forkservers are new interpreters.
    """

    @pytest.fixture(scope="module")
    def driver(request, tmp_path_factory):
        if cold:
            request.getfixturevalue("cold")
        with local_driver(tmp_path_factory.mktemp("logs"), *preload) as made:
            yield made

    return driver


def job(function, world_size=1, *, budget=QUICK, fresh=False, shape=None, **arguments) -> Job:
    """A case of a function with these arguments."""
    workload = FunctionWorkload(function=function, arguments=arguments)
    return Job(workload=workload, world_size=world_size, budget=budget, fresh=fresh, shape=shape)


def run(driver: Driver, workload: Workload, mesh: str | int, *, budget: Budget = ONCE, **how) -> Measurement:
    """Measure on a mesh, or on this number of ranks."""
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) else None
    ranks = shape.world_size if shape else int(mesh)
    return driver.run(Job(workload=workload, world_size=ranks, shape=shape, budget=budget, **how))


def records(measurement: Measurement) -> dict[str, float]:
    """Values by name."""
    return {record.name: record.value for record in measurement.records}


def parity_error(driver: Driver, mesh: str | int, *, kind: type[TrainParity] = TrainParity, **case) -> float:
    """Return the largest relative error of a training over ranks against one process."""
    return records(run(driver, kind(**case), mesh))["parity_error"]
