"""Diffusion transformers for video: Latte and Open-Sora's STDiT.

Both take latents of a frozen image encoder (8 times smaller than the picture, 4 channels), cut them into patches of
2 x 2 and predict the noise in them.  Latte alternates blocks that attend within a frame and blocks that attend over
time; every block of STDiT does both and attends to the words of a caption as well.  Their data are latents and, for
STDiT, embedded captions.  The frozen encoders are a separate part of the step (:mod:`perfsuite.models.program`).

Sources: Ma et al. 2024 (Latte, unconditional L/2 and XL/2), Open-Sora 1.0 (STDiT-XL/2).  Unconditional Latte has
457,094,176 and 673,994,912 parameters, the "457MB" and "673MB" of the published report.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape
from perfsuite.models.base import Model, SampleTensor, require_sizes

PATCH = 2  # Side of a patch in latent pixels
NOISE_LEVELS = 1000  # Steps of the diffusion
TIME_FEATURES = 256  # Sines and cosines that encode a noise level


@dataclass(frozen=True, kw_only=True)
class Dit(Model):
    """Common base of Latte and STDiT."""

    frames: int = 16  # Frames of a video (F).
    side: int = 32  # Height and width of the latents: 32 for pictures of 256 x 256.
    channels: int = 4  # Channels of the latents (C).

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self.name, frames=self.frames, side=self.side, channels=self.channels)
        if self.side % PATCH:
            raise InvalidParameter(
                f"side={self.side} of model {self.name} is not a multiple of the patch, {PATCH}; "
                f"choose {self.side - 1} or {self.side + 1}"
            )
        if self.width % 4:
            raise InvalidParameter(
                f"width={self.width} of model {self.name} is not a multiple of 4, which positions in two dimensions "
                "need; choose a multiple of 4"
            )

    @property
    def patches(self) -> int:
        """Patches of a frame (T)."""
        return (self.side // PATCH) ** 2

    @property
    def tokens_per_sample(self) -> int:
        """N = F x T: 4096 for 16 frames of 256 x 256."""
        return self.frames * self.patches

    @property
    def parts(self) -> tuple[SampleTensor, ...]:
        """Latents from the data set, and noise and noise level, which are drawn for every sample."""
        latents = (self.channels, self.frames, self.side, self.side)
        return (
            SampleTensor(name="latents", shape=latents),
            SampleTensor(name="noise", shape=latents, stored=False),
            SampleTensor(name="level", shape=(), below=NOISE_LEVELS, stored=False),
        )

    @property
    def pixels_in(self) -> int:
        """Numbers in a patch."""
        return self.channels * PATCH**2

    @property
    def pixels_out(self) -> int:
        """Numbers predicted for a patch: noise and its variance."""
        return 2 * self.pixels_in

    @property
    def _time_weights(self) -> int:
        return TIME_FEATURES * self.width + self.width**2

    @property
    def _edge_flops(self) -> float:
        """Operations outside the blocks: patches in, noise level, patches out."""
        per_token = 2.0 * self.width * (self.pixels_in + self.pixels_out)
        return self.tokens_per_sample * per_token + 2.0 * self._time_weights

    @property
    def _within_frames(self) -> float:
        """Operations of one attention within frames: scores and weighted values."""
        return 4.0 * self.frames * self.patches**2 * self.width

    @property
    def _over_time(self) -> float:
        """Operations of one attention over time."""
        return 4.0 * self.patches * self.frames**2 * self.width


class Latte(Dit):
    """Unconditional Latte: even blocks attend within frames, odd ones over time."""

    @property
    def parameters(self) -> int:
        """18 D^2 + 15 D in a block; patches, positions (fixed parameters), noise level, modulated output."""
        width = self.width
        block = 18 * width**2 + 15 * width
        ends = (self.pixels_in + 1) * width + (width + 1) * self.pixels_out
        positions = (self.patches + self.frames) * width
        return self.layers * block + ends + positions + self._time_weights + 2 * width + 2 * width**2 + 2 * width

    @property
    def block_flops(self) -> float:
        """24 N D^2 in a block, 12 D^2 for its modulation, and attention along frames or time."""
        block = 24.0 * self.tokens_per_sample * self.width**2 + 12.0 * self.width**2
        spatial = (self.layers + 1) // 2
        return self.layers * block + spatial * self._within_frames + (self.layers - spatial) * self._over_time

    @property
    def forward_flops(self) -> float:
        """Operations of blocks, both ends, and the modulation of the output."""
        return self.block_flops + self._edge_flops + 4.0 * self.width**2

    def twin(self, shape: MeshShape | None = None) -> Latte:
        """Return two blocks of 48 features on 2 frames of 2 x 2 patches."""
        return dataclasses.replace(self, layers=2, width=48, heads=4, frames=2, side=4)


@dataclass(frozen=True, kw_only=True)
class Stdit(Dit):
    """Open-Sora's STDiT: every block attends within frames, over time and to the caption."""

    caption_length: int = 120  # Words of a caption (M).
    caption_width: int = 4096  # Features of an embedded word (T5-XXL).

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self.name, caption_length=self.caption_length, caption_width=self.caption_width)

    @property
    def parts(self) -> tuple[SampleTensor, ...]:
        """Tensors of :attr:`Dit.parts`, and the embedded caption."""
        return (*super().parts, SampleTensor(name="caption", shape=(self.caption_length, self.caption_width)))

    @property
    def parameters(self) -> int:
        """20 D^2 + 23 D in a block; patches in and out, noise level and its six signals, caption; no positions."""
        width = self.width
        block = 20 * width**2 + 23 * width
        ends = (self.pixels_in + 1) * width + (width + 1) * self.pixels_out + 2 * width
        level = self._time_weights + 2 * width + 6 * width**2 + 6 * width
        caption = self.caption_width * width + width**2 + 2 * width
        return self.layers * block + ends + level + caption

    @property
    def block_flops(self) -> float:
        """36 N D^2 and 4 M D^2 in a block, and its three attentions."""
        tokens, words = self.tokens_per_sample, self.caption_length
        block = 36.0 * tokens * self.width**2 + 4.0 * words * self.width**2
        to_caption = 4.0 * tokens * words * self.width
        return self.layers * (block + to_caption + self._within_frames + self._over_time)

    @property
    def forward_flops(self) -> float:
        """Operations of blocks, both ends, the signals of the noise level, and the caption's embedding."""
        signals = 12.0 * self.width**2
        caption = 2.0 * self.caption_length * (self.caption_width * self.width + self.width**2)
        return self.block_flops + self._edge_flops + signals + caption

    def twin(self, shape: MeshShape | None = None) -> Stdit:
        """Return two blocks of 48 features on 2 frames of 2 x 2 patches and 3 words."""
        return dataclasses.replace(
            self, layers=2, width=48, heads=4, frames=2, side=4, caption_length=3, caption_width=16
        )


MODELS = (
    Latte(name="latte-l", layers=24, width=1024, heads=16),
    Latte(name="latte-xl", layers=28, width=1152, heads=16),
    Latte(name="latte-tiny", layers=2, width=128, heads=4, frames=4, side=8),
    Stdit(name="opensora", layers=28, width=1152, heads=16),
    Stdit(name="opensora-tiny", layers=2, width=128, heads=4, frames=4, side=8, caption_length=8, caption_width=64),
)
