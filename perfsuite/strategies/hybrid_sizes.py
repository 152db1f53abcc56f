"""Sizes of a hybrid mesh without torch: what a rank has of tokens, layers and parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model
from perfsuite.models.language import LanguageModel, Split
from perfsuite.models.moe import EXPERT_FEATURES
from perfsuite.schedules import Schedule, balance
from perfsuite.strategies.context.places import ContextMethod
from perfsuite.strategies.parameter_shapes import ParameterShapes, Shapes, find_shapes
from perfsuite.strategies.plan import Plan

SHARDED = ("dp", "dp_shard")
"""Axes of data parallelism along which parameters are spread; dp_replicate keeps copies."""


@dataclass(frozen=True, kw_only=True)
class HybridSizes:
    """What follows from a plan, the options of strategy hybrid and a rank's place in the mesh."""

    plan: Plan
    shape: MeshShape
    rank: int
    schedule: Schedule | None
    """None without stages."""
    sequence_parallel: bool
    loss_parallel: bool
    context: ContextMethod
    """zigzag, ring, ulysses, torch or deepspeed."""
    replicate: bool
    """Parameters are copied along the data axes and not spread."""
    reshard: bool
    """Gathered parameters are freed after a layer's forward."""
    async_tensor: bool = False
    """Messages along tp overlap with products."""

    @property
    def model(self) -> LanguageModel:
        """What is trained."""
        assert isinstance(self.plan.model, LanguageModel)
        return self.plan.model

    @functools.cached_property
    def shapes(self) -> ParameterShapes:
        """Of all parameters of the model."""
        shapes = find_shapes(self.model)
        assert shapes is not None, f"the shapes of {self.model.name} are not known"
        return shapes

    @property
    def tp(self) -> int:
        """Ranks along tp."""
        return self.shape.size("tp")

    @property
    def cp(self) -> int:
        """Ranks along cp."""
        return self.shape.size("cp")

    @property
    def spreads(self) -> bool:
        """Whether FSDP2 has the parameters: over ranks that share them, in 16 bits over one as well."""
        return self.plan.half or self.ranks("dp_replicate", *SHARDED, "ep", "cp") > 1

    @property
    def item_bytes(self) -> int:
        """Of one element of what is computed and sent (i)."""
        return 2 if self.plan.half else 4

    @property
    def repeats(self) -> int:
        """How often the forward of a block is run again."""
        return 0 if self.plan.checkpointing == "none" else 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on the ranks of a tensor-parallel group: b S / cp."""
        return self.plan.micro_batch_size * self.model.tokens_per_sample // self.cp

    @property
    def whole_bytes(self) -> int:
        """What the ranks of a tensor-parallel group have of a micro-batch together: X = b (S / cp) D i."""
        return self.tokens * self.model.width * self.item_bytes

    def axis(self, *names: str) -> str:
        """Those of ``names`` that have several ranks, joined as the mesh orders them; "" where none has."""
        return "-".join(name for name in self.shape.names if name in names and self.shape.size(name) > 1)

    def ranks(self, *names: str) -> int:
        """Ranks along all of ``names`` together."""
        return math.prod(self.shape.size(name) for name in names)

    def stages(self) -> list[tuple[int, range]]:
        """This rank's stages and the layers of each."""
        if self.schedule is None:
            return [(0, range(self.model.layers))]
        split = split_layers(self.plan.model, self.schedule.num_stages)
        place = self.shape.coordinates(self.rank)["pp"]
        return [(stage, split[stage]) for stage in self.schedule.stages_of(place)]

    def kind(self, name: str) -> Split | None:
        """How tensor parallelism treats the parameter ``name``; layers are called ``blocks.*``."""
        return self.model.parallelize.get(name.rpartition(".")[0])

    def is_summed(self, name: str) -> bool:
        """Whether every rank of tp has all of it and sees its own tokens alone: a norm, or a router."""
        return self.kind(name) == "sequence" or name.endswith("router.weight")

    def split(self, unit: Shapes) -> Shapes:
        """This rank's parts of ``unit`` along tp."""
        return {name: self.part_of(name, shape) for name, shape in unit.items()}

    def part_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """This rank's part of a parameter along tp."""
        kind = self.kind(name)
        if kind == "row":
            return (shape[0], shape[1] // self.tp) if len(shape) > 1 else shape
        if kind in ("column", "words", "tied", "positions", "head"):
            return (shape[0] // self.tp, *shape[1:])
        return shape

    def experts(self) -> Shapes:
        """This rank's part of the (E, ., .) matrices of a layer's experts: some of them, some of their features."""
        parts = {}
        for name, shape in self.shapes.experts.items():
            sizes = list(shape)
            sizes[0] //= self.shape.size("ep")
            sizes[EXPERT_FEATURES[name.rpartition(".")[2]]] //= self.tp
            parts[name] = tuple(sizes)
        return parts

    def own_rows(self, rows: int, at: Mapping[str, int]) -> int:
        """Of ``rows`` those that FSDP2 leaves on this rank: equal chunks, the last ones shorter or empty."""
        if self.replicate:
            return rows
        ranks, index = 1, 0
        for name in self.shape.names:
            if name in (*SHARDED, "ep", "cp"):
                ranks, index = ranks * self.shape.size(name), index * self.shape.size(name) + at[name]
        chunk = -(-rows // ranks)
        return max(0, min(chunk, rows - index * chunk))


def split_layers(model: Model, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage of a pipeline, so that the most expensive stage is as cheap as can be.

    The cost of a block and of the head is its operations; looking up an embedding has none.  GPT-2's head, 50257 words
    wide, costs as much as four and a half of its blocks:

    >>> from perfsuite.models import find
    >>> [len(layers) for layers in split_layers(find("gpt2"), 4)]
    [3, 4, 4, 1]

    Raises InvalidParameter for a model that has no stages and for more stages than layers.
    """
    if not isinstance(model, LanguageModel):
        raise InvalidParameter(
            f"model {model.name} cannot be split into stages: its blocks need more than what the block before gives; "
            "choose a GPT or a LLaMA"
        )
    costs = (model.block_flops / model.layers,) * model.layers
    return _balance(costs, num_stages, model.forward_flops - model.block_flops)


@functools.lru_cache(maxsize=64)
def _balance(costs: tuple[float, ...], num_stages: int, head: float) -> tuple[range, ...]:
    # Kept: the closed form of each rank asks for the same split.
    return balance(costs, num_stages, head=head)
