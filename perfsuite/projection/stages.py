"""Price one micro-batch in each stage of a pipeline: blocks, ends of the model, gathered parameters.

Layouts share blocks by tensor, context and expert parallelism and micro-batch, and stages by layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perfsuite.projection import operations
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.implementation import Implementation
from perfsuite.projection.kernels import NONE, KernelTimes, Links, Seconds
from perfsuite.projection.layout import Group, Layout
from perfsuite.projection.operations import BlockAttention, MatmulKernel, MemoryKernels, Operation, Passes, Share
from perfsuite.projection.pipeline import StageKind, rank_kinds, stage_kinds
from perfsuite.schedules import StageTimes
from perfsuite.strategies.traffic import sharded_unit


class Priced(NamedTuple):
    """Seconds of one micro-batch in one part of the model."""

    forward: Seconds = NONE
    backward_input: Seconds = NONE
    backward_weight: Seconds = NONE
    kernels: float = 0.0
    """Kernels that the host starts."""

    @property
    def backward_s(self) -> float:
        """Return the seconds of both halves of the backward pass."""
        return self.backward_input.total + self.backward_weight.total

    @property
    def total(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward.total + self.backward_s

    def plus(self, other: Priced, times: float = 1.0) -> Priced:
        """Return the sum with ``times`` times ``other``."""
        return Priced(
            self.forward.plus(other.forward, times),
            self.backward_input.plus(other.backward_input, times),
            self.backward_weight.plus(other.backward_weight, times),
            self.kernels + times * other.kernels,
        )


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A block with its messages."""

    block: Priced
    gather: Seconds
    scatter: Seconds
    """Message of one micro-batch, including the sum over replicas."""
    gather_waits_s: float
    scatter_waits_s: float


@dataclass(frozen=True, kw_only=True)
class Stages:
    """All stages of a pipeline with one micro-batch in each."""

    each: tuple[Priced, ...]
    busiest: Priced
    work_s: float
    times: StageTimes


@dataclass(kw_only=True)
class StagePrices:
    """Prices the stages of any layout, with a cache."""

    model: Architecture
    code: Implementation
    calibration: Calibration
    times: KernelTimes
    links: Links
    _blocks: dict[object, tuple[Priced, Priced]] = field(default_factory=dict, init=False)
    _ends: dict[object, tuple[Priced, Priced]] = field(default_factory=dict, init=False)
    _kinds: dict[object, Priced] = field(default_factory=dict, init=False)
    _stages: dict[object, Stages] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        trait = self.calibration.value
        memory = trait("memory_gb_per_s") * 1e9
        self.second_per_byte = 1 / memory if memory else 0.0
        self._traffic_ratio, self._ratio = trait("traffic_ratio", 1.0), trait("in_situ_ratio", 1.0)
        self._overlap = trait("overlap_ratio", 1.0) * self.code.data_overlap

    def of(self, layout: Layout, groups: dict[str, Group]) -> Stages:
        """Return the stages of a layout."""
        sharded = (layout.shape, groups["shard"]) if layout.sharding == "parameters" else ()
        block = (*_block_key(layout, groups), sharded)
        key = (block, groups.get("pp"), layout.schedule, layout.stages_per_rank)
        if key not in self._stages:
            self._stages[key] = self._made(layout, groups, block)
        return self._stages[key]

    def exposed(self, message: Seconds, behind_s: float, layout: Layout) -> float:
        """Return the exposed seconds of a data-parallel message if ``behind_s`` of work can hide it."""
        beside = self.code.overlaps_beside_tensor or layout.shape.size("tp") == 1
        overlap = self._overlap if beside else 0.0
        return message.total - overlap * min(message.total, behind_s)

    def _priced(self, part: Passes, groups: dict[str, Group], *, ends: bool = False) -> Priced:
        """Price a part of the model; recomputation precedes the gradients.

        ``ends``: few large kernels that move exactly the counted bytes, and products in 16 bits.
        """
        again = self._sum(part.recompute, groups, ends=ends)
        everything = (*part.forward, *part.backward_input, *part.backward_weight, *part.recompute)
        return Priced(
            self._sum(part.forward, groups, ends=ends),
            again.plus(self._sum(part.backward_input, groups, ends=ends)),
            self._sum(part.backward_weight, groups, ends=ends),
            sum(operation.kernels if isinstance(operation, MemoryKernels) else 1.0 for operation in everything),
        )

    def _sum(self, part: Iterable[Operation], groups: dict[str, Group], *, ends: bool) -> Seconds:
        """Price operations.

        Messages are hidden one after the other: a ring behind attention, tensor parallelism behind products.
        """
        matmul = attention = memory = 0.0
        messages = []
        for operation in part:
            if isinstance(operation, MatmulKernel):
                matmul += self.times.matmul(operation, wide=ends)
            elif isinstance(operation, BlockAttention):
                attention += self.times.attention(operation)
            elif isinstance(operation, MemoryKernels):
                memory += self.times.traffic(operation, 1.0 if ends else self._traffic_ratio)
            else:
                messages.append(operation)
        work = Seconds(matmul * self._ratio, attention * self._ratio, memory * self._ratio)
        ring = groups["cp"].ranks if "cp" in groups else 1  # the last step's keys are there before it begins
        free = {"attention": work.attention * (1 - 1 / ring), "matmul": work.matmul}
        overlap = {"": 0.0, "attention": 1.0, "products": self.code.tensor_overlap}
        for sent in messages:
            behind = "attention" if sent.collective == "ring" else "matmul"
            group = groups.get(sent.axis)
            copies = self.model.top_k if sent.axis == "ep" and self.code.routes_once else 1
            message = self.links.seconds(sent.collective, sent.message_bytes, group, sent.calls, copies)
            hidden = overlap[sent.beside] * min(message.total, free[behind])
            free[behind] = max(0.0, free[behind] - message.total)
            work = work.waiting(message, message.total - hidden)
        return work

    def _parts(self, layout: Layout, groups: dict[str, Group]) -> tuple[Priced, Priced]:
        """Price one micro-batch of (a dense block, a block with experts)."""
        key = _block_key(layout, groups)
        if key not in self._blocks:
            share = Share(model=self.model, layout=layout, code=self.code)
            dense, expert = (
                self._adding_up(
                    self._priced(operations.block(share, experts=experts), groups),
                    operations.block_share(self.model, layout, experts=experts),
                    layout,
                )
                if self.model.experts or not experts
                else Priced()
                for experts in (False, True)
            )
            self._blocks[key] = dense, expert
        return self._blocks[key]

    def _ends_of(self, layout: Layout, groups: dict[str, Group]) -> tuple[Priced, Priced]:
        """Price one micro-batch of (embedding, head), which are neither recomputed nor gathered."""
        size = layout.shape.size
        key = (size("tp"), size("cp"), groups.get("tp"), layout.micro_batch_size, layout.sequence_parallel)
        if key not in self._ends:
            share = Share(model=self.model, layout=layout, code=self.code)
            embedding, head = operations.embedding(share), operations.head(share)
            self._ends[key] = self._priced(embedding, groups, ends=True), self._priced(head, groups, ends=True)
        return self._ends[key]

    def _adding_up(self, part: Priced, parameters: float, layout: Layout) -> Priced:
        """Add the traffic of gradient accumulation to a part of the model."""
        if layout.sharding == "parameters" and not self.code.scattered_bytes:
            return part
        return part._replace(
            backward_weight=self._moving(part.backward_weight, parameters * self.code.accumulation_bytes)
        )

    def _made(self, layout: Layout, groups: dict[str, Group], block: object) -> Stages:
        kinds, order = stage_kinds(self.model.layers, self.model.expert_layers, layout.stages)
        priced = [self._kind(kind, layout, groups, block) for kind in kinds]
        if layout.shape.size("pp") > 1:
            message = self._stage_message(layout, groups)
            priced = [
                stage._replace(
                    forward=stage.forward if last else stage.forward.plus(message),
                    backward_input=stage.backward_input if first else stage.backward_input.plus(message),
                )
                for stage, (_, _, first, last) in zip(priced, kinds, strict=True)
            ]
        totals = [stage.total for stage in priced]
        return Stages(
            each=tuple([priced[kind] for kind in order]),
            busiest=_busiest(layout, order, priced, totals),
            work_s=sum([totals[kind] for kind in order]),
            times=_times(priced, order),
        )

    def _kind(self, kind: StageKind, layout: Layout, groups: dict[str, Group], block: object) -> Priced:
        """Price a stage without its messages; pipelines with the same blocks per stage share it."""
        layers, experts, first, last = kind
        key = (block, kind)
        if key not in self._kinds:
            dense, expert = self._parts(layout, groups)
            embedding, head = self._ends_of(layout, groups)
            stage = Priced()
            own = operations.end_parameters(self.model, layout, first=first, last=last)
            if layout.sharding == "parameters":
                plain = self._gathered(dense, layout, groups, experts=False)
                mixed = self._gathered(expert, layout, groups, experts=True) if experts else plain
                dense, expert = plain.block, mixed.block
                nearest = mixed if experts == layers else plain  # dense blocks come first
                stage = self._sharded_ends(nearest, embedding if first else Priced(), own, layout, groups)
            stage = stage.plus(dense, layers - experts)
            if experts:
                stage = stage.plus(expert, experts)
            if first:
                stage = stage.plus(embedding)
            if last:
                stage = stage.plus(head)
            self._kinds[key] = self._adding_up(stage, own, layout)
        return self._kinds[key]

    # -- sharded parameters --------------------------------------------------------------------------------------
    # Each block is gathered before its passes, its gradient scattered after them.  A gather hides behind the block
    # before, a scatter behind the backward of the block that follows.  Nothing is before the first block but the
    # embedding, whose own parameters everything waits for, and nothing follows the embedding's scatter.

    def _gathered(self, block: Priced, layout: Layout, groups: dict[str, Group], *, experts: bool) -> Gathered:
        """Price a block with its messages: two gathers, and a scatter if every micro-batch scatters.

        If the host waits for routes, most of a block is over when the gather of the next one begins.
        """
        code, parameters = self.code, operations.block_share(self.model, layout, experts=experts)
        routed = operations.routed_share(self.model, layout) if experts else 0.0
        gather, scatter = self.sharded_messages(parameters, layout, groups, routed)
        backward = self._moving(block.backward_input, parameters * code.sharded_bytes)
        gather_waits_s = self.exposed(gather, backward.total + block.backward_weight.total, layout)
        both = gather.plus(scatter)
        waits_s = self.exposed(both, backward.total + block.backward_weight.total, layout)
        hides_s = 0.0 if experts and code.waits_for_routes else block.forward.total
        forward_waits_s = self.exposed(gather, hides_s, layout)
        ends = backward.waiting(gather, gather_waits_s) if code.scattered_bytes else backward.waiting(both, waits_s)
        return Gathered(
            block=block._replace(forward=block.forward.waiting(gather, forward_waits_s), backward_input=ends),
            gather=gather,
            scatter=scatter,
            gather_waits_s=forward_waits_s,
            scatter_waits_s=max(0.0, waits_s - gather_waits_s),
        )

    def _sharded_ends(
        self, nearest: Gathered, embedding: Priced, parameters: float, layout: Layout, groups: dict[str, Group]
    ) -> Priced:
        """Price the additional waits of a stage per micro-batch: for its ends, and for its first block."""
        gather, scatter = self.sharded_messages(parameters, layout, groups)
        ranks = groups["shard"].ranks
        moved = parameters * self.code.sharded_bytes / 2  # gathered once
        first_s = self.exposed(nearest.gather, embedding.forward.total + moved * self.second_per_byte, layout)
        forward = self._moving(NONE, moved * (1 + 1 / ranks)).plus(gather)
        forward = forward.waiting(nearest.gather, max(0.0, first_s - nearest.gather_waits_s))
        backward = NONE if self.code.scattered_bytes else self._last(nearest, embedding, scatter, layout)
        return Priced(forward=forward, backward_input=backward)

    def scattered_once(self, layout: Layout, groups: dict[str, Group]) -> Seconds:
        """Price the scatter of sharded gradients if only the last micro-batch of a step sends them."""
        if layout.sharding != "parameters" or not self.code.scattered_bytes:
            return NONE
        experts = bool(self.model.expert_layers)
        nearest = self._gathered(self._parts(layout, groups)[experts], layout, groups, experts=experts)
        blocks = layout.most_layers(self.model.layers)
        ends = operations.end_parameters(self.model, layout, first=True, last=layout.stages == 1)
        each = operations.block_share(self.model, layout, experts=experts)
        moving = self._moving(NONE, (ends + blocks * each) * self.code.scattered_bytes)
        every = moving.waiting(nearest.scatter, blocks * nearest.scatter_waits_s)
        _, scatter = self.sharded_messages(ends, layout, groups)
        return every.plus(self._last(nearest, self._ends_of(layout, groups)[0], scatter, layout))

    def _last(self, nearest: Gathered, embedding: Priced, scatter: Seconds, layout: Layout) -> Seconds:
        """Price the wait at the end of the backward pass.

        The embedding's backward pass hides the first block's scatter; nothing hides the scatter of embedding and head.
        """
        last_s = self.exposed(nearest.scatter, embedding.backward_s, layout)
        waits = NONE.waiting(nearest.scatter, max(0.0, last_s - nearest.scatter_waits_s))
        return waits.plus(scatter)

    def sharded_messages(
        self, parameters: float, layout: Layout, groups: dict[str, Group], routed: float = 0.0
    ) -> tuple[Seconds, Seconds]:
        """Return (gather, scatter with the sum over replicas); ``routed`` are parameters of this rank's experts."""
        gather = scatter = NONE
        for count, group in ((parameters - routed, groups["shard"]), (routed, groups["experts"])):
            unit = sharded_unit(count * self.code.compute_bytes, count * self.code.gradient_bytes, group.ranks)
            for collective, size, is_of_copies in unit:
                each = self.links.seconds(collective, size, groups.get("dp_replicate") if is_of_copies else group)
                if collective == "all_gather":
                    gather = gather.plus(each)
                else:
                    scatter = scatter.plus(each)
        return gather, scatter

    def _moving(self, seconds: Seconds, moved_bytes: float) -> Seconds:
        return seconds._replace(memory=seconds.memory + moved_bytes * self.second_per_byte)

    # -- between stages ------------------------------------------------------------------------------------------

    def _stage_message(self, layout: Layout, groups: dict[str, Group]) -> Seconds:
        """Return the exposed message from a stage to the next for one micro-batch."""
        size = Share(model=self.model, layout=layout, code=self.code).activations().stage_bytes
        if self.code.stage_messages == "split" and not layout.sequence_parallel:
            size /= layout.shape.size("tp")
        return NONE.plus(self.links.seconds("send_recv", size, groups["pp"]), 1.0 - self.code.stage_overlap)


def _block_key(layout: Layout, groups: dict[str, Group]) -> tuple[object, ...]:
    size, group = layout.shape.size, groups.get
    return (
        *(size("tp"), size("cp"), size("ep"), group("tp"), group("cp"), group("ep")),
        *(layout.micro_batch_size, layout.checkpointing, layout.sequence_parallel, layout.sharding == "parameters"),
    )


def _busiest(layout: Layout, order: Sequence[int], priced: Sequence[Priced], totals: Sequence[float]) -> Priced:
    ranks = rank_kinds(layout.schedule, layout.shape.size("pp"), layout.stages_per_rank, tuple(order))
    busiest = max(ranks, key=lambda kinds: sum([totals[kind] for kind in kinds]))
    return functools.reduce(Priced.plus, [priced[kind] for kind in busiest])


def _times(priced: Sequence[Priced], order: Sequence[int]) -> StageTimes:
    passes = zip(*((part.total for part in kind[:3]) for kind in priced), strict=True)
    forward, inputs, weights = (tuple([seconds[kind] for kind in order]) for seconds in passes)
    return StageTimes(forward_s=forward, backward_input_s=inputs, backward_weight_s=weights)
