"""Mixture of experts in torch.

Shapes: B samples, S tokens of a sample on this rank, D width, F features of an expert, E experts, k of a token;
n = B S tokens, G of them in a group, R rows (a row is one token on its way to one expert).

A layer works on one rank without communication.  Expert parallelism slices the experts and sets ``dispatch``, which
moves rows to their experts and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from perfsuite.models.language_module import LlamaModule
from perfsuite.models.layers import fill, local
from perfsuite.models.moe import EXPERT_FEATURES, Moe, Routing


class Experts(nn.Module):
    """SwiGLU MLPs of one shape, each with its own rows: all experts of a layer, or a rank's part of them."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.expand = nn.Parameter(torch.empty(experts, width, hidden))
        self.contract = nn.Parameter(torch.empty(experts, hidden, width))
        self.first = 0  # Number of the first expert here in the layer
        self.slice, self.slices = 0, 1
        """The slice of each expert's features that is here, and the number of equal slices."""

    def keep(self, *, part: int, parts: int, slice_: int, slices: int) -> None:
        """Keep the ``part``-th of ``parts`` groups of experts, and the ``slice_``-th of ``slices`` of their features.
        Parameters with values are copied, so that the whole is freed; those on the meta device get values later, so
        that the whole layer never takes memory.
        """
        self.first, self.slice, self.slices = part * (len(self.gate) // parts), slice_, slices
        for name, dim in EXPERT_FEATURES.items():
            expert = getattr(self, name).detach().chunk(parts)[part].chunk(slices, dim=dim)[slice_]
            setattr(self, name, nn.Parameter(expert.clone(memory_format=torch.contiguous_format)))

    def fill(self, values: torch.Tensor, name: str, seed: int) -> None:
        """Write the initial value of the parameter called ``name`` into ``values``, expert by expert.  An expert's
        number in the layer seeds its value: a part of the experts has the same values as in the whole layer.
        """
        dim = EXPERT_FEATURES[name.rpartition(".")[2]] - 1
        for number, expert in enumerate(values, self.first):
            shape = list(expert.shape)
            shape[dim] *= self.slices
            whole = expert if self.slices == 1 else expert.new_empty(shape)
            fill(whole, f"{name}.{number}", seed)
            if self.slices > 1:
                expert.copy_(whole.chunk(self.slices, dim=dim)[self.slice])

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return (R, D) for (R, D) rows sorted by expert, and (E,) rows of each."""
        gate, expand, contract = (local(weight) for weight in (self.gate, self.expand, self.contract))
        if torch.is_autocast_enabled(rows.device.type):  # autocast does not cast for a grouped product
            narrow = torch.get_autocast_dtype(rows.device.type)
            rows, gate, expand, contract = (x.to(narrow) for x in (rows, gate, expand, contract))
        multiply = _product(rows.device.type, rows.dtype, counts)
        return multiply(F.silu(multiply(rows, gate)) * multiply(rows, expand), contract)


def _product(device: str, dtype: torch.dtype, counts: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return the product of rows sorted by expert with each expert's matrix: torch's grouped one if possible."""
    grouped = _grouped_product(device, dtype)
    if grouped is not None:
        ends = counts.cumsum(0).to(torch.int32)
        return lambda rows, weights: grouped(rows, weights, offs=ends)
    lengths = counts.tolist()

    def each(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = torch.split(rows, lengths)
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    return each


@functools.cache
def _grouped_product(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Return torch's grouped product (2.8 and newer) if it computes this dtype on this device, else None."""
    found: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        return None
    try:
        with _disable_current_modes():  # hides this product from checkpointing and counters
            rows, weights = (torch.ones(*shape, dtype=dtype, device=device) for shape in ((16, 16), (1, 16, 16)))
            found(rows, weights, offs=torch.tensor([16], dtype=torch.int32, device=device))
    except (NotImplementedError, RuntimeError):
        return None
    return found


Dispatch = Callable[[torch.Tensor, torch.Tensor, Experts], tuple[torch.Tensor, torch.Tensor]]
"""(R, D) rows sorted by expert and (E,) rows of each -> (R, D) computed rows and (E on this rank,) rows computed."""


@dataclass(frozen=True, kw_only=True)
class SampleSplit:
    """This rank's part of every sample if ranks share a sequence."""

    places: torch.Tensor  # (S,) positions of this rank's tokens in the whole sample
    length: int  # Tokens of the whole sample
    add_up: Callable[[torch.Tensor], None]
    """Replace a tensor by its sum over all ranks that hold parts of the same samples."""
    averaged: int = 1  # The number of those ranks whose gradients are averaged and not summed


Figures = dict[str, torch.Tensor]
"""Figures of routing in one forward, as tensors, so that the host does not wait for the device.

``expert_imbalance``: rows of the fullest expert over the mean of all; ``dropped_share``: share of this rank's rows that
no expert took; ``balance_loss``: E x sum of f_e P_e without its weight, 1 for even routing."""


class Router(nn.Module):
    """Probabilities of the experts of each token; a module of its own, so that strategies can gather its weights."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, E) probabilities of (B, S, D), in fp32."""
        weight: torch.Tensor = self.weight
        if hasattr(weight, "to_local"):  # all ranks of tp hold it and see different tokens, so gradients add up
            from torch.distributed.tensor import Partial

            weight = weight.to_local(grad_placements=[Partial()])
        return F.linear(x, weight).float().softmax(dim=-1)


class MoeMlp(nn.Module):
    """Every token goes to the k experts that the router prefers; their outputs are added with its weights."""

    def __init__(self, width: int, hidden: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.router = Router(width, routing.experts)
        self.experts = Experts(routing.experts, width, hidden)
        self.dispatch: Dispatch = alone
        self.split: SampleSplit | None = None  # This rank's part of split samples; None: it holds whole samples
        self.loss_factor: float | torch.Tensor = 1.0
        """Factor of the micro-batch's mean loss before its backward, and of the balance loss."""
        self.figures: Figures = {}  # Figures of the latest forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D)."""
        shape, routing = x.shape, self.routing
        probabilities = self.router(x)
        weights, chosen = self._choose(probabilities)
        balance = self._balance_loss(probabilities, chosen)
        if routing.balance_weight:
            weighted = balance * routing.balance_weight
            x = _AddLoss.apply(x, weighted, self.loss_factor)
        tokens = x.reshape(-1, shape[-1])
        route = dropless(chosen, routing.experts) if routing.capacity is None else within_capacity(chosen, routing)
        source, target, counts = route
        padded = torch.cat((tokens, tokens.new_zeros(1, shape[-1])))
        rows, load = self.dispatch(padded[source], counts, self.experts)
        rows = torch.cat((rows, rows.new_zeros(1, shape[-1])))
        # Rows are gathered and not added by index, so that the order of sums is the same in every run.
        chosen_rows = rows[target].view(*chosen.shape, shape[-1])
        self._note(load, chosen, route, balance)
        mixed: torch.Tensor = (chosen_rows * weights.to(x.dtype)[..., None]).sum(dim=-2)
        return mixed.view(shape).type_as(x)

    def _choose(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts of every token, (B, S, k); several weights sum to 1, one is its probability."""
        routing = self.routing
        if routing.hot_tokens is None:
            weights, chosen = probabilities.topk(routing.top_k, dim=-1)
        else:
            device = probabilities.device
            whole = torch.arange(probabilities.shape[1], device=device)
            places = whole if self.split is None else self.split.places.to(device)
            chosen = imposed(places, routing).expand(*probabilities.shape[:-1], -1)
            weights = probabilities.gather(-1, chosen)
        return (weights / weights.sum(dim=-1, keepdim=True) if routing.top_k > 1 else weights), chosen

    def _balance_loss(self, probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean over samples of E x sum over e of f_e P_e.  f_e is the share of rows that chose e, P_e the
        mean probability of e.  Computed per sample, so that it does not depend on the batch.  For a split sequence this
        is the rank's part, times the number of ranks over which gradients are averaged: parts add up like gradients.
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

    def _note(self, load: torch.Tensor, chosen: torch.Tensor, route: Route, balance: torch.Tensor) -> None:
        """Keep the figures of routing; with a capacity, buffers are full, so the imbalance shows the choice."""
        source, target, counts = route
        mean = chosen.numel() / self.routing.experts
        if self.routing.capacity is not None:
            load = torch.zeros_like(counts).index_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        else:  # every rank sends as many rows
            mean *= getattr(self.dispatch, "sources", 1)
        parts = 1 if self.split is None else self.split.length / chosen.shape[1] / self.split.averaged
        kept = (target < len(source)).float().mean()
        imbalance, loss = load.max() / mean, balance.detach() * parts
        self.figures = {"expert_imbalance": imbalance, "dropped_share": 1 - kept, "balance_loss": loss}


class _AddLoss(torch.autograd.Function):
    """Returns its input; its backward adds the gradient of a second loss, which so does not need the model's end."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        context.factor, context.like = factor, loss.detach()
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], torch.ones_like(context.like) * context.factor, None


def alone(rows: torch.Tensor, counts: torch.Tensor, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute rows whose experts are all on this rank."""
    return experts(rows, counts), counts


class MoeModule(LlamaModule):
    """A mixture of experts."""

    config: Moe

    def new_mlp(self) -> nn.Module:
        """Return the router and experts of a layer."""
        return MoeMlp(self.config.width, self.config.hidden, self.config.routing)


def moe_layers(module: nn.Module) -> Iterator[MoeMlp]:
    """Yield every mixture of experts in ``module``, first to last."""
    return (part for part in module.modules() if isinstance(part, MoeMlp))


def set_loss_factor(module: nn.Module, factor: float | torch.Tensor) -> None:
    """Set the factor of the balance losses to that of a micro-batch's mean loss before its backward."""
    for layer in moe_layers(module):
        layer.loss_factor = factor


def router_figures(module: nn.Module) -> Figures:
    """Return the figures of the latest forward, of the least even layer or means over layers; empty without experts."""
    of_layers = [layer.figures for layer in moe_layers(module) if layer.figures]
    values = {name: torch.stack([figures[name] for figures in of_layers]) for name in (of_layers or [{}])[0]}
    return {name: value.max() if name == "expert_imbalance" else value.mean() for name, value in values.items()}


# -- routes: from the experts that tokens chose to rows sorted by expert, and back -------------------------------


Route = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(R,) token of each row, sorted by expert; n, one beyond the last token, for an empty row.  (n k,) row of each choice;
R, one beyond the last row, for a dropped choice.  (E,) rows of each expert."""


def dropless(chosen: torch.Tensor, experts: int) -> Route:
    """Return a route with a row for every choice of (B, S, k)."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    target = torch.empty_like(order)
    target[order] = torch.arange(len(order), device=order.device)
    # bincount would wait for the device to know the length of its result.
    counts = torch.zeros(experts, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return order // chosen.shape[-1], target, counts


def within_capacity(chosen: torch.Tensor, routing: Routing) -> Route:
    """Return a route with the same number of rows for every expert and group: excess choices are dropped, free rows are
    empty.  First choices come before second ones and early tokens before late ones, as in GShard and DeepSpeed.
    """
    capacity, experts, k = routing.capacity, routing.experts, chosen.shape[-1]
    assert capacity is not None, "dropless routing has no capacity"
    tokens = chosen.numel() // k
    groups = tokens // routing.group_tokens
    ranked = chosen.reshape(groups, routing.group_tokens, k).transpose(1, 2).reshape(groups, -1)  # (groups, k G)
    places = F.one_hot(ranked, experts).cumsum(dim=1).gather(2, ranked[..., None]).squeeze(-1) - 1
    group = torch.arange(groups, device=chosen.device)[:, None]
    rows = experts * groups * capacity
    slots = torch.where(places < capacity, (ranked * groups + group) * capacity + places, rows)
    target = slots.view(groups, k, -1).transpose(1, 2).reshape(-1)
    source = torch.full((rows + 1,), tokens, device=chosen.device)
    source[target] = torch.arange(tokens * k, device=chosen.device) // k
    counts = torch.full((experts,), groups * capacity, device=chosen.device)
    return source[:-1], target, counts


def imposed(places: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the experts of the tokens at these ``places`` of a sample, (S, k): a pattern in place of a router's
    choice.

    n tokens of a sample's T, evenly spaced, choose expert 0; the other rows are dealt to experts 1 to E - 1 in turn.
    So expert 0 has n E / (T k) times the mean load in every sample, in any split of the samples.

    >>> from perfsuite.models.moe import Moe
    >>> sizes = dict(layers=1, width=8, heads=2, kv_heads=2, hidden=8, sequence_length=4, experts=4)
    >>> imposed(torch.arange(4), Moe(name="m", skew=1.0, **sizes).routing).tolist()
    [[1, 2], [0, 3], [1, 2], [0, 3]]
    """
    count, of = routing.hot_tokens, routing.sequence_length
    assert count is not None, "no imbalance is imposed"
    before = places * count // of
    is_hot = (places + 1) * count // of - before
    dealt = routing.top_k * places - before
    turn = torch.arange(routing.top_k, device=places.device) - is_hot[:, None]
    others = 1 + (dealt[:, None] + turn) % max(routing.experts - 1, 1)
    return torch.where(turn < 0, 0, others)
