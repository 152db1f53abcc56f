"""Any product of parallelisms, one along each axis of the mesh: pipeline, data, experts, context and tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from perfsuite.base.errors import InvalidParameter, nearest_multiples
from perfsuite.base.mesh import AXES, MeshShape
from perfsuite.models.base import Model
from perfsuite.models.language import LanguageModel
from perfsuite.record.workload import Process, Rank
from perfsuite.schedules import Schedule, check_layers, find_schedule, make_schedule
from perfsuite.strategies import expert
from perfsuite.strategies.base import Strategy, require_choice, require_hsdp
from perfsuite.strategies.context.places import ContextMethod, require_context
from perfsuite.strategies.hybrid_sizes import HybridSizes, split_layers
from perfsuite.strategies.hybrid_traffic import HybridTraffic
from perfsuite.strategies.parameter_shapes import find_shapes
from perfsuite.strategies.plan import Plan
from perfsuite.strategies.traffic import Call

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer

_SPARE_LAYERS = 1
"""Of a twin, more than stages: some stage has two, so that stages differ."""
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
"""The axes that an option is about: without any of them it would be said in vain."""


@dataclass(frozen=True, kw_only=True)
class Hybrid(Strategy):
    """Options of a language model on any mesh; None is the default that the axis has."""

    data: Literal["shard", "replicate"] | None = None
    """Along the data axes and cp: parameters are spread by FSDP2 (shard, the default) or copied to every rank."""
    reshard: bool | None = None
    """Gathered parameters are freed after a block's forward (the default); never under a pipeline, which keeps them."""
    sequence_parallel: bool | None = None
    """A rank of tp has its share of the tokens between the split parts (the default); False: all of them."""
    loss_parallel: bool | None = None
    """The loss is taken of logits that stay split by words (the default); False: logits are gathered."""
    async_tensor: bool | None = None
    """Tensor-parallel messages overlap with products, where torch can: compiled, on an accelerator."""
    context: ContextMethod | None = None
    """Along cp: zigzag (the default), ring, ulysses, torch's own context_parallel, or deepspeed for its Ulysses."""
    schedule: str | None = None
    """Along pp: naive, gpipe, 1f1b (the default), interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv, ..."""
    stages_per_rank: int | None = None
    """v, the interleaving; None: the fewest that the schedule can have."""

    name: ClassVar[str] = "hybrid"
    process: ClassVar[Process] = Process()
    """DTensor keeps what it knows of a mesh for every equal one, also when the process group has been formed anew."""
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
    def splits_loss(self) -> bool:
        """Whether the loss is taken of split logits."""
        return self.loss_parallel is not False

    @property
    def attends(self) -> ContextMethod:
        """The way of context parallelism."""
        return self.context or "zigzag"

    # -- what it can train ---------------------------------------------------------------------------------------

    def require(self, shape: MeshShape) -> None:
        """Raise InvalidParameter for one of dp_replicate and dp_shard, and for options of an axis that is not there."""
        super().require(shape)
        require_hsdp(shape, self.name)
        for option, axes in _AXIS_OF.items():
            if getattr(self, option) is not None and not set(axes) & set(shape.names):
                raise InvalidParameter(
                    f"option {option}={getattr(self, option)!r} of strategy {self.name} is about {' or '.join(axes)}, "
                    f"which mesh {shape} lacks; leave it out or add the axis"
                )

    def check_plan(self, plan: Plan, shape: MeshShape) -> None:
        """Raise InvalidParameter for a model, batch or option that the mesh cannot have."""
        model = plan.model
        if not isinstance(model, LanguageModel):
            raise InvalidParameter(
                f"model {model.name} cannot be trained by strategy {self.name}: its blocks need more than what the "
                "block before gives; choose a GPT, a LLaMA or a mixture of experts, or strategy ddp, fsdp or zero3"
            )
        if plan.clip is not None:
            raise InvalidParameter(
                f"clip={plan.clip:g} needs the norm of all gradients, which strategy {self.name} has on several "
                "meshes; leave it out, or choose ddp, fsdp or a ZeRO stage"
            )
        if self.async_tensor and not plan.compiled:
            raise InvalidParameter(
                "async_tensor overlaps messages with products when blocks are compiled; set compiled=True"
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
                f"sequence_length={tokens} of model {model.name} is no multiple of cp x tp = {cp * tp}, which sequence "
                f"parallelism deals the tokens out to; choose {nearest_multiples(tokens, cp * tp)}, or set "
                "sequence_parallel to False"
            )

    def _check_stages(self, plan: Plan, shape: MeshShape) -> None:
        if plan.compiled:
            raise InvalidParameter("compiled blocks cannot be cut into stages; leave compiled out")
        schedule = self.find_schedule(shape, plan.accumulation)
        assert schedule is not None
        if plan.checkpointing != "none" and schedule.splits_backwards:
            raise InvalidParameter(
                f"checkpointing={plan.checkpointing!r} computes blocks again in a backward, which schedule "
                f"{schedule.name} splits; leave it out, or choose a schedule with whole backwards such as 1f1b"
            )
        if self.reshard:
            raise InvalidParameter(
                "reshard of strategy hybrid under a pipeline would gather anew for every micro-batch"
            )
        check_layers(plan.model.layers, schedule.num_stages)
        split_layers(plan.model, schedule.num_stages)

    def find_schedule(self, shape: MeshShape, num_micro_batches: int) -> Schedule | None:
        """The orders of all ranks along pp, None without that axis; InvalidParameter names the legal counts."""
        if "pp" not in shape.names:
            return None
        return make_schedule(
            self.order,
            ranks=shape.size("pp"),
            num_micro_batches=num_micro_batches,
            stages_per_rank=self.stages_per_rank,
        )

    def needs_accelerator(self) -> str:
        """torch overlaps tensor-parallel messages by symmetric memory."""
        return "async_tensor" if self.async_tensor else ""

    def narrows(self, plan: Plan) -> bool:
        """In bf16 and fp16 FSDP2 keeps the wide copy; all that is computed and sent is narrow."""
        return plan.half

    def twin(self, model: Model, shape: MeshShape, num_micro_batches: int) -> Model:
        """The model's twin, with more layers than stages."""
        schedule = self.find_schedule(shape, num_micro_batches)
        small = model.twin(shape)
        return dataclasses.replace(small, layers=schedule.num_stages + _SPARE_LAYERS) if schedule else small

    def traffic(self, plan: Plan, shape: MeshShape, rank: int) -> tuple[Call, ...] | None:
        """Along every axis; None with torch's own context parallelism, which is free to change what it sends."""
        if find_shapes(plan.model) is None or (self.attends == "torch" and shape.size("cp") > 1):
            return None
        return HybridTraffic(**self._resolved(plan, shape, rank)).calls()

    def _resolved(self, plan: Plan, shape: MeshShape, rank: int) -> dict[str, Any]:
        """The fields of :class:`HybridSizes`: these options, with the defaults that the mesh has."""
        return {
            "plan": plan,
            "shape": shape,
            "rank": rank,
            "schedule": self.find_schedule(shape, plan.accumulation),
            "sequence_parallel": self.splits_tokens,
            "loss_parallel": self.splits_loss,
            "context": self.attends,
            "replicate": self.data == "replicate",
            "reshard": "pp" not in shape.names if self.reshard is None else self.reshard,
            "async_tensor": bool(self.async_tensor),
        }

    def training(self, plan: Plan, shape: MeshShape) -> Mapping[str, Any]:
        """What is spread over the data axes and cp, how tokens are split along tp, and the schedule along pp."""
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
        """This rank's layers, with every parallelism that the mesh has."""
        from perfsuite.strategies.hybrid_trainer import HybridTrainer

        return HybridTrainer(rank, HybridSizes(**self._resolved(plan, rank.shape, rank.rank)))
