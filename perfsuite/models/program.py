"""Settings of a training program besides its model, such as frozen encoders and checkpoints; all are off by default.

A published time or memory covers a whole program.  Two runs of one model and strategy are comparable only if these
settings agree too.

Frozen encoders turn captions into features and pictures into latents before a video model.  They are not trained and
not part of a model: no strategy spreads them, so every rank holds them whole.  Sources: T5 v1.1 XXL, whose encoder has
4,762,310,656 parameters (Raffel et al. 2020; d_model 4096, d_ff 10240, 64 heads, 24 layers), and the image encoder of
Stable Diffusion with its quantising convolution, 34,163,664 parameters (Rombach et al. 2022; 128, 256, 512, 512
channels, 8 times smaller, 4 channels).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.models.base import Model, Sampled, SampleTensor
from perfsuite.models.dit import Dit
from perfsuite.record.workload import ITEM_BYTES

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


Convolution = tuple[int, int, int, int]
"""Channels in and out, kernel, and side of the picture over the side of the output."""


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
        yield 3, first, 3, 1
        for level, out in enumerate(self.channels):
            shrink = 2**level
            into = self.channels[max(level - 1, 0)]
            yield from _residual(into, out, shrink)
            yield from _residual(out, out, shrink)
            if level + 1 < len(self.channels):
                yield out, out, 3, 2 * shrink
        for _ in range(2):
            yield from _residual(last, last, SHRINK)
        yield last, 2 * LATENT_CHANNELS, 3, SHRINK
        yield 2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, 1, SHRINK

    @property
    def parameters(self) -> int:
        """Numbers in convolutions with biases, two per normed channel, and one attention of 4 c^2 + 4 c."""
        convolutions = sum(into * out * kernel**2 + out for into, out, kernel, _ in self.convolutions())
        last = self.channels[-1]
        normed = sum(self.channels[max(level - 1, 0)] + 3 * out for level, out in enumerate(self.channels))
        normed += 4 * last + last + last  # two blocks in the middle, before the attention, before the end
        return convolutions + 2 * normed + 4 * last**2 + 4 * last

    def forward_flops(self, side: int) -> float:
        """Return the operations for one picture of ``side`` x ``side`` pixels, 2mkn for every product."""
        layers = self.convolutions()
        total = sum(2.0 * into * out * kernel**2 * (side // shrink) ** 2 for into, out, kernel, shrink in layers)
        places, last = (side // SHRINK) ** 2, self.channels[-1]
        return total + 8.0 * places * last**2 + 4.0 * places**2 * last


def _residual(into: int, out: int, shrink: int) -> Iterator[Convolution]:
    yield into, out, 3, shrink
    yield out, out, 3, shrink
    if into != out:
        yield into, out, 1, shrink


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
ENCODERS: Mapping[str, Encoders] = {
    "t5xxl-sdvae": Encoders(
        text=TextEncoder(layers=24, width=4096, hidden=10240, heads=64, words=32128), picture=_SD_VAE
    ),
    "sdvae": Encoders(picture=_SD_VAE),
    "tiny-text-picture": Encoders(text=TextEncoder(layers=2, width=64, hidden=96, heads=2, words=128), picture=_TINY),
    "tiny-picture": Encoders(picture=_TINY),
}
"""Encoders by name: of Open-Sora, of Latte, and small ones for tests."""


_EMA_DTYPES = ("none", "fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Settings of one training program."""

    encoders: str = "none"
    """Frozen encoders that compute the model's inputs from pixels and words in every step: a key of
    :data:`perfsuite.models.program.ENCODERS`. Every rank holds them whole, in the case's dtype."""
    ema: str = "none"
    """Moving average of the weights after every step: none, or its dtype.  Each rank averages the weights it holds."""
    ema_on_host: bool = False  # Keep the average in host memory.
    clip: float | None = None  # Largest L2 norm of all gradients together; None: gradients are not clipped.
    loss_scale: float | None = None  # Fixed loss scale in fp16; None: a dynamic one.
    logs: bool = False  # Average the loss of every step over the ranks and read it on the host.
    saves: bool = False  # Write weights, optimizer state and average to a file in every step.

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Program:
        """Return the program with these settings.

        Raises InvalidParameter for an unknown setting or an invalid value.

        >>> Program.of({"ema": "fp32"}).ema
        'fp32'
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in names:
                raise InvalidParameter(f"program: setting {name!r} is unknown; {did_you_mean(name, names)}")
        return cls(**settings)

    def __post_init__(self) -> None:
        if self.ema not in _EMA_DTYPES:
            raise InvalidParameter(f"program: ema={self.ema!r} is unknown; choose {', '.join(_EMA_DTYPES)}")
        if self.ema_on_host and self.ema == "none":
            raise InvalidParameter("program: ema_on_host needs a moving average; set ema, for example 'fp32'")
        for name in ("clip", "loss_scale"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise InvalidParameter(f"program: {name}={value!r} is not valid; choose a number above 0, or None")
        for name in ("ema_on_host", "logs", "saves"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"program: {name}={getattr(self, name)!r} is not valid; choose True or False")

    def require(self, model: Model, dtype: str) -> None:
        """Raise InvalidParameter if a case with this model and dtype cannot have these settings."""
        self.find_encoders(model)
        if self.loss_scale is not None and dtype != "fp16":
            raise InvalidParameter(
                f"program: loss_scale={self.loss_scale:g} has no effect with dtype={dtype!r}; choose fp16, or None"
            )

    def find_encoders(self, model: Model) -> Encoders | None:
        """Return the frozen encoders before ``model``, or None; raises InvalidParameter if it cannot have them."""
        name = self.encoders
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

    def inputs(self, model: Model) -> Sampled:
        """Return the owner of a data set's samples: the model, or its encoders' inputs."""
        encoders = self.find_encoders(model)
        return model if encoders is None else encoders.inputs(model)  # type: ignore[arg-type] # encoders go with a Dit

    def frozen_flops(self, model: Model) -> float:
        """Return the operations of the encoders for one sample."""
        encoders = self.find_encoders(model)
        return 0.0 if encoders is None else encoders.forward_flops(model)  # type: ignore[arg-type] # as above

    def encoders_bytes(self, model: Model, dtype: str) -> int:
        """Return the bytes of the encoders on one rank."""
        encoders = self.find_encoders(model)
        return 0 if encoders is None else encoders.parameters * ITEM_BYTES[dtype]

    @property
    def ema_bytes(self) -> int:
        """Bytes of the average on the device, per number of the weights that a rank holds."""
        return 0 if self.ema == "none" or self.ema_on_host else ITEM_BYTES[self.ema]

    @property
    def spans(self) -> tuple[str, ...]:
        """Names of the step's parts that these settings add."""
        chosen = {
            "encoders": self.encoders != "none", "ema": self.ema != "none", "logging": self.logs, "saving": self.saves,
        }  # fmt: skip
        return tuple(name for name, on in chosen.items() if on)
