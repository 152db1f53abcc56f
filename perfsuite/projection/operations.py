"""Count the operations and messages of one rank for one micro-batch: blocks, ends of the model, optimizer.

t tokens of a rank, D width, F hidden features. Every product is (m, n, k): m x k by k x n.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from perfsuite.projection.architecture import Architecture
from perfsuite.projection.implementation import Implementation
from perfsuite.projection.layout import Layout
from perfsuite.strategies.activations import Activations, Sent

Pass = Literal["forward", "backward_input", "backward_weight"]
_RING_KERNELS = (10, 4)
"""Kernels that combine a step of a ring, forward and backward: see :attr:`Implementation.ring_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulKernel:
    """``groups`` products of m x k by k x n; several groups are one grouped product."""

    m: float
    n: float
    k: float
    groups: int = 1
    stage: Pass = "forward"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockAttention:
    """Softmax attention of one block, forward or backward, that writes no scores."""

    batch: float
    queries: float
    keys: float
    heads: float
    key_heads: float
    features: int
    values: int
    causal: bool
    backward: bool = False
    share: float = 1.0
    """Share of the pairs that sliding windows leave."""

    @property
    def flops(self) -> float:
        """Return the operations; the backward pass has 2.5 times as many because it recomputes the scores.

        A causal mask halves them.
        """
        pairs = self.batch * self.heads * self.queries * self.keys * (0.5 if self.causal else 1.0)
        return self.share * pairs * 2.0 * (self.features + self.values) * (2.5 if self.backward else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryKernels:
    """Memory-bound kernels."""

    moved_bytes: float
    kernels: float = 1


Operation = MatmulKernel | BlockAttention | MemoryKernels | Sent
Operations = tuple[Operation, ...]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Operations of one micro-batch by pass; recomputation is separate."""

    forward: Operations = ()
    backward_input: Operations = ()
    backward_weight: Operations = ()
    recompute: Operations = ()


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a model that one rank computes."""

    model: Architecture
    layout: Layout
    code: Implementation

    @property
    def tp(self) -> int:
        """Ranks that share a block's matrices."""
        return self.layout.shape.size("tp")

    @property
    def tokens(self) -> float:
        """Return the tokens of a micro-batch on this rank."""
        return self.layout.micro_batch_size * self.model.tokens / self.layout.shape.size("cp")

    @property
    def outer_tokens(self) -> float:
        """Return the tokens between the parts that tensor parallelism splits."""
        return self.tokens / self.tp if self.layout.sequence_parallel else self.tokens

    @property
    def ring(self) -> int:
        """Return the ranks of the ring of keys and values; 1 without a ring."""
        return self.layout.shape.size("cp") if self.code.context == "ring" and not self.model.token_groups else 1

    def activations(self, *, experts: bool = False) -> Activations:
        """Return the sizes that decide the messages of a micro-batch."""
        model, element = self.model, self.code.compute_bytes
        features = (model.features + model.value_features) / 2 / self.tp
        return Activations(
            tokens=self.tokens,
            width=model.width,
            query_features=model.heads * features,
            key_features=model.key_heads * features,
            item_bytes=element,
            key_gradient_bytes=self.code.ring_gradient_bytes or element,
            tp=self.tp,
            cp=self.layout.shape.size("cp"),
            sequence_parallel=self.layout.sequence_parallel,
            ring=self.code.context == "ring",
            mlp=not experts or bool(model.shared_hidden),
            experts=model.experts * experts,
            rows=self.tokens / self.tp * model.top_k * (model.capacity_factor or 1.0),
            even=model.capacity_factor is not None,
        )

    def split(self, messages: Iterable[Sent]) -> tuple[tuple[Sent, ...], tuple[Sent, ...]]:
        """Return the messages of the (forward, backward) pass between several ranks.

        Megatron gathers the input of a product again in the backward pass, for the weight gradient.
        In the backward pass messages hidden by products precede all others.
        """
        sent = [one for one in messages if self.layout.shape.size(one.axis) > 1]
        forward = tuple(one for one in sent if not one.backward)
        again = (one for one in forward if one.collective == "all_gather" and one.beside and self.code.gathers_again)
        backward = (*(one for one in sent if one.backward), *again)
        return forward, tuple(sorted(backward, key=lambda one: one.beside != "products"))


@functools.lru_cache(maxsize=4096)
def block(share: Share, *, experts: bool) -> Passes:
    """Return the operations of one block."""
    model, code, checkpointing = share.model, share.code, share.layout.checkpointing
    dense = _mlp(share.tokens, model.width, model.hidden / share.tp, model)
    products = (*_projections(share), *(_expert_products(share) if experts else dense))
    scores = _scores(share)
    sent, returned = share.split(share.activations(experts=experts).block())
    forward = (*products, *scores[0], *_elementwise(share, experts=experts, backward=False), *sent)
    recompute: Operations = ()
    if checkpointing == "full":
        left_out = (products[-1], *(one for one in sent if not one.again)) if code.stops_early else ()
        recompute = tuple(one for one in forward if not any(one is other for other in left_out))
    elif checkpointing == "selective" and code.selective is not None:
        again = (dataclasses.replace(one, n=code.selective[0] * one.n) for one in products if code.selective[0])
        softmax = (one for one in scores[0] if isinstance(one, MemoryKernels))
        recompute = (*again, *softmax, *_elementwise(share, experts=experts, backward=False))
    elif checkpointing == "selective" and any(code.score_bytes):
        recompute = scores[0]
    elementwise = _elementwise(share, experts=experts, backward=True)
    return Passes(
        forward=forward,
        backward_input=(*(_input_gradient(product) for product in products), *scores[1], *elementwise, *returned),
        backward_weight=tuple(_weight_gradient(product) for product in products),
        recompute=recompute,
    )


def _input_gradient(product: MatmulKernel) -> MatmulKernel:
    return MatmulKernel(m=product.m, n=product.k, k=product.n, groups=product.groups, stage="backward_input")


def _weight_gradient(product: MatmulKernel) -> MatmulKernel:
    return MatmulKernel(m=product.k, n=product.n, k=product.m, groups=product.groups, stage="backward_weight")


def _projections(share: Share) -> tuple[MatmulKernel, ...]:
    *columns, (width, inner) = share.model.projections
    split = [MatmulKernel(m=share.tokens, n=outputs / share.tp, k=inputs) for outputs, inputs in columns]
    more = share.model.more_projections
    further = (MatmulKernel(m=share.tokens, n=more / share.model.width, k=share.model.width),) if more else ()
    return (*split, MatmulKernel(m=share.tokens, n=width, k=inner / share.tp), *further)


def _mlp(tokens: float, width: int, hidden: float, model: Architecture, groups: int = 1) -> tuple[MatmulKernel, ...]:
    """Return an MLP whose input matrices are one product."""
    return (
        MatmulKernel(m=tokens, n=(model.matrices - 1) * hidden, k=width, groups=groups),
        MatmulKernel(m=tokens, n=width, k=hidden, groups=groups),
    )


def _expert_products(share: Share) -> tuple[MatmulKernel, ...]:
    """Return the products of router, this rank's experts (with as many rows as it sends) and shared experts."""
    model, tokens = share.model, share.tokens
    here = model.experts // share.layout.shape.size("ep")
    rows = tokens * model.top_k * (model.capacity_factor or 1.0) / here
    router = MatmulKernel(m=share.outer_tokens, n=model.experts, k=model.width)
    routed = _mlp(rows, model.width, model.expert_hidden / share.tp, model, groups=here)
    shared = _mlp(tokens, model.width, model.shared_hidden / share.tp, model) if model.shared_hidden else ()
    return (router, *routed, *shared)


def _scores(share: Share) -> tuple[Operations, Operations]:
    """Return attention forward and backward: one kernel, or products and the traffic of written scores."""
    model, code = share.model, share.code
    heads, keys = model.heads / share.tp, model.key_heads / share.tp
    batch, context = share.layout.micro_batch_size, share.layout.shape.size("cp")
    queries = model.tokens / context
    if code.context == "all_to_all":  # a rank has every token of some heads
        heads, keys, queries = heads / context, keys / context, float(model.tokens)
    parts: list[tuple[float, float, float, bool]]
    if model.token_groups:
        parts = [(batch * count, rows, columns, False) for count, rows, columns in model.token_groups]
    elif share.ring > 1 and code.causal_skips:
        # Zig-zag: a rank's own keys, then of each other rank half of the keys for all queries, or all for half of them.
        later = (float(batch), queries, queries / 2, False)
        parts = [(float(batch), queries, queries, True), *(share.ring - 1) * [later]]
    else:
        parts = [(float(batch), queries, model.tokens, code.causal_skips)]
    sizes = {"heads": heads, "key_heads": keys, "features": model.features, "values": model.value_features}
    sizes["share"] = model.pair_share if code.causal_skips else 1.0
    forward, backward = (
        tuple(
            BlockAttention(batch=count, queries=rows, keys=columns, causal=causal, backward=is_backward, **sizes)  # type: ignore[arg-type]
            for count, rows, columns, causal in parts
        )
        for is_backward in (False, True)
    )
    if not any(code.score_bytes):
        return forward, backward
    pairs = sum(count * heads * rows * columns for count, rows, columns, _ in parts)
    first, second = code.ring_score_bytes if share.ring > 1 else code.score_bytes
    plain = tuple(
        MatmulKernel(m=rows, n=columns, k=model.features, groups=round(count * heads))
        for count, rows, columns, _ in parts
    )
    return (
        (*plain, *plain, MemoryKernels(moved_bytes=first * pairs, kernels=2)),
        (*plain, *plain, *plain, *plain, MemoryKernels(moved_bytes=second * pairs, kernels=2)),
    )


def _elementwise(share: Share, *, experts: bool, backward: bool) -> tuple[MemoryKernels, ...]:
    model, code = share.model, share.code
    width, hidden, rows, kernels = (
        (code.backward_width_bytes, code.backward_hidden_bytes, code.backward_row_bytes, code.backward_kernels)
        if backward
        else (code.forward_width_bytes, code.forward_hidden_bytes, code.forward_row_bytes, code.forward_kernels)
    )
    features = (model.top_k * model.expert_hidden + model.shared_hidden) if experts else model.hidden
    moved = width * share.outer_tokens * model.width + hidden * share.tokens * features / share.tp
    if model.key_rank:  # heads consist of a shared and an own part
        parts = model.heads / share.tp * (2 * model.features + model.value_features)
        moved += (16.0 if backward else 8.0) * share.tokens * parts
    if experts:
        moved += rows * share.tokens * model.top_k * model.width
    if share.ring > 1 and any(code.ring_bytes):
        keys = backward * model.key_heads * (model.features + model.value_features)
        parts = (model.heads * model.value_features + keys) / share.tp
        steps = share.ring if backward else share.ring - 1
        moved += code.ring_bytes[backward] * steps * share.tokens * parts
        kernels += _RING_KERNELS[backward] * steps
    return (MemoryKernels(moved_bytes=moved, kernels=kernels),)


@functools.lru_cache(maxsize=4096)
def embedding(share: Share) -> Passes:
    """Return reads and writes of the embedding's rows; gradients are accumulated in a table of zeros of the same size.

    A tied table has a second gradient from the head, which is added.
    """
    model, element = share.model, share.code.compute_bytes
    moved = element * share.outer_tokens * model.width
    table = element * model.embedding_parameters / share.tp * (4.0 if model.tied else 1.0)
    positions = share.code.splits_positions and model.positions > 0
    samples = share.layout.micro_batch_size if positions else 0
    sums, back = share.split(share.activations().embedding(samples=samples))
    return Passes(
        forward=(MemoryKernels(moved_bytes=3.0 * moved, kernels=3), *sums),
        backward_weight=(MemoryKernels(moved_bytes=5.0 * moved + table, kernels=3), *back),
    )


@functools.lru_cache(maxsize=4096)
def head(share: Share) -> Passes:
    """Return the output projection and the loss."""
    model, code = share.model, share.code
    if not model.vocabulary:
        return Passes()
    words = model.vocabulary / share.tp
    product = MatmulKernel(m=share.tokens, n=words, k=model.width)
    sent, returned = share.split(share.activations().head())
    forward = MemoryKernels(moved_bytes=code.forward_logit_bytes * share.tokens * words, kernels=4)
    backward = MemoryKernels(moved_bytes=code.backward_logit_bytes * share.tokens * words, kernels=4)
    return Passes(
        forward=(product, forward, *sent),
        backward_input=(_input_gradient(product), backward, *returned),
        backward_weight=(_weight_gradient(product),),
    )


def end_parameters(model: Architecture, layout: Layout, *, first: bool, last: bool) -> float:
    """Return the parameters on one rank of a stage outside its blocks."""
    count = (model.embedding_parameters + model.more_parameters) * first
    if last and model.vocabulary:
        count += model.head_parameters
        count += model.vocabulary * model.width * (model.tied and layout.stages > 1)
    return count / layout.shape.size("tp")


def block_share(model: Architecture, layout: Layout, *, experts: bool) -> float:
    """Return the parameters of one block on one rank."""
    rest = model.block_parameters(experts=experts)
    if not experts:
        return rest / layout.shape.size("tp")
    routed = routed_share(model, layout)
    return routed + rest / layout.shape.size("tp") - layout.shape.size("ep") * routed


def routed_share(model: Architecture, layout: Layout) -> float:
    """Return the parameters of one block's experts on one rank."""
    whole = model.experts * model.matrices * model.width * model.expert_hidden
    return whole / layout.shape.size("ep") / layout.shape.size("tp")
