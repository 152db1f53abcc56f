"""Frozen encoders before a video model: captions to features, pictures to latents.

They are not trained and not part of a model: no strategy spreads them, so every rank holds them whole.

Sources: T5 v1.1 XXL, whose encoder has 4,762,310,656 parameters (Raffel et al. 2020; d_model 4096, d_ff 10240, 64
heads, 24 layers), and the image encoder of Stable Diffusion with its quantising convolution, 34,163,664 parameters
(Rombach et al. 2022; 128, 256, 512, 512 channels, 8 times smaller, 4 channels).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.models.base import Model, SampleTensor
from perfsuite.models.dit import Dit

HEAD_FEATURES = 64  # Features of one head of the text encoder
DISTANCES = 32  # Classes of distances between words in the text encoder
SHRINK = 8  # Pixels along one side of a latent
LATENT_CHANNELS = 4


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """An encoder as T5's: relative positions, gated GELU, no biases."""

    layers: int
    width: int
    hidden: int
    heads: int
    words: int

    @property
    def parameters(self) -> int:
        """4 D E + 3 D x hidden + 2 D per layer with E = heads x 64, and the vocabulary, distances and last norm."""
        inside = self.heads * HEAD_FEATURES
        layer = 4 * self.width * inside + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + self.words * self.width + DISTANCES * self.heads + self.width

    def forward_flops(self, length: int) -> float:
        """Return the operations for one caption of ``length`` words, 2mkn for every product."""
        inside = self.heads * HEAD_FEATURES
        products = 2.0 * length * (4 * self.width * inside + 3 * self.width * self.hidden)
        return self.layers * (products + 4.0 * length**2 * inside)


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """The channels, kernel and scale of one convolution."""

    into: int
    out: int
    kernel: int
    shrink: int  # Side of the picture over the side of the output


@dataclass(frozen=True, kw_only=True)
class PictureEncoder:
    """An encoder as Stable Diffusion's: two residual blocks at each of four sizes, attention at the smallest."""

    channels: tuple[int, int, int, int]

    def groups(self, channels: int) -> int:
        """Return the groups of a norm over this many channels."""
        return min(32, channels)

    def convolutions(self) -> Iterator[Convolution]:
        """Yield all convolutions, in no particular order."""
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
        """Numbers in convolutions with biases, two per normed channel, and one attention of 4 c^2 + 4 c."""
        convolutions = sum(layer.into * layer.out * layer.kernel**2 + layer.out for layer in self.convolutions())
        last = self.channels[-1]
        normed = 0
        for level, out in enumerate(self.channels):
            normed += self.channels[max(level - 1, 0)] + 3 * out
        normed += 4 * last + last + last  # two blocks in the middle, before the attention, before the end
        return convolutions + 2 * normed + 4 * last**2 + 4 * last

    def forward_flops(self, side: int) -> float:
        """Return the operations for one picture of ``side`` x ``side`` pixels, 2mkn for every product."""
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
class Unencoded:
    """Samples of a model before they are encoded."""

    name: str  # Name of the model
    parts: tuple[SampleTensor, ...]


@dataclass(frozen=True, kw_only=True)
class Encoders:
    """The encoders before a model: one for pictures, and possibly one for text."""

    picture: PictureEncoder
    text: TextEncoder | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters of both encoders.

        >>> ENCODERS["t5xxl-sdvae"].parameters, ENCODERS["sdvae"].parameters
        (4796474320, 34163664)
        """
        return self.picture.parameters + (self.text.parameters if self.text else 0)

    def inputs(self, model: Dit) -> Unencoded:
        """Return the samples of a data set for ``model`` before encoding: a video for latents, words for a caption."""
        side, words = SHRINK * model.side, self.text.words if self.text else 0
        raw = {"latents": SampleTensor(name="video", shape=(3, model.frames, side, side), pixels=True)}
        if words:
            raw |= {
                part.name: SampleTensor(name="words", shape=part.shape[:1], below=words)
                for part in model.parts
                if part.name == "caption"
            }
        return Unencoded(name=model.name, parts=tuple(raw.get(part.name, part) for part in model.parts))

    def forward_flops(self, model: Dit) -> float:
        """Return the operations for one sample of ``model``: of all frames and of the caption."""
        frames = model.frames * self.picture.forward_flops(SHRINK * model.side)
        length = next((part.shape[0] for part in model.parts if part.name == "caption"), 0)
        return frames + (self.text.forward_flops(length) if self.text else 0.0)


_SD_VAE = PictureEncoder(channels=(128, 256, 512, 512))
_TINY = PictureEncoder(channels=(8, 8, 16, 16))
ENCODERS: Mapping[str, Encoders] = MappingProxyType(
    {
        "t5xxl-sdvae": Encoders(
            text=TextEncoder(layers=24, width=4096, hidden=10240, heads=64, words=32128), picture=_SD_VAE
        ),
        "sdvae": Encoders(picture=_SD_VAE),
        "tiny-text-picture": Encoders(
            text=TextEncoder(layers=2, width=64, hidden=96, heads=2, words=128), picture=_TINY
        ),
        "tiny-picture": Encoders(picture=_TINY),
    }
)
"""Encoders by name: of Open-Sora, of Latte, and small ones for tests."""


def find_encoders(name: str, model: Model) -> Encoders | None:
    """Return the encoders of this name, None for ``none``; raises InvalidParameter if ``model`` cannot have them."""
    if name == "none":
        return None
    if name not in ENCODERS:
        raise InvalidParameter(f"encoders={name!r} are unknown; {did_you_mean(name, ('none', *ENCODERS))}")
    encoders = ENCODERS[name]
    if not isinstance(model, Dit):
        raise InvalidParameter(
            f"encoders={name!r} encode videos, and model {model.name} does not take videos; leave encoders out"
        )
    if model.channels != LATENT_CHANNELS:
        raise InvalidParameter(
            f"encoders={name!r} give latents of {LATENT_CHANNELS} channels, and model {model.name} has "
            f"channels={model.channels}; make them equal"
        )
    if encoders.text is not None:
        caption = getattr(model, "caption_width", None)
        if caption is None:
            raise InvalidParameter(
                f"encoders={name!r} read captions, and model {model.name} has none; choose encoders without text, "
                "such as sdvae"
            )
        if encoders.text.width != caption:
            raise InvalidParameter(
                f"encoders={name!r} give words of {encoders.text.width} features, and model {model.name} takes "
                f"caption_width={caption}; make them equal"
            )
    return encoders
