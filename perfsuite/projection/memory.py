"""Estimate the largest allocated memory of the fullest rank, by component.

Activations are counted per block and micro-batch, times the micro-batches that the schedule has in flight. Parameters,
gradients and optimizer state are divided by the ranks that shard them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from perfsuite.metrics.pipeline import ENDS_HOLDING
from perfsuite.projection.architecture import Architecture
from perfsuite.projection.implementation import Implementation
from perfsuite.projection.layout import Layout, Sharding
from perfsuite.projection.operations import Share, block_share, end_parameters, routed_share
from perfsuite.projection.pipeline import rank_stages, stage_kinds
from perfsuite.schedules import check_counts, find_schedule

MEMORY_LIMIT = 0.92
"""Share of the card above which steps slow down (allocator retries): a projection is then a lower bound."""

RESERVED = (1.006, 1.077)
"""Range of "max reserved" over "max allocated" in public logs: 1.006 to 1.009 in five of Megatron-LM, 1.077 in one of
Megatron-DeepSpeed."""
_SHARDED: Mapping[Sharding, int] = MappingProxyType({"none": 3, "optimizer": 2, "gradients": 1, "parameters": 0})
"""The first sharded item of weights, gradients and optimizer state; the later ones are sharded too."""
USABLE = 0.985
"""Share of the data sheet's memory that the driver leaves: 39.4 of 40 GiB."""


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Largest allocated bytes of the fullest rank, by component."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float = 0.0
    temporary: float = 0.0
    """Gathered layers, one layer's weight gradient, one recomputed layer, buffers of the loss."""
    communication: float = 0.0
    accumulated: float = 0.0
    """Gradients allocated together with activations: in persistent buffers, or of earlier micro-batches."""
    updating: float = 0.0
    """Temporary memory of the optimizer, after activations are freed."""
    encoders: float = 0.0
    """Frozen encoders, whole on every rank."""
    ema: float = 0.0
    """Moving average of the weights on the device."""
    capacity: float = 0.0
    """Device memory that the driver leaves; 0: unknown."""

    @property
    def total(self) -> float:
        """Return the largest sum at one time: of activations, or of gradients and the optimizer step."""
        passes = self.accumulated + self.activations + self.logits + self.temporary
        kept = self.parameters + self.optimizer + self.communication + self.encoders + self.ema
        return kept + max(passes, self.gradients + self.updating)

    @property
    def share(self) -> float | None:
        """Return the share of the capacity; None if that is unknown."""
        return self.total / self.capacity if self.capacity else None

    @property
    def fits(self) -> bool:
        """Return whether the sum is below the limit; True if the capacity is unknown."""
        return self.total <= MEMORY_LIMIT * (self.capacity or math.inf)


def memory_of(model: Architecture, layout: Layout, code: Implementation, capacity: float = 0.0) -> MemoryBreakdown:
    """Return the memory of the fullest rank."""
    return Memories(model=model, code=code, capacity=capacity).of(layout)


class Load(NamedTuple):
    """Parameters and activations of a rank before data parallelism shards them."""

    dense: float
    """Parameters that all data-parallel ranks have."""
    routed: float
    activations: float
    logits: float
    temporary: float


@dataclass(kw_only=True)
class Memories:
    """Computes the memory of any layout of one model, with a cache of shared parts."""

    model: Architecture
    code: Implementation
    capacity: float = 0.0
    _loads: dict[object, tuple[Load, ...]] = field(default_factory=dict, init=False)
    _spread: dict[object, tuple[tuple[float, float], ...]] = field(default_factory=dict, init=False)
    _parameters: dict[object, tuple[float, float]] = field(default_factory=dict, init=False)
    _blocks: dict[object, tuple[float, float, float, float, float]] = field(default_factory=dict, init=False)

    def of(self, layout: Layout) -> MemoryBreakdown:
        """Return the memory of the fullest rank."""
        size, ranks = layout.shape.size, layout.shape.size("pp")
        key = (
            *(ranks, size("ep"), size("cp"), size("tp"), layout.schedule, layout.stages_per_rank),
            *(layout.micro_batch_size, _telling(layout), layout.checkpointing),
            *(layout.sequence_parallel, layout.sharding == "parameters"),
        )
        if key not in self._loads:
            some = range(ranks) if ranks <= 4 else (0, 1, ranks - 2, ranks - 1)
            share = Share(model=self.model, layout=layout, code=self.code)
            self._loads[key] = self.loads(share, some)
        place = (layout.shape, layout.sharding)
        if place not in self._spread:
            self._spread[place] = self._per_parameter(layout)
        kept = self._spread[place]
        dense, routed = (sum(values) for values in zip(*kept, strict=True))
        fullest = max(self._loads[key], key=lambda load: dense * load[0] + routed * load[1] + sum(load[2:]))
        parameters, gradients, optimizer = [whole * fullest.dense + own * fullest.routed for whole, own in kept]
        code, several = self.code, layout.num_micro_batches > 1
        accumulated = gradients if several or code.keeps_gradients else 0.0
        if several and code.scattered_bytes:  # whole until the last micro-batch scatters them
            accumulated = code.gradient_bytes * (fullest.dense + fullest.routed)
        if several and code.bucket_bytes:  # DistributedDataParallel's buckets wait for the last one as well
            accumulated += gradients
        whole = layout.sharding in ("none", "parameters")
        updated, each = (parameters, code.weight_bytes) if whole else (optimizer, code.optimizer_state_bytes)
        return MemoryBreakdown(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=fullest.activations,
            logits=fullest.logits,
            temporary=fullest.temporary,
            communication=code.buffer_bytes,
            accumulated=accumulated,
            updating=updated / each * code.updating_bytes if code.updating_bytes else 0.0,
            capacity=self.capacity,
        )

    def _per_parameter(self, layout: Layout) -> tuple[tuple[float, float], ...]:
        """Return the bytes of a (dense, expert) parameter on one rank for weights, gradients and optimizer state."""
        per = layout.shape.size("cp") / layout.shape.size("dp_replicate")
        shared = 1 / (layout.shape.replicas * per), 1 / (layout.dp * per)
        sharded, code = _SHARDED[layout.sharding], self.code
        gradient = code.kept_gradient_bytes if layout.sharding in ("gradients", "parameters") else 0.0
        sizes = (code.weight_bytes, gradient or code.gradient_bytes, code.optimizer_state_bytes)
        return tuple(
            (size * shared[0], size * shared[1]) if index >= sharded else (size, size)
            for index, size in enumerate(sizes)
        )

    def loads(self, share: Share, some: Sequence[int]) -> tuple[Load, ...]:
        """Return the loads of some ranks of the pipeline."""
        layout, size = share.layout, share.layout.shape.size
        key = (
            *(size("tp"), size("cp"), layout.micro_batch_size),
            *(layout.sequence_parallel, layout.checkpointing, layout.sharding == "parameters"),
        )
        if key not in self._blocks:
            self._blocks[key] = (*_kept(share), _temporary(share), _gradients_of_block(share))
        plain, routed, largest, temporary, gradients = self._blocks[key]
        count, own = layout.stages, rank_stages(layout.schedule, size("pp"), layout.stages_per_rank)
        kinds, order = stage_kinds(self.model.layers, self.model.expert_layers, count)
        kept = [(layers - experts) * plain + experts * routed for layers, experts, _, _ in kinds]
        logits = self.code.logit_bytes * share.tokens * self.model.vocabulary / share.tp
        ends = self.code.kept_end_bytes * share.outer_tokens * self.model.width if self.model.vocabulary else 0.0
        made = []
        for rank in some:
            stages = own[rank]
            place = (size("tp"), size("ep"), count, stages)
            if place not in self._parameters:
                self._parameters[place] = _parameters(self.model, layout, stages)
            words, end = (logits, ends) if count - 1 in stages else (0.0, 0.0)
            loss = self.code.loss_bytes / self.code.logit_bytes * words
            activations = _activations(layout, [kept[order[stage]] for stage in stages], rank)
            if layout.sharding == "parameters" and not self.code.keeps_gradients and size("pp") == 1:
                beside = _beside_sharded(share, max(plain, routed), largest, words + end, loss)
            else:
                beside = temporary + largest + max(loss, gradients - words)
            made.append(Load(*self._parameters[place], activations + end, words, beside))
        return tuple(made)


def _temporary(share: Share) -> float:
    """Return two gathered layers and a layer's gradient, or the gradient of one matrix before it is accumulated.

    If a rank has blocks and one end of the model as separate units, the end stays gathered for the whole step. The
    end's gradients come first; a block's gradients come while its activations are freed.
    """
    code, block = share.code, share.model.block_parameters() / share.tp
    if share.layout.sharding == "parameters":
        ends = end_parameters(share.model, share.layout, first=True, last=True)
        if code.unit_gradient_bytes:
            return block * (2 * code.compute_bytes + code.unit_gradient_bytes) + 2 * ends * code.compute_bytes
        if code.keeps_gradients:
            return block * (2 * code.compute_bytes + code.gradient_bytes)
        return 2 * block * code.compute_bytes + ends * (code.compute_bytes + code.gradient_bytes)
    return block * code.aside_bytes


def _beside_sharded(share: Share, kept: float, largest: float, ends_kept: float, loss: float) -> float:
    """Return the largest bytes in addition to all activations, for a rank with all blocks as separate units.

    The ends of the model stay gathered for the whole step. In the backward pass each block is copied out of its gather
    buffer while the gradients of the previous block are scattered. Then the next block is gathered, and the ``kept``
    bytes are freed while the gradients are allocated (torch's FSDPParamGroup). ``ends_kept`` is freed before.
    """
    model, code, layout = share.model, share.code, share.layout
    block = max(block_share(model, layout, experts=experts) for experts in {False, bool(model.experts)})
    gathered, gradients = block * code.compute_bytes, block * code.gradient_bytes
    scattered = gradients * layout.shape.size("dp_replicate") / (layout.shape.replicas * layout.shape.size("cp"))
    ends = end_parameters(model, layout, first=True, last=True) * code.compute_bytes
    words = model.vocabulary * model.width / share.tp
    head = (words + 2 * model.width) * code.gradient_bytes if words else 0.0
    flowing = code.kept_head_bytes * share.outer_tokens * model.width
    hidden, several = model.hidden / share.tp, layout.num_micro_batches > 1
    products = (model.matrices - 1) * code.kept_head_bytes * share.tokens * hidden
    products += code.gradient_bytes * hidden * model.width
    # Gradients of earlier micro-batches are allocated already, and scattered ones are freed. A matrix shared by both
    # ends is accumulated only after both gradients exist.
    own, waiting = (0.0, head * model.tied) if several else (gradients, head)
    each_gone = kept + (gradients if several else 0.0) - scattered
    moments = [ends + gathered + loss, ends + gathered + head + flowing]
    count = model.layers
    for done in {0, min(1, count - 1), max(0, count - 2), count - 1}:
        base = ends + waiting + flowing - ends_kept - done * each_gone
        scattering = gradients if done else 0.0
        ahead = gathered if done < count - 1 else 0.0
        moments += [
            base + 2 * gathered + scattering,
            base + gathered + ahead + scattering + largest + products,
            base - kept + gathered + ahead + scattering + own,
            base - kept + ahead + gradients + own,
        ]
    return max(moments)


def _gradients_of_block(share: Share) -> float:
    """Return the gradients of an MLP's kept tensors in its backward pass, after the logits are freed."""
    hidden, element = share.model.matrices * share.model.hidden / share.tp, share.code.kept_head_bytes
    return element * share.tokens * hidden + 2 * element * share.outer_tokens * share.model.width


def _parameters(model: Architecture, layout: Layout, stages: Iterable[int]) -> tuple[float, float]:
    """Return the (dense, expert) parameters of a rank with these stages before data parallelism shards them."""
    kinds, order = stage_kinds(model.layers, model.expert_layers, layout.stages)
    held = [kinds[order[stage]] for stage in stages]
    layers, sparse = (sum(kind[index] for kind in held) for index in (0, 1))
    routed = routed_share(model, layout)
    dense = (layers - sparse) * block_share(model, layout, experts=False)
    if sparse:
        dense += sparse * (block_share(model, layout, experts=True) - routed)
    ends = sum(end_parameters(model, layout, first=first, last=last) for _, _, first, last in held)
    return dense + ends, sparse * routed


def block_bytes(share: Share, *, experts: bool, whole_block: bool = False) -> float:
    """Return the bytes that one block keeps of one micro-batch for its backward pass.

    ``whole_block``: after its recomputation.
    """
    model, code, tp = share.model, share.code, share.tp
    features = (model.top_k * model.expert_hidden + model.shared_hidden) if experts else model.hidden
    selective = code.selective if share.layout.checkpointing == "selective" and not whole_block else None
    of_keys = model.heads if code.repeats_keys and not selective else model.key_heads
    heads = code.kept_head_bytes * (model.features + model.value_features) * (model.heads + of_keys)
    kept_whole, kept_hidden, kept_row = code.kept_whole_bytes, code.kept_hidden_bytes, code.kept_row_bytes
    if selective:
        _, kept_whole, kept_hidden = selective
        if experts:  # the last products have rows instead of tokens
            kept_whole, kept_row = kept_whole - code.kept_head_bytes, code.kept_head_bytes
    whole = kept_whole * (share.outer_tokens if share.layout.sequence_parallel else share.tokens) * model.width
    split = share.tokens / tp * (heads + 4.0 * model.heads + kept_hidden * features)
    pairs = share.layout.micro_batch_size * model.heads / tp * model.tokens**2 / share.layout.shape.size("cp")
    scores = share.layout.checkpointing != "selective" or code.selective is not None
    kept = whole + split + code.kept_score_bytes * pairs * scores
    if experts:
        kept += kept_row * share.tokens * model.top_k * model.width
    return kept


def _kept(share: Share) -> tuple[float, float, float]:
    """Return kept bytes of (a dense block, a block with experts), and the bytes of the block being recomputed."""
    experts = bool(share.model.expert_layers)
    if share.layout.checkpointing == "full":
        whole = share.code.compute_bytes * share.outer_tokens * share.model.width
        return whole, whole, block_bytes(share, experts=experts)
    dense, sparse = block_bytes(share, experts=False), block_bytes(share, experts=True) if share.model.experts else 0.0
    if share.layout.checkpointing == "selective" and share.code.selective is not None:
        return dense, sparse, block_bytes(share, experts=experts, whole_block=True) - (sparse if experts else dense)
    return dense, sparse, 0.0


def _activations(layout: Layout, sizes: Sequence[float], rank: int) -> float:
    """Return the bytes of all micro-batches in flight, from the bytes of one micro-batch per stage."""
    ranks = layout.shape.size("pp")
    if ranks == 1:
        return sizes[0]
    count = _telling(layout)
    if layout.schedule == "1f1b":
        return min(count, ranks - rank) * sizes[0]
    return _held(layout.schedule, ranks, count, layout.stages_per_rank)[rank] * max(sizes)


def _telling(layout: Layout) -> int:
    """Return a number of micro-batches with the same peak: two whole rounds suffice unless a rank holds all.

    >>> [_telling(Layout.parse("pp4", global_batch=64, schedule=name)) for name in ("1f1b", "zbv", "gpipe")]
    [4, 8, 64]
    """
    ranks, count = layout.shape.size("pp"), layout.num_micro_batches
    if ranks == 1 or layout.schedule == "1f1b":
        return min(count, ranks)
    if count <= 2 * ranks or count % ranks or _holds_all(layout.schedule, ranks, layout.stages_per_rank):
        return count
    return 2 * ranks


@functools.lru_cache(maxsize=256)
def _holds_all(schedule: str, ranks: int, stages_per_rank: int) -> bool:
    return max(_held(schedule, ranks, 2 * ranks, stages_per_rank)) == 2 * ranks * stages_per_rank


@functools.lru_cache(maxsize=256)
def _held(schedule: str, ranks: int, num_micro_batches: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the largest number of micro-batches times stages that each rank holds, from its order of actions."""
    counts = {"ranks": ranks, "num_micro_batches": num_micro_batches, "stages_per_rank": stages_per_rank}
    check_counts(schedule, **counts)
    generate = find_schedule(schedule).generate
    return tuple(
        max(
            accumulate(
                (action.kind == "forward") - (action.kind in ENDS_HOLDING) for action in generate(rank, **counts)
            )
        )
        for rank in range(ranks)
    )
