"""One rank, no communication: what every other strategy is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Rank
from perfsuite.strategies.base import Strategy
from perfsuite.strategies.plan import Plan

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """Plain torch on one rank."""

    name: ClassVar[str] = "single"

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter for more than one rank."""
        if shape.world_size != 1:
            raise InvalidParameter(
                f"strategy single runs on 1 rank, the case has {shape.world_size}; choose ddp, fsdp or zero1 for more"
            )

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any]:
        """Nothing is spread."""
        return {}

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """The whole model and AdamW."""
        from perfsuite.strategies.trainer import Trainer, make_optimizer, new_whole_module

        module = new_whole_module(rank, plan)
        return Trainer(rank, plan, module=module, optimizer=make_optimizer(module, plan))
