"""torch's DistributedDataParallel, and ZeroRedundancyOptimizer, which also spreads the optimizer's state.

Every rank holds the whole model; gradients are averaged in buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.record.workload import Rank
from perfsuite.strategies.base import NARROW_TOLERANCE, Strategy, require_choice
from perfsuite.strategies.plan import Plan
from perfsuite.strategies.traffic import Call, ddp_traffic, zero_redundancy_traffic

if TYPE_CHECKING:
    import torch

    from perfsuite.strategies.trainer import Trainer

_ONE_BUCKET_MIB = 1 << 20  # Larger than any model: one bucket holds all gradients


@dataclass(frozen=True, kw_only=True)
class Ddp(Strategy):
    """Options of DistributedDataParallel."""

    bucket_mib: float = 25.0
    """Size of a gradient bucket in MiB."""
    overlap: bool = True
    """Send buckets during the backward; False: one bucket after it."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """dtype in which gradients are sent."""

    name: ClassVar[str] = "ddp"

    def __post_init__(self) -> None:
        require_choice("ddp", "compression", self.compression, ("none", "fp16", "bf16"))
        if not self.bucket_mib > 0:
            raise InvalidParameter(f"bucket_mib={self.bucket_mib!r} of strategy ddp is not valid; choose more than 0")

    def tolerance(self, plan: Plan) -> float:
        """Return the allowed error, which is larger for compressed gradients."""
        return super().tolerance(plan) if self.compression == "none" else NARROW_TOLERANCE

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Return the messages: every gradient once, in buckets."""
        tally = ddp_traffic(
            plan, shape, bucket_bytes=self.bucket_bytes, item_bytes=4 if self.compression == "none" else 2
        )
        return None if tally is None else tally.calls()

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any]:
        """Return overlap and dtype of the gradients; nothing is spread."""
        return {"overlap": self.overlap, "gradient_dtype": "fp32" if self.compression == "none" else self.compression}

    @property
    def bucket_bytes(self) -> float:
        """Size of a bucket in bytes."""
        return (self.bucket_mib if self.overlap else _ONE_BUCKET_MIB) * 2**20

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return a trainer of the wrapped model with AdamW."""
        from perfsuite.strategies.trainer import Trainer, make_optimizer, new_whole_module

        module = new_whole_module(rank, plan)
        unit = wrap(module, rank, self)
        optimizer = make_optimizer(module, plan)
        return Trainer(
            rank,
            plan,
            module=module,
            unit=unit,
            optimizer=optimizer,
            hold=hold(unit),
            sends_fp16=self.compression == "fp16",
        )


@dataclass(frozen=True, kw_only=True)
class ZeroRedundancy(Strategy):
    """Options of ZeroRedundancyOptimizer."""

    bucket_mib: float = 25.0
    """Size of a gradient bucket in MiB."""

    name: ClassVar[str] = "zero_redundancy"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.optim",)

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise InvalidParameter(
                f"bucket_mib={self.bucket_mib!r} of strategy zero_redundancy is not valid; choose more than 0"
            )

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Return the messages of DDP, and every parameter's new value."""
        tally = zero_redundancy_traffic(plan, shape, bucket_bytes=self.bucket_mib * 2**20)
        return None if tally is None else tally.calls()

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any]:
        """Return the sharding: the optimizer's state is spread."""
        return {"sharding": "optimizer"}

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return a trainer of the wrapped model; each rank's AdamW keeps its parameters' state and sends new values."""
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer

        from perfsuite.strategies.trainer import Trainer, new_whole_module

        module = new_whole_module(rank, plan)
        unit = wrap(module, rank, Ddp(bucket_mib=self.bucket_mib))
        optimizer: Any = ZeroRedundancyOptimizer(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            optimizer_class=torch.optim.AdamW,
            process_group=rank.group(),
            lr=plan.learning_rate,
        )
        return Trainer(rank, plan, module=module, unit=unit, optimizer=optimizer, hold=hold(unit))


def wrap(module: torch.nn.Module, rank: Rank, options: Ddp) -> Any:
    """Return DistributedDataParallel around ``module`` over all ranks."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    group = rank.group()
    wrapper = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=options.bucket_bytes / 2**20,
        gradient_as_bucket_view=True,
        static_graph=options.static_graph,
    )
    if dist.get_backend(group).rpartition(":")[2] == "fake":  # the reducer cannot wait for its calls
        _register(wrapper, None, _keep)
    elif options.compression != "none":
        _register(wrapper, group, _compressing(options.compression))
    return wrapper


def hold(wrapper: Any) -> Callable[[bool], AbstractContextManager[None]]:
    """Average gradients in the last micro-batch of a step, and only sum them in the others."""
    return lambda last: nullcontext() if last else wrapper.no_sync()


def _register(wrapper: Any, state: object, hook: Callable[[Any, Any], Any]) -> None:
    hook.__annotations__ = {}  # DDP compares annotations with classes; here they are text
    wrapper.register_comm_hook(state, hook)


def _keep(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    import torch

    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _compressing(dtype: str) -> Callable[[Any, Any], Any]:
    """Return a hook that sends a bucket in a narrower dtype.  It wraps torch's own hooks under another name: DDP
    refuses its bf16 hook by name on some backends that support bf16.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compress = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[dtype]

    def send_narrow(state: Any, bucket: Any) -> Any:
        return compress(state, bucket)

    return send_narrow
