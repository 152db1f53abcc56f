"""What the ranks of the hybrid strategy's tests run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from perfsuite import models
from perfsuite.base.errors import WrongResult
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Rank, Step, Workload
from perfsuite.strategies import Plan
from perfsuite.workloads.training.parity import TrainParity
from perfsuite.workloads.training.train_step import TrainStep


@dataclass(frozen=True, kw_only=True)
class DrawnParity(TrainParity):
    """Parity of the very model that the test has drawn, not of a twin."""

    def plan(self, shape: MeshShape) -> Plan:
        plan = Plan(
            model=models.find(self.model, self.overrides),
            dtype=self.dtype,
            micro_batch_size=self.micro_batch_size,
            accumulation=self.accumulation,
            checkpointing=self.checkpointing,
            attention=self.attention,
            learning_rate=1e-3,
        )
        self.find_strategy().check_plan(plan, shape)
        return plan


@dataclass(frozen=True, kw_only=True)
class OlderParity(TrainParity):
    """Where torch's fully_shard takes no parameters to ignore, as that of 2.5."""

    def build(self, rank: Rank) -> Step:
        from torch.distributed import fsdp

        newer = fsdp.fully_shard

        def older(module: Any, *, mesh: Any, reshard_after_forward: Any = True, mp_policy: Any = None) -> Any:
            return newer(module, mesh=mesh, reshard_after_forward=reshard_after_forward)

        fsdp.fully_shard = older  # type: ignore[assignment]
        try:
            return super().build(rank)
        finally:
            fsdp.fully_shard = newer


@dataclass(frozen=True, kw_only=True)
class NeverRight(TrainParity):
    """A twin that fails its check."""

    def check(self, rank: Rank, step: Step) -> None:
        raise WrongResult("a twin that is never right", expected=1, got=0)


@dataclass(frozen=True, kw_only=True)
class Doubtful(TrainStep):
    """A training step whose twin fails."""

    def twin(self) -> Workload:
        return NeverRight(model=self.model, strategy=self.strategy)


def overflow_on_one_rank(rank: Rank) -> Any:
    """Rank 1's gradient is infinite in the first of two steps; both ranks must step in the second alone."""
    from perfsuite.strategies.hybrid_trainer import MeshScaler

    def run() -> None:
        parameter = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = MeshScaler(rank.device, rank.group(), init_scale=8.0)
        for step in range(2):
            parameter.grad = torch.full((4,), 2.0 * scaler.get_scale())
            if rank.rank == 1 and step == 0:
                parameter.grad[2] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            rank.record(f"parameter_after_{step}", float(parameter.sum()) / 4, reduce="equal")
        rank.record("scale", scaler.get_scale(), reduce="equal")

    return run
