"""torch's ZeroRedundancyOptimizer over DistributedDataParallel: the optimizer's state is spread, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Rank
from perfsuite.strategies import ddp
from perfsuite.strategies.base import Strategy
from perfsuite.strategies.data_traffic import zero_redundancy_traffic
from perfsuite.strategies.plan import Plan
from perfsuite.strategies.traffic import Call

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ZeroRedundancy(Strategy):
    """Options of ZeroRedundancyOptimizer."""

    bucket_mib: float = 25.0
    """Gradients that travel together, MiB."""

    name: ClassVar[str] = "zero_redundancy"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.optim",)

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise InvalidParameter(
                f"bucket_mib={self.bucket_mib!r} of strategy zero_redundancy is no size; choose more than 0"
            )

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """DDP's, and every parameter's new value."""
        tally = zero_redundancy_traffic(plan, shape, bucket_bytes=self.bucket_mib * 2**20)
        return None if tally is None else tally.calls()

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any]:
        """The optimizer's state is spread."""
        return {"sharding": "optimizer"}

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """The wrapped model; each rank's AdamW keeps the state of its own parameters and sends their new values."""
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

        from perfsuite.strategies.trainer import Trainer, new_whole_module

        module = new_whole_module(rank, plan)
        unit = ddp.wrap(module, rank, ddp.Ddp(bucket_mib=self.bucket_mib))
        optimizer: Any = ZeroRedundancyOptimizer(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            optimizer_class=torch.optim.AdamW,
            process_group=rank.group(),
            lr=plan.learning_rate,
        )
        return Trainer(rank, plan, module=module, unit=unit, optimizer=optimizer, hold=ddp.hold(unit))
