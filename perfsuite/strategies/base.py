"""Base class of strategies: options without torch, supported meshes, and a trainer on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.mesh import DATA_PARALLEL, MeshShape
from perfsuite.models.base import Model, Plan
from perfsuite.record.workload import Process, Rank
from perfsuite.schedules import Schedule
from perfsuite.strategies.traffic import Call

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

EXACT_TOLERANCE = 1e-5  # Largest relative error of fp32 sums in another order
NARROW_TOLERANCE = 2e-2  # Largest relative error if products or gradients keep 8 to 11 bits


def parity_tolerance(dtype: str) -> float:
    """Return the relative error allowed against one process that computes in the same dtype."""
    return EXACT_TOLERANCE if dtype == "fp32" else NARROW_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Strategy(ABC):
    """Options of one strategy, in a frozen dataclass."""

    name: ClassVar[str]
    process: ClassVar[Process | None] = None  # Requirements on processes, if it needs separate ones.
    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that are slow to import, in addition to torch and the modules that every optimizer needs."""
    axes: ClassVar[tuple[str, ...]] = DATA_PARALLEL  # Axes of a mesh along which it can train.
    ignorable: ClassVar[bool] = True
    """Its collectives can be replaced by ones that do nothing, to measure exposed communication."""

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter unless it can train on a mesh of this shape."""
        others = [axis for axis, size in shape.axes if axis not in self.axes and size > 1]
        if others:
            raise InvalidParameter(
                f"mesh {shape} has axis {', '.join(others)}, along which strategy {self.name} cannot train; "
                f"give it {' or '.join(self.axes)}"
            )

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter if options contradict ``plan`` on a mesh of this shape; by default none do."""
        return None

    def find_schedule(self, shape: MeshShape, num_micro_batches: int) -> Schedule | None:
        """Return the order of a step's micro-batches, None without stages; InvalidParameter if there is none."""
        return None

    def twin(self, model: Model, shape: MeshShape, num_micro_batches: int) -> Model:
        """Return a small model of the same architecture that still fills the mesh, for checks against one process."""
        return model.twin(shape)

    def needs_accelerator(self) -> str:
        """Return the option that needs an accelerator; empty, as by default, if there is none."""
        return ""

    def narrows(self, plan: Plan) -> bool:
        """Return whether parameters are used in the plan's dtype; otherwise autocast casts products only."""
        return False

    def tolerance(self, plan: Plan) -> float:
        """Return the relative error of loss and gradients allowed against one process in the same dtype."""
        return parity_tolerance(plan.dtype)

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Return the collectives that ``rank`` posts in one step, by closed form; None, as by default, without one."""
        return None

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any] | None:
        """Return the fields of a record's ``Training`` that the strategy decides; None if these cannot express it."""
        return None

    @abstractmethod
    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return the trainer of this rank: the model on its device, spread by the strategy; imports torch."""


def require_hsdp(shape: MeshShape, strategy: str) -> None:
    """Raise InvalidParameter if the mesh has only one of dp_replicate and dp_shard."""
    if ("dp_replicate" in shape.names) != ("dp_shard" in shape.names):
        raise InvalidParameter(
            f"mesh {shape} has only one of dp_replicate and dp_shard; strategy {strategy} needs both, or dp alone"
        )


def require_choice(strategy: str, option: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise InvalidParameter unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InvalidParameter(
            f"{option}={value!r} of strategy {strategy} is unknown; choose {', '.join(map(repr, choices))}"
        )
