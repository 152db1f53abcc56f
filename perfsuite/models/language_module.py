"""A language model in torch, whole or a range of its layers.  Shapes: B batch, S tokens, D width, V vocabulary."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from perfsuite.models.attention_module import Core
from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.models.language import LanguageModel
from perfsuite.models.layers import Block, TrainingModule, cross_entropy


class Transformer(Block):
    """Attention and an MLP, each behind a norm and beside a residual."""

    norm1: nn.Module
    attention: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """(B, S, D), and what attention takes besides, to (B, S, D)."""
        x, *besides = inputs
        x = x + self.attention(self.norm1(x), *besides)
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class Attention(nn.Module):
    """Causal self-attention; subclasses have the projections."""

    project: nn.Module

    def __init__(self, attention: AttentionMethod) -> None:
        super().__init__()
        self.core: nn.Module = Core(attention)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(B, S, H, E) queries and (B, S, K, E) keys and values to (B, S, D)."""
        mixed = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        result: torch.Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return result


class LanguageModule(TrainingModule):
    """The whole model takes (B, S + 1) tokens and gives their mean loss; a range of its layers is a stage.

    A stage takes (B, S) tokens where it has the first layer and (B, S, D) elsewhere; it gives (B, S, V) logits where it
    has the last layer and (B, S, D) elsewhere.  Its parameters have the names that they have in the whole model.
    """

    besides = 0
    """Tensors that every block takes beside (B, S, D)."""
    places: torch.Tensor | None = None
    """Where in the sequence the tokens stand that this rank has; None: it has all, in order."""

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
        """A layer."""

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, S) to (B, S, D)."""

    @abstractmethod
    def head(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, V)."""

    def inputs_beside(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """What every block takes beside (B, S, D)."""
        return ()

    def positions_of_tokens(self, device: torch.device) -> torch.Tensor:
        """(S,): where this rank's tokens stand in the sequence."""
        if self.places is None:
            return torch.arange(self.config.tokens_per_sample, device=device)
        return self.places.to(device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.whole:
            return cross_entropy(self.compute(tokens[:, :-1]), tokens[:, 1:])
        return self.compute(tokens)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The embedding, the layers and the head, as far as the module has them."""
        if self.first:
            x = self.embed(x)
        besides = self.inputs_beside(x.device)
        for block in self.blocks.children():
            x = block(x, *besides)
        return self.head(x) if self.last else x
