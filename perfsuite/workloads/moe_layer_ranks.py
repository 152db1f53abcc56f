"""A layer of experts as it runs on one rank; imported there only.

Shapes: n tokens of this rank, D width, F features of an expert, E experts, k of a token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from perfsuite.base.collectives import busbw_factor
from perfsuite.record.workload import Rank, Step

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.moe_layer import MoeLayer

WEIGHTS = ("gate", "expand", "contract")
"""Matrices of an expert: D x F, D x F, F x D."""


class Layer(Protocol):
    """An implementation: a router and this rank's experts."""

    normalizes_kept: bool
    """Weights of a token sum to 1 over the experts that took it, not over those it chose."""
    per_sample: bool
    """Capacity is of a sample's tokens, not of a rank's."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""

    def router(self) -> torch.Tensor:
        """(E, D) parameter."""

    def weight(self, name: str, index: int) -> torch.Tensor:
        """One matrix of this rank's expert ``index``, in x out: a view of a parameter."""

    def gradient(self, name: str, index: int) -> torch.Tensor | None:
        """Its gradient."""

    def clear(self) -> None:
        """Forget all gradients."""


class OwnLayer:
    """perfsuite's."""

    normalizes_kept = False
    per_sample = True

    def __init__(self, workload: MoeLayer, rank: Rank, watch: Callable[[bool], None]) -> None:
        import torch

        from perfsuite.models.moe_module import MoeMlp
        from perfsuite.strategies import expert
        from perfsuite.strategies.expert_dispatch import WatchedDispatcher

        routing = workload.config.routing
        with torch.device("meta"):
            layer = MoeMlp(workload.width, workload.hidden, routing)
        expert.apply(layer, rank)
        self._layer = layer.to_empty(device=rank.device).to(rank.dtype(workload.dtype))
        if rank.shape.size("ep") > 1:
            even = routing.capacity is not None
            self._layer.dispatch = WatchedDispatcher(rank.group("ep"), None, even=even, watch=watch)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        output: torch.Tensor = self._layer(x)
        return output

    def router(self) -> torch.Tensor:
        """(E, D) parameter."""
        return self._layer.router.weight

    def weight(self, name: str, index: int) -> torch.Tensor:
        """A view of one matrix of this rank's expert ``index``."""
        matrix: torch.Tensor = getattr(self._layer.experts, name)[index]
        return matrix

    def gradient(self, name: str, index: int) -> torch.Tensor | None:
        """Its gradient."""
        gradient = getattr(self._layer.experts, name).grad
        return None if gradient is None else gradient[index]

    def clear(self) -> None:
        """Forget all gradients."""
        self._layer.zero_grad(set_to_none=True)


def _new_layer(workload: MoeLayer, rank: Rank, watch: Callable[[bool], None]) -> Layer:
    if workload.implementation == "perfsuite":
        return OwnLayer(workload, rank, watch)
    from perfsuite.strategies.deepspeed.zero import require_deepspeed

    require_deepspeed(rank, "implementation='deepspeed'")
    from perfsuite.strategies.deepspeed.moe import DeepSpeedLayer

    return DeepSpeedLayer(workload.config, rank.dtype(workload.dtype), rank)


class LayerStep(Step):
    """One rank's layer, samples and gradients of its output."""

    def __init__(self, workload: MoeLayer, rank: Rank) -> None:
        self.case, self.rank = workload, rank
        self._span = ExitStack()
        self.group = rank.shape.group(rank.rank, "ep") if "ep" in rank.shape.names else (rank.rank,)
        self.here = workload.experts // len(self.group)
        self.layer = _new_layer(workload, rank, self._watch)
        self._fill()
        self.x = self.samples("x", rank.rank).requires_grad_()
        self.upstream = self.samples("upstream", rank.rank)
        self.output = self.x.detach()
        if workload.implementation == "perfsuite":
            sent = workload.message_bytes(rank.shape)
            rank.record("communication_bytes", sent, unit="bytes", reduce="equal")
            factor = busbw_factor("all_to_all", len(self.group))
            rank.record("ep_bus_bytes", sent * factor, unit="bytes", reduce="equal")

    def _watch(self, moving: bool) -> None:
        """What runs from now on."""
        self._span.close()
        self._span.enter_context(self.rank.span("communication" if moving else "compute"))

    def run(self) -> None:
        """Forward and backward."""
        import torch

        self.layer.clear()
        self.x.grad = None
        with self._span:
            self._watch(False)
            output = self.layer(self.x)
            torch.autograd.backward(output, self.upstream)
        self.output = output.detach()

    # -- values, the same for everybody who asks ---------------------------------------------------------------------

    def _draw(self, name: str, *shape: int, deviation: float = 1.0) -> torch.Tensor:
        import torch

        generator = self.rank.generator(zlib.crc32(name.encode()))
        dtype = self.rank.dtype(self.case.dtype)
        return torch.empty(*shape, dtype=dtype, device=self.rank.device).normal_(std=deviation, generator=generator)

    def samples(self, name: str, rank: int) -> torch.Tensor:
        """``x`` or ``upstream`` of any rank: (B / ranks, S, D)."""
        case = self.case
        return self._draw(f"{name} {rank}", case.batch_size // self.rank.world_size, case.sequence_length, case.width)

    def value(self, name: str, expert: int) -> torch.Tensor:
        """One matrix of any expert, in x out."""
        case = self.case
        inputs, outputs = (case.hidden, case.width) if name == "contract" else (case.width, case.hidden)
        return self._draw(f"{name} {expert}", inputs, outputs, deviation=inputs**-0.5)

    def router(self) -> torch.Tensor:
        """(E, D)."""
        case = self.case
        return self._draw("router", case.experts, case.width, deviation=case.width**-0.5)

    @property
    def first(self) -> int:
        """Number of this rank's first expert."""
        return self.group.index(self.rank.rank) * self.here

    def _fill(self) -> None:
        import torch

        with torch.no_grad():
            self.layer.router().copy_(self.router())
            for index in range(self.here):
                for name in WEIGHTS:
                    self.layer.weight(name, index).copy_(self.value(name, self.first + index))

    def check(self) -> None:
        """See :meth:`MoeLayer.check`; a collective along ep."""
        from perfsuite.workloads.moe_layer_check import check_tokens, check_whole

        (check_whole if self.case.checked_whole else check_tokens)(self)

    def close(self) -> None:
        """Free the layer."""
        del self.layer, self.x, self.output, self.upstream
