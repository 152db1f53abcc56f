"""A layer of experts on one rank, and its check against a plain loop over the experts; imported on ranks only.

Shapes: n tokens of this rank, D width, F features of an expert, E experts, k of a token.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.errors import WrongResult
from perfsuite.record.workload import Rank, Step
from perfsuite.strategies.base import parity_tolerance

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.moe_layer import MoeLayer

    Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Weights, experts, and whether the expert accepted the token, (n, k) each."""
    Weight = Callable[[str, int], torch.Tensor]  # Returns a matrix of an expert


WEIGHTS = ("gate", "expand", "contract")  # Matrices of an expert: D x F, D x F, F x D


class Layer(Protocol):
    """An implementation: a router and this rank's experts."""

    normalizes_kept: bool  # Weights of a token sum to 1 over the experts that accepted it, not over all chosen ones
    per_sample: bool  # Capacity counts a sample's tokens, not a rank's

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D)."""

    def router(self) -> torch.Tensor:
        """Return the (E, D) parameter."""

    def weight(self, name: str, index: int) -> torch.Tensor:
        """Return one matrix of this rank's expert ``index``, in x out, as a view of a parameter."""

    def gradient(self, name: str, index: int) -> torch.Tensor | None:
        """Return the gradient of :meth:`weight`."""

    def clear(self) -> None:
        """Clear all gradients."""


class OwnLayer:
    """perfsuite's implementation."""

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
        """Return (B, S, D) for (B, S, D)."""
        output: torch.Tensor = self._layer(x)
        return output

    def router(self) -> torch.Tensor:
        """Return the (E, D) parameter."""
        return self._layer.router.weight

    def weight(self, name: str, index: int) -> torch.Tensor:
        """Return a view of one matrix of this rank's expert ``index``."""
        matrix: torch.Tensor = getattr(self._layer.experts, name)[index]
        return matrix

    def gradient(self, name: str, index: int) -> torch.Tensor | None:
        """Return the gradient of :meth:`weight`."""
        gradient = getattr(self._layer.experts, name).grad
        return None if gradient is None else gradient[index]

    def clear(self) -> None:
        """Clear all gradients."""
        self._layer.zero_grad(set_to_none=True)


def _new_layer(workload: MoeLayer, rank: Rank, watch: Callable[[bool], None]) -> Layer:
    if workload.implementation == "perfsuite":
        return OwnLayer(workload, rank, watch)
    from perfsuite.strategies.deepspeed.zero import require_deepspeed

    require_deepspeed(rank, "implementation='deepspeed'")
    from perfsuite.strategies.deepspeed.peers import DeepSpeedLayer

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
        """Start a span of communication or computation."""
        self._span.close()
        self._span.enter_context(self.rank.span("communication" if moving else "compute"))

    def run(self) -> None:
        """Run forward and backward."""
        import torch

        self.layer.clear()
        self.x.grad = None
        with self._span:
            self._watch(False)
            output = self.layer(self.x)
            torch.autograd.backward(output, self.upstream)
        self.output = output.detach()

    def _draw(self, name: str, *shape: int, deviation: float = 1.0) -> torch.Tensor:
        import torch

        generator = self.rank.generator(zlib.crc32(name.encode()))
        dtype = self.rank.dtype(self.case.dtype)
        return torch.empty(*shape, dtype=dtype, device=self.rank.device).normal_(std=deviation, generator=generator)

    def samples(self, name: str, rank: int) -> torch.Tensor:
        """Return ``x`` or ``upstream`` of any rank: (B / ranks, S, D)."""
        case = self.case
        return self._draw(f"{name} {rank}", case.batch_size // self.rank.world_size, case.sequence_length, case.width)

    def value(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of any expert, in x out."""
        case = self.case
        inputs, outputs = (case.hidden, case.width) if name == "contract" else (case.width, case.hidden)
        return self._draw(f"{name} {expert}", inputs, outputs, deviation=inputs**-0.5)

    def router(self) -> torch.Tensor:
        """Return the (E, D) router."""
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
        """Check as :meth:`MoeLayer.check`; a collective along ep."""
        (check_whole if self.case.checked_whole else check_tokens)(self)

    def close(self) -> None:
        """Free the layer."""
        del self.layer, self.x, self.output, self.upstream


_SAMPLED_TOKENS = 8


def check_whole(step: LayerStep) -> None:
    """Check the output, and the gradients of the input, the router and this rank's experts, for the group's samples."""
    import torch

    weights = {
        (name, expert): step.value(name, expert).requires_grad_()
        for name in WEIGHTS
        for expert in range(step.case.experts)
    }

    def weight(name: str, expert: int) -> torch.Tensor:
        return weights[name, expert]

    x, router = step.samples("x", step.rank.rank).requires_grad_(), step.router().requires_grad_()
    chosen = _choose(step, x, router)
    _record(step, *chosen[1:])
    own = _mix(x.flatten(0, 1), *chosen, weight).view_as(x)
    total = (own * step.upstream).sum()
    others = [member for member in step.group if member != step.rank.rank]
    if others:  # only their rows for this rank's experts
        total = total + _of_others(step, others, router.detach(), weight)
    torch.autograd.backward(total)
    _compare(step, "output", own, step.output)
    _compare(step, "gradient of the input", x.grad, step.x.grad)
    _compare(step, "gradient of the router", router.grad, step.layer.router().grad)
    for name in WEIGHTS:
        parameters = [weights[name, step.first + index] for index in range(step.here)]
        expected = [one.detach() * 0 if one.grad is None else one.grad for one in parameters]  # 0 if no row reached it
        gradients = [step.layer.gradient(name, index) for index in range(step.here)]
        got = [torch.zeros_like(expected[0]) if gradient is None else gradient for gradient in gradients]
        _compare(step, f"gradient of {name}", torch.stack(expected), torch.stack(got))


def _of_others(step: LayerStep, others: Sequence[int], router: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return the loss of other ranks' rows that this rank's experts compute."""
    import torch

    samples = [step.samples("x", member) for member in others]
    shares, experts, kept = (
        torch.cat(parts) for parts in zip(*(_choose(step, x, router) for x in samples), strict=True)
    )
    here = (experts >= step.first) & (experts < step.first + step.here)
    rows = torch.cat([x.flatten(0, 1) for x in samples])
    upstream = torch.cat([step.samples("upstream", member).flatten(0, 1) for member in others])
    return (_mix(rows, shares, experts, kept & here, weight) * upstream).sum()


def check_tokens(step: LayerStep) -> None:
    """Check the output of some of this rank's tokens; the weights of their experts are drawn again."""
    import torch

    tokens = torch.linspace(0, step.x[..., 0].numel() - 1, _SAMPLED_TOKENS, device=step.x.device).long()
    with torch.no_grad():
        shares, experts, kept = _choose(step, step.x, step.router())
        _record(step, experts, kept)
        rows = step.x.flatten(0, 1)[tokens]
        expected = _mix(rows, shares[tokens], experts[tokens], kept[tokens], step.value)
    _compare(step, f"output of {_SAMPLED_TOKENS} tokens", expected, step.output.flatten(0, 1)[tokens])


def _choose(step: LayerStep, x: torch.Tensor, router: torch.Tensor) -> Choice:
    """Return weights, experts, and whether the expert accepted the token, (n, k) each, of (B, S, D)."""
    import torch
    import torch.nn.functional as F

    from perfsuite.models.moe_module import imposed, within_capacity

    routing = step.case.config.routing
    probabilities = F.linear(x, router).float().softmax(dim=-1)
    shares, experts = probabilities.topk(routing.top_k, dim=-1)
    if routing.hot_tokens is not None:
        experts = imposed(torch.arange(x.shape[1], device=x.device), routing).expand_as(experts)
        shares = probabilities.gather(-1, experts)
    kept = torch.ones_like(experts, dtype=torch.bool)
    if routing.capacity is not None:
        together = experts if step.layer.per_sample else experts.reshape(1, -1, routing.top_k)
        length = together.shape[1]
        routing = dataclasses.replace(routing, sequence_length=length, group_tokens=length)
        route = within_capacity(together, routing)
        kept = (route.target < len(route.source)).view_as(kept)
    counted = shares * kept if step.layer.normalizes_kept else shares
    if routing.top_k > 1:
        shares = shares / counted.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return shares.flatten(0, 1), experts.flatten(0, 1), kept.flatten(0, 1)


def _mix(
    rows: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, kept: torch.Tensor, weight: Weight
) -> torch.Tensor:
    """Return the outputs of (n, D) rows, computed expert by expert."""
    import torch
    import torch.nn.functional as F

    mixed = torch.zeros_like(rows)
    for expert in sorted(set(experts[kept].tolist())):
        token, choice = ((experts == expert) & kept).nonzero(as_tuple=True)
        gate, expand, contract = (weight(name, expert) for name in WEIGHTS)
        of = rows[token]
        out = (F.silu(of @ gate) * (of @ expand)) @ contract
        mixed = mixed.index_add(0, token, out * shares[token, choice, None].to(out.dtype))
    return mixed


def _record(step: LayerStep, experts: torch.Tensor, kept: torch.Tensor) -> None:
    """Record the routing of the (n, k) choices of this rank and its group; a collective along ep."""
    import torch.distributed as dist

    counts = experts.flatten().bincount(minlength=step.case.experts)
    if len(step.group) > 1:
        dist.all_reduce(counts, group=step.rank.group("ep"))
    mean = len(step.group) * experts.numel() / step.case.experts
    step.rank.record("expert_imbalance", counts.max() / mean, reduce="max")
    step.rank.record("dropped_share", 1 - kept.float().mean(), reduce="mean")


def _compare(step: LayerStep, name: str, expected: torch.Tensor | None, got: torch.Tensor | None) -> None:
    assert expected is not None, "the loop gives every gradient"
    tolerance = parity_tolerance(step.case.dtype)
    error = float("nan") if got is None else float((got.float() - expected.float()).norm())
    error /= max(float(expected.float().norm()), 1e-30)
    if not error <= tolerance:
        raise WrongResult(
            f"{name} of {step.case} on rank {step.rank.rank} against a plain loop, relative error",
            expected=f"at most {tolerance:g}",
            got=error,
        )
