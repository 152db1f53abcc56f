"""The training step as it runs on one rank; imported there only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from perfsuite.base.errors import WrongResult
from perfsuite.record.workload import Rank, Step
from perfsuite.strategies import expert
from perfsuite.workloads.training.agreement import texts_of_all
from perfsuite.workloads.training.finite import FirstStep, tell_first

if TYPE_CHECKING:
    import torch

    from perfsuite.strategies.trainer import Copies, Trainer
    from perfsuite.workloads.training.train_step import TrainStep


class TrainingStep(Step):
    """One rank's model and data."""

    def __init__(self, workload: TrainStep, rank: Rank) -> None:
        plan = workload.plan(rank.shape)
        self._rank = rank
        self._strategy = workload.strategy
        self.trainer: Trainer = workload.find_strategy().build(rank, plan)
        self._data = workload.open_data(rank, self.trainer)
        self.batches: Iterator[Any] = iter(()) if self._data is None else self._data
        self.loss: torch.Tensor | None = None
        self._first_step: FirstStep | None = None
        self._parameters_known = False
        if rank.purpose == "time" and not plan.compiled:  # a hook would be compiled, and compiled anew without it
            self._first_step = FirstStep(self.trainer.module)
        for name, value, unit in (
            ("local_batch", plan.micro_batch_size, "samples"),
            ("sequence_length", plan.model.tokens_per_sample, "tokens"),
            ("accumulation", plan.accumulation, "steps"),
            ("global_batch", plan.batch_size * rank.shape.replicas, "samples"),
        ):
            rank.record(name, value, unit=unit, reduce="equal")

    def run(self) -> None:
        """One step of the optimizer."""
        self.loss = self.trainer.forward_and_backward(self.batches)
        with self._rank.span("optimizer"):
            self.trainer.step()
        if self.loss is not None:
            self._rank.record("loss", self.loss, reduce="mean")
        if self._first_step is not None:
            self._first_step.end()

    def mean_loss(self) -> float:
        """Loss of the last step over all replicas; a collective."""
        return self.trainer.mean_loss(self.loss)

    def check(self) -> None:
        """See :meth:`TrainStep.check`; a collective, and all ranks come to the same conclusion."""
        loss = self.mean_loss()
        if not math.isfinite(loss):
            raise WrongResult(
                f"loss of {self.trainer.plan.model.name} under {self._strategy} in {self.trainer.plan.dtype}, "
                f"mean over replicas{tell_first(self._rank, self._first_step)}",
                expected="a finite number",
                got=loss,
            )
        self._require_finite_parameters()
        if self.trainer.plan.model.experts:
            expert.record(self._rank, [self.trainer.module])
        for copies in self.trainer.copies():
            self._check_copies(copies)

    def _require_finite_parameters(self) -> None:
        """Raise WrongResult on all ranks where the first step left parameters that are not finite; a collective, once.

        Their loss comes with the next step only, and some strategies find copies unequal before.
        """
        if self._first_step is None or self._parameters_known:
            return
        import torch

        from perfsuite.strategies.trainer import local

        self._parameters_known = True
        mine = [local(parameter.detach()).sum(dtype=torch.float32) for parameter in self.trainer.module.parameters()]
        fine = not mine or bool(torch.stack(mine).isfinite().all())
        broken = [text for text in texts_of_all(self._rank, "" if fine else "broken") if text]
        if broken:
            raise WrongResult(
                f"parameters of {self.trainer.plan.model.name} under {self._strategy} in {self.trainer.plan.dtype} "
                f"after a step{tell_first(self._rank, self._first_step)}",
                expected="finite numbers",
                got=f"others on {len(broken)} of {self._rank.world_size} ranks",
            )

    def _check_copies(self, copies: Copies) -> None:
        import torch
        import torch.distributed as dist

        both = torch.full((2,), -math.inf, dtype=torch.float64, device=self._rank.device)  # a rank may hold no copy
        for mine in copies.sums:
            both = torch.maximum(both, torch.stack((mine, -mine)))
        dist.all_reduce(both, dist.ReduceOp.MAX, group=copies.group)
        most, least = float(both[0]), -float(both[1])
        if most not in (least, -math.inf):
            raise WrongResult(
                f"sum of {copies.what} under {self._strategy}, largest and smallest of any rank",
                expected=most,
                got=least,
            )

    def close(self) -> None:
        """End the loaders and free the model."""
        if self._data is not None:
            self._data.close()
        self.trainer.close()
        self.loss = None
