"""Expert parallelism: each rank along ``ep`` holds some of the experts; rows are sent to their experts and back.

``ep`` is a data axis: its ranks train different samples and hold all parameters except experts.  Along ``tp`` the
experts' hidden features are split, and tokens as in sequence parallelism.  Torch is imported on ranks only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model
from perfsuite.models.moe import EXPERT_FEATURES, Moe
from perfsuite.record.workload import Rank

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from perfsuite.models.moe_module import Experts, MoeMlp


def require(model: Model, shape: MeshShape, *, sequence_parallel: bool = True, zigzag: bool = True) -> None:
    """Raise InvalidParameter unless the model's experts can be spread over a mesh of this shape.  ``zigzag``: along cp
    a rank holds two chunks of a sequence, one from its beginning and one from its end.
    """
    ep, tp = shape.size("ep"), shape.size("tp")
    if not isinstance(model, Moe):
        if ep > 1:
            raise InvalidParameter(
                f"mesh {shape} has ep={ep}, but model {model.name} has no experts; leave ep out, or choose a model "
                "with experts such as moe-tiny or mixtral-8x7b"
            )
        return
    if model.experts % ep:
        raise InvalidParameter(
            f"ep={ep} does not divide experts={model.experts} of model {model.name}; choose {_divisors(model.experts)}"
        )
    if tp > 1 and not sequence_parallel:
        raise InvalidParameter(
            f"tp={tp} without sequence parallelism would send every row of model {model.name} {tp} times; "
            "set sequence_parallel=True, or leave tp out"
        )
    if model.hidden % tp:
        raise InvalidParameter(
            f"tp={tp} does not divide hidden={model.hidden} of the experts of model {model.name}; "
            f"choose {_divisors(math.gcd(model.hidden, model.heads))}"
        )
    cp, tokens = shape.size("cp"), model.sequence_length
    if model.capacity_factor is None or cp * tp == 1:
        return
    held = math.gcd(tokens // (2 * cp if zigzag and cp > 1 else cp), tokens // (cp * tp))
    group = model.routing.group_tokens
    if held % group:  # tokens that share a capacity are on several ranks, so drops would differ
        raise InvalidParameter(
            f"group_tokens={group} of model {model.name} share a capacity, but mesh {shape} gives a rank {held} "
            f"neighbouring tokens; choose group_tokens={_divisors(held)}, or capacity_factor=None"
        )


def _divisors(number: int) -> str:
    *most, last = [str(count) for count in range(1, number + 1) if number % count == 0]
    return f"{', '.join(most)} or {last}" if most else last


# -- on the ranks ------------------------------------------------------------------------------------------------


def apply(module: nn.Module, rank: Rank, places: torch.Tensor | None = None) -> None:
    """Slice the experts of ``module`` over ep and tp and connect their rows, by :func:`keep_own` and :func:`connect`.
    ``places``: (S / cp,) positions of this rank's tokens in a sample that cp splits, before tp does; None: all.
    """
    keep_own(module, rank)
    connect(module, rank, places)


def keep_own(module: nn.Module, rank: Rank) -> None:
    """Keep this rank's part of every layer's experts; on the meta device no rank allocates the others."""
    from perfsuite.models.moe_module import moe_layers

    shape, at = rank.shape, rank.shape.coordinates(rank.rank)
    ep, tp = shape.size("ep"), shape.size("tp")
    if ep * tp > 1:
        for layer in moe_layers(module):
            layer.experts.keep(part=at.get("ep", 0), parts=ep, slice_=at.get("tp", 0), slices=tp)


def connect(module: nn.Module, rank: Rank, places: torch.Tensor | None = None) -> None:
    """Connect the dispatch of rows; every rank has its part of the experts and their values."""
    import torch

    from perfsuite.models.moe_module import SampleSplit, moe_layers
    from perfsuite.strategies.expert_dispatch import Dispatcher

    shape, at = rank.shape, rank.shape.coordinates(rank.rank)
    groups = {axis: rank.group(axis) for axis in ("ep", "cp", "tp") if shape.size(axis) > 1}
    for layer in moe_layers(module):
        _lay_out_over_tp(layer, rank)
        if groups.keys() & {"ep", "tp"}:
            even = layer.routing.capacity is not None
            layer.dispatch = Dispatcher(groups.get("ep"), groups.get("tp"), even=even)
        if groups.keys() & {"cp", "tp"}:
            length = layer.routing.sequence_length
            held = torch.arange(length) if places is None else places.cpu()
            layer.split = SampleSplit(
                places=held.chunk(shape.size("tp"))[at.get("tp", 0)],
                length=length,
                add_up=functools.partial(_add_up, [groups[axis] for axis in ("cp", "tp") if axis in groups]),
                averaged=shape.size("cp"),
            )


def expert_modules(module: nn.Module) -> Iterator[Experts]:
    """Yield the parts of ``module`` whose parameters differ along ep, so that ep does not sum their gradients."""
    from perfsuite.models.moe_module import moe_layers

    return (layer.experts for layer in moe_layers(module))


def record(rank: Rank, module: nn.Module) -> None:
    """Record the figures of routing in the latest forward of the rank's module; nothing without experts."""
    from perfsuite.models.moe_module import router_figures

    for name, value in router_figures(module).items():
        rank.record(name, value, reduce="max" if name == "expert_imbalance" else "mean")


def _lay_out_over_tp(layer: MoeMlp, rank: Rank) -> None:
    """Wrap the layer in DTensors: the router is replicated along tp and the experts' features are split."""
    if rank.shape.size("tp") == 1:
        return
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = rank.submesh("tp")  # torch 2.5 cannot slice a slice
    weight = layer.router.weight.detach()
    layer.router.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Replicate()], run_check=False))
    for name, dim in EXPERT_FEATURES.items():
        part = getattr(layer.experts, name).detach()
        setattr(layer.experts, name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)))


def _add_up(groups: Sequence[dist.ProcessGroup], values: torch.Tensor) -> None:
    import torch.distributed as dist

    for group in groups:
        dist.all_reduce(values, group=group)
