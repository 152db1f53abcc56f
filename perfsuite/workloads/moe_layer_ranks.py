"""A layer of experts on one rank, and its check against a plain loop over the experts; imported on ranks only.

Shapes: n tokens of this rank, D width, F features of an expert, E experts, k of a token.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.errors import WrongResult
from perfsuite.models.moe import Moe
from perfsuite.models.moe_module import MoeMlp, imposed, within_capacity
from perfsuite.record.workload import Rank, Step
from perfsuite.strategies import expert
from perfsuite.strategies.base import parity_tolerance
from perfsuite.strategies.expert_dispatch import Dispatcher

if TYPE_CHECKING:
    from perfsuite.strategies.deepspeed.peers import DeepSpeedLayer

    Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Weights, experts, and whether the expert accepted the token, (n, k) each."""
    Weight = Callable[[str, int], torch.Tensor]  # Returns a matrix of an expert
    Watch = Callable[[bool], None]  # Is called when communication begins (True) or computation does


WEIGHTS = ("gate", "expand", "contract")  # Matrices of an expert: D x F, D x F, F x D


class _OwnLayer:
    """perfsuite's router, and this rank's experts."""

    normalizes_kept = False  # Weights of a token sum to 1 over all chosen experts, not over those that accepted it
    per_sample = True  # Capacity counts a sample's tokens, not a rank's

    def __init__(self, config: Moe, dtype: torch.dtype, rank: Rank, watch: Watch) -> None:
        routing = config.routing
        with torch.device("meta"):
            layer = MoeMlp(config.width, config.hidden, routing)
        expert.apply(layer, rank)
        self._layer = layer.to_empty(device=rank.device).to(dtype)
        if rank.shape.size("ep") > 1:
            even = routing.capacity is not None
            self._layer.dispatch = Dispatcher(rank.group("ep"), None, even=even, watch=watch)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer(x)

    def router(self) -> torch.Tensor:
        return self._layer.router.weight

    def weight(self, name: str, index: int) -> torch.Tensor:
        return getattr(self._layer.experts, name)[index]

    def gradient(self, name: str, index: int) -> torch.Tensor | None:
        gradient = getattr(self._layer.experts, name).grad
        return None if gradient is None else gradient[index]

    def clear(self) -> None:
        self._layer.zero_grad(set_to_none=True)


def _new_layer(
    config: Moe, dtype: torch.dtype, rank: Rank, implementation: str, watch: Watch
) -> _OwnLayer | DeepSpeedLayer:
    if implementation == "perfsuite":
        return _OwnLayer(config, dtype, rank, watch)
    from perfsuite.strategies.deepspeed.zero import require_deepspeed

    require_deepspeed(rank, "implementation='deepspeed'")
    from perfsuite.strategies.deepspeed.peers import DeepSpeedLayer

    return DeepSpeedLayer(config, dtype, rank)


class LayerStep(Step):
    """One rank's layer, samples and gradients of its output."""

    def __init__(self, case: Any, rank: Rank) -> None:
        """``case`` is a MoeLayer, whose module imports this one."""
        self.config, self.rank, self.name, self.dtype = case.config, rank, str(case), case.dtype
        self.shape = (case.batch_size // rank.world_size, case.sequence_length, case.width)
        self._span = ExitStack()
        self.group = rank.shape.group(rank.rank, "ep") if "ep" in rank.shape.names else (rank.rank,)
        self.here = case.experts // len(self.group)
        self.layer = _new_layer(self.config, rank.dtype(case.dtype), rank, case.implementation, self._watch)
        with torch.no_grad():
            self.layer.router().copy_(self.router())
            for index in range(self.here):
                for weight in WEIGHTS:
                    self.layer.weight(weight, index).copy_(self.value(weight, self.first + index))
        self.x = self.samples("x", rank.rank).requires_grad_()
        self.upstream = self.samples("upstream", rank.rank)
        self.output = self.x.detach()
        if case.implementation == "perfsuite":
            sent_bytes = case.message_bytes(rank.shape)
            rank.record("communication_bytes", sent_bytes, unit="bytes", reduce="equal")
            factor = busbw_factor("all_to_all", len(self.group))
            rank.record("ep_bus_bytes", sent_bytes * factor, unit="bytes", reduce="equal")

    def _watch(self, moving: bool) -> None:
        """Start a span of communication or computation."""
        self._span.close()
        self._span.enter_context(self.rank.span("communication" if moving else "compute"))

    def run(self) -> None:
        """Run forward and backward."""
        self.layer.clear()
        self.x.grad = None
        with self._span:
            self._watch(False)
            output = self.layer(self.x)
            torch.autograd.backward(output, self.upstream)
        self.output = output.detach()

    def _draw(self, name: str, *shape: int, deviation: float = 1.0) -> torch.Tensor:
        generator = self.rank.generator(zlib.crc32(name.encode()))
        dtype = self.rank.dtype(self.dtype)
        return torch.empty(*shape, dtype=dtype, device=self.rank.device).normal_(std=deviation, generator=generator)

    def samples(self, name: str, rank: int) -> torch.Tensor:
        """Return ``x`` or ``upstream`` of any rank: (B / ranks, S, D)."""
        return self._draw(f"{name} {rank}", *self.shape)

    def value(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of any expert, in x out."""
        sizes = (self.config.width, self.config.hidden)
        inputs, outputs = sizes[::-1] if name == "contract" else sizes
        return self._draw(f"{name} {expert}", inputs, outputs, deviation=inputs**-0.5)

    def router(self) -> torch.Tensor:
        """Return the (E, D) router."""
        return self._draw("router", self.config.experts, self.config.width, deviation=self.config.width**-0.5)

    @property
    def first(self) -> int:
        """Number of this rank's first expert."""
        return self.group.index(self.rank.rank) * self.here

    def close(self) -> None:
        """Free the layer."""
        del self.layer, self.x, self.output, self.upstream


_SAMPLED_TOKENS = 8


def check_whole(step: LayerStep) -> None:
    """Check the output, and the gradients of the input, the router and this rank's experts, for the group's samples."""
    weights = {
        (name, expert): step.value(name, expert).requires_grad_()
        for name in WEIGHTS
        for expert in range(step.config.experts)
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
    tokens = torch.linspace(0, step.x[..., 0].numel() - 1, _SAMPLED_TOKENS, device=step.x.device).long()
    with torch.no_grad():
        shares, experts, kept = _choose(step, step.x, step.router())
        _record(step, experts, kept)
        rows = step.x.flatten(0, 1)[tokens]
        expected = _mix(rows, shares[tokens], experts[tokens], kept[tokens], step.value)
    _compare(step, f"output of {_SAMPLED_TOKENS} tokens", expected, step.output.flatten(0, 1)[tokens])


def _choose(step: LayerStep, x: torch.Tensor, router: torch.Tensor) -> Choice:
    """Return weights, experts, and whether the expert accepted the token, (n, k) each, of (B, S, D)."""
    routing = step.config.routing
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
        source, target, _ = within_capacity(together, routing)
        kept = (target < len(source)).view_as(kept)
    counted = shares * kept if step.layer.normalizes_kept else shares
    if routing.top_k > 1:
        shares = shares / counted.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return shares.flatten(0, 1), experts.flatten(0, 1), kept.flatten(0, 1)


def _mix(
    rows: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor, kept: torch.Tensor, weight: Weight
) -> torch.Tensor:
    """Return the outputs of (n, D) rows, computed expert by expert."""
    mixed = torch.zeros_like(rows)
    for number in sorted(set(experts[kept].tolist())):
        token, choice = ((experts == number) & kept).nonzero(as_tuple=True)
        gate, expand, contract = (weight(name, number) for name in WEIGHTS)
        of = rows[token]
        out = (F.silu(of @ gate) * (of @ expand)) @ contract
        mixed = mixed.index_add(0, token, out * shares[token, choice, None].to(out.dtype))
    return mixed


def _record(step: LayerStep, experts: torch.Tensor, kept: torch.Tensor) -> None:
    """Record the routing of the (n, k) choices of this rank and its group; a collective along ep."""
    counts = experts.flatten().bincount(minlength=step.config.experts)
    if len(step.group) > 1:
        dist.all_reduce(counts, group=step.rank.group("ep"))
    mean = len(step.group) * experts.numel() / step.config.experts
    step.rank.record("expert_imbalance", counts.max() / mean, reduce="max")
    step.rank.record("dropped_share", 1 - kept.float().mean(), reduce="mean")


def _compare(step: LayerStep, name: str, expected: torch.Tensor | None, got: torch.Tensor | None) -> None:
    assert expected is not None, "the loop gives every gradient"
    tolerance = parity_tolerance(step.dtype)
    error = float("nan") if got is None else float((got.float() - expected.float()).norm())
    error /= max(float(expected.float().norm()), 1e-30)
    if not error <= tolerance:
        raise WrongResult(
            f"{name} of {step.name} on rank {step.rank.rank} against a plain loop, relative error",
            expected=f"at most {tolerance:g}",
            got=error,
        )
