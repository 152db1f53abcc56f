"""What one rank of a hybrid mesh posts in one step, without torch; perfsuite docs model-parallel derives every line.

b samples of a micro-batch, m micro-batches, S tokens, D width, K features of all keys, E experts, k of them for a
token, i bytes of an element; X = b (S / cp) D i, what a tensor-parallel group holds together.  Full checkpointing runs
the forward of a block again, all but the dense block's last sum, which nothing in the backward needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfsuite.models.moe import Moe
from perfsuite.strategies.context.places import SPREADS_HEADS
from perfsuite.strategies.hybrid_sizes import SHARDED, HybridSizes
from perfsuite.strategies.parameter_shapes import Shapes
from perfsuite.strategies.traffic import ATTENTION, DATA, MLP, OTHER, PIPELINE, Call, Tally, padded_bytes

_COUNT_BYTES = 8
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class HybridTraffic(HybridSizes):
    """The closed form of one rank."""

    def calls(self) -> tuple[Call, ...]:
        """Of all of the rank's stages.

        A layer's attention gathers and scatters twice each, its MLP as well: of two layers of 128 features and one
        sample of 64 tokens in fp32, X is 32 KiB.

        >>> from perfsuite.models import find
        >>> from perfsuite.base.mesh import MeshShape
        >>> from perfsuite.strategies import STRATEGIES, Plan
        >>> plan = Plan(model=find("llama2-tiny", {}), dtype="fp32", micro_batch_size=1)
        >>> form = STRATEGIES["hybrid"].traffic(plan, MeshShape.parse("tp2"), 0)
        >>> [(call.collective, call.calls, call.message_bytes) for call in form if call.part == "attention"]
        [('all_gather', 4, 131072), ('reduce_scatter', 4, 131072)]

        Around a ring of two, keys and values (8 KiB each here) go once in the forward and once in the backward, their
        gradients twice:

        >>> form = STRATEGIES["hybrid"].traffic(plan, MeshShape.parse("cp2"), 0)
        >>> [(call.calls, call.message_bytes) for call in form if call.collective == "send"]
        [(8, 131072)]
        """
        tally, whole = Tally(), []
        for stage, layers in self.stages():
            for _ in layers:
                self._add_block(tally)
            first, last = layers.start == 0, layers.stop == self.model.layers
            self._add_ends(tally, first=first, last=last)
            whole += self._add_units(tally, layers, first=first, last=last)
            self._add_neighbours(tally, stage)
        for size in whole if self.spreads else [sum(whole)] if whole else []:  # FSDP2 sums them one by one
            tally.add(self.axis("tp"), "all_reduce", OTHER, 1, size)
        self._add_tied(tally)
        if self.plan.dtype == "fp16":
            self._add_scale(tally)
        return tally.calls()

    # -- one block -----------------------------------------------------------------------------------------------

    def _add_block(self, tally: Tally) -> None:
        times, again = self.plan.accumulation, self.repeats
        self._add_part(tally, ATTENTION, times, gathers=again, sums=again)
        if isinstance(self.model, Moe):
            self._add_experts(tally, self.model, times * (1 + again), backwards=times)
        else:
            self._add_part(tally, MLP, times, gathers=again, sums=0)
        if self.cp > 1:
            self._add_context(tally, times, again)

    def _add_part(self, tally: Tally, part: str, times: int, *, gathers: int, sums: int) -> None:
        """A part behind one gather and before one sum; ``gathers`` and ``sums`` are run again in the backward."""
        axis, size = self.axis("tp"), self.whole_bytes
        if self.sequence_parallel:  # the backward of a gather is a scattered sum, and the other way round
            tally.add(axis, "all_gather", part, times * (2 + gathers), size)
            tally.add(axis, "reduce_scatter", part, times * (2 + sums), size)
        else:  # nothing is gathered; the sums of the forward's output and of the input's gradient
            tally.add(axis, "all_reduce", part, times * (2 + sums), size)

    def _add_context(self, tally: Tally, times: int, again: int) -> None:
        axis, key_features = self.axis("cp"), self.model.key_width // self.tp
        if self.context in SPREADS_HEADS:
            for features in (self.model.width // self.tp, key_features):  # query and output, key and value
                tally.add(
                    axis, "all_to_all", ATTENTION, 2 * times * (2 + again), self.tokens * features * self.item_bytes
                )
            return
        both = 2 * self.tokens * key_features
        for way in ("send", "receive"):
            tally.add(axis, way, ATTENTION, times * (self.cp - 1) * (2 + again), both * self.item_bytes)
            tally.add(axis, way, ATTENTION, times * self.cp, both * _FP32)

    def _add_experts(self, tally: Tally, model: Moe, forwards: int, *, backwards: int) -> None:
        """Rows to the experts and back, in the forward and in the backward; counts before them unless all are equal."""
        ep, tp, tokens = self.axis("ep"), self.axis("tp"), self.tokens // self.tp
        routing = model.routing
        even = routing.capacity is not None
        rows = tokens * routing.top_k
        if routing.capacity is not None:
            rows = tokens // routing.group_tokens * routing.capacity * routing.experts
        size, calls = rows * model.width * self.item_bytes, 2 * (forwards + backwards)
        tally.add(ep, "all_to_all", MLP, calls, size, uneven=not even)
        tally.add(tp, "all_to_all", MLP, calls, self.tp * size, uneven=not even)
        if not even:
            tally.add(ep, "all_to_all", MLP, forwards, model.experts * _COUNT_BYTES)
            tally.add(tp, "all_gather", MLP, forwards, self.tp * model.experts * _COUNT_BYTES)
        if routing.balance_weight:
            for axis in (self.axis("cp"), tp):
                counts = self.plan.micro_batch_size * model.experts * _FP32
                tally.add(axis, "all_reduce", MLP, forwards, counts)

    # -- the rest of a stage -------------------------------------------------------------------------------------

    def _add_ends(self, tally: Tally, *, first: bool, last: bool) -> None:
        axis, times = self.axis("tp"), self.plan.accumulation
        sizes = [self.whole_bytes] if first else []
        if first and "positions.weight" in self.shapes.first:
            sizes.append(self.whole_bytes // self.plan.micro_batch_size)
        if last:
            sizes.append(self.whole_bytes)
        for size in sizes:
            if self.sequence_parallel:
                tally.add(axis, "all_gather", OTHER, times, size)
                tally.add(axis, "reduce_scatter", OTHER, times, size)
            else:
                tally.add(axis, "all_reduce", OTHER, times, size)
        if last and self.loss_parallel:
            tally.add(axis, "all_reduce", OTHER, 3 * times, self.tokens * _FP32)
        elif last:
            tally.add(axis, "all_gather", OTHER, times, self.tokens * self.model.vocabulary * self.item_bytes)

    def _add_units(self, tally: Tally, layers: range, *, first: bool, last: bool) -> list[int]:
        """What FSDP2 gathers and reduces; bytes of each gradient that the ranks of tp sum."""
        root = self.shapes.root(first=first, last=last)
        blocks = {f"blocks.*.{name}": shape for name, shape in self.shapes.block.items()}
        once = 1 if self.schedule else self.plan.accumulation
        gathers = once * (2 if self.reshard else 1)
        whole = []
        for unit, count, times in ((blocks, len(layers), gathers), (root, 1, once)):
            for _ in range(count):
                self._add_unit(tally, self.split(unit), ("ep", "cp"), times)
            if self.sequence_parallel:
                sizes = [math.prod(shape) * self.item_bytes for name, shape in unit.items() if self.is_summed(name)]
                whole += sizes * count
        if self.model.experts:
            for _ in layers:
                self._add_unit(tally, self.experts(), ("cp",), gathers)
        return whole

    def _add_unit(self, tally: Tally, unit: Shapes, others: tuple[str, ...], gathers: int) -> None:
        axes = (*SHARDED, *others)
        shapes = list(unit.values())
        if not shapes:
            return
        if self.replicate:
            whole = padded_bytes(shapes, 1, self.item_bytes)
            tally.add(self.axis("dp_replicate", *axes), "all_reduce", DATA, 1, whole)
            return
        ranks = self.ranks(*axes)
        size = padded_bytes(shapes, ranks, self.item_bytes)
        tally.add(self.axis(*axes), "all_gather", DATA, gathers, size)
        tally.add(self.axis(*axes), "reduce_scatter", DATA, 1, size)
        tally.add(self.axis("dp_replicate"), "all_reduce", DATA, 1, size // ranks)

    # -- between stages ------------------------------------------------------------------------------------------

    def _add_neighbours(self, tally: Tally, stage: int) -> None:
        if self.schedule is None:
            return
        places = self.schedule.rank_of_stage
        size = self.whole_bytes // (self.tp if self.sequence_parallel else 1)
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
            rows = self.own_rows(rows // self.tp, at)
            for way in ("send", "receive"):
                tally.add("pp", way, PIPELINE, 1, rows * width * _FP32)

    def _add_scale(self, tally: Tally) -> None:
        """Whether any rank of the mesh overflowed."""
        axis = self.axis(*self.shape.names)
        names = axis.split("-")
        data = any(name.startswith("dp") for name in names) and not {"pp", "tp"} & set(names)
        part = PIPELINE if names == ["pp"] else DATA if data else OTHER
        tally.add(axis, "all_reduce", part, 1, _FP32)
