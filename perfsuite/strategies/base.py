"""What a strategy is: options that need no torch, a rule about meshes, and a trainer on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.errors import InvalidParameter
from perfsuite.mesh import MeshShape
from perfsuite.models.base import Checkpointing, Model
from perfsuite.workload import Process, Rank

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

DATA_AXES = ("dp", "dp_replicate", "dp_shard")
"""Axes along which ranks see different samples."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is trained, and how much of it at a time: the same for every strategy."""

    model: Model
    dtype: str
    """fp32, tf32, or the dtype of matrix products under autocast: bf16, fp16."""
    micro_batch_size: int
    """Samples of one forward on one rank."""
    accumulation: int = 1
    """Micro-batches whose gradients are added up before the optimizer steps."""
    checkpointing: Checkpointing = "none"
    compiled: bool = False
    """torch.compile on every block."""
    learning_rate: float = 1e-4
    """Of AdamW."""
    seed: int = 0
    """Initial values follow from it and from the parameters' names alone."""

    @property
    def half(self) -> bool:
        """Whether matrix products run in a dtype narrower than the parameters."""
        return self.dtype in ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """Options of one way to train; subclasses are frozen dataclasses and know nothing of time."""

    name: ClassVar[str]
    process: ClassVar[Process | None] = None
    """Declared when it needs processes of its own."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to import, beside torch and what every optimizer needs."""
    replicates: ClassVar[bool] = True
    """Every rank holds all parameters, so they can be compared between ranks."""
    ignorable: ClassVar[bool] = True
    """Its collectives can be made to do nothing, by which communication is told from computation."""

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter unless it can train on a mesh of this shape."""
        others = [axis for axis, size in shape.axes if axis not in DATA_AXES and size > 1]
        if others:
            raise InvalidParameter(
                f"mesh {shape} has axis {', '.join(others)}, but strategy {self.name} splits the data alone; "
                f"give it {' or '.join(DATA_AXES)}"
            )

    def check_plan(self, plan: Plan, ranks: int) -> None:
        """Raise InvalidParameter where options contradict ``plan`` on ``ranks`` ranks; by default nothing can."""
        return None

    def narrows(self, plan: Plan) -> bool:
        """Whether parameters themselves are used in the plan's dtype; otherwise autocast narrows products alone."""
        return False

    def tolerance(self, plan: Plan) -> float:
        """Relative error of loss and gradients that is allowed against one process in the same dtype.

        1e-5 in fp32: sums in another order.  2e-2 where products or gradients keep 8 to 11 bits.
        """
        return 1e-5 if plan.dtype == "fp32" else 2e-2

    @abstractmethod
    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """On every rank: the model on the rank's device, spread as the strategy does; imports torch."""


def data_parallel_size(shape: MeshShape) -> int:
    """Ranks that see different samples: product of the sizes of the data axes.

    >>> data_parallel_size(MeshShape.of(dp_replicate=2, dp_shard=4))
    8
    """
    size = 1
    for axis in DATA_AXES:
        size *= shape.size(axis)
    return size


def require_choice(strategy: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise InvalidParameter unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InvalidParameter(
            f"{option}={value!r} of strategy {strategy} is unknown; choose {', '.join(map(repr, choices))}"
        )
