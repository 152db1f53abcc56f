"""GPT in torch.  Shapes: B batch, S tokens, H heads, E features of a head, D = H x E width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.models.gpt import Gpt
from perfsuite.models.language_module import Attention, LanguageModule, Transformer


class TiedEmbedding(nn.Embedding):
    """Token embedding and output projection in one module: strategies gather parameters when it is called."""

    def forward(self, inputs: torch.Tensor, *, project: bool = False) -> torch.Tensor:
        """Return (B, S, D) for (B, S) tokens, or (B, S, V) logits for (B, S, D) features."""
        return F.linear(inputs, self.weight) if project else super().forward(inputs)


class GptAttention(Attention):
    """One matrix has queries, keys and values of a head in adjacent rows, so that ranks can share it by heads."""

    def __init__(self, config: Gpt, attention: AttentionMethod) -> None:
        super().__init__(attention)
        self.head_features = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        query, key, value = self.qkv(x).unflatten(-1, (-1, 3, self.head_features)).unbind(-2)
        return self.attend(query, key, value)


class GptMlp(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        result: torch.Tensor = self.contract(F.gelu(self.expand(x), approximate="tanh"))
        return result


class GptBlock(Transformer):
    """A layer of a GPT."""

    def __init__(self, config: Gpt, checkpointing: Checkpointing, attention: AttentionMethod) -> None:
        super().__init__(checkpointing)
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = GptAttention(config, attention)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = GptMlp(config)


class GptModule(LanguageModule):
    """A GPT; the first and the last stage of a pipeline hold a copy of the embedding each."""

    config: Gpt

    def __init__(
        self, config: Gpt, checkpointing: Checkpointing, attention: AttentionMethod, layers: range | None
    ) -> None:
        super().__init__(config, checkpointing, attention, layers)
        if self.first or self.last:
            self.tokens = TiedEmbedding(config.vocabulary, config.width)
        if self.first:
            self.positions = nn.Embedding(config.context, config.width)
        if self.last:
            self.norm = nn.LayerNorm(config.width)

    def new_block(self, checkpointing: Checkpointing, attention: AttentionMethod) -> Transformer:
        """Return a new layer."""
        return GptBlock(self.config, checkpointing, attention)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of word and position embeddings."""
        x: torch.Tensor = self.tokens(tokens) + self.positions(self.positions_of_tokens(tokens.device))
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits from the last norm and the tied projection."""
        logits: torch.Tensor = self.tokens(self.norm(x), project=True)
        return logits
