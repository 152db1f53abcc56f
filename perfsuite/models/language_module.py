"""Language models in torch, whole or a range of their layers.

Shapes: B batch, S tokens, H heads, E features of a head, D = H x E width, V vocabulary.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.models.language import Gpt, LanguageModel, Llama
from perfsuite.models.layers import AttentionCore, Block, TrainingModule, cross_entropy


class TransformerBlock(Block):
    """Attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(
        self, checkpointing: Checkpointing, new_norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__(checkpointing)
        self.norm1, self.attention = new_norm(), attention
        self.norm2, self.mlp = new_norm(), mlp

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D) and the extra inputs of attention."""
        x, *extra_inputs = inputs
        x = x + self.attention(self.norm1(x), *extra_inputs)
        return x + self.mlp(self.norm2(x))


class LanguageAttention(nn.Module):
    """Causal self-attention; subclasses define the projections."""

    project: nn.Module

    def __init__(self, attention: AttentionMethod) -> None:
        super().__init__()
        self.core: nn.Module = AttentionCore(attention)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, H, E) queries and (B, S, K, E) keys and values."""
        mixed = self.core(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.project(mixed.transpose(1, 2).flatten(2))


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
    def new_block(self, checkpointing: Checkpointing, attention: AttentionMethod) -> TransformerBlock:
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


class TiedEmbedding(nn.Embedding):
    """Token embedding and output projection in one module: strategies gather parameters when it is called."""

    def forward(self, inputs: torch.Tensor, *, project: bool = False) -> torch.Tensor:
        """Return (B, S, D) for (B, S) tokens, or (B, S, V) logits for (B, S, D) features."""
        return F.linear(inputs, self.weight) if project else super().forward(inputs)


class GptAttention(LanguageAttention):
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


class _GptMlp(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        return self.contract(F.gelu(self.expand(x), approximate="tanh"))


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

    def new_block(self, checkpointing: Checkpointing, attention: AttentionMethod) -> TransformerBlock:
        """Return a new layer."""
        norm = functools.partial(nn.LayerNorm, self.config.width)
        return TransformerBlock(checkpointing, norm, GptAttention(self.config, attention), _GptMlp(self.config))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sum of word and position embeddings."""
        return self.tokens(tokens) + self.positions(self.positions_of_tokens(tokens.device))

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits from the last norm and the tied projection."""
        return self.tokens(self.norm(x), project=True)


_ROTARY_BASE = 10000.0
_EPSILON = 1e-5


class LlamaAttention(LanguageAttention):
    """Attention with rotary positions; heads of queries may share keys."""

    def __init__(self, config: Llama, attention: AttentionMethod) -> None:
        super().__init__(attention)
        self.head_features = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key, self.value = (nn.Linear(config.width, config.key_width, bias=False) for _ in range(2))
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D) and the (S, E / 2) cosines and sines of the positions."""
        # The size of the projection gives the number of heads: a rank may have some of them.
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_features)) for project in (self.query, self.key, self.value)
        )
        return self.attend(_turn(query, cosines, sines), _turn(key, cosines, sines), value)


class SwiGlu(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.expand = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.contract = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        return self.contract(F.silu(self.gate(x)) * self.expand(x))


class LlamaModule(LanguageModule):
    """A LLaMA."""

    config: Llama
    extra_inputs = 2

    def __init__(
        self, config: Llama, checkpointing: Checkpointing, attention: AttentionMethod, layers: range | None
    ) -> None:
        super().__init__(config, checkpointing, attention, layers)
        if self.first:
            self.tokens = nn.Embedding(config.words, config.width)
        if self.last:
            self.norm = nn.RMSNorm(config.width, eps=_EPSILON)
            self.output = nn.Linear(config.width, config.words, bias=False)
        # Computed at the first forward and not a buffer: a model on the meta device has no values to keep.
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def new_block(self, checkpointing: Checkpointing, attention: AttentionMethod) -> TransformerBlock:
        """Return a new layer."""
        norm = functools.partial(nn.RMSNorm, self.config.width, eps=_EPSILON)
        return TransformerBlock(checkpointing, norm, LlamaAttention(self.config, attention), self.new_mlp())

    def new_mlp(self) -> nn.Module:
        """Return the MLP of a layer."""
        return SwiGlu(self.config.width, self.config.hidden)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the word embeddings; blocks apply the positions."""
        return self.tokens(tokens)

    def block_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the cosines and sines of the positions."""
        if self._angles is None:
            features = self.config.width // self.config.heads
            self._angles = rotary_angles(self.positions_of_tokens(device), features)
        return self._angles

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits from the last norm and the output projection."""
        return self.output(self.norm(x))


def rotary_angles(positions: torch.Tensor, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines, (S, features / 2) each, of Su et al. 2021 (RoFormer) at (S,) positions."""
    turns = torch.arange(0, features, 2, device=positions.device, dtype=torch.float32) / features
    angles = positions.float()[:, None] * _ROTARY_BASE**-turns
    return angles.cos(), angles.sin()


def _turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head of (B, S, H, E) by the angles of its position, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]  # the same for all heads
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.type_as(x)
