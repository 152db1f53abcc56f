"""Base class of model configurations, and the plan of a training step, without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import MeshShape

Checkpointing = Literal["none", "full", "selective"]
"""none: keep all activations; full: compute every block again in the backward; selective: compute again all operations
except matrix products and attention."""
AttentionMethod = Literal["auto", "math", "flash"]
"""auto: the kernel that torch chooses; math: plain products, with all attention scores in memory; flash: the kernel
that stores no scores."""


@dataclass(frozen=True, kw_only=True)
class SampleTensor:
    """One tensor of a training sample, without the batch dimension."""

    name: str  # Keyword of the module's ``forward``
    shape: tuple[int, ...]
    below: int = 0
    """Values are integers from 0 to below - 1.  0: they are fp32 numbers from the standard normal distribution."""
    stored: bool = True  # Comes from the data set; else it is drawn for every sample (noise and its level in diffusion)
    pixels: bool = False  # The tensor is a video (3, frames, height, width): 0 to 255 in a data set, -1 to 1 in a batch


class Sampled(Protocol):
    """The owner of a data set's samples: a model, or the encoders before one."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def parts(self) -> tuple[SampleTensor, ...]:
        """Tensors of one sample."""


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """The sizes of a model."""

    name: str  # Key in MODELS, such as llama2-7b.
    layers: int  # Number of blocks.
    width: int  # Features of a token between blocks (D).
    heads: int  # Attention heads; divide ``width``.

    def __post_init__(self) -> None:
        require_sizes(self.name, layers=self.layers, width=self.width, heads=self.heads)
        if self.width % self.heads:
            raise InvalidParameter(
                f"heads={self.heads} does not divide width={self.width} of model {self.name}; "
                f"choose {', '.join(map(str, sorted(divisors(self.width, self.heads)[:4])))}"
            )

    @property
    @abstractmethod
    def parts(self) -> tuple[SampleTensor, ...]:
        """Tensors of one sample."""

    @property
    @abstractmethod
    def tokens_per_sample(self) -> int:
        """Tokens of one sample in the blocks (S)."""

    @property
    def vocabulary(self) -> int:
        """Rows of the output projection of a language model; 0 for other models."""
        return 0

    def padded(self, parts: int) -> Model:
        """Return the configuration with a vocabulary, if it is a padded one, that ``parts`` divides."""
        return self

    def built_for(self, tp: int) -> Model:
        """Return the configuration for ``tp`` ranks in a projection: with padded words if tp does not divide them."""
        return self.padded(tp)

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters; fixed embeddings count if they are stored as parameters."""

    @property
    def active_parameters(self) -> int:
        """Parameters that compute one token: all in a dense model, less the unused experts in a mixture."""
        return self.parameters

    @property
    def experts(self) -> int:
        """Experts of a block; 0 for a dense model."""
        return 0

    @property
    def notes(self) -> Sequence[str]:
        """Remarks to print with a projection of the model."""
        return ()

    @property
    @abstractmethod
    def block_flops(self) -> float:
        """Operations of one sample in the forward of all blocks; full checkpointing runs them twice.  Counts 2mkn for
        every product of m x k by k x n.  Attention is counted in full, even if a causal kernel skips half of it.
        Norms, activations and the loss are not counted.
        """

    @property
    @abstractmethod
    def forward_flops(self) -> float:
        """Operations of one sample in the whole forward, counted as in :attr:`block_flops`."""

    @abstractmethod
    def twin(self, shape: MeshShape | None = None) -> Model:
        """Return a small model of the same architecture, for checks against one process: milliseconds on one core.
        Every axis of a mesh of this shape divides its sizes as it divides those of the model.
        """


def require_sizes(owner: str, **sizes: int) -> None:
    """Raise InvalidParameter unless every size is a whole number of at least 1."""
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidParameter(f"{name}={value!r} of model {owner} is not valid; choose a whole number from 1")


def divisors(size: int, near: int) -> list[int]:
    """Return the divisors of ``size``, those nearest to ``near`` first.

    >>> divisors(12, 5)
    [4, 6, 3, 2, 1, 12]
    """
    return sorted((count for count in range(1, size + 1) if size % count == 0), key=lambda count: abs(count - near))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Model, batch and precision of a training step; the same for every strategy."""

    model: Model
    dtype: str  # fp32, tf32, or bf16 or fp16: the dtype of products under autocast.
    micro_batch_size: int  # Samples of one forward on one rank.
    accumulation: int = 1  # Micro-batches whose gradients are summed before the optimizer steps.
    checkpointing: Checkpointing = "none"
    attention: AttentionMethod = "auto"
    compiled: bool = False  # torch.compile on every block.
    learning_rate: float = 1e-4
    clip: float | None = None  # Largest L2 norm of all gradients together; None: gradients are not clipped.
    loss_scale: float | None = None  # Fixed loss scale in fp16; None: a dynamic one.
    seed: int = 0  # Initial values depend only on it and on the parameters' names.

    @property
    def half(self) -> bool:
        """Whether matrix products run in a dtype narrower than the parameters."""
        return self.dtype in ("bf16", "fp16")

    @property
    def batch_size(self) -> int:
        """Samples of one replica per step: LBS x GAS."""
        return self.micro_batch_size * self.accumulation
