"""What one micro-batch takes in each stage of a pipeline: blocks, the ends of the model, what is gathered for them.

Layouts share most of it: blocks by tensor, context and expert parallelism and micro-batch, stages by their layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perfsuite.projection import operations
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.communication import Links, Message
from perfsuite.projection.kernels import KernelTimes
from perfsuite.projection.layout import Group, Layout
from perfsuite.projection.operations import Share
from perfsuite.projection.pipeline import StageKind, rank_kinds, stage_kinds
from perfsuite.projection.pricing import NONE, Priced, Prices, Seconds
from perfsuite.projection.traffic import Implementation
from perfsuite.schedules import StageTimes


@dataclass(frozen=True, kw_only=True)
class Stages:
    """All stages of a pipeline, one micro-batch in each."""

    each: tuple[Priced, ...]
    busiest: Priced
    """Of the rank that works longest, all its stages together."""
    work_s: float
    """Of all stages."""
    times: StageTimes
    """Of their passes."""


@dataclass(kw_only=True)
class StagePrices:
    """Prices the stages of any layout, and keeps them."""

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
        self._overlap = trait("overlap_ratio", self.code.data_overlap)

    def of(self, layout: Layout, groups: dict[str, Group]) -> Stages:
        """The stages of a layout."""
        sharded = (layout.shape, groups.get("dp_shard") or groups["data"]) if layout.sharding == "parameters" else ()
        block = (*_block_key(layout, groups), sharded)
        key = (block, groups.get("pp"), layout.schedule, layout.stages_per_rank)
        if key not in self._stages:
            self._stages[key] = self._made(layout, groups, block)
        return self._stages[key]

    def exposed(self, message: Message, behind_s: float, layout: Layout) -> float:
        """Seconds of a message of data parallelism that this much work does not hide."""
        beside = self.code.overlaps_beside_tensor or layout.shape.size("tp") == 1
        overlap = self._overlap if beside else 0.0
        return message.seconds - overlap * min(message.seconds, behind_s)

    def _prices(self, groups: dict[str, Group], *, ends: bool = False) -> Prices:
        """``ends``: few large kernels that move what they are counted to, and products in 16 bits."""
        return Prices(
            times=self.times,
            links=self.links,
            groups=groups,
            wide=ends,
            traffic_ratio=1.0 if ends else self._traffic_ratio,
            ratio=self._ratio,
        )

    def _parts(self, layout: Layout, groups: dict[str, Group]) -> tuple[Priced, Priced]:
        """(dense block, block with experts) of one micro-batch."""
        key = _block_key(layout, groups)
        if key not in self._blocks:
            share = Share(model=self.model, layout=layout, code=self.code)
            blocks = self._prices(groups)
            self._blocks[key] = (
                self._adding_up(
                    blocks.passes(operations.block(share, experts=False)),
                    operations.block_share(self.model, layout, experts=False),
                    layout,
                ),
                self._adding_up(
                    blocks.passes(operations.block(share, experts=True)),
                    operations.block_share(self.model, layout, experts=True),
                    layout,
                )
                if self.model.experts
                else Priced(),
            )
        return self._blocks[key]

    def _ends_of(self, layout: Layout, groups: dict[str, Group]) -> tuple[Priced, Priced]:
        """(embedding, head) of one micro-batch: nothing of them is computed again or gathered."""
        size = layout.shape.size
        key = (size("tp"), size("cp"), groups.get("tp"), layout.micro_batch_size, layout.sequence_parallel)
        if key not in self._ends:
            share, prices = Share(model=self.model, layout=layout, code=self.code), self._prices(groups, ends=True)
            self._ends[key] = prices.passes(operations.embedding(share)), prices.passes(operations.head(share))
        return self._ends[key]

    def _adding_up(self, part: Priced, parameters: float, layout: Layout) -> Priced:
        """A part of the model whose gradient is added to that of the micro-batches before."""
        if layout.sharding == "parameters" and not self.code.scattered_bytes:
            return part
        moved_s = parameters * self.code.accumulation_bytes * self.second_per_byte
        return part._replace(
            backward_weight=part.backward_weight._replace(memory=part.backward_weight.memory + moved_s)
        )

    def _made(self, layout: Layout, groups: dict[str, Group], block: object) -> Stages:
        kinds, order = stage_kinds(self.model.layers, self.model.expert_layers, layout.stages)
        priced = [self._kind(kind, layout, groups, block) for kind in kinds]
        if layout.shape.size("pp") > 1:
            message = self._stage_message(layout, groups)
            priced = [
                stage._replace(
                    forward=stage.forward if last else stage.forward.waiting(message, message.seconds),
                    backward_input=stage.backward_input
                    if first
                    else stage.backward_input.waiting(message, message.seconds),
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
        """A stage without its messages to the next, shared by all pipelines that cut blocks alike."""
        layers, experts, first, last = kind
        key = (block, kind)
        if key not in self._kinds:
            dense, expert = self._parts(layout, groups)
            embedding, head = self._ends_of(layout, groups)
            stage = Priced()
            own = operations.end_parameters(self.model, layout, first=first, last=last)
            if layout.sharding == "parameters":
                sharded = self._sharded(layout, groups)
                plain = self._gathered(sharded, dense, experts=False)
                mixed = self._gathered(sharded, expert, experts=True) if experts else plain
                dense, expert = plain.block, mixed.block
                nearest = mixed if experts == layers else plain  # dense blocks come first
                stage = sharded.ends(nearest, embedding if first else Priced(), own)
            stage = stage.plus(dense, layers - experts)
            if experts:
                stage = stage.plus(expert, experts)
            if first:
                stage = stage.plus(embedding)
            if last:
                stage = stage.plus(head)
            stage = self._adding_up(stage, own, layout)
            self._kinds[key] = stage
        return self._kinds[key]

    def _gathered(self, sharded: ShardedPrices, block: Priced, *, experts: bool) -> Gathered:
        return sharded.block(
            block, operations.block_share(self.model, sharded.layout, experts=experts), experts=experts
        )

    def _sharded(self, layout: Layout, groups: dict[str, Group]) -> ShardedPrices:
        return ShardedPrices(
            code=self.code,
            links=self.links,
            layout=layout,
            groups=groups,
            second_per_byte=self.second_per_byte,
            exposed=self.exposed,
        )

    def scattered_once(self, layout: Layout, groups: dict[str, Group]) -> Seconds:
        """Gradients of sharded parameters, where no micro-batch but the last of a step sends them."""
        if layout.sharding != "parameters" or not self.code.scattered_bytes:
            return NONE
        dense, expert = self._parts(layout, groups)
        sharded, experts = self._sharded(layout, groups), bool(self.model.expert_layers)
        blocks = math.ceil(self.model.layers / layout.stages) * layout.stages_per_rank
        return sharded.scattered(
            self._gathered(sharded, expert if experts else dense, experts=experts),
            self._ends_of(layout, groups)[0],
            operations.end_parameters(self.model, layout, first=True, last=layout.stages == 1),
            blocks,
            operations.block_share(self.model, layout, experts=experts),
        )

    def _stage_message(self, layout: Layout, groups: dict[str, Group]) -> Message:
        """What a stage sends to the next for one micro-batch, as far as nothing hides it."""
        if layout.shape.size("pp") == 1:
            return Message(0.0, 0.0)
        share = Share(model=self.model, layout=layout, code=self.code)
        size = 2.0 * share.outer_tokens * self.model.width
        if self.code.stage_messages == "split" and not layout.sequence_parallel:
            size /= share.tp
        message = self.links.seconds("send_recv", size, groups["pp"])
        exposed = 1.0 - self.code.stage_overlap
        return Message(exposed * message.link_s, exposed * message.network_s)


def _block_key(layout: Layout, groups: dict[str, Group]) -> tuple[object, ...]:
    size, group = layout.shape.size, groups.get
    return (
        *(size("tp"), size("cp"), size("ep"), group("tp"), group("cp"), group("ep")),
        *(layout.micro_batch_size, layout.checkpointing, layout.sequence_parallel, layout.sharding == "parameters"),
    )


def _busiest(layout: Layout, order: Sequence[int], priced: Sequence[Priced], totals: Sequence[float]) -> Priced:
    ranks = rank_kinds(layout.schedule, layout.shape.size("pp"), layout.stages_per_rank, tuple(order))
    first, *rest = max(ranks, key=lambda kinds: sum([totals[kind] for kind in kinds]))
    total = priced[first]
    for kind in rest:
        total = total.plus(priced[kind])
    return total


def _times(priced: Sequence[Priced], order: Sequence[int]) -> StageTimes:
    passes = zip(*((part.total for part in kind[:3]) for kind in priced), strict=True)
    forward, inputs, weights = (tuple([seconds[kind] for kind in order]) for seconds in passes)
    return StageTimes(forward_s=forward, backward_input_s=inputs, backward_weight_s=weights)


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """A block with what it waits for."""

    block: Priced
    gather: Message
    scatter: Message
    """Of one micro-batch, with the sum over copies of what is sharded."""
    gather_waits_s: float
    """That one pass does not hide."""
    scatter_waits_s: float


@dataclass(frozen=True, kw_only=True)
class ShardedPrices:
    """Prices the messages of sharded parameters and gradients of one layout."""

    code: Implementation
    links: Links
    layout: Layout
    groups: dict[str, Group]
    second_per_byte: float
    exposed: Callable[[Message, float, Layout], float]
    """(message, seconds of work, layout) -> seconds of the message that the work does not hide."""

    @property
    def group(self) -> Group:
        """Ranks that share parameters out."""
        return self.groups.get("dp_shard") or self.groups["data"]

    def block(self, block: Priced, parameters: float, *, experts: bool = False) -> Gathered:
        """A block of so many parameters on one rank: gathered twice; scattered here where every micro-batch is.

        Where the host waits for routes, most of a block is over when the next one's gather begins.
        """
        code = self.code
        gather, scatter = self._messages(parameters)
        backward = self._moving(block.backward_input, parameters * code.sharded_bytes)
        behind_s = backward.total + block.backward_weight.total
        gather_waits_s = self.exposed(gather, behind_s, self.layout)
        both = _together(gather, scatter)
        waits_s = self.exposed(both, behind_s, self.layout)
        hides_s = 0.0 if experts and code.waits_for_routes else block.forward.total
        forward_waits_s = self.exposed(gather, hides_s, self.layout)
        ends = backward.waiting(gather, gather_waits_s) if code.scattered_bytes else backward.waiting(both, waits_s)
        return Gathered(
            block=block._replace(forward=block.forward.waiting(gather, forward_waits_s), backward_input=ends),
            gather=gather,
            scatter=scatter,
            gather_waits_s=forward_waits_s,
            scatter_waits_s=max(0.0, waits_s - gather_waits_s),
        )

    def ends(self, nearest: Gathered, embedding: Priced, parameters: float) -> Priced:
        """What a stage waits for besides, each micro-batch: its ends, of so many parameters, and its first block."""
        gather, _ = self._messages(parameters)
        moved = parameters * self.code.sharded_bytes / 2  # gathered once
        copied_s = moved * self.second_per_byte
        first_s = self.exposed(nearest.gather, embedding.forward.total + copied_s, self.layout)
        forward = self._moving(NONE, moved * (1 + 1 / self.group.ranks)).waiting(gather, gather.seconds)
        forward = forward.waiting(nearest.gather, max(0.0, first_s - nearest.gather_waits_s))
        backward = NONE if self.code.scattered_bytes else self._last(nearest, embedding, parameters)
        return Priced(forward=forward, backward_input=backward)

    def scattered(self, nearest: Gathered, embedding: Priced, parameters: float, blocks: float, each: float) -> Seconds:
        """Once a step, where the last micro-batch alone scatters: blocks of ``each`` parameters, and the ends."""
        moved = (parameters + blocks * each) * self.code.scattered_bytes
        every = self._moving(NONE, moved).waiting(nearest.scatter, blocks * nearest.scatter_waits_s)
        return every.plus(self._last(nearest, embedding, parameters))

    def _last(self, nearest: Gathered, embedding: Priced, parameters: float) -> Seconds:
        """Behind the first block's scatter is the embedding's backward alone, behind that of the ends nothing."""
        _, scatter = self._messages(parameters)
        last_s = self.exposed(nearest.scatter, embedding.backward_s, self.layout)
        waits = NONE.waiting(nearest.scatter, max(0.0, last_s - nearest.scatter_waits_s))
        return waits.waiting(scatter, scatter.seconds)

    def _messages(self, parameters: float) -> tuple[Message, Message]:
        gather = self.links.seconds("all_gather", parameters * self.code.compute_bytes, self.group)
        gradients = parameters * self.code.gradient_bytes
        scatter = self.links.seconds("reduce_scatter", gradients, self.group)
        if self.layout.shape.size("dp_replicate") > 1:
            rest = self.links.seconds("all_reduce", gradients / self.group.ranks, self.groups["dp_replicate"])
            scatter = _together(scatter, rest)
        return gather, scatter

    def _moving(self, seconds: Seconds, moved_bytes: float) -> Seconds:
        return seconds._replace(memory=seconds.memory + moved_bytes * self.second_per_byte)


def _together(first: Message, second: Message) -> Message:
    return Message(first.link_s + second.link_s, first.network_s + second.network_s)
