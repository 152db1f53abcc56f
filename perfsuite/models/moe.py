"""Mixtures of experts: a LLaMA with several MLPs in each block; a router chooses a few of them for every token.

Sources: Jiang et al. 2024 (Mixtral 8x7B); Fedus et al. 2021 (Switch: balance loss, capacity); Lepikhin et al. 2020
(GShard: groups with a capacity each).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import divisors, require_sizes
from perfsuite.models.language import Llama, Split, multiple

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


EXPERT_FEATURES: Mapping[str, int] = {"gate": 2, "expand": 2, "contract": 1}
"""Dimension with an expert's F features, for each (E, ., .) matrix of a layer's experts."""


@dataclass(frozen=True, kw_only=True)
class Moe(Llama):
    """A LLaMA with a router and experts in every block.

    >>> MODELS[0].name, MODELS[0].parameters, MODELS[0].active_parameters
    ('mixtral-8x7b', 46702792704, 12879925248)
    """

    experts: int = 8  # MLPs of a block (E).
    top_k: int = 2  # Experts that compute a token (k).
    capacity_factor: float | None = None
    """None: dropless, as in Mixtral; else an expert takes at most this times its even share and drops the rest."""
    group_tokens: int = 0
    """Neighbouring tokens that share an expert's capacity; divides ``sequence_length``; 0: the whole sample."""
    balance_weight: float = 0.01
    """Weight of the balance loss E x sum of f_e P_e, the mean over samples, of each block; 0: none."""
    skew: float | None = None
    """Rows of the fullest expert over the mean, 1 to E / k, imposed on the router's choice; None: not imposed."""

    parallelize: ClassVar[Mapping[str, Split]] = {
        **{part: how for part, how in Llama.parallelize.items() if not part.startswith("blocks.*.mlp")},
        "blocks.*.mlp": "experts",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self.name, experts=self.experts, top_k=self.top_k)
        if self.top_k > self.experts:
            raise InvalidParameter(
                f"top_k={self.top_k} of model {self.name} is more than its experts={self.experts}; "
                f"choose 1 to {self.experts}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise InvalidParameter(
                f"capacity_factor={self.capacity_factor!r} of model {self.name} is not above 0; choose for example "
                "1.25, or None to drop nothing"
            )
        if not self.balance_weight >= 0:
            raise InvalidParameter(
                f"balance_weight={self.balance_weight!r} of model {self.name} is below 0; choose 0 or more"
            )
        tokens, group = self.sequence_length, self.group_tokens
        if not isinstance(group, int) or group < 0 or (group and tokens % group):
            near = sorted(divisors(tokens, group)[:4]) if isinstance(group, int) else sorted(divisors(tokens, 0))
            raise InvalidParameter(
                f"group_tokens={group!r} does not divide sequence_length={tokens} of model {self.name}; "
                f"choose {', '.join(map(str, near))}, or 0 for the whole sample"
            )
        if self.skew is not None:
            hot_tokens(self.name, self.sequence_length, self.experts, self.top_k, self.skew)

    @property
    def routing(self) -> Routing:
        """Settings of the torch module's router."""
        hot = None
        if self.skew is not None:
            hot = hot_tokens(self.name, self.sequence_length, self.experts, self.top_k, self.skew)
        return Routing(
            experts=self.experts,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            sequence_length=self.sequence_length,
            group_tokens=self.group_tokens or self.sequence_length,
            balance_weight=self.balance_weight,
            hot_tokens=hot,
        )

    @property
    def _expert_weights(self) -> int:
        """Numbers in one expert: 3 D F."""
        return 3 * self.width * self.hidden

    @property
    def _block_weights(self) -> int:
        """Numbers in the matrices that compute one token in a block: 2 D^2 + 2 D K, E D of the router, k experts."""
        attention = self.width * (2 * self.width + 2 * self.key_width)
        return attention + self.width * self.experts + self.top_k * self._expert_weights

    @property
    def active_parameters(self) -> int:
        """Active parameters: all parameters except the E - k unused experts per block.  FLOPs are counted by them."""
        return super().parameters

    @property
    def parameters(self) -> int:
        """Parameters with all experts."""
        return self.active_parameters + self.layers * (self.experts - self.top_k) * self._expert_weights

    def dense(self) -> Llama:
        """Return a LLaMA with one MLP as wide as k experts: its parameters are the active ones less the routers'."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Llama)}
        return Llama(**{**fields, "name": f"{self.name}-dense", "hidden": self.top_k * self.hidden})

    def twin(self, shape: MeshShape | None = None) -> Moe:
        """Return two blocks with few experts, the same number on every rank of ep, and a capacity per rank's tokens."""
        dense = self.dense().twin(shape)
        ep, cp, tp = (shape.size(axis) if shape else 1 for axis in ("ep", "cp", "tp"))
        top_k = min(self.top_k, 2)
        experts, tokens = multiple(ep, max(4, 2 * top_k)), dense.sequence_length
        sizes = {field.name: getattr(dense, field.name) for field in dataclasses.fields(Llama)}
        return dataclasses.replace(
            self,
            **{**sizes, "name": self.name},
            experts=experts,
            top_k=top_k,
            group_tokens=tokens // (2 * cp * tp) if cp * tp > 1 else 0,
            skew=None if self.skew is None else nearest_skew(self.skew, tokens=tokens, experts=experts, top_k=top_k),
        )


_MIXTRAL = Moe(
    name="mixtral-8x7b", layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, sequence_length=4096, experts=8
)
_TINY = Moe(
    name="moe-tiny", layers=2, width=128, heads=8, kv_heads=4, hidden=256, words=512, sequence_length=64, experts=8
)

MODELS = (
    _MIXTRAL,
    # 64 experts of a quarter of the size, 8 of them for a token: as many active parameters, 1.9 times as many in all.
    dataclasses.replace(_MIXTRAL, name="mixtral-64", experts=64, top_k=8, hidden=3584),
    # Report 004 prints 1.3T and 175B active of 64 experts, top 2, and 1.6T of 64; perfsuite chose every other size.
    Moe(
        name="moe-1.3t", layers=96, width=18944, heads=148, kv_heads=148, hidden=3328, sequence_length=2048, experts=64
    ),
    Moe(name="moe-1.6t", layers=64, width=10240, heads=80, kv_heads=8, hidden=12544, sequence_length=2048, experts=64),
    _TINY,
    dataclasses.replace(_TINY, name="moe-tiny-64", experts=64, top_k=8, hidden=64),
    _MIXTRAL.dense(),
    _TINY.dense(),
)
"""Mixtures, and dense models with as many active parameters."""
