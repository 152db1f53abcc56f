"""Routes of tokens: rows sorted by expert, and the way back to tokens.

Shapes: B samples, S tokens of one, k experts of a token, E experts; n = B S tokens in groups of G; R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from perfsuite.models.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Route:
    """The token of each row, and the row of each token's choices."""

    source: torch.Tensor  # (R,) token of each row, sorted by expert; n, one beyond the last token, for an empty row
    target: torch.Tensor  # (n k,) row of each choice; R, one beyond the last row, for a dropped choice
    counts: torch.Tensor  # (E,) rows of each expert


def dropless(chosen: torch.Tensor, experts: int) -> Route:
    """Return a route with a row for every choice of (B, S, k)."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    target = torch.empty_like(order)
    target[order] = torch.arange(len(order), device=order.device)
    # bincount would wait for the device to know the length of its result.
    counts = torch.zeros(experts, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    return Route(source=order // chosen.shape[-1], target=target, counts=counts)


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
    return Route(source=source[:-1], target=target, counts=counts)


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
