"""One rank's stages of a model, trained as a pipeline; each stage is spread over the data axes that the mesh has.

Stages are spread by FSDP2; DDP does not work inside every schedule.  A GPT's embedding is also its head: the first and
the last stage have a copy each, and the gradients of both are added up before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
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
from perfsuite.strategies.trainer import Batch, Trainer, local, make_optimizer
from perfsuite.workload import DTYPES, Rank


class PipelineTrainer(Trainer):
    """The stages of one rank, their schedule and their optimizer; all methods are called on all ranks alike."""

    def __init__(self, rank: Rank, plan: Plan, schedule: Schedule) -> None:
        """``schedule`` orders the ``plan.accumulation`` micro-batches."""
        rank.dtype(plan.dtype)  # fp32 and tf32 differ by a switch
        split = split_layers(plan.model, schedule.num_stages)
        place = rank.shape.coordinates(rank.rank).get("pp", 0)
        self.modules: dict[int, ModelStage] = {
            stage: _make(rank, plan, split[stage], last=stage == schedule.num_stages - 1)
            for stage in schedule.stages_of(place)
        }
        self.pipeline = Pipeline(rank, schedule, self.modules, _edges(plan), cross_entropy)
        stages = nn.ModuleList(self.modules.values())
        super().__init__(rank, plan, module=stages, optimizer=make_optimizer(stages, plan))
        self._nothing = torch.empty(plan.batch_size, 2, dtype=torch.int64, device=rank.device)

    @property
    def needs_data(self) -> bool:
        """Whether this rank takes inputs or targets."""
        return self.pipeline.first or self.pipeline.last

    def forward_and_backward(
        self, batches: Iterator[Batch], first_forward: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> torch.Tensor | None:
        """All micro-batches as the schedule has them; the mean loss on the rank that has the last stage.

        Forwards overlap: ``first_forward`` is not entered.
        """
        tokens = self._nothing
        with self.rank.span("data"):
            if self.needs_data:
                tokens = torch.cat([batch["tokens"] for batch in islice(batches, self.plan.accumulation)])
        # A copy of its own: torch 2.5 and 2.7 compare even the stride of a single sample with the one announced.
        inputs = tokens[:, :-1].clone(memory_format=torch.contiguous_format)
        loss = self.pipeline.step(inputs, tokens[:, 1:])
        with self.rank.span("tie"):
            self._add_up_tied()
        return loss

    def _add_up_tied(self) -> None:
        held = [local(parameter.grad) for parameter in self._tied() if parameter.grad is not None]
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

    def _tied(self) -> list[nn.Parameter]:
        """This rank's copies of the parameter that the first and the last stage share; none where nothing is tied."""
        if not isinstance(self.plan.model, Gpt):
            return []
        return [parameter for name, parameter in self.named_parameters() if name == TIED]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of every stage of this rank; a name may come twice."""
        for module in self.modules.values():
            yield from module.named_parameters()

    def copies(self) -> tuple[str, Sequence[torch.Tensor], dist.ProcessGroup] | None:
        """The first and the last stage's copies of a tied embedding, or the same part of both."""
        if not isinstance(self.plan.model, Gpt):
            return None
        sums = [local(parameter).detach().double().sum() for parameter in self._tied()]
        return "the tied embedding", sums, self.pipeline.group

    def close(self) -> None:
        """Let go of everything, so that its memory is free."""
        self.pipeline.close()
        self.modules.clear()
        super().close()


def _make(rank: Rank, plan: Plan, layers: range, *, last: bool) -> ModelStage:
    module = make_stage(plan, layers, last=last)
    materialize(module, rank.device, seed=plan.seed)
    if rank.shape.replicas > 1:
        api = fsdp_api(rank)
        # Gathered once per step: between micro-batches the runtime keeps the parameters of a stage.
        spread: dict[str, Any] = {"mesh": rank.mesh[rank.shape.data_axes], "reshard_after_forward": False}
        for block in module.blocks.values():
            api.fully_shard(block, **spread)
        api.fully_shard(module, **spread)
    return module


def _edges(plan: Plan) -> Edges:
    """What passes between the stages of a language model; the residual stays in fp32 whatever the products are in."""
    size, length = plan.micro_batch_size, plan.model.tokens_per_sample
    logits = getattr(torch, DTYPES[plan.dtype]) if plan.half else torch.float32
    return Edges(
        first=torch.empty(size, length, dtype=torch.int64, device="meta"),
        between=torch.empty(size, length, plan.model.width, device="meta", requires_grad=True),
        last=torch.empty(size, length, plan.model.vocabulary, dtype=logits, device="meta", requires_grad=True),
    )
