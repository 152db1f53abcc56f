"""Several workloads on one set of ranks: what DTensor and torch work out once in a process is shared by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Budget, CallableStep, Process, Purpose, Rank, Workload, as_step
from perfsuite.runtime.driver import Driver, Job

ONCE = Budget(smoke=True, timeout_s=300.0)


@dataclass(frozen=True, kw_only=True)
class Build:
    workload: Workload
    purpose: Purpose = "time"


@dataclass(frozen=True, kw_only=True)
class Several(Workload):
    """Runs and checks its parts one after the other, each built and closed as a case of its own is."""

    parts: Mapping[str, Build] = field(default_factory=dict)
    """By a name that begins the names of its records."""

    @property
    def process(self) -> Process | None:
        """Processes of their own where a part needs them."""
        return next((part.workload.process for part in self.parts.values() if part.workload.process), None)

    def work(self, shape: MeshShape) -> Work:
        return Work()

    def build(self, rank: Rank) -> CallableStep:
        def run() -> None:
            for name, part in self.parts.items():
                own = cast(Rank, _OwnRank(rank, name, part.purpose))
                step = as_step(part.workload.build(own), name)
                try:
                    step.run()
                    part.workload.check(own, step)
                finally:
                    step.close()

        return CallableStep(run)


class _OwnRank:
    """The rank as one part sees it."""

    def __init__(self, rank: Rank, name: str, purpose: Purpose) -> None:
        self._rank, self._name, self.purpose = rank, name, purpose

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)

    def record(self, name: str, value: Any, **how: Any) -> None:
        self._rank.record(f"{self._name}: {name}", value, **how)


def records_of(driver: Driver, mesh: str, parts: Mapping[str, Build]) -> dict[str, dict[str, float]]:
    """Value by name of record, by part."""
    shape = MeshShape.parse(mesh)
    job = Job(workload=Several(parts=dict(parts)), world_size=shape.world_size, shape=shape, budget=ONCE)
    told: dict[str, dict[str, float]] = {name: {} for name in parts}
    for record in driver.run(job).records:
        part, _, name = record.name.partition(": ")
        told[part][name] = record.value
    return told


def mesh_beside_cuda(rank):
    """Whether the group of a mesh of one axis is that of the case, on a host that has CUDA."""
    from unittest.mock import patch

    with patch.object(torch.cuda, "is_available", lambda: True):
        group = rank.mesh.get_group()
    same = float(group is dist.group.WORLD)
    return lambda: rank.record("same", same, reduce="max")
