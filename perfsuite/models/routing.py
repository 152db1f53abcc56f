"""How tokens find their experts, without torch: who is chosen, what is dropped, and how uneven it is made on purpose.

Sources: Fedus et al. 2021 (Switch: balance loss, capacity); Lepikhin et al. 2020 (GShard: groups with a capacity each).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter

SKEW_TOLERANCE = 0.01
"""How far the imbalance that a sample of so many tokens can have may be from the one asked for."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens find their experts."""

    experts: int
    """E."""
    top_k: int
    """Experts of one token (k)."""
    capacity_factor: float | None
    """An expert takes this times its even share of a group's rows and drops the others; None: it takes all."""
    sequence_length: int
    """Tokens of a whole sample."""
    group_tokens: int
    """Neighbouring tokens that share an expert's capacity."""
    balance_weight: float
    """Weight of the loss that even routing makes smallest."""
    hot_tokens: int | None
    """So many tokens of a sample choose expert 0 and all else is even, whatever the router says; None: it chooses."""

    @property
    def capacity(self) -> int | None:
        """Rows of one group that an expert takes at most: ceil(factor k G / E), and never more than the group has.

        >>> sizes = dict(experts=8, top_k=2, sequence_length=64, balance_weight=0.0, hot_tokens=None)
        >>> Routing(capacity_factor=1.25, group_tokens=64, **sizes).capacity
        20
        """
        if self.capacity_factor is None:
            return None
        even = self.capacity_factor * self.top_k * self.group_tokens / self.experts
        return min(self.group_tokens, math.ceil(round(even, 9)))


def nearest_skew(skew: float, *, tokens: int, experts: int, top_k: int) -> float:
    """The skew nearest to this one that ``tokens`` can have exactly.

    >>> nearest_skew(1.7, tokens=16, experts=4, top_k=2)
    1.75
    """
    unit = experts / (tokens * top_k)
    least, most = _hot_range(tokens, experts, top_k)
    return min(max(round(skew / unit), least), most) * unit


def _hot_range(tokens: int, experts: int, top_k: int) -> tuple[int, int]:
    """Fewest and most tokens that the fullest expert can have: where each token takes all experts, it has all."""
    return tokens if experts == top_k else -(-tokens * top_k // experts), tokens


def hot_tokens(owner: str, tokens: int, experts: int, top_k: int, skew: float) -> int:
    """Tokens of every ``tokens`` that must choose one expert so that its load is ``skew`` times the mean.

    The mean is tokens x top_k / experts rows, so n tokens are a skew of n experts / (tokens top_k).  Raises
    InvalidParameter where no whole n comes within 1 % of it.

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
            f"skew={skew!r} of model {owner} cannot be had by {tokens} tokens that choose {top_k} of {experts} "
            f"experts: the fullest has 1 to {experts / top_k:g} times the mean in steps of {unit:g}; "
            f"choose {' or '.join(f'{n * unit:g}' for n in near)}, or a longer sequence_length"
        )
    return count
