"""GPT in torch.  Shapes: B batch, S tokens, D width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.base import Checkpointing
from perfsuite.models.gpt import Gpt
from perfsuite.models.layers import Block, TrainingModule, attend, cross_entropy


class TiedEmbedding(nn.Embedding):
    """Token embedding that is also the output projection.

    Both uses go through ``forward``: strategies that gather parameters do so when the module that owns them is called.
    """

    def forward(self, inputs: torch.Tensor, *, project: bool = False) -> torch.Tensor:
        """(B, S) tokens to (B, S, D), or (B, S, D) features to (B, S, V) logits."""
        return F.linear(inputs, self.weight) if project else super().forward(inputs)


class GptBlock(Block):
    """Attention and MLP, each behind a layer norm and beside a residual."""

    def __init__(self, config: Gpt, checkpointing: Checkpointing) -> None:
        super().__init__(checkpointing)
        self.heads = config.heads
        width = config.width
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        (x,) = inputs
        query, key, value = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.project(attend(query, key, value, heads=self.heads, causal=True))
        hidden = F.gelu(self.expand(self.norm2(x)), approximate="tanh")
        result: torch.Tensor = x + self.contract(hidden)
        return result


class GptModule(TrainingModule):
    """Next-token loss of a GPT."""

    def __init__(self, config: Gpt, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.tokens = TiedEmbedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(GptBlock(config, checkpointing) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of (B, S + 1) tokens."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.tokens(self.norm(x), project=True), targets)
