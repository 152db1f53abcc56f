"""Is a pipeline the same training as one process?  Loss, gradients and next loss, on a model of milliseconds.

Every rank trains the whole global batch by itself as well, in plain torch, and compares what its own stages have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfsuite import models
from perfsuite.errors import WrongResult
from perfsuite.mesh import MeshShape
from perfsuite.records import Work
from perfsuite.strategies.base import Plan
from perfsuite.workload import Rank, Step
from perfsuite.workloads.training.pipeline_case import PipelineCase, raise_alike, texts_of_all

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.training.parity import Outcome

_LEARNING_RATE = 1e-3
_SPARE_LAYERS = 1
"""More layers than stages: some stage has two, so that stages differ."""


@dataclass(frozen=True, kw_only=True)
class PipelineParity(PipelineCase):
    """The twin of a pipeline."""

    model: str
    """Name of the configuration whose twin is trained."""
    dtype: str = "fp32"
    seed: int = 0
    micro_batch_size: int = 1

    def plan(self) -> Plan:
        """What each rank trains a part of."""
        layers = self.find_schedule().num_stages + _SPARE_LAYERS
        return Plan(
            model=dataclasses.replace(models.find(self.model).twin(), layers=layers),
            dtype=self.dtype,
            micro_batch_size=self.micro_batch_size,
            learning_rate=_LEARNING_RATE,
            seed=self.seed,
        )

    def work(self, shape: MeshShape) -> Work:
        """Nothing that anybody would rate."""
        return Work(dtype=self.dtype)

    def build(self, rank: Rank) -> PipelineParityStep:
        """The small model as a pipeline."""
        return PipelineParityStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult on all ranks unless loss, gradients and the next loss are those of one process."""
        from perfsuite.workloads.training.parity import one_process

        assert isinstance(step, PipelineParityStep)
        plan = self.plan()
        expected = one_process(rank, plan, step.batch, narrow=False)
        missing = set(expected.gradients) - step.names_of_all_ranks()
        problem = f"no stage has {', '.join(sorted(missing))}" if missing else ""
        mine = {name: each for name, each in expected.gradients.items() if name in step.outcome.gradients}
        try:
            error = step.outcome.compare(
                dataclasses.replace(expected, gradients=mine),
                f"schedule {self.schedule} on mesh {self.mesh}, {self.num_micro_batches} micro-batches",
                1e-5 if plan.dtype == "fp32" else 2e-2,
            )
            rank.record("parity_error", error, reduce="max")
        except WrongResult as wrong:
            problem = str(wrong)
        raise_alike(rank, problem)


class PipelineParityStep(Step):
    """Two steps of the optimizer on one global batch."""

    def __init__(self, workload: PipelineParity, rank: Rank) -> None:
        from perfsuite.models.loading import synthetic_batch
        from perfsuite.strategies.pipeline.trainer import PipelineTrainer

        plan = workload.plan()
        self.trainer = PipelineTrainer(rank, plan, workload.find_schedule())
        self._rank = rank
        samples = self.trainer.batch_size * self.trainer.replicas
        batch = synthetic_batch(plan.model, list(range(samples)))
        self.batch: Mapping[str, torch.Tensor] = {name: values.to(rank.device) for name, values in batch.items()}
        self.outcome: Outcome

    def run(self) -> None:
        """Loss and gradients, a step, and the loss again."""
        from perfsuite.workloads.training.parity import Outcome

        loss, gradients = self.trainer.loss_and_gradients(self.batch)
        self.trainer.step()
        next_loss, _ = self.trainer.loss_and_gradients(self.batch)
        self.trainer.step()
        self.outcome = Outcome(loss=loss, gradients=gradients, next_loss=next_loss)

    def names_of_all_ranks(self) -> set[str]:
        """Parameters that some rank has a gradient of; a collective."""
        found = texts_of_all(self._rank, json.dumps(sorted(self.outcome.gradients)))
        return {name for names in found for name in json.loads(names)}

    def close(self) -> None:
        """Free the model."""
        self.trainer.close()
        self.__dict__.pop("outcome", None)
