"""One parallelism along each axis of the mesh: stages along ``pp``, each of them spread over the data axes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.errors import InvalidParameter
from perfsuite.mesh import DATA_AXES, MeshShape
from perfsuite.models.base import Model
from perfsuite.schedules import Schedule, check_layers, find_schedule, make_schedule
from perfsuite.strategies.base import Plan, Strategy, require_hsdp
from perfsuite.strategies.pipeline.split import split_layers
from perfsuite.workload import Rank

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

_SPARE_LAYERS = 1
"""Of a twin, more than stages: some stage has two, so that stages differ."""


@dataclass(frozen=True, kw_only=True)
class Hybrid(Strategy):
    """Options of a pipeline, data parallelism beside it, of a GPT or a LLaMA; accumulation counts its micro-batches."""

    schedule: str = "1f1b"
    """naive, gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipev."""
    stages_per_rank: int | None = None
    """v, the interleaving; None: the fewest that the schedule can have."""

    name: ClassVar[str] = "hybrid"
    preload: ClassVar[tuple[str, ...]] = ("torch.distributed.pipelining", "torch.distributed.fsdp")
    axes: ClassVar[tuple[str, ...]] = ("pp", *DATA_AXES)
    ignorable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        find_schedule(self.schedule)

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter unless the mesh has an axis pp, which may have size 1."""
        super().require(shape)
        if "pp" not in shape.names:
            raise InvalidParameter(
                f"mesh {shape} has no axis pp, which strategy hybrid needs; give it one, such as pp4 or pp2-dp2"
            )
        require_hsdp(shape, self.name)

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter for what stages cannot train."""
        if plan.dtype == "fp16":
            raise InvalidParameter("dtype='fp16' trains no pipeline; choose from fp32, tf32, bf16")
        if plan.compiled:
            raise InvalidParameter("compiled blocks cannot be cut into stages; leave compiled out")
        schedule = self.find_schedule(shape, plan.accumulation)
        if plan.checkpointing != "none" and schedule.splits_backwards:
            raise InvalidParameter(
                f"checkpointing={plan.checkpointing!r} computes blocks again in a backward, which schedule "
                f"{self.schedule} splits; leave it out, or choose a schedule with whole backwards such as 1f1b"
            )
        check_layers(plan.model.layers, schedule.num_stages)
        split_layers(plan.model, schedule.num_stages)

    def find_schedule(self, shape: MeshShape, num_micro_batches: int) -> Schedule:
        """The orders of all ranks along pp; InvalidParameter names the legal counts."""
        return make_schedule(
            self.schedule,
            ranks=shape.size("pp"),
            num_micro_batches=num_micro_batches,
            stages_per_rank=self.stages_per_rank,
        )

    def twin(self, model: Model, shape: MeshShape, num_micro_batches: int) -> Model:
        """The model's twin with more layers than stages."""
        stages = self.find_schedule(shape, num_micro_batches).num_stages
        return dataclasses.replace(model.twin(), layers=stages + _SPARE_LAYERS)

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """This rank's stages under torch's pipeline runtime, each stage under FSDP2 where there are replicas."""
        from perfsuite.strategies.pipeline.trainer import PipelineTrainer

        return PipelineTrainer(rank, plan, self.find_schedule(rank.shape, plan.accumulation))
