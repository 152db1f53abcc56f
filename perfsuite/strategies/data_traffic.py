"""What data parallelism sends in a step, without torch: DDP, ZeRO's optimizer, FSDP2."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfsuite.base.mesh import MeshShape
from perfsuite.strategies.parameter_shapes import ParameterShapes, find_shapes
from perfsuite.strategies.plan import Plan
from perfsuite.strategies.traffic import DATA, Call, Tally, buckets, padded_bytes

_FP32 = 4
_HALF = 2


def ddp_traffic(plan: Plan, shape: MeshShape, *, bucket_bytes: float, item_bytes: int = _FP32) -> Tally | None:
    """All gradients once, in buckets; None for models whose shapes nobody tells.

    Gradients are ready in the reverse order of the forward; bucket limits count the parameters' own bytes.

    >>> from perfsuite.models import find
    >>> plan = Plan(model=find("gpt2", {}), dtype="fp32", micro_batch_size=1)
    >>> ddp_traffic(plan, MeshShape.of(dp=2), bucket_bytes=25 << 20).calls()[0].message_bytes == 4 * 124439808
    True
    """
    shapes = find_shapes(plan.model)
    if shapes is None:
        return None
    tally = Tally()
    sizes = [math.prod(parameter) for parameter in reversed(_all(shapes, plan.model.layers))]
    calls = buckets([_FP32 * size for size in sizes], bucket_bytes)
    tally.add(_joined(shape), "all_reduce", DATA, 1, item_bytes * sum(sizes))
    tally.add(_joined(shape), "all_reduce", DATA, calls - 1, 0)
    return tally


def zero_redundancy_traffic(plan: Plan, shape: MeshShape, *, bucket_bytes: float) -> Tally | None:
    """DDP's, and every parameter's new value from the rank that has its state."""
    tally, shapes = ddp_traffic(plan, shape, bucket_bytes=bucket_bytes), find_shapes(plan.model)
    if tally is not None and shapes is not None:
        for parameter in _all(shapes, plan.model.layers):
            tally.add(_joined(shape), "broadcast", DATA, 1, _FP32 * math.prod(parameter))
    return tally


def fsdp_traffic(plan: Plan, shape: MeshShape, *, reshard: bool, mixed_precision: bool) -> tuple[Call, ...] | None:
    """Each unit gathered for its use and its gradients scattered once; with copies, the parts are summed over them.

    Blocks are gathered for the forward and, where freed after it, for the backward; the rest of the model once.  Every
    micro-batch gathers, the last one reduces.  ``mixed_precision`` gathers in 16 bits and reduces in fp32.

    >>> from perfsuite.models import find
    >>> plan = Plan(model=find("llama2-tiny", {}), dtype="fp32", micro_batch_size=1)
    >>> calls = fsdp_traffic(plan, MeshShape.of(dp=2), reshard=True, mixed_precision=False)
    >>> [(call.collective, call.calls, call.message_bytes) for call in calls]
    [('all_gather', 5, 3428864), ('reduce_scatter', 3, 1976832)]
    """
    shapes = find_shapes(plan.model)
    if shapes is None:
        return None
    tally, times = Tally(), plan.accumulation
    shard, replicate = ("dp_shard", "dp_replicate") if "dp_shard" in shape.names else ("dp", "")
    ranks = shape.size(shard)
    gathered = _HALF if mixed_precision else _FP32
    root = list(shapes.root(first=True, last=True).values())
    units = [(list(shapes.layer.values()), 2 if reshard else 1)] * plan.model.layers + [(root, 1)]
    for unit, gathers in units:
        tally.add(_axis(shape, shard), "all_gather", DATA, times * gathers, padded_bytes(unit, ranks, gathered))
        tally.add(_axis(shape, shard), "reduce_scatter", DATA, 1, padded_bytes(unit, ranks, _FP32))
        tally.add(_axis(shape, replicate), "all_reduce", DATA, 1, padded_bytes(unit, ranks, _FP32) // ranks)
    return tally.calls()


def _all(shapes: ParameterShapes, layers: int) -> Sequence[tuple[int, ...]]:
    """Every parameter of the model once, in the order of a forward."""
    last = {name: parameter for name, parameter in shapes.last.items() if name != shapes.tied}
    return [*shapes.first.values(), *list(shapes.layer.values()) * layers, *last.values()]


def _axis(shape: MeshShape, name: str) -> str:
    return name if name and shape.size(name) > 1 else ""


def _joined(shape: MeshShape) -> str:
    return "-".join(name for name, size in shape.axes if size > 1)
