"""Closed forms of the messages that a strategy posts in one step, without torch; counted steps are compared with them.

A closed form is a tuple of :class:`Call`, one for each axis, collective and part; perfsuite docs model-parallel derives
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model, Plan
from perfsuite.models.language import Gpt, Llama

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

ATTENTION = "attention"  # Part of a step: attention of all blocks, forward and backward
MLP = "mlp"  # Part of a step: the MLPs or experts of all blocks with their dispatch
DATA = "data"  # Part of a step: parameters gathered, and gradients summed over ranks with different samples
PIPELINE = "pipeline"  # Part of a step: messages between stages, and waiting for them
OTHER = "other"  # Part of a step: norms, embeddings, the loss, the optimizer
PARTS = (ATTENTION, MLP, DATA, PIPELINE, OTHER)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Calls of one collective along one axis for one part of the step."""

    axis: str  # Axis of the mesh, or several joined by dashes in the mesh's order: ``tp``, ``dp-ep-cp``
    collective: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send or receive
    part: str  # One of PARTS
    calls: int
    message_bytes: int  # Size S of all calls together, as nccl-tests counts it
    uneven: bool = False  # The bytes are this rank's mean share; only their sum over all ranks is exact


class Tally:
    """Sums of calls by axis, collective and part; an axis of one rank adds nothing.

    >>> tally = Tally()
    >>> tally.add("tp", "all_gather", "attention", 2, 512)
    >>> tally.add("tp", "all_gather", "attention", 1, 256)
    >>> tally.add("", "all_gather", "attention", 1, 256)
    >>> [(call.calls, call.message_bytes) for call in tally.calls()]
    [(3, 1280)]
    """

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str, str]] = Counter()
        self._uneven: set[tuple[str, str, str]] = set()

    def add(
        self, axis: str, collective: str, part: str, calls: int, message_bytes: int, *, uneven: bool = False
    ) -> None:
        """Add ``calls`` of ``message_bytes`` each."""
        if axis and calls:
            key = (axis, collective, part)
            self._calls[key] += calls
            self._bytes[key] += calls * message_bytes
            if uneven:
                self._uneven.add(key)

    def calls(self) -> tuple[Call, ...]:
        """Return the sums in the order of their first call."""
        return tuple(
            Call(axis=axis, collective=name, part=part, calls=count, message_bytes=size, uneven=key in self._uneven)
            for key, count in self._calls.items()
            for (axis, name, part), size in [(key, self._bytes[key])]
        )


def padded_bytes(shapes: Sequence[tuple[int, ...]], ranks: int, item_bytes: int) -> int:
    """Return the bytes of parameters of these shapes, their first dimensions padded to a multiple of ``ranks``.

    FSDP2 gathers and reduces parameters in this form.

    >>> padded_bytes([(5, 3), (8,)], 4, 4)
    128
    """
    return item_bytes * sum(-(-first // ranks) * ranks * math.prod(rest) for first, *rest in shapes)


def buckets(sizes: Sequence[int], limit_bytes: float) -> int:
    """Return the number of DDP's messages for gradients of these bytes, in the order in which they are ready.

    The gradient that reaches the limit closes a bucket.

    >>> buckets([4, 4, 4], 8), buckets([4, 4, 4], 100), buckets([4, 4, 4], 1)
    (2, 1, 3)
    """
    count, filled = 0, 0
    for size in sizes:
        count += filled == 0
        filled += size
        if filled >= limit_bytes:
            filled = 0
    return count


# -- shapes of the parameters of language models, in the order of a forward ----------------------------------------

Shapes = Mapping[str, tuple[int, ...]]  # Shape by name


@dataclass(frozen=True, kw_only=True)
class ParameterShapes:
    """Shapes of a model by stage; matrices are (out, in), as in torch."""

    first: Shapes  # Embeddings, on the stage of the first layer
    block: Shapes
    last: Shapes
    """Last norm and output projection, on the stage of the last layer; a tied embedding is in ``first`` too."""
    experts: Shapes = field(default_factory=dict)  # Experts of every layer, (E, in, out); ``block`` has their router
    tied: str = ""  # Name of the parameter that ``first`` and ``last`` both have

    @property
    def layer(self) -> Shapes:
        """All parameters of a layer."""
        return {**self.block, **self.experts}

    def root(self, *, first: bool, last: bool) -> Shapes:
        """Return the parameters of a stage outside its layers, a tied parameter once."""
        return {**(self.first if first else {}), **(self.last if last else {})}


def find_shapes(model: Model) -> ParameterShapes | None:
    """Return the shapes of ``model``; None if it is neither a GPT nor a LLaMA.

    >>> from perfsuite.models import find
    >>> find_shapes(find("gpt2", {})).block["attention.qkv.weight"]
    (2304, 768)
    """
    if isinstance(model, Gpt):
        return _gpt(model)
    return _llama(model) if isinstance(model, Llama) else None


def _gpt(model: Gpt) -> ParameterShapes:
    width = model.width

    def linear(name: str, out: int, into: int) -> Shapes:
        return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    tokens = {"tokens.weight": (model.vocabulary, width)}
    return ParameterShapes(
        first={**tokens, "positions.weight": (model.context, width)},
        block={
            **norm("norm1"),
            **linear("attention.qkv", 3 * width, width),
            **linear("attention.project", width, width),
            **norm("norm2"),
            **linear("mlp.expand", 4 * width, width),
            **linear("mlp.contract", width, 4 * width),
        },
        last={**tokens, **norm("norm")},
        tied="tokens.weight",
    )


def _llama(model: Llama) -> ParameterShapes:
    """Return the shapes of a LLaMA; experts replace the MLP, with matrices (in, out)."""
    width, keys, hidden, experts = model.width, model.key_width, model.hidden, model.experts
    mlp = {"gate": (hidden, width), "expand": (hidden, width), "contract": (width, hidden)}
    dense = {f"mlp.{name}.weight": shape for name, shape in mlp.items()}
    return ParameterShapes(
        first={"tokens.weight": (model.words, width)},
        block={
            "norm1.weight": (width,),
            "attention.query.weight": (width, width),
            "attention.key.weight": (keys, width),
            "attention.value.weight": (keys, width),
            "attention.project.weight": (width, width),
            "norm2.weight": (width,),
            **({"mlp.router.weight": (experts, width)} if experts else dense),
        },
        experts={f"mlp.experts.{name}": (experts, into, out) for name, (out, into) in mlp.items()} if experts else {},
        last={"norm.weight": (width,), "output.weight": (model.words, width)},
    )


# -- data parallelism: DDP, ZeRO's optimizer, FSDP2 ---------------------------------------------------------------

SHARDED = ("dp", "dp_shard")  # Axes of data parallelism along which parameters are spread; dp_replicate keeps copies
_FP32 = 4
_HALF = 2


def ddp_traffic(
    plan: Plan, shape: MeshShape, *, bucket_bytes: float, item_bytes: int = _FP32, sends_values: bool = False
) -> tuple[Call, ...] | None:
    """Return the calls of all gradients, sent once in buckets; None for models without known shapes.

    Gradients are ready in the reverse order of the forward; bucket limits count the parameters' own bytes.  With
    ``sends_values`` the rank that has a parameter's state sends its new value, too.

    >>> from perfsuite.models import find
    >>> plan = Plan(model=find("gpt2", {}), dtype="fp32", micro_batch_size=1)
    >>> ddp_traffic(plan, MeshShape.of(dp=2), bucket_bytes=25 << 20)[0].message_bytes == 4 * 124439808
    True
    """
    shapes = find_shapes(plan.model)
    if shapes is None:
        return None
    tally, axes = Tally(), joined(shape)
    last = [parameter for name, parameter in shapes.last.items() if name != shapes.tied]
    parameters = [*shapes.first.values(), *list(shapes.layer.values()) * plan.model.layers, *last]
    sizes = [math.prod(parameter) for parameter in reversed(parameters)]
    calls = buckets([_FP32 * size for size in sizes], bucket_bytes)
    tally.add(axes, "all_reduce", DATA, 1, item_bytes * sum(sizes))
    tally.add(axes, "all_reduce", DATA, calls - 1, 0)
    for size in sizes if sends_values else ():
        tally.add(axes, "broadcast", DATA, 1, _FP32 * size)
    return tally.calls()


def fsdp_traffic(plan: Plan, shape: MeshShape, *, reshard: bool, mixed_precision: bool) -> tuple[Call, ...] | None:
    """Return the calls of FSDP2: units are gathered for use, gradients are scattered once and summed over copies.

    Blocks are gathered for the forward and, if freed after it, for the backward; the rest of the model once.  Every
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
    gathered = _HALF if mixed_precision else _FP32
    root = list(shapes.root(first=True, last=True).values())
    units = [(list(shapes.layer.values()), 2 if reshard else 1)] * plan.model.layers + [(root, 1)]
    for unit, gathers in units:
        add_unit(tally, shape, SHARDED, unit, times * gathers, gathered_bytes=gathered, reduced_bytes=_FP32)
    return tally.calls()


def sharded_unit(gathered: float, gradients: float, ranks: int) -> tuple[tuple[str, float, bool], ...]:
    """Return the messages of a unit of parameters that ``ranks`` share: collective, bytes S, whether copies send it.
    Its parameters of ``gathered`` bytes are gathered, its ``gradients`` bytes scattered and summed over the copies.
    """
    return (
        ("all_gather", gathered, False),
        ("reduce_scatter", gradients, False),
        ("all_reduce", gradients / ranks, True),
    )


def add_unit(
    tally: Tally,
    shape: MeshShape,
    axes: Sequence[str],
    parameters: Sequence[tuple[int, ...]],
    gathers: int,
    *,
    gathered_bytes: int,
    reduced_bytes: int,
) -> None:
    """Add a unit of FSDP2 over ``axes``, with its gradient summed over ``dp_replicate``."""
    ranks = math.prod(map(shape.size, axes))
    gathered, reduced = (padded_bytes(parameters, ranks, each) for each in (gathered_bytes, reduced_bytes))
    for collective, size, is_of_copies in sharded_unit(gathered, reduced, ranks):
        axis = joined(shape, "dp_replicate") if is_of_copies else joined(shape, *axes)
        tally.add(axis, collective, DATA, gathers if collective == "all_gather" else 1, int(size))


def joined(shape: MeshShape, *names: str) -> str:
    """Return those of ``names``, by default of all axes, with several ranks, joined in the mesh's order."""
    return "-".join(name for name, size in shape.axes if size > 1 and (not names or name in names))


def make_call(
    dist: ModuleType,
    collective: str,
    source: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    root: int = 0,
    splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Callable[[], object]:
    """Return torch's call of a collective with nccl-tests' name; ``target`` is ``source`` if it works in place.

    ``root`` is a rank of the world; ``splits`` are the elements that an all_to_all receives and sends, if uneven.
    """
    # Older torch has all_gather_into_tensor and reduce_scatter_tensor.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    parts, sizes = None, [list(each) or None for each in splits]
    if collective in ("gather", "scatter") and dist.get_rank() == root:  # elsewhere torch wants None
        parts = list((target if collective == "gather" else source).chunk(dist.get_world_size(group)))
    calls: Mapping[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(source, group=group),
        "all_gather": lambda: gather(target, source, group=group),
        "reduce_scatter": lambda: scatter(target, source, group=group),
        "all_to_all": lambda: dist.all_to_all_single(target, source, *sizes, group=group),
        "broadcast": lambda: dist.broadcast(source, root, group=group),
        "reduce": lambda: dist.reduce(source, root, group=group),
        "gather": lambda: dist.gather(source, parts, root, group=group),
        "scatter": lambda: dist.scatter(target, parts, root, group=group),
    }
    return calls[collective]
