"""A layer of experts against a plain loop over the experts, on one rank; imported there only.

Shapes: n tokens of this rank, D width, k experts of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from perfsuite.base.errors import WrongResult
from perfsuite.strategies.base import parity_tolerance
from perfsuite.workloads.moe_layer_ranks import WEIGHTS, LayerStep

if TYPE_CHECKING:
    import torch

    Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Weights, experts, and whether the expert took it, (n, k) each."""
    Weight = Callable[[str, int], torch.Tensor]
    """A matrix of an expert."""

_SAMPLED_TOKENS = 8


def check_whole(step: LayerStep) -> None:
    """Output, and the gradients of the input, the router and this rank's experts, of all samples of the group."""
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
    mine = _mix(x.flatten(0, 1), *chosen, weight).view_as(x)
    total = (mine * step.upstream).sum()
    others = [member for member in step.group if member != step.rank.rank]
    if others:  # of their rows only those that come to this rank's experts
        total = total + _of_others(step, others, router.detach(), weight)
    torch.autograd.backward(total)
    _compare(step, "output", mine, step.output)
    _compare(step, "gradient of the input", x.grad, step.x.grad)
    _compare(step, "gradient of the router", router.grad, step.layer.router().grad)
    for name in WEIGHTS:
        expected = [_or_zero(weights[name, step.first + index]) for index in range(step.here)]
        gradients = [step.layer.gradient(name, index) for index in range(step.here)]
        got = [torch.zeros_like(expected[0]) if gradient is None else gradient for gradient in gradients]
        _compare(step, f"gradient of {name}", torch.stack(expected), torch.stack(got))


def _of_others(step: LayerStep, others: Sequence[int], router: torch.Tensor, weight: Weight) -> torch.Tensor:
    """What other ranks' rows add to the loss by way of this rank's experts."""
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
    """Output of some of this rank's tokens, the weights of whose experts are drawn again."""
    import torch

    tokens = torch.linspace(0, step.x[..., 0].numel() - 1, _SAMPLED_TOKENS, device=step.x.device).long()
    with torch.no_grad():
        shares, experts, kept = _choose(step, step.x, step.router())
        _record(step, experts, kept)
        rows = step.x.flatten(0, 1)[tokens]
        expected = _mix(rows, shares[tokens], experts[tokens], kept[tokens], step.value)
    _compare(step, f"output of {_SAMPLED_TOKENS} tokens", expected, step.output.flatten(0, 1)[tokens])


def _choose(step: LayerStep, x: torch.Tensor, router: torch.Tensor) -> Choice:
    """Weights, experts, and whether the expert took it, (n, k) each, of (B, S, D)."""
    import torch
    import torch.nn.functional as F

    from perfsuite.models.routes_module import imposed, within_capacity

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
    rows: torch.Tensor,
    shares: torch.Tensor,
    experts: torch.Tensor,
    kept: torch.Tensor,
    weight: Weight,
) -> torch.Tensor:
    """(n, D) rows through their experts, one expert after the other."""
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
    """What this rank's tokens, (n, k), and those of its group chose; a collective along ep."""
    import torch.distributed as dist

    counts = experts.flatten().bincount(minlength=step.case.experts)
    if len(step.group) > 1:
        dist.all_reduce(counts, group=step.rank.group("ep"))
    mean = len(step.group) * experts.numel() / step.case.experts
    step.rank.record("expert_imbalance", counts.max() / mean, reduce="max")
    step.rank.record("dropped_share", 1 - kept.float().mean(), reduce="mean")


def _compare(step: LayerStep, what: str, expected: torch.Tensor | None, got: torch.Tensor | None) -> None:
    assert expected is not None, "the loop gives every gradient"
    tolerance = parity_tolerance(step.case.dtype)
    error = float("nan") if got is None else float((got.float() - expected.float()).norm())
    error /= max(float(expected.float().norm()), 1e-30)
    if not error <= tolerance:
        raise WrongResult(
            f"{what} of {step.case} on rank {step.rank.rank} against a plain loop, relative error",
            expected=f"at most {tolerance:g}",
            got=error,
        )


def _or_zero(parameter: torch.Tensor) -> torch.Tensor:
    """Its gradient; zeros where no row came by."""
    return parameter.detach() * 0 if parameter.grad is None else parameter.grad
