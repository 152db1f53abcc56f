"""Pipelines as they run on one rank, to be timed or to be looked at; imported there only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from perfsuite.workload import Rank, Step
from perfsuite.workloads.training.memory_ledger import Ledger, ledger_of, parts_against_peak, storage_bytes

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.training.pipeline_step import PipelineStep


class PipelineStepOnRank(Step):
    """One rank's stages, and its data where it has the first or the last stage."""

    def __init__(self, workload: PipelineStep, rank: Rank) -> None:
        import torch

        from perfsuite.models.loading import Share, Synthetic
        from perfsuite.strategies.pipeline.trainer import PipelineTrainer

        self._rank = rank
        plan = workload.plan()
        self.trainer = PipelineTrainer(rank, plan, workload.find_schedule())
        share = Share(rank=self.trainer.replica, ranks=self.trainer.replicas, micro_batch_size=self.trainer.batch_size)
        self._data = Synthetic(plan.model, share, rank.device) if self.trainer.needs_data else None
        self._nothing = torch.empty(self.trainer.batch_size, 2, dtype=torch.int64, device=rank.device)
        self.loss: torch.Tensor | None = None

    def run(self) -> None:
        """One step of the optimizer."""
        self.forward_and_backward()
        with self._rank.span("optimizer"):
            self.trainer.step()
        if self.loss is not None:
            self._rank.record("loss", self.loss, reduce="mean")

    def forward_and_backward(self) -> None:
        """All micro-batches of a step."""
        with self._rank.span("data"):
            tokens = next(self._data)["tokens"] if self._data else self._nothing
        self.loss = self.trainer.run(tokens)

    def mean_loss(self) -> float:
        """Loss of the last step over all pipelines; a collective."""
        return self.trainer.mean_loss(self.loss)

    def tied_sums(self) -> tuple[float, float]:
        """Least and most, over all ranks of this pipeline, of the sums of their copies of a tied parameter.

        A collective; (0, 0) where nothing is tied.
        """
        import torch
        import torch.distributed as dist

        from perfsuite.strategies.trainer import local

        low = torch.tensor([float("inf"), float("inf")], dtype=torch.float64, device=self._rank.device)
        sums = [local(parameter).detach().double().sum() for parameter in self.trainer.tied()]
        if sums:
            low[0], low[1] = torch.stack(sums).min(), -torch.stack(sums).max()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.trainer.pipeline.group)
        least, most = float(low[0]), -float(low[1])
        return (least, most) if least < float("inf") else (0.0, 0.0)

    def close(self) -> None:
        """Free the model and the batches."""
        if self._data is not None:
            self._data.close()
        self.trainer.close()
        self.loss = None


class PipelineMemoryStep(Step):
    """Weights, gradients, optimizer state, the most that a step allocates, and the activations in it, on each rank.

    Activations are what forwards and backwards allocate at most beyond what was there when they began: gradients are
    there already, zeroed instead of freed.  Every rank's are recorded under its place in the pipeline.
    """

    def __init__(self, workload: PipelineStep, rank: Rank) -> None:
        self._workload = workload
        self._rank = rank

    @contextmanager
    def _built(self, ledger: Ledger) -> Iterator[PipelineStepOnRank]:
        """A step whose optimizer has its state, built under the ledger and closed at the end."""
        with ledger.observing():
            step = PipelineStepOnRank(self._workload, self._rank)
            try:
                step.run()
                yield step
            finally:
                step.close()

    def run(self) -> None:
        """Two builds: one for the activations, one for a whole step; and the records."""
        measured = {**self._whole_step(), "peak_activations": self._activations()}
        for name, count in measured.items():
            self._rank.record(f"{name}_bytes", float(count), unit="bytes", reduce="max")
        place = self._rank.shape.coordinates(self._rank.rank).get("pp", 0)
        for name in ("peak_activations", "peak"):
            self._rank.record(f"{name}_bytes_rank{place}", float(measured[name]), unit="bytes", reduce="max")

    def _activations(self) -> int:
        ledger = ledger_of(self._rank.device)
        with self._built(ledger) as step:
            step.forward_and_backward()
            step.trainer.optimizer.zero_grad(set_to_none=False)
            ledger.mark("start")
            step.forward_and_backward()
            ledger.mark("final")
        totals = ledger.totals()
        return totals["peak"] - totals["start"]

    def _whole_step(self) -> dict[str, int]:
        ledger = ledger_of(self._rank.device)
        with self._built(ledger) as step:
            ledger.mark("start")
            step.forward_and_backward()
            seen: set[int] = set()
            kinds = {name: storage_bytes(held, seen) for name, held in step.trainer.tensors().items()}
            step.trainer.step()
            ledger.mark("final")
        peak = ledger.totals()["peak"]
        return {**kinds, "peak": peak, **parts_against_peak(sum(kinds.values()), peak)}
