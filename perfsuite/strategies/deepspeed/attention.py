"""DeepSpeed's Ulysses, to compare with perfsuite's; imported only if DeepSpeed is installed."""

from __future__ import annotations

import torch
from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-untyped] # DeepSpeed has no types
from torch import nn

from perfsuite.models.attention_module import Core
from perfsuite.models.base import AttentionMethod
from perfsuite.record.workload import Rank
from perfsuite.strategies.deepspeed.engine import start

_BATCH_DIM, _TOKENS_DIM, _HEADS_DIM = 0, 1, 2


class _Local(nn.Module):
    """Attention of whole sequences with some of the heads, in DeepSpeed's order of dimensions."""

    def __init__(self, method: AttentionMethod) -> None:
        super().__init__()
        self.core = Core(method)

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
