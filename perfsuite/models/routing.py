"""Settings of a router, without torch: chosen experts, capacity, and imposed imbalance.

Sources: Fedus et al. 2021 (Switch: balance loss, capacity); Lepikhin et al. 2020 (GShard: groups with a capacity each).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter

SKEW_TOLERANCE = 0.01
"""Largest relative difference between the imbalance asked for and the nearest one that the tokens allow."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Settings of a layer's router."""

    experts: int  # Experts of the layer (E)
    top_k: int  # Experts of one token (k)
    capacity_factor: float | None
    """An expert takes this times its even share of a group's rows and drops the others; None: it takes all rows."""
    sequence_length: int  # Tokens of a whole sample
    group_tokens: int  # Neighbouring tokens that share an expert's capacity
    balance_weight: float  # Weight of the loss that is smallest for even routing
    hot_tokens: int | None
    """This many tokens of a sample choose expert 0, all others are dealt evenly; None: the router chooses."""

    @property
    def capacity(self) -> int | None:
        """Most rows of one group for an expert: ceil(factor k G / E), at most the group's tokens; None if dropless.

        >>> sizes = dict(experts=8, top_k=2, sequence_length=64, balance_weight=0.0, hot_tokens=None)
        >>> Routing(capacity_factor=1.25, group_tokens=64, **sizes).capacity
        20
        """
        if self.capacity_factor is None:
            return None
        even = self.capacity_factor * self.top_k * self.group_tokens / self.experts
        return min(self.group_tokens, math.ceil(round(even, 9)))


def nearest_skew(skew: float, *, tokens: int, experts: int, top_k: int) -> float:
    """Return the skew nearest to this one that ``tokens`` can have exactly.

    >>> nearest_skew(1.7, tokens=16, experts=4, top_k=2)
    1.75
    """
    unit = experts / (tokens * top_k)
    least, most = _hot_range(tokens, experts, top_k)
    return min(max(round(skew / unit), least), most) * unit


def _hot_range(tokens: int, experts: int, top_k: int) -> tuple[int, int]:
    """Return the fewest and the most tokens of the fullest expert; it has all if each token takes all experts."""
    return tokens if experts == top_k else -(-tokens * top_k // experts), tokens


def hot_tokens(owner: str, tokens: int, experts: int, top_k: int, skew: float) -> int:
    """Return the number of ``tokens`` that must choose one expert so that its load is ``skew`` times the mean.

    The mean is tokens x top_k / experts rows, so n tokens are a skew of n experts / (tokens top_k).  Raises
    InvalidParameter if no whole n comes within 1 % of the skew.

    >>> hot_tokens("m", tokens=64, experts=8, top_k=2, skew=3.0)
    48
    """
    least, most = _hot_range(tokens, experts, top_k)
    unit = experts / (tokens * top_k)
    wanted = skew / unit
    count = min(max(round(wanted), least), most)
    if abs(count - wanted) > SKEW_TOLERANCE * wanted:
        near = sorted({min(max(math.floor(wanted), least), most), min(max(math.ceil(wanted), least), most)})
        raise InvalidParameter(
            f"skew={skew!r} of model {owner} is not possible with {tokens} tokens that choose {top_k} of {experts} "
            f"experts: the fullest has 1 to {experts / top_k:g} times the mean in steps of {unit:g}; "
            f"choose {' or '.join(f'{n * unit:g}' for n in near)}, or a longer sequence_length"
        )
    return count
