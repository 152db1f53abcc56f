"""LLaMA in torch.  Shapes: B batch, S tokens, D width, E features of a head, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.base import Checkpointing
from perfsuite.models.layers import Block, TrainingModule, attend, cross_entropy
from perfsuite.models.llama import Llama

_ROTARY_BASE = 10000.0
_EPSILON = 1e-5


class LlamaBlock(Block):
    """Attention with rotary positions and a SwiGLU MLP, each behind an RMS norm and beside a residual."""

    def __init__(self, config: Llama, checkpointing: Checkpointing) -> None:
        super().__init__(checkpointing)
        self.heads = config.heads
        width = config.width
        self.norm1 = nn.RMSNorm(width, eps=_EPSILON)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, config.kv_width, bias=False)
        self.value = nn.Linear(width, config.kv_width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=_EPSILON)
        self.gate = nn.Linear(width, config.hidden, bias=False)
        self.expand = nn.Linear(width, config.hidden, bias=False)
        self.contract = nn.Linear(config.hidden, width, bias=False)

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """(B, S, D) and the (S, E / 2) cosines and sines of the positions to (B, S, D)."""
        x, cosines, sines = inputs
        normed = self.norm1(x)
        query = _turn(self.query(normed), cosines, sines)
        key = _turn(self.key(normed), cosines, sines)
        x = x + self.project(attend(query, key, self.value(normed), heads=self.heads, causal=True))
        normed = self.norm2(x)
        result: torch.Tensor = x + self.contract(F.silu(self.gate(normed)) * self.expand(normed))
        return result


class LlamaModule(TrainingModule):
    """Next-token loss of a LLaMA."""

    def __init__(self, config: Llama, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.head_features = config.width // config.heads
        self.tokens = nn.Embedding(config.words, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config, checkpointing) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=_EPSILON)
        self.output = nn.Linear(config.width, config.words, bias=False)
        # Made at the first forward and no buffer: a model built on the meta device has no values to keep.
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of (B, S + 1) tokens."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self._angles is None:
            self._angles = rotary_angles(inputs.shape[1], self.head_features, inputs.device)
        x = self.tokens(inputs)
        for block in self.blocks:
            x = block(x, *self._angles)
        return cross_entropy(self.output(self.norm(x)), targets)


def rotary_angles(length: int, features: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, (length, features / 2) each, of Su et al. 2021 (RoFormer)."""
    rates = _ROTARY_BASE ** -(torch.arange(0, features, 2, device=device, dtype=torch.float32) / features)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * rates
    return angles.cos(), angles.sin()


def _turn(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of each head of (B, S, H x E) by the angles of its position, in fp32."""
    halves = x.view(*x.shape[:-1], -1, 2, cosines.shape[-1]).float()
    first, second = halves[..., 0, :], halves[..., 1, :]
    cosines, sines = cosines[:, None], sines[:, None]  # the same for all heads
    turned = torch.stack((first * cosines - second * sines, second * cosines + first * sines), dim=-2)
    return turned.flatten(2).type_as(x)
