"""What the fullest rank has allocated at most, by component.

Activations are counted per block and micro-batch from what its code keeps, times the micro-batches that the schedule
has in flight; the rest is parameters over the ranks that share them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from perfsuite.metrics.pipeline import peak_activations
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.layout import Layout
from perfsuite.projection.operations import Share
from perfsuite.projection.traffic import Implementation
from perfsuite.schedules import StageTimes, find_schedule, make_schedule, simulate, stages_of

MEMORY_LIMIT = 0.92
"""Share of the card from which on steps slow down (allocator retries): a projection is then a lower bound."""

USABLE = 0.985
"""Of a data sheet's memory, what the driver leaves: 39.4 of 40 GiB."""


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes that the fullest rank has allocated at most, by component."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float = 0.0
    temporary: float = 0.0
    """Gathered layers, a layer's weight gradient kept aside, a layer computed again."""
    communication: float = 0.0
    """Buckets and buffers."""
    capacity: float = 0.0
    """Of the device; 0: unknown."""

    @property
    def total(self) -> float:
        """All components."""
        parts = (self.parameters, self.gradients, self.optimizer, self.activations)
        return sum(parts) + self.logits + self.temporary + self.communication

    @property
    def share(self) -> float | None:
        """Of the capacity; None where that is unknown."""
        return self.total / self.capacity if self.capacity else None


def memory_of(model: Architecture, layout: Layout, code: Implementation, capacity: float = 0.0) -> MemoryBreakdown:
    """The fullest rank of a pipeline, or the one rank that all are alike."""
    ranks = layout.shape.size("pp")
    if ranks == 1:
        return _rank(model, layout, code, capacity, rank=0)
    some = range(ranks) if ranks <= 4 else (0, 1, ranks - 2, ranks - 1)
    return max((_rank(model, layout, code, capacity, rank=rank) for rank in some), key=lambda memory: memory.total)


def _rank(model: Architecture, layout: Layout, code: Implementation, capacity: float, *, rank: int) -> MemoryBreakdown:
    share = Share(model=model, layout=layout, code=code)
    stages = _stages(layout, rank)
    dense, routed = _parameters(share, stages)
    whole = dense + routed
    data, experts = layout.shape.replicas * layout.shape.size("cp"), layout.dp * layout.shape.size("cp")
    if layout.shape.size("dp_replicate") > 1:
        data, experts = (count // layout.shape.size("dp_replicate") for count in (data, experts))
    shared = dense / data + routed / experts
    sharding = layout.sharding
    kept, largest = _activations(share, stages, rank)
    last = layout.stages - 1 in stages
    logits = code.logit_bytes * share.tokens * model.vocabulary / share.tp if last else 0.0
    block = max(model.block_parameters(), model.block_parameters(experts=True) if model.experts else 0) / share.tp
    if model.experts:
        block = model.block_parameters() / share.tp
    return MemoryBreakdown(
        parameters=code.weight_bytes * (shared if sharding == "parameters" else whole),
        gradients=code.gradient_bytes * (shared if sharding in ("gradients", "parameters") else whole),
        optimizer=code.optimizer_state_bytes * (whole if sharding == "none" else shared),
        activations=kept,
        logits=logits,
        temporary=_temporary(share, block) + largest + max(0.0, _gradients_of_block(share) - logits),
        communication=code.buffer_bytes,
        capacity=capacity,
    )


def _temporary(share: Share, block: float) -> float:
    """Two gathered layers and a layer's whole gradient, or one matrix' gradient kept aside."""
    code = share.code
    if share.layout.sharding == "parameters":
        return block * (2 * code.compute_bytes + code.gradient_bytes)
    return block * code.aside_bytes


def _gradients_of_block(share: Share) -> float:
    """Of what an MLP keeps, while its backward runs: after the loss, when the logits are gone."""
    hidden = share.model.matrices * share.model.hidden / share.tp
    return 2.0 * share.tokens * hidden + 4.0 * share.outer_tokens * share.model.width


def _stages(layout: Layout, rank: int) -> tuple[int, ...]:
    ranks = layout.shape.size("pp")
    if ranks == 1:
        return (0,)
    placement = find_schedule(layout.schedule).placement
    return stages_of(rank, ranks=ranks, stages_per_rank=layout.stages_per_rank, placement=placement)


def _layers(share: Share, stage: int) -> tuple[int, int]:
    """(dense layers, layers with experts) of a stage."""
    even, more = divmod(share.model.layers, share.layout.stages)
    layers, before = even + (stage < more), stage * even + min(stage, more)
    if not share.model.experts:
        return layers, 0
    experts = max(0, before + layers - max(before, share.model.dense_layers))
    return layers - experts, experts


def _parameters(share: Share, stages: tuple[int, ...]) -> tuple[float, float]:
    """(shared by all data ranks, experts') of a rank with these stages."""
    model, layout = share.model, share.layout
    routed = model.experts * model.matrices * model.width * model.expert_hidden
    dense = experts = 0.0
    for stage in stages:
        plain, expert = _layers(share, stage)
        dense += plain * model.block_parameters()
        if expert:
            dense += expert * (model.block_parameters(experts=True) - routed)
            experts += expert * routed
    if 0 in stages:
        dense += model.embedding_parameters + model.more_parameters
    if layout.stages - 1 in stages and model.vocabulary:
        tied = model.vocabulary * model.width if model.tied and layout.stages > 1 else 0
        dense += model.head_parameters + tied
    return dense / share.tp, experts / share.tp / layout.shape.size("ep")


def block_bytes(share: Share, *, experts: bool) -> float:
    """What one block keeps of one micro-batch for its backward."""
    model, code, tp = share.model, share.code, share.tp
    features = (model.top_k * model.expert_hidden + model.shared_hidden) if experts else model.hidden
    heads = 2.0 * model.features * (model.heads + model.key_heads) + 2.0 * model.value_features * (
        model.heads + model.key_heads
    )
    whole = code.kept_whole_bytes * share.outer_tokens * model.width
    if not share.layout.sequence_parallel:
        whole = code.kept_whole_bytes * share.tokens * model.width
    split = share.tokens / tp * (heads + 4.0 * model.heads + code.kept_hidden_bytes * features)
    pairs = share.layout.micro_batch_size * model.heads / tp * model.tokens**2 / share.layout.shape.size("cp")
    kept = whole + split + code.kept_score_bytes * pairs * (share.layout.checkpointing != "selective")
    if experts:
        kept += code.kept_expert_bytes * share.tokens * model.top_k * model.width
    return kept


def _activations(share: Share, stages: tuple[int, ...], rank: int) -> tuple[float, float]:
    """(kept of all micro-batches in flight, the block that is computed again) in bytes."""
    layout, largest = share.layout, 0.0
    if layout.checkpointing == "full":
        plain = routed = 2.0 * share.outer_tokens * share.model.width
        largest = block_bytes(share, experts=bool(share.model.expert_layers))
    else:
        plain = block_bytes(share, experts=False)
        routed = block_bytes(share, experts=True) if share.model.experts else 0.0
    sizes = [dense * plain + experts * routed for dense, experts in (_layers(share, stage) for stage in stages)]
    ranks = layout.shape.size("pp")
    if ranks == 1:
        return sizes[0], largest
    if layout.stages_per_rank == 1 and layout.schedule == "1f1b":
        return min(layout.num_micro_batches, ranks - rank) * sizes[0], largest
    held = _held(layout.schedule, ranks, min(layout.num_micro_batches, 4 * ranks), layout.stages_per_rank)
    return held[rank] * max(sizes), largest


@functools.lru_cache(maxsize=256)
def _held(schedule: str, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[float, ...]:
    """Micro-batches times stages that each rank holds at most, from the schedule's own order."""
    made = make_schedule(schedule, ranks=ranks, num_micro_batches=num_micro_batches, stages_per_rank=stages_per_rank)
    times = StageTimes.in_proportion([1.0] * made.num_stages)
    return peak_activations(simulate(made, times))
