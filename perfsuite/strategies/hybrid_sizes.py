"""Sizes and messages of one rank of a hybrid mesh, without torch; perfsuite docs model-parallel derives every line.

b samples of a micro-batch, m micro-batches, S tokens, D width, K features of all keys, E experts, k of them for a
token, i bytes of an element; X = b (S / cp) D i, the activations of a tensor-parallel group.  Full checkpointing runs
the forward of a block again, except the last sum of a dense block, which the backward does not need.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model, Plan
from perfsuite.models.language import LanguageModel, Split
from perfsuite.models.moe import EXPERT_FEATURES, Moe
from perfsuite.schedules import Schedule, balance
from perfsuite.strategies.activations import Activations, Sent
from perfsuite.strategies.context import SPREADS_HEADS, ContextMethod
from perfsuite.strategies.traffic import (
    DATA,
    OTHER,
    PIPELINE,
    SHARDED,
    Call,
    ParameterShapes,
    Shapes,
    Tally,
    add_unit,
    find_shapes,
    joined,
    padded_bytes,
)

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class HybridSizes:
    """Sizes that follow from a plan, the options of strategy hybrid and a rank's place in the mesh."""

    plan: Plan
    shape: MeshShape
    rank: int
    schedule: Schedule | None
    sequence_parallel: bool
    loss_parallel: bool
    context: ContextMethod
    replicate: bool  # Copy parameters along the data axes instead of spreading them
    reshard: bool  # Free gathered parameters after a layer's forward
    async_tensor: bool = False  # Overlap messages along tp with products

    @property
    def model(self) -> LanguageModel:
        """The model that is trained."""
        assert isinstance(self.plan.model, LanguageModel)
        return self.plan.model

    @functools.cached_property
    def shapes(self) -> ParameterShapes:
        """Shapes of all parameters of the model."""
        shapes = find_shapes(self.model)
        assert shapes is not None, f"the shapes of {self.model.name} are unknown"
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
    def item_bytes(self) -> int:
        """Bytes of one element that is computed and sent (i)."""
        return 2 if self.plan.half else 4

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch in one tensor-parallel group: b S / cp."""
        return self.plan.micro_batch_size * self.model.tokens_per_sample // self.cp

    def stages(self) -> list[tuple[int, range]]:
        """Return this rank's stages and the layers of each."""
        if self.schedule is None:
            return [(0, range(self.model.layers))]
        split = split_layers(self.plan.model, self.schedule.num_stages)
        place = self.shape.coordinates(self.rank)["pp"]
        return [(stage, split[stage]) for stage in self.schedule.stages_of(place)]

    def kind(self, name: str) -> Split | None:
        """Return how tensor parallelism splits the parameter ``name``; layers are called ``blocks.*``."""
        return self.model.parallelize.get(name.rpartition(".")[0])

    def split(self, unit: Shapes) -> Shapes:
        """Return this rank's parts of ``unit`` along tp."""
        parts = dict(unit)
        for name, (first, *rest) in unit.items():
            kind = self.kind(name)
            if kind == "row" and rest:
                parts[name] = first, rest[0] // self.tp
            elif kind in ("column", "words", "tied", "positions", "head"):
                parts[name] = first // self.tp, *rest
        return parts

    def experts(self) -> Shapes:
        """Return the shapes of this rank's experts (E, ., .) of a layer: some of them, some of their features."""
        parts = {}
        for name, shape in self.shapes.experts.items():
            sizes = list(shape)
            sizes[0] //= self.shape.size("ep")
            sizes[EXPERT_FEATURES[name.rpartition(".")[2]]] //= self.tp
            parts[name] = tuple(sizes)
        return parts

    def own_rows(self, rows: int, at: Mapping[str, int]) -> int:
        """Return the number of ``rows`` that FSDP2 leaves on this rank: equal chunks, the last ones may be empty."""
        if self.replicate:
            return rows
        ranks, index = 1, 0
        for name in self.shape.names:
            if name in (*SHARDED, "ep", "cp"):
                ranks, index = ranks * self.shape.size(name), index * self.shape.size(name) + at[name]
        chunk = -(-rows // ranks)
        return max(0, min(chunk, rows - index * chunk))

    # -- traffic ----------------------------------------------------------------------------------------------

    def calls(self) -> tuple[Call, ...]:
        """Return the calls of all of the rank's stages in one step.

        Attention gathers and scatters twice in each layer, and so does the MLP: of two layers of 128 features and one
        sample of 64 tokens in fp32, X is 32 KiB.

        >>> from perfsuite.models import find
        >>> from perfsuite.base.mesh import MeshShape
        >>> from perfsuite.strategies import STRATEGIES, Plan
        >>> plan = Plan(model=find("llama2-tiny", {}), dtype="fp32", micro_batch_size=1)
        >>> form = STRATEGIES["hybrid"].traffic(plan, MeshShape.parse("tp2"), 0)
        >>> [(call.collective, call.calls, call.message_bytes) for call in form if call.part == "attention"]
        [('all_gather', 4, 131072), ('reduce_scatter', 4, 131072)]

        In a ring of two, keys and values (8 KiB each here) are sent once in the forward and once in the backward, and
        their gradients twice:

        >>> form = STRATEGIES["hybrid"].traffic(plan, MeshShape.parse("cp2"), 0)
        >>> [(call.calls, call.message_bytes) for call in form if call.collective == "send"]
        [(8, 131072)]
        """
        tally, whole = Tally(), []
        repeats = 0 if self.plan.checkpointing == "none" else 1  # of a block's forward in the backward
        for stage, layers in self.stages():
            for _ in layers:
                self._add(tally, self.activations.block(), repeats)
            first, last = layers.start == 0, layers.stop == self.model.layers
            if first:
                positions = "positions.weight" in self.shapes.first
                self._add(tally, self.activations.embedding(samples=positions * self.plan.micro_batch_size))
            if last:
                self._add(tally, self.activations.head(words=0 if self.loss_parallel else self.model.vocabulary))
            whole += self._add_units(tally, layers, first=first, last=last)
            self._add_neighbours(tally, stage)
        # FSDP2 sums them one by one; it manages parameters that several ranks share, and always those in 16 bits.
        managed = self.plan.half or joined(self.shape, "dp_replicate", *SHARDED, "ep", "cp")
        for size in whole if managed else [sum(whole)] if whole else []:
            tally.add(joined(self.shape, "tp"), "all_reduce", OTHER, 1, size)
        self._add_tied(tally)
        if self.plan.dtype == "fp16":
            self._add_scale(tally)
        return tally.calls()

    @functools.cached_property
    def activations(self) -> Activations:
        """Sizes of the activations of a micro-batch."""
        routed: dict[str, Any] = {}
        if isinstance(self.model, Moe):
            routing, tokens = self.model.routing, self.tokens // self.tp
            rows = tokens * routing.top_k
            if routing.capacity is not None:
                rows = tokens // routing.group_tokens * routing.capacity * routing.experts
            loads = self.plan.micro_batch_size * self.model.experts * _FP32 if routing.balance_weight else 0
            even = routing.capacity is not None
            routed = {"mlp": False, "experts": self.model.experts, "rows": rows, "even": even, "load_bytes": loads}
        return Activations(
            tokens=self.tokens,
            width=self.model.width,
            query_features=self.model.width // self.tp,
            key_features=self.model.key_width // self.tp,
            item_bytes=self.item_bytes,
            key_gradient_bytes=_FP32,
            tp=self.tp,
            cp=self.cp,
            sequence_parallel=self.sequence_parallel,
            ring=self.context not in SPREADS_HEADS,
            **routed,
        )

    def _add(self, tally: Tally, messages: Iterable[Sent], repeats: int = 0) -> None:
        """Add messages of every micro-batch; ``repeats`` of a block's forward are in the backward."""
        for sent in messages:
            passes = 1 + repeats if sent.again and not sent.backward else 1
            for way in ("send", "receive") if sent.collective == "ring" else (sent.collective,):
                calls, size = self.plan.accumulation * passes * sent.calls, int(sent.message_bytes)
                tally.add(joined(self.shape, sent.axis), way, sent.part, calls, size, uneven=sent.uneven)

    # -- the rest of a stage -------------------------------------------------------------------------------------

    def _add_units(self, tally: Tally, layers: range, *, first: bool, last: bool) -> list[int]:
        """Add the messages of FSDP2; return the bytes of each gradient that the ranks of tp sum."""
        root = self.shapes.root(first=first, last=last)
        blocks = {f"blocks.*.{name}": shape for name, shape in self.shapes.block.items()}
        once = 1 if self.schedule else self.plan.accumulation
        gathers = once * (2 if self.reshard else 1)
        whole = []
        for unit, count, times in ((blocks, len(layers), gathers), (root, 1, once)):
            for _ in range(count):
                self._add_unit(tally, self.split(unit), ("ep", "cp"), times)
            if self.sequence_parallel:
                # Every rank of tp holds all of a norm or router but sees only its own tokens.
                summed = [name for name in unit if self.kind(name) == "sequence" or name.endswith("router.weight")]
                sizes = [math.prod(unit[name]) * self.item_bytes for name in summed]
                whole += sizes * count
        if self.model.experts:
            for _ in layers:
                self._add_unit(tally, self.experts(), ("cp",), gathers)
        return whole

    def _add_unit(self, tally: Tally, unit: Shapes, others: tuple[str, ...], gathers: int) -> None:
        axes = (*SHARDED, *others)
        shapes, item = list(unit.values()), self.item_bytes
        if shapes and self.replicate:
            axis = joined(self.shape, "dp_replicate", *axes)
            tally.add(axis, "all_reduce", DATA, 1, padded_bytes(shapes, 1, item))
        elif shapes:
            add_unit(tally, self.shape, axes, shapes, gathers, gathered_bytes=item, reduced_bytes=item)

    # -- between stages ------------------------------------------------------------------------------------------

    def _add_neighbours(self, tally: Tally, stage: int) -> None:
        if self.schedule is None:
            return
        places, size = self.schedule.rank_of_stage, int(self.activations.stage_bytes)
        for other in (stage - 1, stage + 1):
            if 0 <= other < len(places) and places[other] != places[stage]:
                for way in ("send", "receive"):
                    tally.add("pp", way, PIPELINE, self.plan.accumulation, size)

    def _add_tied(self, tally: Tally) -> None:
        """Add the exchange of the tied embedding's gradient between the first and the last stage."""
        if self.schedule is None or not self.shapes.tied or self.schedule.num_stages == 1:
            return
        ends = (self.schedule.rank_of_stage[0], self.schedule.rank_of_stage[-1])
        at = self.shape.coordinates(self.rank)
        if ends[0] != ends[1] and at["pp"] in ends:
            rows, width = self.shapes.first[self.shapes.tied]
            rows = self.own_rows(rows // self.tp, at)
            for way in ("send", "receive"):
                tally.add("pp", way, PIPELINE, 1, rows * width * _FP32)

    def _add_scale(self, tally: Tally) -> None:
        """Add the all-reduce that detects an overflow on any rank of the mesh."""
        axis = joined(self.shape)
        names = axis.split("-")
        data = any(name.startswith("dp") for name in names) and not {"pp", "tp"} & set(names)
        part = PIPELINE if names == ["pp"] else DATA if data else OTHER
        tally.add(axis, "all_reduce", part, 1, _FP32)


@functools.lru_cache(maxsize=64)  # the closed form of each rank needs the same split
def split_layers(model: Model, num_stages: int) -> tuple[range, ...]:
    """Return the layers of each stage, such that the most expensive stage costs least.

    The cost of a block and of the head is its operations; looking up an embedding has none.  GPT-2's head, 50257 words
    wide, costs as much as four and a half of its blocks:

    >>> from perfsuite.models import find
    >>> [len(layers) for layers in split_layers(find("gpt2"), 4)]
    [3, 4, 4, 1]

    Raises InvalidParameter for a model without stages and for more stages than layers.
    """
    if not isinstance(model, LanguageModel):
        raise InvalidParameter(
            f"model {model.name} cannot be split into stages: its blocks need other inputs than the previous block's "
            "output; choose a GPT or a LLaMA"
        )
    costs = (model.block_flops / model.layers,) * model.layers
    return balance(costs, num_stages, head=model.forward_flops - model.block_flops)
