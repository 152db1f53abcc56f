"""torch's data parallelism: DistributedDataParallel, ZeroRedundancyOptimizer, and FSDP2 (fully_shard).

DistributedDataParallel keeps the whole model on every rank and averages gradients in buckets;
ZeroRedundancyOptimizer also spreads the optimizer's state.  FSDP2 spreads parameters, gradients and optimizer state,
and gathers a block for its use.  Together with other parallelisms FSDP2 spreads a part of a model.  Experts are spread
over the ranks that hold the same experts, everything else also over ``ep`` and ``cp``, whose ranks train different
tokens.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Plan
from perfsuite.record.workload import DTYPES, Rank
from perfsuite.strategies.base import NARROW_TOLERANCE, Strategy, require_choice, require_hsdp
from perfsuite.strategies.traffic import SHARDED, Call, ddp_traffic, fsdp_traffic

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from perfsuite.strategies.trainer import Trainer


_ONE_BUCKET_MIB = 1 << 20  # Larger than any model: one bucket holds all gradients


@dataclass(frozen=True, kw_only=True)
class Ddp(Strategy):
    """Options of DistributedDataParallel."""

    bucket_mib: float = 25.0  # Size of a gradient bucket in MiB.
    overlap: bool = True  # Send buckets during the backward; False: one bucket after it.
    static_graph: bool = False  # Promise that every step uses the same parameters in the same order.
    compression: Literal["none", "fp16", "bf16"] = "none"  # dtype in which gradients are sent.

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
        item_bytes = 4 if self.compression == "none" else 2
        return ddp_traffic(plan, shape, bucket_bytes=self.bucket_bytes, item_bytes=item_bytes)

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
        unit, optimizer, narrow = wrap(module, rank, self), make_optimizer(module, plan), self.compression == "fp16"
        return Trainer(rank, plan, module=module, unit=unit, optimizer=optimizer, hold=hold(unit), sends_fp16=narrow)


@dataclass(frozen=True, kw_only=True)
class ZeroRedundancy(Strategy):
    """Options of ZeroRedundancyOptimizer."""

    bucket_mib: float = 25.0  # Size of a gradient bucket in MiB.

    name: ClassVar[str] = "zero_redundancy"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.optim",)

    def __post_init__(self) -> None:
        if not self.bucket_mib > 0:
            raise InvalidParameter(
                f"bucket_mib={self.bucket_mib!r} of strategy zero_redundancy is not valid; choose more than 0"
            )

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Return the messages of DDP, and every parameter's new value."""
        return ddp_traffic(plan, shape, bucket_bytes=self.bucket_mib * 2**20, sends_values=True)

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
    """Return a hook that sends narrow buckets; DDP refuses torch's own bf16 hook by name on some backends."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compress = getattr(default_hooks, f"{dtype}_compress_hook")

    def send_narrow(state: Any, bucket: Any) -> Any:
        return compress(state, bucket)

    return send_narrow


_AVERAGES = (2, 13)
"""First torch in which FSDP2 is tested to average over gloo; older ones sum instead, with the same result."""


@dataclass(frozen=True, kw_only=True)
class Fsdp(Strategy):
    """Options of fully_shard.  On a mesh with dp_replicate and dp_shard it is HSDP: copies of the spread parameters."""

    reshard: bool = True
    """Free gathered parameters after a block's forward and gather them again for its backward (ZeRO-3); False keeps
    them (ZeRO-2)."""
    mixed_precision: bool = False
    """In bf16 and fp16: gather parameters in that dtype and reduce gradients in fp32; False: autocast."""
    offload: bool = False  # Keep parameters, gradients and optimizer state in host memory.

    name: ClassVar[str] = "fsdp"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.fsdp",)

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter unless dp_replicate and dp_shard come together."""
        super().require(shape)
        require_hsdp(shape, self.name)

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter for mixed precision without a narrow dtype, and for clipping with offload."""
        if self.mixed_precision and not plan.half:
            raise InvalidParameter(
                f"mixed_precision of strategy fsdp has no effect with dtype={plan.dtype!r}; choose bf16 or fp16"
            )
        if self.offload and plan.clip is not None:
            raise InvalidParameter(
                f"clip={plan.clip:g} does not work with offload of strategy fsdp: collectives cannot sum the norm of "
                "gradients in host memory; leave one of them out"
            )

    def narrows(self, plan: Plan) -> bool:
        """Return whether mixed precision is on."""
        return self.mixed_precision

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Return the messages: parameters gathered, gradients scattered."""
        return fsdp_traffic(plan, shape, reshard=self.reshard, mixed_precision=self.mixed_precision)

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any] | None:
        """Return the sharding; None with offload, which the record cannot express."""
        return None if self.offload else {"sharding": "parameters" if self.reshard else "gradients"}

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return a trainer; blocks get values and are spread one by one, so that no rank holds the whole model."""
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
    """Return torch's FSDP2 module; raises UnsupportedCase if it cannot run on the rank's device."""
    import torch
    from torch.distributed import fsdp

    api: Any = fsdp
    if not hasattr(api, "fully_shard"):  # torch 2.5 has it here
        from torch.distributed._composable import fsdp as api
    if rank.device.type == "cpu" and not hasattr(api.FSDPModule, "set_force_sum_reduction_for_comms"):
        # 2.5.0 raises (no streams), 2.7.1 sums instead of averaging (pytorch issue 162338).
        raise UnsupportedCase(
            f"torch {torch.__version__} cannot run strategy fsdp on a cpu: it needs an accelerator's streams, or its "
            f"averages of gradients over gloo are wrong; use a newer torch (2.13 is tested)"
        )
    return api


def sharder(rank: Rank) -> Callable[..., None]:
    """Return torch's fully_shard with averaged gradients; over gloo torch 2.8.0 sums (pytorch issue 162338)."""
    import torch

    fully_shard: Callable[..., None] = fsdp_api(rank).fully_shard
    if rank.device.type != "cpu" or tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= _AVERAGES:
        return fully_shard

    def shard(part: Any, **options: Any) -> None:
        fully_shard(part, **options)
        part.set_force_sum_reduction_for_comms(True)

    return shard


def reduce_in_last(module: Any) -> Callable[[bool], AbstractContextManager[None]]:
    """Reduce gradients in the last micro-batch of a step, and only sum them in the others."""

    @contextmanager
    def hold(last: bool) -> Iterator[None]:
        module.set_requires_gradient_sync(last)
        yield

    return hold


class DataParallel:
    """Spreads the layers of one module."""

    def __init__(self, rank: Rank, plan: Plan, *, replicate: bool, reshard: bool) -> None:
        """``replicate``: keep a copy on each rank; ``reshard``: free gathered values after a layer's forward.  In bf16
        and fp16 FSDP2 is used even on one rank: it keeps a wide copy for the optimizer and computes in the narrow
        dtype.
        """
        shape = rank.shape
        shared, own = (*SHARDED, "ep", "cp"), (*SHARDED, "cp")
        self.active, self._spreads_experts = (
            plan.half or any(shape.size(axis) > 1 for axis in ("dp_replicate", *axes)) for axes in (shared, own)
        )
        self._kept: set[nn.Parameter] = set()
        self._reshard, self._replicate = reshard, replicate
        if self.active:
            api = fsdp_api(rank)
            # Old torch cannot leave parameters out: then experts without a copy are spread over this rank alone.
            ignores = "ignored_params" in inspect.signature(api.fully_shard).parameters  # 2.5 does not
            self._spreads_experts = self._spreads_experts or not ignores
            self._shard: Any = _replicate() if replicate else sharder(rank)
            self._options: dict[str, Any] = {}
            if plan.half:
                dtype = rank.dtype(plan.dtype)
                # Inputs have the right dtype already: angles of positions stay wide.
                self._options["mp_policy"] = api.MixedPrecisionPolicy(
                    param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False
                )
            self._mesh = _mesh(rank, shared, replicate=replicate)
            self._own_mesh = _mesh(rank, own, replicate=replicate)

    def spread(self, layer: nn.Module, experts: Iterable[nn.Module] = ()) -> None:
        """Spread a layer with its experts."""
        if not self.active:
            return
        for owned in experts:
            if self._spreads_experts:
                self._spread(owned, self._own_mesh, set(), self._reshard)
            else:
                self._kept.update(owned.parameters())
        self._spread(layer, self._mesh, self._kept, self._reshard)

    def spread_rest(self, module: nn.Module) -> None:
        """Spread the parameters outside layers; they stay gathered, as their backward follows their forward at once."""
        if self.active:
            self._spread(module, self._mesh, self._kept, False)

    def _spread(self, part: nn.Module, mesh: DeviceMesh, kept: set[nn.Parameter], reshard: bool) -> None:
        options = {**self._options, "mesh": mesh}
        if ignored := kept & set(part.parameters()):
            options["ignored_params"] = ignored
        if not self._replicate:
            options["reshard_after_forward"] = reshard
        self._shard(part, **options)


def _mesh(rank: Rank, axes: tuple[str, ...], *, replicate: bool) -> DeviceMesh:
    """Return a mesh of one dimension over ``axes``; if dp_replicate keeps copies, it is a second dimension before."""
    if replicate or rank.shape.size("dp_replicate") == 1:
        return rank.submesh("dp_replicate", *axes)
    names = rank.submesh(*axes).mesh_dim_names
    assert names is not None
    root: Any = rank.mesh
    with warnings.catch_warnings():
        # torch 2.11 and newer warn of slices with a flattened dimension, but FSDP2 needs slices of one mesh.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        sliced: DeviceMesh = root["dp_replicate", names[0]]
    return sliced


def _replicate() -> Any:
    import torch

    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:
        raise UnsupportedCase(
            f"data='replicate' needs torch's replicate_with_fsdp, which torch {torch.__version__} lacks; use a newer "
            "torch (2.13 is tested) or data='shard'"
        ) from None
    return replicate
