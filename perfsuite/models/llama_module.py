"""LLaMA in torch.  Shapes: B batch, S tokens, H heads, E features of a head, D = H x E width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.models.language_module import Attention, LanguageModule, Transformer
from perfsuite.models.llama import Llama

_ROTARY_BASE = 10000.0
_EPSILON = 1e-5


class LlamaAttention(Attention):
    """Attention with rotary positions; heads of queries may share keys."""

    def __init__(self, config: Llama, attention: AttentionMethod) -> None:
        super().__init__(attention)
        self.head_features = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.key_width, bias=False)
        self.value = nn.Linear(config.width, config.key_width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D) for (B, S, D) and the (S, E / 2) cosines and sines of the positions."""
        # The size of the projection gives the number of heads: a rank may have some of them.
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_features)) for project in (self.query, self.key, self.value)
        )
        return self.attend(_turn(query, cosines, sines), _turn(key, cosines, sines), value)


class LlamaMlp(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, config: Llama) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.expand = nn.Linear(config.width, config.hidden, bias=False)
        self.contract = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to (B, S, D)."""
        result: torch.Tensor = self.contract(F.silu(self.gate(x)) * self.expand(x))
        return result


class LlamaBlock(Transformer):
    """A layer of a LLaMA."""

    def __init__(self, config: Llama, checkpointing: Checkpointing, attention: AttentionMethod, mlp: nn.Module) -> None:
        super().__init__(checkpointing)
        self.norm1 = nn.RMSNorm(config.width, eps=_EPSILON)
        self.attention = LlamaAttention(config, attention)
        self.norm2 = nn.RMSNorm(config.width, eps=_EPSILON)
        self.mlp = mlp


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

    def new_block(self, checkpointing: Checkpointing, attention: AttentionMethod) -> Transformer:
        """Return a new layer."""
        return LlamaBlock(self.config, checkpointing, attention, self.new_mlp(self.config))

    def new_mlp(self, config: Llama) -> nn.Module:
        """Return the MLP of a layer."""
        return LlamaMlp(config)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the word embeddings; blocks apply the positions."""
        x: torch.Tensor = self.tokens(tokens)
        return x

    def block_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return the cosines and sines of the positions."""
        if self._angles is None:
            features = self.config.width // self.config.heads
            self._angles = rotary_angles(self.positions_of_tokens(device), features)
        return self._angles

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits from the last norm and the output projection."""
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


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
