"""torch's FSDP2 (fully_shard): parameters, gradients and optimizer state are spread; blocks are gathered when used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import DTYPES, Rank
from perfsuite.strategies.base import Strategy, require_hsdp
from perfsuite.strategies.data_traffic import fsdp_traffic
from perfsuite.strategies.plan import Plan
from perfsuite.strategies.traffic import Call

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

_AVERAGES = (2, 13)
"""torch from which on FSDP2 is known to average over gloo; where it is told to sum instead, the result is the same."""


@dataclass(frozen=True, kw_only=True)
class Fsdp(Strategy):
    """Options of fully_shard.  On a mesh with dp_replicate and dp_shard it is HSDP: copies of what is spread."""

    reshard: bool = True
    """Gathered parameters are freed after a block's forward and gathered again for its backward (ZeRO-3); False keeps
    them (ZeRO-2)."""
    mixed_precision: bool = False
    """In bf16 and fp16: parameters are gathered in that dtype and gradients reduced in fp32; False: autocast."""
    offload: bool = False
    """Parameters, gradients and optimizer state live in host memory."""

    name: ClassVar[str] = "fsdp"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.fsdp",)

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter unless dp_replicate and dp_shard come together."""
        super().require(shape)
        require_hsdp(shape, self.name)

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter for mixed precision without a narrower dtype, or a norm of what is offloaded."""
        if self.mixed_precision and not plan.half:
            raise InvalidParameter(
                f"mixed_precision of strategy fsdp with dtype={plan.dtype!r} mixes nothing; choose bf16 or fp16"
            )
        if self.offload and plan.clip is not None:
            raise InvalidParameter(
                f"clip={plan.clip:g} needs the norm of gradients that offload of strategy fsdp keeps in host memory, "
                "where no collective reaches them; leave one of them out"
            )

    def narrows(self, plan: Plan) -> bool:
        """With mixed precision."""
        return self.mixed_precision

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Parameters gathered, gradients scattered."""
        return fsdp_traffic(plan, shape, reshard=self.reshard, mixed_precision=self.mixed_precision)

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any] | None:
        """Parameters are spread, and freed between forward and backward or not; offloading has no word."""
        return None if self.offload else {"sharding": "parameters" if self.reshard else "gradients"}

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Blocks get their values one at a time and are spread at once: no rank ever holds the whole model."""
        import torch

        from perfsuite.models.layers import materialize
        from perfsuite.strategies.trainer import Trainer, make_optimizer, new_module

        api, fully_shard = fsdp_api(rank), sharder(rank)
        spread: dict[str, Any] = {"mesh": rank.mesh}
        if self.mixed_precision:
            narrow = getattr(torch, DTYPES[plan.dtype])
            spread["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        if self.offload:
            spread["offload_policy"] = api.CPUOffloadPolicy(pin_memory=rank.device.type != "cpu")
        module = new_module(rank, plan)
        for number, block in module.blocks.named_children():
            materialize(block, rank.device, seed=plan.seed, prefix=f"blocks.{number}.")
            fully_shard(block, reshard_after_forward=self.reshard, **spread)
        materialize(module, rank.device, seed=plan.seed)
        fully_shard(module, **spread)
        return Trainer(
            rank,
            plan,
            module=module,
            optimizer=make_optimizer(module, plan),
            hold=reduce_in_last(module) if plan.accumulation > 1 else None,
            casts=not self.mixed_precision,
            replicates=False,
        )


def fsdp_api(rank: Rank) -> Any:
    """torch's FSDP2 from where this torch has it; UnsupportedCase where it cannot run on the rank's device."""
    import torch
    from torch.distributed import fsdp

    api: Any = fsdp
    if not hasattr(api, "fully_shard"):  # torch 2.5 has it in another place
        from torch.distributed._composable import fsdp as api
    if rank.device.type == "cpu" and not hasattr(api.FSDPModule, "set_force_sum_reduction_for_comms"):
        # 2.5.0 raises (no streams), 2.7.1 sums where it should average (pytorch issue 162338).
        raise UnsupportedCase(
            f"torch {torch.__version__} cannot run strategy fsdp on a cpu: it needs an accelerator's streams or "
            f"averages gradients wrongly over gloo; use a newer torch (2.13 is tested)"
        )
    return api


def sharder(rank: Rank) -> Callable[..., None]:
    """torch's fully_shard, such that gradients are averaged.

    Over gloo torch 2.8.0 sums where it should average (pytorch issue 162338): there it is told to sum, and divides.
    """
    import torch

    fully_shard: Callable[..., None] = fsdp_api(rank).fully_shard
    if rank.device.type != "cpu" or tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= _AVERAGES:
        return fully_shard

    def shard(part: Any, **options: Any) -> None:
        fully_shard(part, **options)
        part.set_force_sum_reduction_for_comms(True)

    return shard


def reduce_in_last(module: Any) -> Callable[[bool], AbstractContextManager[None]]:
    """Gradients are reduced in the last micro-batch of a step and only added up in the others."""

    @contextmanager
    def hold(last: bool) -> Iterator[None]:
        module.set_requires_gradient_sync(last)
        yield

    return hold
