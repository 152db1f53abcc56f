"""What one rank of a hybrid mesh posts in one step, without torch; docs/model-parallel.md derives every line.

b samples of a micro-batch, m micro-batches, S tokens, D width, K features of all keys, E experts, k of them for a
token, i bytes of an element; X = b (S / cp) D i, what a tensor-parallel group holds together.  Full checkpointing runs
the forward of a block again, all but the dense block's last sum, which nothing in the backward needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.mesh import MeshShape
from perfsuite.models.language import LanguageModel, Split
from perfsuite.schedules import Schedule
from perfsuite.strategies.base import Plan
from perfsuite.strategies.parameter_shapes import ParameterShapes, Shapes, find_shapes
from perfsuite.strategies.pipeline.split import split_layers
from perfsuite.strategies.traffic import ATTENTION, DATA, MLP, OTHER, PIPELINE, Call, Tally, padded_bytes

_SHARDED = ("dp", "dp_shard")
_COUNT_BYTES = 8
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class HybridTraffic:
    """The closed form of one rank."""

    plan: Plan
    model: LanguageModel
    shapes: ParameterShapes
    shape: MeshShape
    rank: int
    schedule: Schedule | None
    sequence_parallel: bool
    loss_parallel: bool
    context: str
    replicate: bool
    reshard: bool

    def calls(self) -> tuple[Call, ...]:
        """Of all of the rank's stages."""
        tally = Tally()
        for stage, layers in self._stages():
            for _ in layers:
                self._add_block(tally)
            first, last = layers.start == 0, layers.stop == self.model.layers
            self._add_ends(tally, first=first, last=last)
            self._add_units(tally, layers, first=first, last=last)
            self._add_neighbours(tally, stage)
        self._add_tied(tally)
        if self.plan.dtype == "fp16":
            self._add_scale(tally)
        return tally.calls()

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def _tp(self) -> int:
        return self.shape.size("tp")

    @property
    def _cp(self) -> int:
        return self.shape.size("cp")

    @property
    def _item(self) -> int:
        return 2 if self.plan.half else 4

    @property
    def _repeats(self) -> int:
        """How often the forward of a block is run again."""
        return 0 if self.plan.checkpointing == "none" else 1

    @property
    def _tokens(self) -> int:
        """Tokens of a micro-batch on the ranks of a tensor-parallel group: b S / cp."""
        return self.plan.micro_batch_size * self.model.tokens_per_sample // self._cp

    @property
    def _whole_bytes(self) -> int:
        """X."""
        return self._tokens * self.model.width * self._item

    def _axis(self, *names: str) -> str:
        """Those of ``names`` that have several ranks, joined as the mesh orders them; "" where none has."""
        return "-".join(name for name in self.shape.names if name in names and self.shape.size(name) > 1)

    def _ranks(self, *names: str) -> int:
        return math.prod(self.shape.size(name) for name in names)

    def _stages(self) -> list[tuple[int, range]]:
        if self.schedule is None:
            return [(0, range(self.model.layers))]
        split = split_layers(self.model, self.schedule.num_stages)
        place = self.shape.coordinates(self.rank)["pp"]
        return [(stage, split[stage]) for stage in self.schedule.stages_of(place)]

    # -- one block -----------------------------------------------------------------------------------------------

    def _add_block(self, tally: Tally) -> None:
        times, again = self.plan.accumulation, self._repeats
        self._add_part(tally, ATTENTION, times, gathers=again, sums=again)
        if self.model.experts:
            self._add_experts(tally, times * (1 + again), backwards=times)
        else:
            self._add_part(tally, MLP, times, gathers=again, sums=0)
        if self._cp > 1:
            self._add_context(tally, times, again)

    def _add_part(self, tally: Tally, part: str, times: int, *, gathers: int, sums: int) -> None:
        """A part behind one gather and before one sum; ``gathers`` and ``sums`` are run again in the backward."""
        axis, size = self._axis("tp"), self._whole_bytes
        if self.sequence_parallel:  # the backward of a gather is a scattered sum, and the other way round
            tally.add(axis, "all_gather", part, times * (2 + gathers), size)
            tally.add(axis, "reduce_scatter", part, times * (2 + sums), size)
        else:  # nothing is gathered; the sums of the forward's output and of the input's gradient
            tally.add(axis, "all_reduce", part, times * (2 + sums), size)

    def _add_context(self, tally: Tally, times: int, again: int) -> None:
        axis, key_features = self._axis("cp"), self.model.key_width // self._tp
        if self.context == "ulysses":
            for features in (self.model.width // self._tp, key_features):  # query and output, key and value
                tally.add(axis, "all_to_all", ATTENTION, 2 * times * (2 + again), self._tokens * features * self._item)
            return
        both = 2 * self._tokens * key_features
        for way in ("send", "receive"):
            tally.add(axis, way, ATTENTION, times * (self._cp - 1) * (2 + again), both * self._item)
            tally.add(axis, way, ATTENTION, times * self._cp, both * _FP32)

    def _add_experts(self, tally: Tally, forwards: int, *, backwards: int) -> None:
        """Rows to the experts and back, in the forward and in the backward; counts before them unless all are equal."""
        model: Any = self.model
        ep, tp, tokens = self._axis("ep"), self._axis("tp"), self._tokens // self._tp
        routing = model.routing
        even = routing.capacity is not None
        rows = tokens * routing.top_k
        if routing.capacity is not None:
            rows = tokens // routing.group_tokens * routing.capacity * routing.experts
        size, calls = rows * model.width * self._item, 2 * (forwards + backwards)
        tally.add(ep, "all_to_all", MLP, calls, size, uneven=not even)
        tally.add(tp, "all_to_all", MLP, calls, self._tp * size, uneven=not even)
        if not even:
            tally.add(ep, "all_to_all", MLP, forwards, model.experts * _COUNT_BYTES)
            tally.add(tp, "all_gather", MLP, forwards, self._tp * model.experts * _COUNT_BYTES)
        if routing.balance_weight:
            for axis in (self._axis("cp"), tp):
                counts = self.plan.micro_batch_size * model.experts * _FP32
                tally.add(axis, "all_reduce", MLP, forwards, counts)

    # -- the rest of a stage -------------------------------------------------------------------------------------

    def _add_ends(self, tally: Tally, *, first: bool, last: bool) -> None:
        axis, times = self._axis("tp"), self.plan.accumulation
        sizes = [self._whole_bytes] if first else []
        if first and "positions.weight" in self.shapes.first:
            sizes.append(self._whole_bytes // self.plan.micro_batch_size)
        if last:
            sizes.append(self._whole_bytes)
        for size in sizes:
            if self.sequence_parallel:
                tally.add(axis, "all_gather", OTHER, times, size)
                tally.add(axis, "reduce_scatter", OTHER, times, size)
            else:
                tally.add(axis, "all_reduce", OTHER, times, size)
        if last and self.loss_parallel:
            tally.add(axis, "all_reduce", OTHER, 3 * times, self._tokens * _FP32)
        elif last:
            tally.add(axis, "all_gather", OTHER, times, self._tokens * self.model.vocabulary * self._item)

    def _add_units(self, tally: Tally, layers: range, *, first: bool, last: bool) -> None:
        """What FSDP2 gathers and reduces, and the gradients of what tensor parallelism leaves whole."""
        root = self.shapes.root(first=first, last=last)
        blocks = {f"blocks.*.{name}": shape for name, shape in self.shapes.block.items()}
        once = 1 if self.schedule else self.plan.accumulation
        gathers = once * (2 if self.reshard else 1)
        for unit, count, times in ((blocks, len(layers), gathers), (root, 1, once)):
            for _ in range(count):
                self._add_unit(tally, self._split(unit), ("ep", "cp"), times)
                for name, shape in unit.items():
                    if self.sequence_parallel and self._is_summed(name):
                        tally.add(self._axis("tp"), "all_reduce", OTHER, 1, math.prod(shape) * self._item)
        if self.model.experts:
            for _ in layers:
                self._add_unit(tally, self._experts(), ("cp",), gathers)

    def _add_unit(self, tally: Tally, unit: Shapes, others: tuple[str, ...], gathers: int) -> None:
        axes = (*_SHARDED, *others)
        shapes = list(unit.values())
        if not shapes:
            return
        if self.replicate:
            whole = padded_bytes(shapes, 1, self._item)
            tally.add(self._axis("dp_replicate", *axes), "all_reduce", DATA, 1, whole)
            return
        ranks = self._ranks(*axes)
        size = padded_bytes(shapes, ranks, self._item)
        tally.add(self._axis(*axes), "all_gather", DATA, gathers, size)
        tally.add(self._axis(*axes), "reduce_scatter", DATA, 1, size)
        tally.add(self._axis("dp_replicate"), "all_reduce", DATA, 1, size // ranks)

    def _kind(self, name: str) -> Split | None:
        return self.model.parallelize.get(name.rpartition(".")[0])

    def _is_summed(self, name: str) -> bool:
        """Whether every rank of tp has all of it and sees its own tokens alone: a norm, or a router."""
        return self._kind(name) == "sequence" or name.endswith("router.weight")

    def _split(self, unit: Shapes) -> Shapes:
        return {name: self._part_of(name, shape) for name, shape in unit.items()}

    def _part_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """This rank's part of a parameter along tp."""
        kind = self._kind(name)
        if kind == "row":
            return (shape[0], shape[1] // self._tp) if len(shape) > 1 else shape
        if kind in ("column", "words", "tied", "positions", "head"):
            return (shape[0] // self._tp, *shape[1:])
        return shape

    def _experts(self) -> Shapes:
        """This rank's part of the (E, ., .) matrices of a layer's experts: some of them, some of their features."""
        features: Mapping[str, int] = {"gate": 2, "expand": 2, "contract": 1}
        parts = {}
        for name, shape in self.shapes.experts.items():
            sizes = list(shape)
            sizes[0] //= self.shape.size("ep")
            sizes[features[name.rpartition(".")[2]]] //= self._tp
            parts[name] = tuple(sizes)
        return parts

    # -- between stages ------------------------------------------------------------------------------------------

    def _add_neighbours(self, tally: Tally, stage: int) -> None:
        if self.schedule is None:
            return
        places = self.schedule.rank_of_stage
        size = self._whole_bytes // (self._tp if self.sequence_parallel else 1)
        for other in (stage - 1, stage + 1):
            if 0 <= other < len(places) and places[other] != places[stage]:
                for way in ("send", "receive"):
                    tally.add("pp", way, PIPELINE, self.plan.accumulation, size)

    def _add_tied(self, tally: Tally) -> None:
        """The first and the last stage exchange the gradient of this rank's part of the embedding."""
        if self.schedule is None or not self.shapes.tied or self.schedule.num_stages == 1:
            return
        ends = (self.schedule.rank_of_stage[0], self.schedule.rank_of_stage[-1])
        at = self.shape.coordinates(self.rank)
        if ends[0] != ends[1] and at["pp"] in ends:
            rows, width = self.shapes.first[self.shapes.tied]
            rows = self._own_rows(rows // self._tp, at)
            for way in ("send", "receive"):
                tally.add("pp", way, PIPELINE, 1, rows * width * _FP32)

    def _own_rows(self, rows: int, at: Mapping[str, int]) -> int:
        """Of ``rows`` those that FSDP2 leaves on this rank: equal chunks, the last ones shorter or empty."""
        if self.replicate:
            return rows
        ranks, index = 1, 0
        for name in self.shape.names:
            if name in (*_SHARDED, "ep", "cp"):
                ranks, index = ranks * self.shape.size(name), index * self.shape.size(name) + at[name]
        chunk = -(-rows // ranks)
        return max(0, min(chunk, rows - index * chunk))

    def _add_scale(self, tally: Tally) -> None:
        """Whether any rank of the mesh overflowed."""
        axis = self._axis(*self.shape.names)
        names = axis.split("-")
        data = any(name.startswith("dp") for name in names) and not {"pp", "tp"} & set(names)
        part = PIPELINE if names == ["pp"] else DATA if data else OTHER
        tally.add(axis, "all_reduce", part, 1, _FP32)


def hybrid_traffic(
    plan: Plan,
    shape: MeshShape,
    rank: int,
    *,
    schedule: Schedule | None,
    sequence_parallel: bool,
    loss_parallel: bool,
    context: str,
    replicate: bool,
    reshard: bool,
) -> tuple[Call, ...] | None:
    """The closed form; None for torch's own context parallelism, which is free to change what it sends."""
    shapes = find_shapes(plan.model)
    if shapes is None or (context == "torch" and shape.size("cp") > 1):
        return None
    assert isinstance(plan.model, LanguageModel)
    return HybridTraffic(
        plan=plan,
        model=plan.model,
        shapes=shapes,
        shape=shape,
        rank=rank,
        schedule=schedule,
        sequence_parallel=sequence_parallel,
        loss_parallel=loss_parallel,
        context=context,
        replicate=replicate,
        reshard=reshard,
    ).calls()
