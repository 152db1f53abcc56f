"""Strategy hybrid: any product of pipeline, data, expert, context and tensor parallelism, one per axis of the mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from perfsuite.base.errors import InvalidParameter, nearest_multiples
from perfsuite.base.mesh import AXES, MeshShape
from perfsuite.models.base import Model, Plan
from perfsuite.models.language import LanguageModel
from perfsuite.record.workload import Process, Rank
from perfsuite.schedules import Schedule, check_layers, find_schedule, make_schedule
from perfsuite.strategies import expert
from perfsuite.strategies.base import Strategy, require_choice, require_hsdp
from perfsuite.strategies.context import ContextMethod, require_context
from perfsuite.strategies.hybrid_sizes import HybridSizes, split_layers
from perfsuite.strategies.traffic import Call, find_shapes

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

_SPARE_LAYERS = 1  # Layers of a twin in addition to its stages: one stage has two, so that stages differ
_AXIS_OF: Mapping[str, tuple[str, ...]] = {
    "data": ("dp", "dp_replicate", "dp_shard", "ep", "cp"),
    "reshard": ("dp", "dp_shard", "ep", "cp"),
    "sequence_parallel": ("tp",),
    "loss_parallel": ("tp",),
    "async_tensor": ("tp",),
    "context": ("cp",),
    "schedule": ("pp",),
    "stages_per_rank": ("pp",),
}
"""Axes that an option applies to; a mesh without any of them refuses the option."""


@dataclass(frozen=True, kw_only=True)
class Hybrid(Strategy):
    """Options of a language model on any mesh; None is the default of the axis."""

    data: Literal["shard", "replicate"] | None = None
    """Along the data axes and cp: spread parameters by FSDP2 (shard, the default) or copy them to every rank."""
    reshard: bool | None = None
    """Free gathered parameters after a block's forward (the default); a pipeline always keeps them."""
    sequence_parallel: bool | None = None
    """Hold a rank's share of the tokens between the split parts of tp (the default); False: all tokens."""
    loss_parallel: bool | None = None
    """Compute the loss from logits split by words (the default); False: gather the logits."""
    async_tensor: bool | None = None
    """Overlap tensor-parallel messages with products; needs compiled blocks and an accelerator."""
    context: ContextMethod | None = None
    """Along cp: zigzag (the default), ring, ulysses, torch's own context_parallel, or deepspeed's Ulysses."""
    schedule: str | None = None
    """Along pp: naive, gpipe, 1f1b (the default), interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, ..."""
    stages_per_rank: int | None = None  # Interleaving v; None: the smallest that the schedule allows.

    name: ClassVar[str] = "hybrid"
    process: ClassVar[Process] = Process()
    """Processes of its own: DTensor caches state by equal meshes, across process groups."""
    preload: ClassVar[tuple[str, ...]] = (
        "torch.distributed.pipelining",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "perfsuite.strategies.hybrid_trainer",
    )
    axes: ClassVar[tuple[str, ...]] = AXES

    def __post_init__(self) -> None:
        find_schedule(self.order)
        for option, choices in (("data", ("shard", "replicate")), ("context", get_args(ContextMethod))):
            if getattr(self, option) is not None:
                require_choice(self.name, option, getattr(self, option), choices)

    @property
    def order(self) -> str:
        """Name of the schedule."""
        return self.schedule or "1f1b"

    @property
    def splits_tokens(self) -> bool:
        """Whether tensor parallelism is sequence parallel."""
        return self.sequence_parallel is not False

    @property
    def attends(self) -> ContextMethod:
        """Method of context parallelism."""
        return self.context or "zigzag"

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter for only one of dp_replicate and dp_shard, and for options of an absent axis."""
        super().require(shape)
        require_hsdp(shape, self.name)
        for option, axes in _AXIS_OF.items():
            if getattr(self, option) is not None and not set(axes) & set(shape.names):
                raise InvalidParameter(
                    f"option {option}={getattr(self, option)!r} of strategy {self.name} applies to "
                    f"{' or '.join(axes)}, which mesh {shape} lacks; leave it out or add the axis"
                )

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter for a model, batch or option that does not fit the mesh."""
        model = plan.model
        if not isinstance(model, LanguageModel):
            raise InvalidParameter(
                f"model {model.name} cannot be trained by strategy {self.name}: its blocks need other inputs than the "
                "previous block's output; choose a GPT, a LLaMA or a mixture of experts, or strategy ddp, fsdp or zero3"
            )
        if plan.clip is not None:
            raise InvalidParameter(
                f"clip={plan.clip:g} does not work with strategy {self.name}, which has gradients on several meshes; "
                "leave it out, or choose ddp, fsdp or a ZeRO stage"
            )
        if self.async_tensor and not plan.compiled:
            raise InvalidParameter(
                "async_tensor without compiled=True has no effect: the compiler overlaps messages; set compiled=True"
            )
        model.check_tensor_parallel(shape.size("tp"))
        expert.require(model, shape, sequence_parallel=self.splits_tokens, zigzag=self.attends in ("zigzag", "torch"))
        self._check_tokens(model, shape)
        if "pp" in shape.names:
            self._check_stages(plan, shape)

    def _check_tokens(self, model: LanguageModel, shape: MeshShape) -> None:
        tp, cp, tokens = shape.size("tp"), shape.size("cp"), model.tokens_per_sample
        if cp > 1:
            require_context(self.attends, length=tokens, heads=model.heads, key_heads=model.key_heads, cp=cp, tp=tp)
        if tp > 1 and self.splits_tokens and tokens % (cp * tp):
            raise InvalidParameter(
                f"sequence_length={tokens} of model {model.name} is not a multiple of cp x tp = {cp * tp}, over which "
                f"sequence parallelism spreads the tokens; choose {nearest_multiples(tokens, cp * tp)}, or set "
                "sequence_parallel to False"
            )

    def _check_stages(self, plan: Plan, shape: MeshShape) -> None:
        if plan.compiled:
            raise InvalidParameter("compiled blocks cannot be cut into stages; leave compiled out")
        schedule = self.find_schedule(shape, plan.accumulation)
        assert schedule is not None
        if plan.checkpointing != "none" and schedule.splits_backwards:
            raise InvalidParameter(
                f"checkpointing={plan.checkpointing!r} does not work with the split backwards of schedule "
                f"{schedule.name}; leave it out, or choose a schedule with whole backwards such as 1f1b"
            )
        if self.reshard:
            raise InvalidParameter(
                "reshard of strategy hybrid with a pipeline would gather again for every micro-batch; leave it out"
            )
        check_layers(plan.model.layers, schedule.num_stages)
        split_layers(plan.model, schedule.num_stages)

    def find_schedule(self, shape: MeshShape, num_micro_batches: int) -> Schedule | None:
        """Return the orders of all ranks along pp, None without pp; raises InvalidParameter if there are none."""
        if "pp" not in shape.names:
            return None
        v = self.stages_per_rank
        return make_schedule(self.order, ranks=shape.size("pp"), num_micro_batches=num_micro_batches, stages_per_rank=v)

    def needs_accelerator(self) -> str:
        """Return async_tensor if it is set: it uses symmetric memory."""
        return "async_tensor" if self.async_tensor else ""

    def narrows(self, plan: Plan) -> bool:
        """Return whether the dtype is narrow: then FSDP2 keeps a wide copy and computes and sends narrow values."""
        return plan.half

    def twin(self, model: Model, shape: MeshShape, num_micro_batches: int) -> Model:
        """Return the model's twin, with more layers than stages."""
        schedule = self.find_schedule(shape, num_micro_batches)
        small = model.twin(shape)
        return dataclasses.replace(small, layers=schedule.num_stages + _SPARE_LAYERS) if schedule else small

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Return the messages along every axis; None with torch's context parallelism, whose messages may change."""
        if find_shapes(plan.model) is None or (self.attends == "torch" and shape.size("cp") > 1):
            return None
        return self._sizes(plan, shape, rank).calls()

    def _sizes(self, plan: Plan, shape: MeshShape, rank: int) -> HybridSizes:
        return HybridSizes(
            plan=plan,
            shape=shape,
            rank=rank,
            schedule=self.find_schedule(shape, plan.accumulation),
            sequence_parallel=self.splits_tokens,
            loss_parallel=self.loss_parallel is not False,
            context=self.attends,
            replicate=self.data == "replicate",
            reshard="pp" not in shape.names if self.reshard is None else self.reshard,
            async_tensor=bool(self.async_tensor),
        )

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any]:
        """Return the sharding over the data axes and cp, the split of tokens along tp, and the schedule along pp."""
        schedule = self.find_schedule(shape, plan.accumulation)
        spread = math.prod(shape.size(axis) for axis in ("dp", "dp_shard", "ep", "cp")) > 1
        kept = schedule is not None if self.reshard is None else not self.reshard
        sharding = "none" if self.data == "replicate" or not spread else "gradients" if kept else "parameters"
        order = {"schedule": self.order, "stages_per_rank": schedule.stages_per_rank} if schedule else {}
        return {
            "sharding": sharding,
            "sequence_parallel": self.splits_tokens and shape.size("tp") > 1,
            "gradient_dtype": plan.dtype if plan.half else "fp32",
            **order,
        }

    def build(self, rank: Rank, plan: Plan) -> Trainer:
        """Return the trainer of this rank's layers, with every parallelism of the mesh."""
        from perfsuite.strategies.hybrid_trainer import HybridTrainer

        return HybridTrainer(rank, self._sizes(plan, rank.shape, rank.rank))
