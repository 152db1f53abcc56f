"""DeepSpeed's layer of experts and its Ulysses, to compare with perfsuite's; imported only if DeepSpeed is installed.

The layer of experts makes its own groups from all ranks: neighbouring ranks share the experts.  Without a capacity it
pads every expert's rows to those of the fullest one; with one, an expert takes at most as many of a rank's tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.moe.layer import MoE  # type: ignore[import-untyped] # DeepSpeed has no types
from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-untyped] # as above
from torch import nn

from perfsuite.models.base import AttentionMethod
from perfsuite.models.language_module import SwiGlu
from perfsuite.models.layers import AttentionCore
from perfsuite.record.workload import Rank
from perfsuite.strategies.deepspeed.engine import start

if TYPE_CHECKING:
    from perfsuite.models.moe import Moe


class DeepSpeedLayer:
    """``deepspeed.moe.layer.MoE`` without noise, random choices or a minimum capacity."""

    normalizes_kept = True
    per_sample = False

    def __init__(self, config: Moe, dtype: torch.dtype, rank: Rank) -> None:
        start(rank)
        with torch.device(rank.device):
            layer: Any = MoE(
                config.width,
                SwiGlu(config.width, config.hidden),
                num_experts=config.experts,
                ep_size=rank.shape.size("ep"),
                k=config.top_k,
                capacity_factor=config.capacity_factor or 1.0,
                min_capacity=0,
                drop_tokens=config.capacity_factor is not None,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
        layer.set_deepspeed_parallelism()
        self._layer = layer.to(dtype)
        self._experts = layer.deepspeed_moe.experts.deepspeed_experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D)."""
        return self._layer(x)[0]

    def router(self) -> torch.Tensor:
        """Return the (E, D) parameter."""
        return self._layer.deepspeed_moe.gate.wg.weight

    def weight(self, name: str, index: int) -> torch.Tensor:
        """Return one matrix of this rank's expert ``index``, in x out, as a view of a parameter."""
        weight: torch.Tensor = getattr(self._experts[index], name).weight
        return weight.T

    def gradient(self, name: str, index: int) -> torch.Tensor | None:
        """Return the gradient of :meth:`weight`."""
        gradient = getattr(self._experts[index], name).weight.grad
        return None if gradient is None else gradient.T

    def clear(self) -> None:
        """Clear all gradients."""
        self._layer.zero_grad(set_to_none=True)


_BATCH_DIM, _TOKENS_DIM, _HEADS_DIM = 0, 1, 2


class _Local(nn.Module):
    """Attention of whole sequences with some of the heads, in DeepSpeed's order of dimensions."""

    def __init__(self, method: AttentionMethod) -> None:
        super().__init__()
        self.core = AttentionCore(method)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return (B, S, H, E) for (B, S, H, E)."""
        out: torch.Tensor = self.core(*(x.transpose(1, 2) for x in (query, key, value)))
        return out.transpose(1, 2).contiguous()


class DeepSpeedCore(nn.Module):
    """Causal attention over the tokens of all ranks along cp, in place of a block's core."""

    def __init__(self, rank: Rank, *, method: AttentionMethod) -> None:
        super().__init__()
        start(rank)
        self.spread = DistributedAttention(_Local(method), rank.group("cp"), _HEADS_DIM, _TOKENS_DIM)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's (B, H, S, E) for its (B, H, S, E) queries and (B, K, S, E) keys and values."""
        out: torch.Tensor = self.spread(*(x.transpose(1, 2) for x in (query, key, value)), _BATCH_DIM)
        return out.transpose(1, 2)
