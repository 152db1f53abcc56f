"""A language model in torch, whole or a range of its layers.  Shapes: B batch, S tokens, D width, V vocabulary."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.models.language import LanguageModel
from perfsuite.models.layers import Block, Core, TrainingModule, cross_entropy


class Transformer(Block):
    """Attention and an MLP, each with a norm before it and a residual connection."""

    norm1: nn.Module
    attention: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D) and the extra inputs of attention."""
        x, *extra_inputs = inputs
        x = x + self.attention(self.norm1(x), *extra_inputs)
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Attention(nn.Module):
    """Causal self-attention; subclasses define the projections."""

    project: nn.Module

    def __init__(self, attention: AttentionMethod) -> None:
        super().__init__()
        self.core: nn.Module = Core(attention)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, H, E) queries and (B, S, K, E) keys and values."""
        mixed = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        result: torch.Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return result


class LanguageModule(TrainingModule):
    """The whole model maps (B, S + 1) tokens to their mean loss; a range of its layers is a stage.  The first stage
    takes (B, S) tokens, others (B, S, D); the last stage returns (B, S, V) logits, others (B, S, D). Parameters of a
    stage have the names of the whole model.
    """

    extra_inputs = 0  # Number of inputs of a block in addition to (B, S, D)
    places: torch.Tensor | None = None  # Positions of this rank's tokens in the sequence; None: all, in order

    def __init__(
        self, config: LanguageModel, checkpointing: Checkpointing, attention: AttentionMethod, layers: range | None
    ) -> None:
        super().__init__()
        self.whole = layers is None
        layers = range(config.layers) if layers is None else layers
        self.first, self.last = layers.start == 0, layers.stop == config.layers
        self.config = config
        self.blocks = nn.ModuleDict({str(layer): self.new_block(checkpointing, attention) for layer in layers})

    @abstractmethod
    def new_block(self, checkpointing: Checkpointing, attention: AttentionMethod) -> Transformer:
        """Return a new layer."""

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S) tokens."""

    @abstractmethod
    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, V) logits for (B, S, D)."""

    def block_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the inputs of every block in addition to (B, S, D)."""
        return ()

    def positions_of_tokens(self, device: torch.device) -> torch.Tensor:
        """Return the (S,) positions of this rank's tokens in the sequence."""
        if self.places is None:
            return torch.arange(self.config.tokens_per_sample, device=device)
        return self.places.to(device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the whole model, or the output of a stage."""
        if self.whole:
            return cross_entropy(self.compute(tokens[:, :-1]), tokens[:, 1:])
        return self.compute(tokens)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the embedding, the layers and the head, as far as the module has them."""
        if self.first:
            x = self.embed(x)
        extra_inputs = self.block_inputs(x.device)
        for block in self.blocks.children():
            x = block(x, *extra_inputs)
        return self.head(x) if self.last else x
