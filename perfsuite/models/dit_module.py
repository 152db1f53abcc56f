"""Latte and STDiT in torch.

Shapes: B batch, C channels, F frames, T patches of a frame, N = F x T tokens, M words of a caption, D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.models.dit import NOISE_LEVELS, PATCH, TIME_FEATURES, Dit, Latte, Stdit
from perfsuite.models.layers import Block, Core, TrainingModule, attend


class Attention(nn.Module):
    """Self-attention of (B, S, D)."""

    def __init__(self, config: Dit, attention: AttentionMethod) -> None:
        super().__init__()
        self.heads = config.heads
        self.core = Core(attention, causal=False)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D): each row of the batch attends to itself."""
        result: torch.Tensor = self.project(attend(self.core, *self.qkv(x).chunk(3, dim=-1), heads=self.heads))
        return result


class CrossAttention(nn.Module):
    """Attention of (B, N, D) to the (B, M, D) words of a caption."""

    def __init__(self, config: Stdit, attention: AttentionMethod) -> None:
        super().__init__()
        self.heads = config.heads
        self.core = Core(attention, causal=False)
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor, caption: torch.Tensor) -> torch.Tensor:
        """Return (B, N, D)."""
        key, value = self.key_value(caption).chunk(2, dim=-1)
        result: torch.Tensor = self.project(attend(self.core, self.query(x), key, value, heads=self.heads))
        return result


def _mlp(first: int, hidden: int, last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, last))


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the layer norm without parameters, shifted and scaled by the noise level: (B, N, D), (B, 1, D)."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _within_frames(attention: Attention, x: torch.Tensor, frames: int) -> torch.Tensor:
    """Attend among the tokens of a frame: (B, N, D)."""
    b, n, d = x.shape
    mixed: torch.Tensor = attention(x.reshape(b * frames, n // frames, d))
    return mixed.reshape(b, n, d)


def _over_time(attention: Attention, x: torch.Tensor, frames: int) -> torch.Tensor:
    """Attend among the tokens of one place in all frames: (B, N, D)."""
    b, n, d = x.shape
    places = x.reshape(b, frames, n // frames, d).transpose(1, 2)
    mixed: torch.Tensor = attention(places.reshape(-1, frames, d))
    return mixed.reshape(b, n // frames, frames, d).transpose(1, 2).reshape(b, n, d)


class LatteBlock(Block):
    """Attention along one axis and an MLP, both modulated and gated by the noise level."""

    def __init__(
        self, config: Latte, checkpointing: Checkpointing, attention: AttentionMethod, *, temporal: bool
    ) -> None:
        super().__init__(checkpointing)
        self.frames = config.frames
        self.along = _over_time if temporal else _within_frames
        self.attention = Attention(config, attention)
        self.mlp = _mlp(config.width, 4 * config.width, config.width)
        self.modulation = nn.Linear(config.width, 6 * config.width)

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return (B, N, D) for (B, N, D) tokens and a (B, D) noise level."""
        x, level = inputs
        signals = self.modulation(F.silu(level))[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = signals
        x = x + gate1 * self.along(self.attention, _modulate(x, shift1, scale1), self.frames)
        result: torch.Tensor = x + gate2 * self.mlp(_modulate(x, shift2, scale2))
        return result


class StditBlock(Block):
    """Attention within frames, over time and to the caption, and an MLP."""

    def __init__(self, config: Stdit, checkpointing: Checkpointing, attention: AttentionMethod) -> None:
        super().__init__(checkpointing)
        self.frames = config.frames
        self.attention = Attention(config, attention)
        self.temporal = Attention(config, attention)
        self.cross = CrossAttention(config, attention)
        self.mlp = _mlp(config.width, 4 * config.width, config.width)
        self.table = nn.Parameter(torch.randn(6, config.width) / config.width**0.5)

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return (B, N, D) for (B, N, D) tokens, (B, 6, D) signals of the noise level and (B, M, D) words."""
        x, signals, caption = inputs
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.table + signals).chunk(6, dim=1)
        x = x + gate1 * _within_frames(self.attention, _modulate(x, shift1, scale1), self.frames)
        x = x + gate1 * _over_time(self.temporal, x, self.frames)
        x = x + self.cross(x, caption)
        result: torch.Tensor = x + gate2 * self.mlp(_modulate(x, shift2, scale2))
        return result


class DitModule(TrainingModule):
    """Base of both models; the loss is the error of the predicted noise, without the predicted variance."""

    def __init__(self, config: Dit) -> None:
        super().__init__()
        self.config = config
        self.patch = nn.Linear(config.pixels_in, config.width)
        width = config.width
        self.time = nn.Sequential(nn.Linear(TIME_FEATURES, width), nn.SiLU(), nn.Linear(width, width))
        self.output = nn.Linear(config.width, config.pixels_out)
        # Computed at the first forward and not a buffer: a model on the meta device has no values to keep.
        self._signal: torch.Tensor | None = None

    def predict(self, tokens: torch.Tensor, level: torch.Tensor, caption: torch.Tensor | None) -> torch.Tensor:
        """Return (B, N, numbers per patch) for such patches, (B, D) noise levels and a (B, M, features) caption."""
        raise AssertionError("a subclass predicts")

    def forward(
        self, latents: torch.Tensor, noise: torch.Tensor, level: torch.Tensor, caption: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean squared error for (B, C, F, side, side) latents under ``noise`` at (B,) noise levels."""
        if self._signal is None:
            betas = torch.linspace(1e-4, 2e-2, NOISE_LEVELS, device=latents.device)
            self._signal = (1 - betas).cumprod(0)
        kept = self._signal[level][:, None, None, None, None]
        mixed = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        narrow = self.patch.weight.dtype  # dtype of the weights, which a strategy may have cast
        embedded = self.time(_sinusoids(level, TIME_FEATURES).to(narrow))
        predicted = self.predict(_to_patches(mixed).to(narrow), embedded, caption)
        return F.mse_loss(predicted[..., : self.config.pixels_in].float(), _to_patches(noise))


class LatteModule(DitModule):
    """Unconditional Latte."""

    def __init__(self, config: Latte, checkpointing: Checkpointing, attention: AttentionMethod) -> None:
        super().__init__(config)
        self.places = nn.Parameter(torch.zeros(1, config.patches, config.width), requires_grad=False)
        self.moments = nn.Parameter(torch.zeros(1, config.frames, config.width), requires_grad=False)
        self.blocks = nn.ModuleList(
            LatteBlock(config, checkpointing, attention, temporal=index % 2 == 1) for index in range(config.layers)
        )
        self.modulation = nn.Linear(config.width, 2 * config.width)

    def predict(self, tokens: torch.Tensor, level: torch.Tensor, caption: torch.Tensor | None) -> torch.Tensor:
        """Predict (B, N, numbers per patch); positions in time are added before the first block over time."""
        frames = self.config.frames
        x = self.patch(tokens) + self.places.repeat(1, frames, 1)
        for index, block in enumerate(self.blocks.children()):
            if index == 1:
                x = x + self.moments.repeat_interleave(self.config.patches, dim=1)
            x = block(x, level)
        shift, scale = self.modulation(F.silu(level))[:, None].chunk(2, dim=-1)
        result: torch.Tensor = self.output(_modulate(x, shift, scale))
        return result


class StditModule(DitModule):
    """STDiT."""

    def __init__(self, config: Stdit, checkpointing: Checkpointing, attention: AttentionMethod) -> None:
        super().__init__(config)
        self.signals = nn.Linear(config.width, 6 * config.width)
        self.words = _mlp(config.caption_width, config.width, config.width)
        self.blocks = nn.ModuleList(StditBlock(config, checkpointing, attention) for _ in range(config.layers))
        self.table = nn.Parameter(torch.randn(2, config.width) / config.width**0.5)
        self._positions: torch.Tensor | None = None

    def predict(self, tokens: torch.Tensor, level: torch.Tensor, caption: torch.Tensor | None) -> torch.Tensor:
        """Predict (B, N, numbers per patch); positions are fixed sines and cosines of place and frame."""
        config = self.config
        if self._positions is None:
            places = torch.arange(config.patches, device=tokens.device)
            rows, columns = places // (config.side // PATCH), places % (config.side // PATCH)
            half = config.width // 2
            place = torch.cat((_sinusoids(rows, half), _sinusoids(columns, half)), dim=-1)
            moment = _sinusoids(torch.arange(config.frames, device=tokens.device), config.width)
            self._positions = (moment[:, None] + place[None]).flatten(0, 1)[None]
        assert caption is not None, "STDiT needs a caption"
        x = self.patch(tokens) + self._positions.type_as(tokens)
        signals = self.signals(F.silu(level)).unflatten(-1, (6, -1))
        words = self.words(caption)
        for block in self.blocks.children():
            x = block(x, signals, words)
        shift, scale = (self.table + level[:, None]).chunk(2, dim=1)
        result: torch.Tensor = self.output(_modulate(x, shift, scale))
        return result


def _to_patches(video: torch.Tensor) -> torch.Tensor:
    """Cut (B, C, F, side, side) into (B, N, C x 2 x 2), frame by frame."""
    b, _, f, side, _ = video.shape
    cut = video.reshape(b, -1, f, side // PATCH, PATCH, side // PATCH, PATCH)
    return cut.permute(0, 2, 3, 5, 1, 4, 6).reshape(b, f * (side // PATCH) ** 2, -1)


def _sinusoids(places: torch.Tensor, features: int) -> torch.Tensor:
    """Return the cosines and sines of (n,) places at geometric rates: (n, features)."""
    count = features // 2
    rates = torch.exp(-math.log(10000.0) * torch.arange(count, device=places.device) / count)
    angles = places.float()[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
