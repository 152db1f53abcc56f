"""Data parallelism of a part of a model beside other parallelisms, by FSDP2: its values spread, or a copy on each rank.

Imported on ranks only.  Experts are spread over the ranks that have the same ones, everything else also over ``ep`` and
``cp``: every one of those ranks has seen other tokens.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from perfsuite.base.errors import UnsupportedCase
from perfsuite.record.workload import DTYPES, Rank
from perfsuite.strategies.fsdp import fsdp_api, sharder
from perfsuite.strategies.hybrid_sizes import SHARDED
from perfsuite.strategies.plan import Plan


class DataParallel:
    """What spreads the parts of one module, a layer at a time."""

    def __init__(self, rank: Rank, plan: Plan, *, replicate: bool, reshard: bool) -> None:
        """``replicate``: a copy on each rank; ``reshard``: gathered values are freed after a layer's forward.

        In bf16 and fp16 it works also where there is nobody to share with: FSDP2 keeps the wide copy that the optimizer
        steps, and everything that is computed and sent is narrow.
        """
        shape = rank.shape
        shared, own = (*SHARDED, "ep", "cp"), (*SHARDED, "cp")
        self.active, self._spreads_experts = (
            plan.half or any(shape.size(axis) > 1 for axis in ("dp_replicate", *axes)) for axes in (shared, own)
        )
        self._kept: set[nn.Parameter] = set()
        self._reshard = reshard
        if self.active:
            # Experts that no other rank has, where torch cannot leave parameters out: spread over this rank alone.
            self._spreads_experts = self._spreads_experts or not leaves_out_parameters(rank)
            self._spread = _spreader(rank, plan, replicate=replicate)
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
        """Spread what the module has beside its layers: its backward comes right after its forward, so it stays."""
        if self.active:
            self._spread(module, self._mesh, self._kept, False)


def leaves_out_parameters(rank: Rank) -> bool:
    """Whether torch's fully_shard takes parameters to ignore; that of 2.5 does not."""
    return "ignored_params" in inspect.signature(fsdp_api(rank).fully_shard).parameters


def _mesh(rank: Rank, axes: tuple[str, ...], *, replicate: bool) -> DeviceMesh:
    """One dimension over ``axes``; a second one before it where dp_replicate keeps copies of what is spread."""
    if replicate or rank.shape.size("dp_replicate") == 1:
        return rank.submesh("dp_replicate", *axes)
    names = rank.submesh(*axes).mesh_dim_names
    assert names is not None
    root: Any = rank.mesh
    with warnings.catch_warnings():
        # torch 2.11 and newer warn of slices with a flattened dimension; FSDP2 takes nothing but slices of one mesh.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        sliced: DeviceMesh = root["dp_replicate", names[0]]
    return sliced


def _spreader(rank: Rank, plan: Plan, *, replicate: bool) -> Any:
    api, fully_shard = fsdp_api(rank), sharder(rank)
    options: dict[str, Any] = {}
    if plan.half:
        narrow = getattr(torch, DTYPES[plan.dtype])
        # Inputs are as narrow as they are meant to be: angles of positions stay wide.
        options["mp_policy"] = api.MixedPrecisionPolicy(
            param_dtype=narrow, reduce_dtype=narrow, cast_forward_inputs=False
        )
    copies = _replicate() if replicate else None

    def spread(part: nn.Module, mesh: DeviceMesh, kept: set[nn.Parameter], reshard: bool) -> None:
        ignored = kept & set(part.parameters())
        extra = {**options, **({"ignored_params": ignored} if ignored else {})}
        if copies is not None:
            copies(part, mesh=mesh, **extra)
        else:
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard, **extra)

    return spread


def _replicate() -> Any:
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:
        raise UnsupportedCase(
            f"data='replicate' needs torch's replicate_with_fsdp, which torch {torch.__version__} lacks; use a newer "
            "torch (2.13 is tested) or data='shard'"
        ) from None
    return replicate
