"""A training step of a language model as a pipeline: throughput, bubble, phases, memory.

The timeline is that of torch's own runtime, action by action.  Ranks run free; what they wait for is each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from perfsuite import models
from perfsuite.errors import InvalidParameter, WrongResult
from perfsuite.mesh import MeshShape
from perfsuite.metrics.flop_conventions import Transformer, count_all
from perfsuite.models.base import Model
from perfsuite.records import Work
from perfsuite.schedules import check_layers, micro_batch_size
from perfsuite.strategies.base import Plan
from perfsuite.strategies.pipeline.split import split_layers
from perfsuite.workload import Purpose, Rank, Step, Workload, Yardstick
from perfsuite.workloads.training.pipeline_case import TIMELINE_METRICS, PipelineCase

if TYPE_CHECKING:
    from perfsuite.workloads.training.pipeline_steps import PipelineStepOnRank

_TIMED = (
    "step_time_s",
    "samples_per_s",
    "samples_per_s_per_device",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "tflops_per_device",
    "mfu_percent",
    *TIMELINE_METRICS,
    "optimizer_ms",
)
_MEMORY = ("weights_gib", "gradients_gib", "optimizer_gib", "peak_activations_gib", "peak_gib")
_DTYPES = ("fp32", "tf32", "bf16")


@dataclass(frozen=True, kw_only=True)
class PipelineStep(PipelineCase):
    """One optimizer step of a GPT or LLaMA split into stages."""

    model: str
    """Name of a configuration: gpt2, gpt2-xl, gpt3-13b, llama2-7b, ..."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration to replace, such as ``layers``."""
    micro_batch_size: int | None = None
    """Samples of a micro-batch; None: from ``global_batch_size``, else 1."""
    global_batch_size: int | None = None
    """Samples of a step of all pipelines; None: micro_batch_size x num_micro_batches x pipelines."""
    dtype: str = "fp32"
    """fp32, tf32, or bf16 by autocast."""
    learning_rate: float = 1e-4
    """Of AdamW."""
    seed: int = 0
    """Of the initial values."""
    builds: tuple[Purpose, ...] = ()
    """What to look at beside the time, in builds of their own: memory."""

    metrics: ClassVar[tuple[str, ...]] = _TIMED
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in _DTYPES:
            raise InvalidParameter(f"dtype={self.dtype!r} trains no pipeline; choose from {', '.join(_DTYPES)}")
        if set(self.builds) - {"memory"}:
            raise InvalidParameter(f"builds={self.builds!r} of a pipeline; choose ('memory',) or none")
        for name in ("micro_batch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidParameter(f"{name}={value!r} is not a count; choose a whole number from 1")
        check_layers(self.find_model().layers, self.find_schedule().num_stages)
        split_layers(self.find_model(), self.find_schedule().num_stages)
        self.find_micro_batch_size()
        # A class variable of Workload that depends on the case here: a frozen instance keeps its own.
        object.__setattr__(self, "metrics", (*_TIMED, *(_MEMORY if "memory" in self.builds else ())))

    # -- what the case is ----------------------------------------------------------------------------------------

    def find_model(self) -> Model:
        """The configuration."""
        model = models.find(self.model, self.overrides)
        return model.split(MeshShape.parse(self.mesh).size("tp")) if self.mesh else model

    def find_micro_batch_size(self) -> int:
        """Samples of a micro-batch; InvalidParameter, naming legal counts, where the batch does not divide."""
        if self.global_batch_size is None:
            return self.micro_batch_size or 1
        pipelines = MeshShape.parse(self.mesh).size("dp")
        if self.global_batch_size % pipelines:
            below = self.global_batch_size // pipelines * pipelines
            legal = f"{below} or {below + pipelines}" if below else str(pipelines)
            raise InvalidParameter(
                f"global_batch_size={self.global_batch_size} does not divide by {pipelines} pipelines of mesh "
                f"{self.mesh}; choose {legal}"
            )
        size = micro_batch_size(self.global_batch_size // pipelines, self.num_micro_batches)
        if self.micro_batch_size not in (None, size):
            raise InvalidParameter(
                f"micro_batch_size={self.micro_batch_size} is not global_batch_size {self.global_batch_size} / "
                f"{self.num_micro_batches} micro-batches / {pipelines} pipelines = {size}; leave one of them out"
            )
        return size

    def plan(self) -> Plan:
        """What each rank trains a part of."""
        return Plan(
            model=self.find_model(),
            dtype=self.dtype,
            micro_batch_size=self.find_micro_batch_size(),
            learning_rate=self.learning_rate,
            seed=self.seed,
        )

    def untimed(self) -> tuple[Purpose, ...]:
        """The builds asked for."""
        return self.builds

    def native_dtype(self) -> str:
        """Emulated products say nothing about a device."""
        return self.dtype

    def work(self, shape: MeshShape) -> Work:
        """Operations by convention, samples and tokens of one step of all pipelines."""
        model = self.find_model()
        samples = float(self.find_micro_batch_size() * self.num_micro_batches * shape.size("dp"))
        counted = Transformer(
            parameters=model.parameters,
            layers=model.layers,
            width=model.width,
            tokens=model.tokens_per_sample,
            vocabulary=model.vocabulary,
            forward_flops=model.forward_flops,
            block_flops=model.block_flops,
            recomputes=False,
        )
        return Work(
            flops={name: samples * count for name, count in count_all(counted).items()},
            dtype=self.dtype,
            samples=samples,
            tokens=samples * model.tokens_per_sample,
        )

    # -- on the ranks --------------------------------------------------------------------------------------------

    def build(self, rank: Rank) -> Step:
        """This rank's stages and its data; for the purpose memory, what looks at it."""
        from perfsuite.workloads.training.pipeline_steps import PipelineMemoryStep, PipelineStepOnRank

        return PipelineMemoryStep(self, rank) if rank.purpose == "memory" else PipelineStepOnRank(self, rank)

    def twin(self) -> Workload | None:
        """The same schedule on a model that one process can check."""
        from perfsuite.workloads.training.pipeline_parity import PipelineParity

        return PipelineParity(
            model=self.model,
            mesh=self.mesh,
            schedule=self.schedule,
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.stages_per_rank,
            dtype=self.dtype,
            seed=self.seed,
        )

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult unless the loss is finite and both copies of a tied embedding are the same."""
        from perfsuite.workloads.training.pipeline_steps import PipelineStepOnRank

        if isinstance(step, PipelineStepOnRank):
            self._check(rank, step)

    def _check(self, rank: Rank, step: PipelineStepOnRank) -> None:
        import math

        loss, (least, most) = step.mean_loss(), step.tied_sums()
        if not math.isfinite(loss):
            what = f"loss of {self.model} under schedule {self.schedule} in {self.dtype}"
            raise WrongResult(what, expected="a finite number", got=loss)
        if least != most:
            what = f"sum of the tied embedding of {self.model}, on the first and on the last stage"
            raise WrongResult(what, expected=least, got=most)
