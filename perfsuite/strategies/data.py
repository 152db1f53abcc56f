"""Data parallelism of a part of a model by FSDP2, together with other parallelisms.

Imported on ranks only.  Experts are spread over the ranks that hold the same experts, everything else also over ``ep``
and ``cp``, whose ranks train different tokens.
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
from perfsuite.strategies.plan import Plan
from perfsuite.strategies.traffic import SHARDED


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
        self._reshard = reshard
        if self.active:
            # Old torch cannot leave parameters out: then experts without a copy are spread over this rank alone.
            ignores = "ignored_params" in inspect.signature(fsdp_api(rank).fully_shard).parameters  # 2.5 does not
            self._spreads_experts = self._spreads_experts or not ignores
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
        """Spread the parameters outside layers; they stay gathered, as their backward follows their forward at once."""
        if self.active:
            self._spread(module, self._mesh, self._kept, False)


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


def _spreader(rank: Rank, plan: Plan, *, replicate: bool) -> Any:
    api, fully_shard = fsdp_api(rank), sharder(rank)
    options: dict[str, Any] = {}
    if plan.half:
        narrow = getattr(torch, DTYPES[plan.dtype])
        # Inputs have the right dtype already: angles of positions stay wide.
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
