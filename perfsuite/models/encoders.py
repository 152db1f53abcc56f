"""Frozen encoders before a video model: captions to features, pictures to latents.  They are run and never trained.

Sources: T5 v1.1 XXL, whose encoder has 4,762,310,656 parameters (Raffel et al. 2020; d_model 4096, d_ff 10240, 64
heads, 24 layers), and the image encoder of Stable Diffusion with its quantising convolution, 34,163,664 parameters
(Rombach et al. 2022; 128, 256, 512, 512 channels, 8 times smaller, 4 channels).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfsuite.base.errors import InvalidParameter

HEAD_FEATURES = 64
"""Features of one head of the text encoder."""
DISTANCES = 32
"""Classes of distances that the text encoder tells apart."""
SHRINK = 8
"""Pixels along one side of a latent."""
LATENT_CHANNELS = 4


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """An encoder as T5's: relative positions, gated GELU, no biases."""

    layers: int
    width: int
    """Features of a word (D)."""
    hidden: int
    """Features inside the MLP."""
    heads: int
    words: int
    """Rows of the vocabulary."""

    @property
    def parameters(self) -> int:
        """4 D E + 3 D x hidden + 2 D in a layer, E = heads x 64; the vocabulary, distances and a last norm."""
        inside = self.heads * HEAD_FEATURES
        layer = 4 * self.width * inside + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + self.words * self.width + DISTANCES * self.heads + self.width

    def forward_flops(self, length: int) -> float:
        """Operations for one caption of ``length`` words, 2mkn for every product."""
        inside = self.heads * HEAD_FEATURES
        products = 2.0 * length * (4 * self.width * inside + 3 * self.width * self.hidden)
        return self.layers * (products + 4.0 * length**2 * inside)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """One convolution: what it maps, and where."""

    into: int
    out: int
    kernel: int
    shrink: int
    """How many times smaller than the picture its output is."""


@dataclass(frozen=True, kw_only=True)
class PictureEncoder:
    """An encoder as Stable Diffusion's: two residual blocks at each of four sizes, attention at the smallest."""

    channels: tuple[int, int, int, int]

    def groups(self, channels: int) -> int:
        """Groups of a norm over so many channels."""
        return min(32, channels)

    def convolutions(self) -> Iterator[Convolution]:
        """All of them, in no particular order."""
        first, last = self.channels[0], self.channels[-1]
        yield Convolution(into=3, out=first, kernel=3, shrink=1)
        for level, out in enumerate(self.channels):
            shrink = 2**level
            into = self.channels[max(level - 1, 0)]
            yield from _residual(into, out, shrink)
            yield from _residual(out, out, shrink)
            if level + 1 < len(self.channels):
                yield Convolution(into=out, out=out, kernel=3, shrink=2 * shrink)
        for _ in range(2):
            yield from _residual(last, last, SHRINK)
        yield Convolution(into=last, out=2 * LATENT_CHANNELS, kernel=3, shrink=SHRINK)
        yield Convolution(into=2 * LATENT_CHANNELS, out=2 * LATENT_CHANNELS, kernel=1, shrink=SHRINK)

    @property
    def parameters(self) -> int:
        """Convolutions with biases, two numbers per normed channel, and one attention of 4 c^2 + 4 c."""
        convolutions = sum(layer.into * layer.out * layer.kernel**2 + layer.out for layer in self.convolutions())
        last = self.channels[-1]
        normed = 0
        for level, out in enumerate(self.channels):
            normed += self.channels[max(level - 1, 0)] + 3 * out
        normed += 4 * last + last + last  # two blocks in the middle, before the attention, before the end
        return convolutions + 2 * normed + 4 * last**2 + 4 * last

    def forward_flops(self, side: int) -> float:
        """Operations for one picture of ``side`` x ``side`` pixels, 2mkn for every product."""
        total = sum(
            2.0 * layer.into * layer.out * layer.kernel**2 * (side // layer.shrink) ** 2
            for layer in self.convolutions()
        )
        places, last = (side // SHRINK) ** 2, self.channels[-1]
        return total + 8.0 * places * last**2 + 4.0 * places**2 * last


def _residual(into: int, out: int, shrink: int) -> Iterator[Convolution]:
    yield Convolution(into=into, out=out, kernel=3, shrink=shrink)
    yield Convolution(into=out, out=out, kernel=3, shrink=shrink)
    if into != out:
        yield Convolution(into=into, out=out, kernel=1, shrink=shrink)


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """The two that stand before a model."""

    text: TextEncoder
    picture: PictureEncoder

    @property
    def parameters(self) -> int:
        """Of both.

        >>> ENCODERS["t5xxl-sdvae"].text.parameters, ENCODERS["t5xxl-sdvae"].picture.parameters
        (4762310656, 34163664)
        """
        return self.text.parameters + self.picture.parameters


ENCODERS: Mapping[str, Encoders] = MappingProxyType(
    {
        "t5xxl-sdvae": Encoders(
            text=TextEncoder(layers=24, width=4096, hidden=10240, heads=64, words=32128),
            picture=PictureEncoder(channels=(128, 256, 512, 512)),
        ),
        "tiny": Encoders(
            text=TextEncoder(layers=2, width=64, hidden=96, heads=2, words=128),
            picture=PictureEncoder(channels=(8, 8, 16, 16)),
        ),
    }
)
"""By name: the published pair, and one of milliseconds."""


def find_encoders(name: str, owner: str, caption_width: int) -> Encoders | None:
    """The encoders of this name, None for none; InvalidParameter where there are none such or they do not fit."""
    if name == "none":
        return None
    if name not in ENCODERS:
        raise InvalidParameter(f"encoders={name!r} of model {owner} are unknown; choose none, {', '.join(ENCODERS)}")
    encoders = ENCODERS[name]
    if encoders.text.width != caption_width:
        raise InvalidParameter(
            f"encoders={name!r} make words of {encoders.text.width} features, model {owner} takes "
            f"caption_width={caption_width}; make them equal"
        )
    return encoders
