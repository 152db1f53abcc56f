"""Messages of a micro-batch's activations along tp, cp and ep: in a block, and at the ends of a model; without torch.

Strategy hybrid counts them and projections price them; perfsuite docs model-parallel derives every size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from perfsuite.strategies.traffic import ATTENTION, MLP, OTHER

COUNT_BYTES = 8  # Bytes of a count of rows
_FP32 = 4


class Sent(NamedTuple):
    """Equal messages of one micro-batch."""

    axis: str  # tp, cp or ep
    collective: str  # As in ``Call``; ring: sent to the next rank and received from the one before
    message_bytes: float  # Size S of each, as nccl-tests counts it
    part: str  # One of ``PARTS``
    backward: bool = False
    calls: int = 1  # Messages, one after the other
    again: bool = True  # A recomputed block sends it again
    beside: Literal["", "attention", "products"] = ""  # Work that can hide it
    uneven: bool = False


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Sizes of the activations of one micro-batch on one rank."""

    tokens: float  # Tokens of a tensor-parallel group: b S / cp
    width: int
    query_features: float  # Features on this rank of a token's query and output, on average
    key_features: float  # The same of key and value
    item_bytes: float
    key_gradient_bytes: float  # Bytes of an element of a key's gradient in a ring
    tp: int
    cp: int
    sequence_parallel: bool
    ring: bool  # Keys go round a ring; False: heads are exchanged for tokens
    mlp: bool = True  # A block has an MLP that tp splits; False: only routed experts
    experts: int = 0  # Routed experts of a layer; 0: none
    rows: float = 0.0  # Rows that a rank sends to experts
    even: bool = False  # Ranks send equal numbers of rows, without counting them first
    load_bytes: float = 0.0  # Bytes of the loads of experts that a balance loss sums; 0: none

    def block(self) -> Iterator[Sent]:
        """Yield the messages of one block.  Attention and MLP gather tokens before and sum partial results after; the
        backward pass does the reverse. Full checkpointing repeats the forward pass, except the last sum, which the
        backward pass does not need.
        """
        whole, parts = self.whole_bytes, (ATTENTION, MLP) if self.mlp else (ATTENTION,)
        last = parts[-1] if self.mlp else ""
        for part in parts:
            if self.sequence_parallel:
                yield Sent("tp", "all_gather", whole, part, beside="products")
            if part != last:
                yield self._sum(part)
        if self.cp > 1:
            yield from self._context()
        if self.experts:
            yield from self._routed()
        if last:
            yield self._sum(last, again=False)
        for part in parts:
            yield self._sum(part, backward=True)
            if self.sequence_parallel:
                yield Sent("tp", "all_gather", whole, part, backward=True, beside="products")

    @property
    def whole_bytes(self) -> float:
        """Bytes in one tensor-parallel group: X = b (S / cp) D i."""
        return self.tokens * self.width * self.item_bytes

    @property
    def stage_bytes(self) -> float:
        """Bytes that a rank sends to another stage."""
        return self.whole_bytes / (self.tp if self.sequence_parallel else 1)

    def _sum(self, part: str, size: float | None = None, *, backward: bool = False, again: bool = True) -> Sent:
        name = "reduce_scatter" if self.sequence_parallel else "all_reduce"
        size = self.whole_bytes if size is None else size
        return Sent("tp", name, size, part, backward=backward, again=again, beside="products")

    def _context(self) -> Iterator[Sent]:
        """Yield keys and values that go round a ring, or heads exchanged for tokens.  In the backward pass keys go
        round again. Their gradients make one more step to their owner, which no work hides.
        """
        keys, steps = 2 * self.tokens * self.key_features, self.cp - 1
        for backward in (False, True):
            if self.ring:
                yield Sent("cp", "ring", self.item_bytes * keys, ATTENTION, backward, steps, beside="attention")
                continue
            for features in (self.key_features, self.query_features):
                size = self.item_bytes * self.tokens * features
                yield Sent("cp", "all_to_all", size, ATTENTION, backward, calls=2)
        if self.ring:
            size = self.key_gradient_bytes * keys
            yield Sent("cp", "ring", size, ATTENTION, backward=True, calls=steps, beside="attention")
            yield Sent("cp", "ring", size, ATTENTION, backward=True)

    def _routed(self) -> Iterator[Sent]:
        """Yield the rows to experts and back, along ep and then to all ranks of tp, which have a part of every expert.
        Unequal numbers of rows are sent before them.
        """
        if not self.even:
            counts = self.experts * COUNT_BYTES
            yield Sent("ep", "all_to_all", counts, MLP)
            yield Sent("tp", "all_gather", self.tp * counts, MLP)
        size = self.item_bytes * self.rows * self.width
        for backward in (False, True):
            yield Sent("ep", "all_to_all", size, MLP, backward, calls=2, uneven=not self.even)
            yield Sent("tp", "all_to_all", self.tp * size, MLP, backward, calls=2, uneven=not self.even)
        if self.load_bytes:
            yield Sent("cp", "all_reduce", self.load_bytes, MLP)
            yield Sent("tp", "all_reduce", self.load_bytes, MLP)

    def embedding(self, *, samples: int = 0) -> Iterator[Sent]:
        """Yield the sums of looked-up rows; learned positions are summed separately if ``samples`` share them."""
        for size in (self.whole_bytes, *((self.whole_bytes / samples,) if samples else ())):
            yield self._sum(OTHER, size)
            if self.sequence_parallel:
                yield Sent("tp", "all_gather", size, OTHER, backward=True, beside="products")

    def head(self, *, words: int = 0) -> Iterator[Sent]:
        """Yield the messages of the output projection and of the loss; logits of ``words`` are gathered, 0: none are.
        Without gathered logits a token has three sums: its largest logit, its exponentials and its target's logit.
        """
        if self.sequence_parallel:
            yield Sent("tp", "all_gather", self.whole_bytes, OTHER, beside="products")
        if words:
            yield Sent("tp", "all_gather", self.tokens * words * self.item_bytes, OTHER, beside="products")
        else:
            yield Sent("tp", "all_reduce", _FP32 * self.tokens, OTHER, calls=3, beside="products")
        yield self._sum(OTHER, backward=True)
