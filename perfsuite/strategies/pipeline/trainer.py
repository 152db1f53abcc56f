"""One rank's part of a model trained as a pipeline, with data parallelism beside it where the mesh has an axis dp.

Stages are spread over ``dp`` by FSDP2; DDP does not work inside every schedule.  A GPT's embedding is also its head:
the first and the last stage have a copy each, and the gradients of both are added up before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from perfsuite.models.gpt import Gpt
from perfsuite.models.layers import cross_entropy, materialize
from perfsuite.schedules import Schedule
from perfsuite.strategies.base import Plan
from perfsuite.strategies.fsdp import fsdp_api
from perfsuite.strategies.pipeline.modules import TIED, ModelStage, make_stage
from perfsuite.strategies.pipeline.pipeline import Edges, Pipeline
from perfsuite.strategies.pipeline.split import split_layers
from perfsuite.strategies.trainer import local, make_optimizer, whole
from perfsuite.workload import DTYPES, Rank


class PipelineTrainer:
    """The stages of one rank, their schedule and their optimizer; all methods are called on all ranks alike."""

    def __init__(self, rank: Rank, plan: Plan, schedule: Schedule) -> None:
        """``plan.accumulation`` is not used: micro-batches are the schedule's."""
        rank.dtype(plan.dtype)  # fp32 and tf32 differ by a switch
        self.rank = rank
        self.plan = plan
        self.replicas = rank.shape.size("dp")
        self.replica = rank.shape.coordinates(rank.rank).get("dp", 0)
        self.place = rank.shape.coordinates(rank.rank).get("pp", 0)
        split = split_layers(plan.model, schedule.num_stages)
        self.modules: dict[int, ModelStage] = {
            stage: self._make(split[stage], last=stage == schedule.num_stages - 1)
            for stage in schedule.stages_of(self.place)
        }
        self.pipeline = Pipeline(rank, schedule, self.modules, _edges(plan), cross_entropy)
        self.optimizer: Any = make_optimizer(nn.ModuleList(self.modules.values()), plan)

    @property
    def batch_size(self) -> int:
        """Samples of one step of this pipeline."""
        return self.plan.micro_batch_size * self.pipeline.schedule.num_micro_batches

    @property
    def needs_data(self) -> bool:
        """Whether this rank takes inputs or targets."""
        return self.pipeline.first or self.pipeline.last

    def _make(self, layers: range, *, last: bool) -> ModelStage:
        module = make_stage(self.plan, layers, last=last)
        materialize(module, self.rank.device, seed=self.plan.seed)
        if self.replicas > 1:
            api = fsdp_api(self.rank)
            # Gathered once per step: between micro-batches the runtime keeps the parameters of a stage.
            spread: dict[str, Any] = {"mesh": self.rank.mesh["dp"], "reshard_after_forward": False}
            for block in module.blocks.values():
                api.fully_shard(block, **spread)
            api.fully_shard(module, **spread)
        return module

    # -- one step ------------------------------------------------------------------------------------------------

    def run(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Gradients of (samples, S + 1) tokens; the mean loss on the rank that has the last stage, None elsewhere."""
        # A copy of its own: torch 2.5 and 2.7 compare even the stride of a single sample with the one announced.
        inputs = tokens[:, :-1].clone(memory_format=torch.contiguous_format)
        loss = self.pipeline.step(inputs, tokens[:, 1:])
        with self.rank.span("tie"):
            self._add_up_tied()
        return loss

    def step(self) -> None:
        """Let the optimizer step and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _add_up_tied(self) -> None:
        held = [local(parameter.grad) for parameter in self.tied() if parameter.grad is not None]
        schedule = self.pipeline.schedule
        if not held or schedule.num_stages == 1:
            return
        ends = (schedule.rank_of_stage[0], schedule.rank_of_stage[-1])
        if ends[0] == ends[1]:
            total = held[0] + held[1]
            for gradient in held:
                gradient.copy_(total)
        else:
            self.pipeline.exchange(held[0], between=ends)

    def tied(self) -> list[nn.Parameter]:
        """This rank's copies of the parameter that the first and the last stage share; none where nothing is tied."""
        if not isinstance(self.plan.model, Gpt):
            return []
        return [
            parameter
            for module in self.modules.values()
            for name, parameter in module.named_parameters()
            if name == TIED
        ]

    # -- looking inside ------------------------------------------------------------------------------------------

    def loss_and_gradients(self, batch: Mapping[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
        """Mean loss of a global batch, and the whole gradients in fp32 of the parameters of this rank's stages.

        A collective.  The gradients stay in place until :meth:`step`, which must follow.
        """
        first = self.replica * self.batch_size
        return self.mean_loss(self.run(batch["tokens"][first : first + self.batch_size])), dict(self._gradients())

    def mean_loss(self, loss: torch.Tensor | None) -> float:
        """The loss over all replicas, told to every rank; a collective."""
        mine = 0.0 if loss is None else float(loss) / self.replicas
        total = torch.tensor([mine], dtype=torch.float64, device=self.rank.device)
        dist.all_reduce(total, group=self.rank.group())
        return float(total)

    def _gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module in self.modules.values():
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    yield name, whole(parameter.grad).float()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """What this rank keeps between steps: ``weights``, ``gradients`` and ``optimizer``."""
        parameters = [each for module in self.modules.values() for each in module.parameters()]
        states = self.optimizer.state.values()
        return {
            "weights": [local(each) for each in parameters],
            "gradients": [local(each.grad) for each in parameters if each.grad is not None],
            "optimizer": [local(each) for state in states for each in state.values() if torch.is_tensor(each)],
        }

    def close(self) -> None:
        """Let go of everything, so that its memory is free."""
        self.pipeline.close()
        self.modules.clear()
        del self.optimizer


def _edges(plan: Plan) -> Edges:
    """What passes between the stages of a language model; the residual stays in fp32 whatever the products are in."""
    size, length = plan.micro_batch_size, plan.model.tokens_per_sample
    logits = getattr(torch, DTYPES[plan.dtype]) if plan.half else torch.float32
    return Edges(
        first=torch.empty(size, length, dtype=torch.int64, device="meta"),
        between=torch.empty(size, length, plan.model.width, device="meta", requires_grad=True),
        last=torch.empty(size, length, plan.model.vocabulary, dtype=logits, device="meta", requires_grad=True),
    )
