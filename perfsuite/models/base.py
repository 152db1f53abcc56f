"""What every model configuration offers without torch: its inputs, its size and its work; build.py makes its module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape

Checkpointing = Literal["none", "full", "selective"]
"""none: all activations are kept; full: every block runs again in the backward; selective: only what is not a matrix
product or attention runs again."""
AttentionMethod = Literal["auto", "math", "flash"]
"""auto: what torch chooses on the device; math: plain products, the scores of all pairs in memory; flash: the kernel
that keeps no scores."""


@dataclass(frozen=True, kw_only=True)
class SampleTensor:
    """One tensor of a training sample, without the batch dimension."""

    name: str
    """Keyword of the module's ``forward``."""
    shape: tuple[int, ...]
    below: int = 0
    """Whole numbers from 0 to below - 1; 0: fp32 numbers from the standard normal distribution."""
    stored: bool = True
    """Comes from the data set; otherwise drawn anew for every sample (noise and time of a diffusion model)."""
    pixels: bool = False
    """(3, frames, height, width) of a video: 0 to 255 in a data set, -1 to 1 in a batch."""


class Sampled(Protocol):
    """What a data set is read for: a model, or the encoders before one."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def parts(self) -> tuple[SampleTensor, ...]:
        """The tensors of one sample."""


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A configuration: plain numbers."""

    name: str
    """As in MODELS: llama2-7b."""
    layers: int
    """Blocks."""
    width: int
    """Features of a token between blocks (D)."""
    heads: int
    """Attention heads; divide ``width``."""

    def __post_init__(self) -> None:
        for field in ("layers", "width", "heads"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise InvalidParameter(
                    f"{field}={value!r} of model {self.name} is no size; choose a whole number from 1"
                )
        if self.width % self.heads:
            legal = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            near = sorted(legal, key=lambda heads: abs(heads - self.heads))[:4]
            raise InvalidParameter(
                f"heads={self.heads} does not divide width={self.width} of model {self.name}; "
                f"choose {', '.join(map(str, sorted(near)))}"
            )

    @property
    @abstractmethod
    def parts(self) -> tuple[SampleTensor, ...]:
        """The tensors of one sample."""

    @property
    @abstractmethod
    def tokens_per_sample(self) -> int:
        """Tokens that go through the blocks for one sample: S."""

    @property
    def vocabulary(self) -> int:
        """Rows of the output projection of a language model; 0 for other models."""
        return 0

    def padded(self, parts: int) -> Model:
        """The configuration whose vocabulary, where one is padded, divides into so many equal parts."""
        return self

    def built_for(self, tp: int) -> Model:
        """Return the configuration that ``tp`` ranks share in a projection, its words padded where that is needed."""
        return self.padded(tp)

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Numbers in all parameters, fixed embeddings that are stored as parameters included."""

    @property
    def active_parameters(self) -> int:
        """Numbers that a token meets: all, unless it is sent to some of many experts."""
        return self.parameters

    @property
    def experts(self) -> int:
        """Experts of a block; 0 for a dense model."""
        return 0

    @property
    def notes(self) -> Sequence[str]:
        """Remarks for whoever projects the model."""
        return ()

    @property
    @abstractmethod
    def block_flops(self) -> float:
        """Operations of one sample in the forward of all blocks: what full checkpointing runs twice.

        2mkn for every product of m x k by k x n, attention counted in full even where a causal kernel skips half of
        it; nothing else (norms, activations, the loss) counts.
        """

    @property
    @abstractmethod
    def forward_flops(self) -> float:
        """Operations of one sample in the whole forward, counted as in :attr:`block_flops`."""

    @abstractmethod
    def twin(self, shape: MeshShape | None = None) -> Model:
        """A sibling of the same architecture that takes milliseconds on one core, for checks against one process.

        Its sizes are such that every axis of a mesh of this shape divides what it divides of the model.
        """


def require_checkpointing(checkpointing: str) -> None:
    """Raise InvalidParameter unless ``checkpointing`` is one of the three kinds."""
    kinds = get_args(Checkpointing)
    if checkpointing not in kinds:
        raise InvalidParameter(f"checkpointing={checkpointing!r} is unknown; choose {', '.join(kinds)}")


def require_attention(attention: str) -> None:
    """Raise InvalidParameter unless ``attention`` is one of the three methods."""
    methods = get_args(AttentionMethod)
    if attention not in methods:
        raise InvalidParameter(f"attention={attention!r} is unknown; choose {', '.join(methods)}")


def require_sizes(owner: str, **sizes: int) -> None:
    """Raise InvalidParameter unless every size is a whole number of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidParameter(f"{name}={value!r} of model {owner} is no size; choose a whole number from 1")
