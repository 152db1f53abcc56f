"""Price the step of any layout of one model: blocks, stages, pipeline, data parallelism, optimizer, ranks.

A projector caches blocks and stages, so ten thousand layouts of a job cost as much as their different blocks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from perfsuite.projection.architecture import Architecture
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.implementation import Implementation
from perfsuite.projection.kernels import NONE, KernelTimes, Links, Seconds
from perfsuite.projection.layout import Group, Layout
from perfsuite.projection.pipeline import PricedPipeline
from perfsuite.projection.stages import Priced, StagePrices, Stages
from perfsuite.statistics.robust import expected_maximum

_SPREAD_OF = 8
"""A calibrated step already contains the wait for the slowest of this many ranks."""


class StepTime(NamedTuple):
    """Seconds of a step; ``parts`` sum to ``seconds``."""

    seconds: float
    parts: tuple[tuple[str, str, float], ...]
    bubble_ratio: float
    host_s: float
    """Seconds that the host needs to start all kernels of a step."""
    stages: Stages


@dataclass(kw_only=True)
class Projector:
    """Everything about a job except its layout."""

    model: Architecture
    code: Implementation
    calibration: Calibration
    devices_per_node: int
    dtype: str
    times: KernelTimes = field(init=False)
    _pipelines: dict[object, float] = field(default_factory=dict, init=False)
    _parameters: dict[object, tuple[float, float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.times = KernelTimes(calibration=self.calibration, dtype=self.dtype)
        self._links = Links(calibration=self.calibration, devices_per_node=self.devices_per_node)
        self._stages = StagePrices(
            model=self.model, code=self.code, calibration=self.calibration, times=self.times, links=self._links
        )
        trait = self.calibration.value
        self._spread = trait("rank_spread_ratio")
        self._optimizer = trait("optimizer_ratio", 1.0)
        self._host_s, self._launch_s = trait("host_step_s"), trait("launch_us") * 1e-6

    def step(self, layout: Layout, *, simulated: bool = True) -> StepTime:
        """Return the step of one layout. Unequal stages are ``simulated``, or estimated to rank many layouts."""
        groups = layout.groups(self.devices_per_node)
        stages = self._stages.of(layout, groups)
        count, ranks, busiest = layout.num_micro_batches, layout.shape.size("pp"), stages.busiest
        parts: list[tuple[str, str, float]] = []
        for name, seconds in (
            ("forward", busiest.forward),
            ("backward", busiest.backward_input.plus(busiest.backward_weight)),
        ):
            parts += [(name, resource, count * value) for resource, value in zip(Seconds._fields, seconds, strict=True)]
        bubble_ratio = 0.0
        if ranks > 1:
            took = self._pipeline_s(layout, stages, simulated=simulated)
            parts.append(("bubble", "bubble", took - sum([seconds for _, _, seconds in parts])))
            bubble_ratio = 1 - count * stages.work_s / (ranks * took)
        parts += self._end(layout, groups, stages.each[0])
        scattered = self._stages.scattered_once(layout, groups)
        parts += [("gradients", resource, value) for resource, value in zip(Seconds._fields, scattered, strict=True)]
        launched = count * busiest.kernels * self._launch_s
        device_s = sum([seconds for _, _, seconds in parts])
        waits_s = max(0.0, launched - device_s)
        beyond = expected_maximum(max(_SPREAD_OF, layout.world_size)) - expected_maximum(_SPREAD_OF)
        slower_s = self._spread * beyond * (device_s + waits_s + self._host_s)
        parts += [
            ("launching kernels", "host", waits_s),
            ("host", "host", self._host_s),
            ("slowest rank", "straggler", slower_s),
        ]
        kept = tuple([part for part in parts if part[2]])
        seconds_s = device_s + waits_s + self._host_s + slower_s
        return StepTime(seconds_s, kept, bubble_ratio, launched + self._host_s, stages)

    def _pipeline_s(self, layout: Layout, stages: Stages, *, simulated: bool) -> float:
        """Return the seconds from the first to the last action of the pipeline, for any data parallelism."""
        # Stages live as long as this projector.
        key = (id(stages), layout.schedule, layout.num_micro_batches, simulated)
        if key not in self._pipelines:
            self._pipelines[key] = PricedPipeline(
                schedule=layout.schedule or "1f1b",
                ranks=layout.shape.size("pp"),
                num_micro_batches=layout.num_micro_batches,
                stages_per_rank=layout.stages_per_rank,
                times=stages.times,
            ).step_s(simulated=simulated)
        return self._pipelines[key]

    def _end(self, layout: Layout, groups: dict[str, Group], first: Priced) -> list[tuple[str, str, float]]:
        """Price the end of a step: exposed messages of data parallelism, and the optimizer."""
        parts: list[tuple[str, str, float]] = []
        seconds, size = self._links.seconds, layout.shape.size
        place = (size("tp"), size("ep"), size("pp"), layout.stages_per_rank)
        if place not in self._parameters:
            self._parameters[place] = rank_parameters(self.model, layout)
        dense, expert = self._parameters[place]
        window = min(size("pp"), layout.num_micro_batches) if layout.stages_per_rank > 1 else 1
        backward_s, forward_s = window * first.backward_s, window * first.forward.total
        copied, shard, experts = layout.sharding == "none", groups["shard"], groups["experts"]
        if copied:
            for count, axes in ((dense, ("data",)), (expert, ("experts", "dp_replicate"))):
                each = [seconds("all_reduce", count * self.code.gradient_bytes, groups.get(axis)) for axis in axes]
                if any(message.total for message in each):
                    parts += self._reduced(count, functools.reduce(Seconds.plus, each), backward_s, layout)
        elif layout.sharding != "parameters":
            gather, scatter = self._stages.sharded_messages(dense + expert, layout, groups, expert)
            parts += self._waits("gradients", scatter, backward_s, layout)
            anew = self.code.gathers_each and layout.sharding == "gradients" and size("pp") == 1
            times = layout.num_micro_batches if anew else 1
            waits = self._waits("parameters", gather, forward_s, layout)
            parts += [(name, resource, times * value) for name, resource, value in waits]
        if layout.sequence_parallel:
            parts += self._waits("norms", self._norms(layout, groups), 0.0, layout)
        if self.model.tied and size("pp") > 1:
            words = self.model.vocabulary * self.model.width / size("tp")
            words *= self.code.kept_gradient_bytes or self.code.gradient_bytes
            words /= shard.ranks if layout.sharding in ("gradients", "parameters") else 1
            stride, nodes = groups["pp"].stride, min(2, groups["pp"].nodes)
            concurrent = min(stride, self.devices_per_node)
            pair = Group(ranks=2, per_node=2 // nodes, nodes=nodes, stride=stride, concurrent=concurrent)
            parts += self._waits("tied embedding", seconds("all_reduce", words, pair), 0.0, layout)
        own = dense / (1 if copied else shard.ranks) + expert / (1 if copied else experts.ranks)
        optimizer_s = own * self.code.optimizer_bytes * self._stages.second_per_byte
        started_s = self.calibration.value("kernel_us") * 1e-6 * self._optimizer_kernels(layout)
        parts.append(("optimizer", "memory", self._optimizer * optimizer_s + started_s))
        return parts

    def _norms(self, layout: Layout, groups: dict[str, Group]) -> Seconds:
        """Price the sum over tp of the gradients of norms and routers; each rank computed them from its own tokens.

        FSDP2 keeps each of them as a separate parameter, so they are summed one by one.
        """
        model, code, layers = self.model, self.code, layout.most_layers(self.model.layers)
        norms = (2 * layers + 1) * (2 if model.biases else 1)
        routers = min(layers, model.expert_layers)
        size = code.compute_bytes * model.width * (norms + routers * model.experts)
        calls = norms + routers if code.kept_gradient_bytes else 1
        return self._links.seconds("all_reduce", size / calls, groups.get("tp"), calls)

    def _optimizer_kernels(self, layout: Layout) -> int:
        """Return the optimizer's kernels: one set for the list of parameters, or one per parameter without lists."""
        code = self.code
        if not code.block_tensors:
            return code.optimizer_kernels
        ends = math.ceil(code.end_tensors / layout.shape.size("pp"))
        return code.optimizer_kernels * (layout.most_layers(self.model.layers) * code.block_tensors + ends)

    def _reduced(self, count: float, message: Seconds, behind_s: float, layout: Layout) -> list[tuple[str, str, float]]:
        """Price gradients in buckets. The last bucket is never hidden, and all gradients are copied into buckets."""
        code = self.code
        last_s = _last_bucket(count * code.gradient_bytes, code.bucket_bytes) * message.total
        copied_s = count * code.bucket_copied_bytes * self._stages.second_per_byte
        waits = self._waits("gradients", message, behind_s, layout, least_s=last_s)
        return [*waits, ("gradients into buckets", "memory", copied_s)]

    def _waits(
        self, name: str, message: Seconds, behind_s: float, layout: Layout, least_s: float = 0.0
    ) -> list[tuple[str, str, float]]:
        exposed = NONE.waiting(message, max(least_s, self._stages.exposed(message, behind_s, layout)))
        return [(name, "link", exposed.link), (name, "network", exposed.network)]


def _last_bucket(gradient_bytes: float, bucket_bytes: float) -> float:
    """Return the share of the gradients in the last bucket; the other buckets are full.

    Source: torch's DistributedDataParallel, whose first bucket is smaller only without ``bucket_cap_mb``.

    >>> _last_bucket(20.0, 25.0), _last_bucket(60.0, 25.0), _last_bucket(50.0, 25.0)
    (1.0, 0.16666666666666666, 0.5)
    """
    if not bucket_bytes or not gradient_bytes:
        return 0.0
    return ((gradient_bytes % bucket_bytes) or bucket_bytes) / gradient_bytes


def rank_parameters(model: Architecture, layout: Layout) -> tuple[float, float]:
    """Return (dense, expert) parameters of the fullest rank before data parallelism shards them."""
    tp, ep, pp = (layout.shape.size(axis) for axis in ("tp", "ep", "pp"))
    layers = layout.most_layers(model.layers)
    routed = model.experts * model.matrices * model.width * model.expert_hidden
    expert_layers = min(layers, model.expert_layers)
    dense = (layers - expert_layers) * model.block_parameters() + model.more_parameters
    if expert_layers:
        dense += expert_layers * (model.block_parameters(experts=True) - routed)
    if model.vocabulary:
        dense += model.embedding_parameters + (model.head_parameters if pp == 1 else 0)
    return dense / tp, expert_layers * routed / tp / ep
