"""Video models in torch: Latte, STDiT, and the frozen encoders before them.

Shapes: B batch, C or c channels, F frames, T patches of a frame, N = F x T tokens, M words of a caption, D width or
features of a word, S side of a picture.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from perfsuite.models.base import AttentionMethod, Checkpointing
from perfsuite.models.dit import NOISE_LEVELS, PATCH, TIME_FEATURES, Dit, Latte, Stdit
from perfsuite.models.layers import AttentionCore, Block, TrainingModule, attend, materialize
from perfsuite.models.program import DISTANCES, HEAD_FEATURES, LATENT_CHANNELS, Encoders, PictureEncoder, TextEncoder


class SelfAttention(nn.Module):
    """Self-attention of (B, S, D)."""

    def __init__(self, config: Dit, attention: AttentionMethod) -> None:
        super().__init__()
        self.heads = config.heads
        self.core = AttentionCore(attention, causal=False)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D): each row of the batch attends to itself."""
        return self.project(attend(self.core, *self.qkv(x).chunk(3, dim=-1), heads=self.heads))


class CrossAttention(nn.Module):
    """Attention of (B, N, D) to the (B, M, D) words of a caption."""

    def __init__(self, config: Stdit, attention: AttentionMethod) -> None:
        super().__init__()
        self.heads = config.heads
        self.core = AttentionCore(attention, causal=False)
        self.query = nn.Linear(config.width, config.width)
        self.key_value = nn.Linear(config.width, 2 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor, caption: torch.Tensor) -> torch.Tensor:
        """Return (B, N, D)."""
        key, value = self.key_value(caption).chunk(2, dim=-1)
        return self.project(attend(self.core, self.query(x), key, value, heads=self.heads))


def _mlp(first: int, hidden: int, last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, last))


def _modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the layer norm without parameters, shifted and scaled by the noise level: (B, N, D), (B, 1, D)."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _within_frames(attention: SelfAttention, x: torch.Tensor, frames: int) -> torch.Tensor:
    """Attend among the tokens of a frame: (B, N, D)."""
    b, n, d = x.shape
    mixed: torch.Tensor = attention(x.reshape(b * frames, n // frames, d))
    return mixed.reshape(b, n, d)


def _over_time(attention: SelfAttention, x: torch.Tensor, frames: int) -> torch.Tensor:
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
        self.attention = SelfAttention(config, attention)
        self.mlp = _mlp(config.width, 4 * config.width, config.width)
        self.modulation = nn.Linear(config.width, 6 * config.width)

    def compute(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return (B, N, D) for (B, N, D) tokens and a (B, D) noise level."""
        x, level = inputs
        signals = self.modulation(F.silu(level))[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = signals
        x = x + gate1 * self.along(self.attention, _modulate(x, shift1, scale1), self.frames)
        return x + gate2 * self.mlp(_modulate(x, shift2, scale2))


class StditBlock(Block):
    """Attention within frames, over time and to the caption, and an MLP."""

    def __init__(self, config: Stdit, checkpointing: Checkpointing, attention: AttentionMethod) -> None:
        super().__init__(checkpointing)
        self.frames = config.frames
        self.attention = SelfAttention(config, attention)
        self.temporal = SelfAttention(config, attention)
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
        return x + gate2 * self.mlp(_modulate(x, shift2, scale2))


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
        return self.output(_modulate(x, shift, scale))


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
        return self.output(_modulate(x, shift, scale))


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


_FARTHEST = 128  # Distances of at least this many words share one class
_LATENT_SCALE = 0.18215  # Factor to unit variance, published with the encoder


class _TextLayer(nn.Module):
    def __init__(self, config: TextEncoder) -> None:
        super().__init__()
        inside = config.heads * HEAD_FEATURES
        self.heads = config.heads
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.query, self.key, self.value = (nn.Linear(config.width, inside, bias=False) for _ in range(3))
        self.project = nn.Linear(inside, config.width, bias=False)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
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
        return x + self.down(F.gelu(self.gate(normed), approximate="tanh") * self.up(normed))


class _Text(nn.Module):
    def __init__(self, config: TextEncoder) -> None:
        super().__init__()
        self.words = nn.Embedding(config.words, config.width)
        self.distances = nn.Embedding(DISTANCES, config.heads)
        self.layers = nn.ModuleList(_TextLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return (B, M, D) for (B, M) token ids."""
        places = torch.arange(words.shape[1], device=words.device)
        bias = self.distances(_distance_class(places[None] - places[:, None])).permute(2, 0, 1)[None]
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)


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
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


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


class _Picture(nn.Module):
    def __init__(self, config: PictureEncoder) -> None:
        super().__init__()
        channels, last = config.channels, config.channels[-1]
        stages: list[nn.Module] = [nn.Conv2d(3, channels[0], 3, padding=1)]
        for level, out in enumerate(channels):
            stages += [_Residual(config, channels[max(level - 1, 0)], out), _Residual(config, out, out)]
            if level + 1 < len(channels):
                halve = {"pad": nn.ZeroPad2d((0, 1, 0, 1)), "conv": nn.Conv2d(out, out, 3, stride=2)}
                stages.append(nn.Sequential(OrderedDict(halve)))
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
