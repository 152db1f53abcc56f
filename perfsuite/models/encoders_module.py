"""Frozen encoders in torch.

Shapes: B batch, M words, D features of a word, F frames, c channels, S side of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.encoders import DISTANCES, HEAD_FEATURES, LATENT_CHANNELS, Encoders, PictureEncoder, TextEncoder
from perfsuite.models.layers import materialize

_FARTHEST = 128  # Distances of at least this many words share one class
_LATENT_SCALE = 0.18215  # Factor to unit variance, published with the encoder


class _Norm(nn.Module):
    """Root mean square norm of the last dimension, with a gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.type_as(x), eps=1e-6)


class _TextLayer(nn.Module):
    def __init__(self, config: TextEncoder) -> None:
        super().__init__()
        inside = config.heads * HEAD_FEATURES
        self.heads = config.heads
        self.norm = _Norm(config.width)
        self.query, self.key, self.value = (nn.Linear(config.width, inside, bias=False) for _ in range(3))
        self.project = nn.Linear(inside, config.width, bias=False)
        self.mlp_norm = _Norm(config.width)
        self.gate, self.up = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return (B, M, D) for (B, M, D) and the (1, heads, M, M) bias of the scores."""
        normed = self.norm(x)
        q, k, v = (
            project(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        # T5 does not scale its scores; its initial values do.
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.type_as(q), scale=1.0)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        result: torch.Tensor = x + self.down(F.gelu(self.gate(normed), approximate="tanh") * self.up(normed))
        return result


class _Text(nn.Module):
    def __init__(self, config: TextEncoder) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.distances = nn.Embedding(DISTANCES, config.heads)
        self.layers = nn.ModuleList(_TextLayer(config) for _ in range(config.layers))
        self.norm = _Norm(config.width)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return (B, M, D) for (B, M) token ids."""
        places = torch.arange(words.shape[1], device=words.device)
        bias = self.distances(_distance_class(places[None] - places[:, None])).permute(2, 0, 1)[None]
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, bias)
        result: torch.Tensor = self.norm(x)
        return result


def _distance_class(distance: torch.Tensor) -> torch.Tensor:
    """Return the class of each distance: exact up to a quarter of the classes, then ever wider, per direction."""
    half = DISTANCES // 2
    exact = half // 2
    away = distance.abs()
    wide = exact + (torch.log(away.clamp(min=1) / exact) / math.log(_FARTHEST / exact) * (half - exact)).long()
    return torch.where(away < exact, away, wide.clamp(max=half - 1)) + (distance > 0) * half


class _Residual(nn.Module):
    def __init__(self, config: PictureEncoder, into: int, out: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(config.groups(into), into, eps=1e-6)
        self.conv1 = nn.Conv2d(into, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(config.groups(out), out, eps=1e-6)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        result: torch.Tensor = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        return result


class _Mixing(nn.Module):
    """Attention of one head between all places of a picture."""

    def __init__(self, config: PictureEncoder, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(config.groups(channels), channels, eps=1e-6)
        self.query, self.key, self.value, self.project = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = (project(places)[:, None] for project in (self.query, self.key, self.value))
        mixed: torch.Tensor = self.project(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + mixed.transpose(1, 2).reshape(x.shape)


class _Halve(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.conv(F.pad(x, (0, 1, 0, 1)))
        return result


class _Picture(nn.Module):
    def __init__(self, config: PictureEncoder) -> None:
        super().__init__()
        channels, last = config.channels, config.channels[-1]
        stages: list[nn.Module] = [nn.Conv2d(3, channels[0], 3, padding=1)]
        for level, out in enumerate(channels):
            stages += [_Residual(config, channels[max(level - 1, 0)], out), _Residual(config, out, out)]
            if level + 1 < len(channels):
                stages.append(_Halve(out))
        stages += [_Residual(config, last, last), _Mixing(config, last), _Residual(config, last, last)]
        stages += [nn.GroupNorm(config.groups(last), last, eps=1e-6), nn.SiLU()]
        stages.append(nn.Conv2d(last, 2 * LATENT_CHANNELS, 3, padding=1))
        stages.append(nn.Conv2d(2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, 1))
        self.stages = nn.Sequential(*stages)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        """Return (B, 4, F, S / 8, S / 8) latents of (B, 3, F, S, S) pixels, frame by frame: the distribution's mean."""
        b, _, f, _, _ = video.shape
        moments: torch.Tensor = self.stages(video.transpose(1, 2).flatten(0, 1))
        latents = moments[:, :LATENT_CHANNELS] * _LATENT_SCALE
        return latents.reshape(b, f, *latents.shape[1:]).transpose(1, 2)


class FrozenEncoders(nn.Module):
    """The encoders of a model, always in evaluation mode and without gradients."""

    def __init__(self, config: Encoders) -> None:
        super().__init__()
        self.picture = _Picture(config.picture)
        self.text = _Text(config.text) if config.text else None
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def forward(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the batch with latents in place of a (B, 3, F, S, S) ``video`` and features for (B, M) ``words``."""
        encoded = dict(batch)
        narrow = next(self.picture.parameters()).dtype
        encoded["latents"] = self.picture(encoded.pop("video").to(narrow))
        if self.text is not None:
            encoded["caption"] = self.text(encoded.pop("words"))
        return encoded


def build_encoders(config: Encoders, device: torch.device, dtype: torch.dtype, *, seed: int) -> FrozenEncoders:
    """Return the encoders on ``device``, created in ``dtype``, so that no wider copy takes memory."""
    with torch.device("meta"):
        encoders = FrozenEncoders(config).to(dtype)
    materialize(encoders, device, seed=seed, prefix="encoders.")
    return encoders
