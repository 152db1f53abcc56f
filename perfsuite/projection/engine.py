"""The step of any layout of one model on one device: blocks, stages, pipeline, data parallelism, optimizer, ranks.

A projector keeps what it priced, so that ten thousand layouts of one job cost as much as their different blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from perfsuite.projection import operations
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.communication import Links, Message
from perfsuite.projection.kernels import KernelTimes
from perfsuite.projection.layout import Group, Layout
from perfsuite.projection.operations import Share
from perfsuite.projection.pipeline import Pipeline
from perfsuite.projection.pricing import NONE, Priced, Prices, Seconds
from perfsuite.projection.traffic import Implementation
from perfsuite.schedules import StageTimes, stages_of
from perfsuite.schedules.catalog import find_schedule

_SPREAD_OF = 8
"""Ranks whose slowest a calibrated step already waited for."""


class StepTime(NamedTuple):
    """Seconds of a step; ``parts`` sum to ``seconds``."""

    seconds: float
    parts: tuple[tuple[str, str, float], ...]
    """(name, resource, seconds)."""
    bubble_ratio: float
    host_s: float
    """Seconds that the host needs to start all kernels of a step."""
    stages: tuple[Priced, ...]


@dataclass(kw_only=True)
class Projector:
    """Everything about a job but its layout."""

    model: Architecture
    code: Implementation
    calibration: Calibration
    devices_per_node: int
    dtype: str
    simulated: bool = True
    """Whether unequal stages are simulated; else estimated, for ranking many layouts."""
    times: KernelTimes = field(init=False)
    _blocks: dict[object, tuple[Priced, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.times = KernelTimes(calibration=self.calibration, dtype=self.dtype)
        self._links = Links(calibration=self.calibration, devices_per_node=self.devices_per_node)
        trait = self.calibration.value
        memory = trait("memory_gb_per_s") * 1e9
        self._second_per_byte = 1 / memory if memory else 0.0
        self._traffic_ratio, self._ratio = trait("traffic_ratio", 1.0), trait("in_situ_ratio", 1.0)
        self._overlap = trait("overlap_ratio", self.code.data_overlap)
        self._spread = trait("rank_spread_ratio")
        self._host_s, self._launch_s = trait("host_step_s"), trait("launch_us") * 1e-6

    def step(self, layout: Layout) -> StepTime:
        """The step of one layout."""
        groups = layout.groups(self.devices_per_node)
        stages = self._stages(layout, groups)
        count, ranks = layout.num_micro_batches, layout.shape.size("pp")
        parts: list[tuple[str, str, float]] = []
        busiest = self._busiest_rank(layout, stages)
        for name, seconds in (
            ("forward", busiest.forward),
            ("backward", busiest.backward_input.plus(busiest.backward_weight)),
        ):
            parts += [(name, resource, count * value) for resource, value in zip(Seconds._fields, seconds, strict=True)]
        work_s = sum(seconds for _, _, seconds in parts)
        bubble_ratio = 0.0
        if ranks > 1:
            took = self._pipeline(layout, stages).step_s(simulated=self.simulated)
            parts.append(("bubble", "bubble", took - work_s))
            busy = count * sum(stage.forward.total + _backward(stage) for stage in stages)
            bubble_ratio = 1 - busy / (ranks * took)
        parts += self._end(layout, groups, stages)
        launched = count * busiest.kernels * self._launch_s
        device_s = sum(seconds for _, _, seconds in parts)
        parts.append(("launching kernels", "host", max(0.0, launched - device_s)))
        parts.append(("host", "host", self._host_s))
        slower = self._slowest_of(layout.world_size) * sum(seconds for _, _, seconds in parts)
        parts.append(("slowest rank", "straggler", slower))
        kept = tuple(part for part in parts if part[2])
        return StepTime(sum(part[2] for part in kept), kept, bubble_ratio, launched + self._host_s, stages)

    # -- what one micro-batch takes in each stage ---------------------------------------------------------------------

    def _prices(self, groups: dict[str, Group], *, wide: bool = False) -> Prices:
        return Prices(
            times=self.times,
            links=self._links,
            groups=groups,
            wide=wide,
            traffic_ratio=self._traffic_ratio,
            ratio=self._ratio,
        )

    def _parts(self, layout: Layout, groups: dict[str, Group]) -> tuple[Priced, ...]:
        """(dense block, block with experts, embedding, head) of one micro-batch."""
        size = layout.shape.size
        key = (
            *(size(axis) for axis in ("tp", "cp", "ep")),
            *(groups.get(axis) for axis in ("tp", "cp", "ep")),
            (layout.micro_batch_size, layout.checkpointing, layout.sequence_parallel, layout.sharding),
        )
        if key not in self._blocks:
            share = Share(model=self.model, layout=layout, code=self.code)
            blocks, ends = self._prices(groups), self._prices(groups, wide=True)
            self._blocks[key] = (
                self._adding_up(blocks.passes(operations.block(share, experts=False)), layout, experts=False),
                self._adding_up(blocks.passes(operations.block(share, experts=True)), layout, experts=True)
                if self.model.experts
                else Priced(),
                ends.passes(operations.embedding(share)),
                ends.passes(operations.head(share)),
            )
        return self._blocks[key]

    def _adding_up(self, block: Priced, layout: Layout, *, experts: bool) -> Priced:
        """A block whose gradient is added to that of the micro-batches before."""
        if layout.sharding == "parameters":
            return block
        here = block_share(self.model, layout, experts=experts)
        moved_s = here * self.code.accumulation_bytes * self._second_per_byte
        return block._replace(
            backward_weight=block.backward_weight._replace(memory=block.backward_weight.memory + moved_s)
        )

    def _stages(self, layout: Layout, groups: dict[str, Group]) -> tuple[Priced, ...]:
        dense, expert, embedding, head = self._parts(layout, groups)
        if layout.sharding == "parameters":
            dense, expert = (
                self._sharded(block, layout, groups, bool(index)) for index, block in enumerate((dense, expert))
            )
        message = self._stage_message(layout, groups)
        count = layout.stages
        even, more = divmod(self.model.layers, count)
        stages, before = [], 0
        for index in range(count):
            layers = even + (index < more)
            experts = max(0, before + layers - max(before, self.model.dense_layers)) if self.model.experts else 0
            stage = Priced().plus(dense, layers - experts).plus(expert, experts)
            if index == 0:
                stage = stage.plus(embedding)
            if index == count - 1:
                stage = stage.plus(head)
            if layout.shape.size("pp") > 1:
                stage = stage._replace(
                    forward=stage.forward.waiting(message, message.seconds if index < count - 1 else 0.0),
                    backward_input=stage.backward_input.waiting(message, message.seconds if index else 0.0),
                )
            stages.append(stage)
            before += layers
        return tuple(stages)

    def _sharded(self, block: Priced, layout: Layout, groups: dict[str, Group], experts: bool) -> Priced:
        """A block whose parameters are gathered before each pass and whose gradients are scattered after it."""
        size = block_share(self.model, layout, experts=experts)
        group = groups.get("dp_shard") or groups["data"]
        gather = self._links.seconds("all_gather", size * self.code.compute_bytes, group)
        scatter = self._links.seconds("reduce_scatter", size * self.code.gradient_bytes, group)
        forward, backward = block.forward, block.backward_input
        both = Message(gather.link_s + scatter.link_s, gather.network_s + scatter.network_s)
        if layout.shape.size("dp_replicate") > 1:
            rest = self._links.seconds(
                "all_reduce", size * self.code.gradient_bytes / group.ranks, groups["dp_replicate"]
            )
            both = Message(both.link_s + rest.link_s, both.network_s + rest.network_s)
        backward = backward._replace(memory=backward.memory + size * self.code.sharded_bytes * self._second_per_byte)
        behind = backward.total + block.backward_weight.total
        waits = self._exposed(both, behind, layout)
        if not self.code.prefetches_backward:  # nothing but the scatter is left to hide
            scattered = both.seconds - gather.seconds
            waits = gather.seconds + self._exposed(Message(scattered, 0.0), behind, layout)
        return block._replace(
            forward=forward.waiting(gather, self._exposed(gather, forward.total, layout)),
            backward_input=backward.waiting(both, waits),
        )

    def _exposed(self, message: Message, behind_s: float, layout: Layout) -> float:
        beside = self.code.overlaps_beside_tensor or layout.shape.size("tp") == 1
        overlap = self._overlap if beside else 0.0
        return message.seconds - overlap * min(message.seconds, behind_s)

    def _stage_message(self, layout: Layout, groups: dict[str, Group]) -> Message:
        """What a stage sends to the next for one micro-batch, as far as nothing hides it."""
        if layout.shape.size("pp") == 1:
            return Message(0.0, 0.0)
        share = Share(model=self.model, layout=layout, code=self.code)
        size = 2.0 * share.outer_tokens * self.model.width
        if self.code.stage_messages == "split" and not layout.sequence_parallel:
            size /= share.tp
        message = self._links.seconds("send_recv", size, groups["pp"])
        exposed = 1.0 - self.code.stage_overlap
        return Message(exposed * message.link_s, exposed * message.network_s)

    # -- the whole step -----------------------------------------------------------------------------------------------

    def _pipeline(self, layout: Layout, stages: tuple[Priced, ...]) -> Pipeline:
        return Pipeline(
            schedule=layout.schedule or "1f1b",
            ranks=layout.shape.size("pp"),
            num_micro_batches=layout.num_micro_batches,
            stages_per_rank=layout.stages_per_rank,
            times=StageTimes(
                forward_s=tuple(stage.forward.total for stage in stages),
                backward_input_s=tuple(stage.backward_input.total for stage in stages),
                backward_weight_s=tuple(stage.backward_weight.total for stage in stages),
            ),
        )

    def _busiest_rank(self, layout: Layout, stages: tuple[Priced, ...]) -> Priced:
        ranks = layout.shape.size("pp")
        if ranks == 1:
            return stages[0]
        placement = find_schedule(layout.schedule or "1f1b").placement
        sums = []
        for rank in range(ranks):
            total = Priced()
            for stage in stages_of(rank, ranks=ranks, stages_per_rank=layout.stages_per_rank, placement=placement):
                total = total.plus(stages[stage])
            sums.append(total)
        return max(sums, key=lambda total: total.forward.total + _backward(total))

    def _end(
        self, layout: Layout, groups: dict[str, Group], stages: tuple[Priced, ...]
    ) -> list[tuple[str, str, float]]:
        """Gradients and parameters of data parallelism, as far as nothing hides them, and the optimizer."""
        parts: list[tuple[str, str, float]] = []
        seconds = self._links.seconds
        dense, expert = rank_parameters(self.model, layout)
        window = min(layout.shape.size("pp"), layout.num_micro_batches) if layout.stages_per_rank > 1 else 1
        backward_s, forward_s = window * _backward(stages[0]), window * stages[0].forward.total
        for size, axis in ((dense, "data"), (expert, "dp")):
            group = groups.get(axis)
            if layout.sharding == "parameters" or group is None or group.ranks == 1 or not size:
                continue
            gradients = size * self.code.gradient_bytes
            if layout.sharding == "none":
                parts += self._waits("gradients", seconds("all_reduce", gradients, group), backward_s, layout)
            else:
                parts += self._waits("gradients", seconds("reduce_scatter", gradients, group), backward_s, layout)
                gather = seconds("all_gather", size * self.code.compute_bytes, group)
                parts += self._waits("parameters", gather, forward_s, layout)
        if self.model.tied and layout.shape.size("pp") > 1:
            words = self.model.embedding_parameters / layout.shape.size("tp") * self.code.gradient_bytes
            pair = Group(
                ranks=2,
                per_node=1 if groups["pp"].nodes > 1 else 2,
                nodes=min(2, groups["pp"].nodes),
                stride=groups["pp"].stride,
                concurrent=min(groups["pp"].stride, self.devices_per_node),
            )
            parts += self._waits("tied embedding", seconds("all_reduce", words, pair), 0.0, layout)
        own = dense / (1 if layout.sharding == "none" else groups["data"].ranks)
        own += expert / (1 if layout.sharding == "none" or "dp" not in groups else groups["dp"].ranks)
        parts.append(("optimizer", "memory", own * self.code.optimizer_bytes * self._second_per_byte))
        return parts

    def _waits(self, name: str, message: Message, behind_s: float, layout: Layout) -> list[tuple[str, str, float]]:
        exposed = NONE.waiting(message, self._exposed(message, behind_s, layout))
        return [(name, "link", exposed.link), (name, "network", exposed.network)]

    def _slowest_of(self, ranks: int) -> float:
        """How much longer the slowest of so many ranks takes than that of 8: sigma (E max of N - E max of 8)."""
        if ranks <= _SPREAD_OF or not self._spread:
            return 0.0
        return self._spread * (expected_maximum(ranks) - expected_maximum(_SPREAD_OF))


def _backward(stage: Priced) -> float:
    return stage.backward_input.total + stage.backward_weight.total


def expected_maximum(count: int) -> float:
    """Of so many standard normal numbers, by Blom's approximation.

    >>> round(expected_maximum(8), 2), round(expected_maximum(2048), 2)
    (1.43, 3.43)
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def block_share(model: Architecture, layout: Layout, *, experts: bool) -> float:
    """Parameters of one block on one rank."""
    routed = model.experts * model.matrices * model.width * model.expert_hidden if experts else 0
    rest = model.block_parameters(experts=experts) - routed
    return (rest + routed / layout.shape.size("ep")) / layout.shape.size("tp")


def rank_parameters(model: Architecture, layout: Layout) -> tuple[float, float]:
    """(dense, experts') parameters of the fullest rank before data parallelism shares them out."""
    tp, ep, pp = (layout.shape.size(axis) for axis in ("tp", "ep", "pp"))
    layers = math.ceil(model.layers / layout.stages) * layout.stages_per_rank
    routed = model.experts * model.matrices * model.width * model.expert_hidden if model.experts else 0
    expert_layers = min(layers, model.expert_layers)
    dense = layers * model.block_parameters()
    if expert_layers:
        rest = model.block_parameters(experts=True) - routed
        dense = (layers - expert_layers) * model.block_parameters() + expert_layers * rest
    ends = model.embedding_parameters if model.vocabulary else 0
    if pp == 1:
        ends += model.head_parameters if model.vocabulary else 0
    return (dense + ends + model.more_parameters) / tp, expert_layers * routed / tp / ep
