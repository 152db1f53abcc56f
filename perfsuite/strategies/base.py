"""What a strategy is: options that need no torch, a rule about meshes, and a trainer on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import DATA_PARALLEL, MeshShape
from perfsuite.models.base import AttentionMethod, Checkpointing, Model
from perfsuite.record.workload import Process, Rank
from perfsuite.schedules import Schedule
from perfsuite.strategies.traffic import Call

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

EXACT_TOLERANCE = 1e-5
"""Relative error that sums in another order make in fp32."""
NARROW_TOLERANCE = 2e-2
"""Relative error where products or gradients keep 8 to 11 bits."""


def parity_tolerance(dtype: str) -> float:
    """Relative error that is allowed against one process that computes in the same dtype."""
    return EXACT_TOLERANCE if dtype == "fp32" else NARROW_TOLERANCE


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
    attention: AttentionMethod = "auto"
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

    @property
    def batch_size(self) -> int:
        """Samples of a step that one replica trains: LBS x GAS."""
        return self.micro_batch_size * self.accumulation


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """Options of one way to train; subclasses are frozen dataclasses and know nothing of time."""

    name: ClassVar[str]
    process: ClassVar[Process | None] = None
    """Declared when it needs processes of its own."""
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to import, beside torch and what every optimizer needs."""
    axes: ClassVar[tuple[str, ...]] = DATA_PARALLEL
    """Axes of a mesh that it can train along."""
    ignorable: ClassVar[bool] = True
    """Its collectives can be made to do nothing, by which communication is told from computation."""

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter unless it can train on a mesh of this shape."""
        others = [axis for axis, size in shape.axes if axis not in self.axes and size > 1]
        if others:
            raise InvalidParameter(
                f"mesh {shape} has axis {', '.join(others)}, along which strategy {self.name} cannot train; "
                f"give it {' or '.join(self.axes)}"
            )

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter where options contradict ``plan`` on a mesh of this shape; by default nothing can."""
        return None

    def find_schedule(self, shape: MeshShape, num_micro_batches: int) -> Schedule | None:
        """The order in which stages train the micro-batches of a step; None where the mesh has no stages.

        Raises InvalidParameter, with the legal counts, where there is no such order.
        """
        return None

    def twin(self, model: Model, shape: MeshShape, num_micro_batches: int) -> Model:
        """A small sibling of ``model`` that still fills the mesh, for checks against one process."""
        return model.twin(shape)

    def needs_accelerator(self) -> str:
        """The option that no CPU can have; empty, as by default, where there is none."""
        return ""

    def narrows(self, plan: Plan) -> bool:
        """Whether parameters themselves are used in the plan's dtype; otherwise autocast narrows products alone."""
        return False

    def tolerance(self, plan: Plan) -> float:
        """Relative error of loss and gradients that is allowed against one process in the same dtype."""
        return parity_tolerance(plan.dtype)

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """What ``rank`` posts in one step, by closed form; None where there is none, as by default."""
        return None

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any] | None:
        """The fields of :class:`perfsuite.record.result.Training` that the strategy decides.

        None, as by default, where the record has no words for what the strategy or its options do.
        """
        return None

    @abstractmethod
    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """On every rank: the model on the rank's device, spread as the strategy does; imports torch."""


def require_hsdp(shape: MeshShape, strategy: str) -> None:
    """Raise InvalidParameter where one of dp_replicate and dp_shard comes without the other."""
    if ("dp_replicate" in shape.names) != ("dp_shard" in shape.names):
        raise InvalidParameter(
            f"mesh {shape} has one of dp_replicate and dp_shard; strategy {strategy} needs both, or dp alone"
        )


def require_choice(strategy: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise InvalidParameter unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InvalidParameter(
            f"{option}={value!r} of strategy {strategy} is unknown; choose {', '.join(map(repr, choices))}"
        )
