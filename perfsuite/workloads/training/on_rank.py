"""The training step as it runs on one rank; imported there only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from perfsuite.errors import WrongResult
from perfsuite.strategies import Strategy
from perfsuite.strategies.base import data_parallel_size
from perfsuite.workload import Rank, Step

if TYPE_CHECKING:
    from perfsuite.strategies.trainer import Trainer
    from perfsuite.workloads.training.train_step import TrainStep


class TrainingStep(Step):
    """One rank's model and data."""

    def __init__(self, workload: TrainStep, rank: Rank) -> None:
        plan = workload.plan(rank.shape)
        self._rank = rank
        self.trainer: Trainer = workload.find_strategy().build(rank, plan)
        self.batches = workload.open_data(rank, plan)
        for name, value, unit in (
            ("local_batch", plan.micro_batch_size, "samples"),
            ("sequence_length", plan.model.tokens_per_sample, "tokens"),
            ("accumulation", plan.accumulation, "steps"),
            ("global_batch", plan.micro_batch_size * plan.accumulation * data_parallel_size(rank.shape), "samples"),
        ):
            rank.record(name, value, unit=unit, reduce="equal")

    def run(self) -> None:
        """One step of the optimizer."""
        import torch

        rank, trainer = self._rank, self.trainer
        count, losses = trainer.plan.accumulation, []
        for micro in range(count):
            with rank.span("data", micro_batch=micro):
                batch = next(self.batches)
            with trainer.micro_batch(last=micro == count - 1):
                with rank.span("forward", micro_batch=micro):
                    loss = trainer.forward(batch)
                with rank.span("backward", micro_batch=micro):
                    trainer.backward(loss)
            losses.append(loss.detach())
        with rank.span("optimizer"):
            trainer.step()
        self.loss = losses[0] if count == 1 else torch.stack(losses).mean()
        rank.record("loss", self.loss, reduce="mean")

    def mean_loss(self) -> float:
        """Loss of the last step over all ranks; a collective."""
        import torch.distributed as dist

        group = self.trainer.group
        total = self.loss.detach().double().reshape(1) / dist.get_world_size(group)
        dist.all_reduce(total, group=group)
        return float(total)

    def check(self, strategy: Strategy) -> None:
        """See :meth:`TrainStep.check`; a collective, and all ranks come to the same conclusion."""
        import torch
        import torch.distributed as dist

        loss = self.mean_loss()
        if not math.isfinite(loss):
            raise WrongResult(
                f"loss of {self.trainer.plan.model.name} under {strategy.name} in {self.trainer.plan.dtype}, "
                "mean over ranks",
                expected="a finite number",
                got=loss,
            )
        if not strategy.replicates:
            return
        mine = self.trainer.checksum()
        both = torch.stack((mine, -mine))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.trainer.group)
        most, least = float(both[0]), -float(both[1])
        if most != least:
            raise WrongResult(
                f"sum of all parameters under {strategy.name}, largest and smallest of any rank",
                expected=most,
                got=least,
            )

    def close(self) -> None:
        """End the loaders and free the model."""
        self.batches.close()
        self.trainer.close()
        self.__dict__.pop("loss", None)
