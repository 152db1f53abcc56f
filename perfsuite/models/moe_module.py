"""Mixture of experts in torch.

Shapes: B samples, S tokens of a sample on this rank, D width, F features of an expert, E experts, k of a token;
n = B S tokens, G of them in a group, R rows (a row is one token on its way to one expert).

A layer works alone: router, experts, and all rows stay where they are.  Expert parallelism slices the experts and sets
``dispatch``, which moves rows to where their experts are and back; how tokens choose, drop and add up stays here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.experts_module import Experts
from perfsuite.models.llama import Llama
from perfsuite.models.llama_module import LlamaModule
from perfsuite.models.moe import Moe
from perfsuite.models.routes_module import Route, dropless, imposed, within_capacity
from perfsuite.models.routing import Routing

Dispatch = Callable[[torch.Tensor, torch.Tensor, Experts], tuple[torch.Tensor, torch.Tensor]]
"""(R, D) rows sorted by expert and (E,) rows of each to (R, D) computed rows and (E on this rank,) rows computed."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """What this rank holds of every sample where a sequence is split over ranks, and how to see the rest."""

    places: torch.Tensor
    """(S,) positions of this rank's tokens in the whole sample."""
    length: int
    """Tokens of the whole sample."""
    add_up: Callable[[torch.Tensor], None]
    """Replaces a tensor by its sum over all ranks that hold parts of the same samples."""
    averaged: int = 1
    """Of those ranks, how many have their gradients averaged and not added up."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What routing was like in one forward; tensors, so that nothing waits for the device."""

    imbalance: torch.Tensor
    """Rows of the fullest expert on this rank over the mean of all experts."""
    dropped_share: torch.Tensor
    """Rows that no expert took, of all that this rank's tokens asked for."""
    balance_loss: torch.Tensor
    """E x sum of f_e P_e without its weight; 1 where routing is even."""


class Router(nn.Module):
    """How much of every token each expert should have; called as a module, so that who gathers weights knows when."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, E) probabilities, in fp32."""
        weight: torch.Tensor = self.weight
        if hasattr(weight, "to_local"):  # the same on all ranks of tp, whose tokens differ: gradients add up
            from torch.distributed.tensor import Partial

            weight = weight.to_local(grad_placements=[Partial()])
        return F.linear(x, weight).float().softmax(dim=-1)


class MoeMlp(nn.Module):
    """Every token goes through the k experts that the router gives most to; their outputs are added by its weights."""

    def __init__(self, width: int, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.router = Router(width, routing.experts)
        self.experts = Experts(routing.experts, width, hidden)
        self.dispatch: Dispatch = alone
        self.split: Split | None = None
        """None: this rank holds whole samples."""
        self.loss_factor: float | torch.Tensor = 1.0
        """What the micro-batch's mean loss is multiplied by before its backward; the balance loss is, too."""
        self.figures: Figures | None = None
        """Of the latest forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        shape, routing = x.shape, self.routing
        probabilities = self.router(x)
        weights, chosen = self._choose(probabilities)
        balance = self._balance_loss(probabilities, chosen)
        if routing.balance_weight:
            weighted = balance * routing.balance_weight
            x = _Beside.apply(x, weighted, self.loss_factor)  # type: ignore[no-untyped-call] # torch does not type it
        tokens = x.reshape(-1, shape[-1])
        route = self._route(chosen)
        padded = torch.cat((tokens, tokens.new_zeros(1, shape[-1])))
        rows, load = self.dispatch(padded[route.source], route.counts, self.experts)
        rows = torch.cat((rows, rows.new_zeros(1, shape[-1])))
        # Gathered, not added by index: the order of a sum is then the same in every run.
        chosen_rows = rows[route.target].view(*chosen.shape, shape[-1])
        self._note(load, chosen, route, balance)
        mixed: torch.Tensor = (chosen_rows * weights.to(x.dtype)[..., None]).sum(dim=-2)
        return mixed.view(shape).type_as(x)

    def _choose(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts of every token, (B, S, k); the k weights sum to 1, a single one is its probability."""
        routing = self.routing
        if routing.hot_tokens is None:
            weights, chosen = probabilities.topk(routing.top_k, dim=-1)
        else:
            places = self._places(probabilities)
            chosen = imposed(places, routing)
            chosen = chosen.expand(*probabilities.shape[:-1], -1)
            weights = probabilities.gather(-1, chosen)
        return (weights / weights.sum(dim=-1, keepdim=True) if routing.top_k > 1 else weights), chosen

    def _places(self, probabilities: torch.Tensor) -> torch.Tensor:
        if self.split is not None:
            return self.split.places.to(probabilities.device)
        return torch.arange(probabilities.shape[1], device=probabilities.device)

    def _balance_loss(self, probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Mean over samples of E x sum over e of f_e P_e: f_e the share of rows that chose e, P_e its mean probability.

        Taken sample by sample, so that it does not depend on which samples come together.  Of a sequence that is split,
        this is the rank's part, times the ranks over which gradients are averaged: parts add up where gradients do.
        """
        counts = torch.zeros_like(probabilities[:, 0]).scatter_add_(
            1, chosen.flatten(1), torch.ones_like(chosen.flatten(1), dtype=probabilities.dtype)
        )
        length, averaged = probabilities.shape[1], 1
        if self.split is not None:
            length, averaged = self.split.length, self.split.averaged
            if self.routing.balance_weight:
                self.split.add_up(counts)
        shares, means = counts / (length * self.routing.top_k), probabilities.sum(dim=1) / length
        return averaged * self.routing.experts * (shares * means).sum(dim=-1).mean()

    def _route(self, chosen: torch.Tensor) -> Route:
        if self.routing.capacity is None:
            return dropless(chosen, self.routing.experts)
        return within_capacity(chosen, self.routing)

    def _note(self, load: torch.Tensor, chosen: torch.Tensor, route: Route, balance: torch.Tensor) -> None:
        """Keep what routing was like.  With a capacity buffers are full whatever was chosen: then it is the choice."""
        if self.routing.capacity is not None:
            load = torch.zeros_like(route.counts).index_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
            mean = chosen.numel() / self.routing.experts
        else:
            mean = self._mean_load(load, chosen)
        parts = 1 if self.split is None else self.split.length / chosen.shape[1] / self.split.averaged
        kept = (route.target < len(route.source)).float().mean()
        self.figures = Figures(
            imbalance=load.max() / mean, dropped_share=1 - kept, balance_loss=balance.detach() * parts
        )

    def _mean_load(self, load: torch.Tensor, chosen: torch.Tensor) -> float:
        """Rows of an expert, the mean over all, where every rank sends as many."""
        sources = getattr(self.dispatch, "sources", 1)
        return float(sources * chosen.numel() / self.routing.experts)


class _Beside(torch.autograd.Function):
    """Passes a tensor through; in the backward the loss beside it gets its gradient.

    So a block's loss needs no way to the end of the model, which may be on another rank.
    """

    @staticmethod
    def forward(context: Any, x: torch.Tensor, loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        context.factor, context.like = factor, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], torch.ones_like(context.like) * context.factor, None


def alone(rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts are here."""
    return experts(rows, counts), counts


class MoeModule(LlamaModule):
    """A mixture of experts."""

    def new_mlp(self, config: Llama) -> nn.Module:
        """Router and experts."""
        assert isinstance(config, Moe)
        return MoeMlp(config.width, config.hidden, config.routing)


def moe_layers(module: nn.Module) -> Iterator[MoeMlp]:
    """Every mixture of experts in ``module``, first to last."""
    return (part for part in module.modules() if isinstance(part, MoeMlp))


def set_loss_factor(module: nn.Module, factor: float | torch.Tensor) -> None:
    """Tell the balance losses what a micro-batch's mean loss is multiplied by before its backward.

    That is 1 over the micro-batches, times the scale of fp16, and 1 over the ranks where gradients are only summed.
    """
    for layer in moe_layers(module):
        layer.loss_factor = factor


def router_figures(module: nn.Module) -> Figures | None:
    """Of the latest forward: the least even layer, means of what was dropped and of the balance loss.

    None for a module without experts, or before its first forward.  Nothing waits for the device.
    """
    of_layers = [layer.figures for layer in moe_layers(module) if layer.figures is not None]
    if not of_layers:
        return None
    return Figures(
        imbalance=torch.stack([figures.imbalance for figures in of_layers]).max(),
        dropped_share=torch.stack([figures.dropped_share for figures in of_layers]).mean(),
        balance_loss=torch.stack([figures.balance_loss for figures in of_layers]).mean(),
    )
