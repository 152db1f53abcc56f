"""An emulated pipeline as it runs on one rank; imported there only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfsuite.record.workload import Rank, Step
from perfsuite.strategies.base import EXACT_TOLERANCE

if TYPE_CHECKING:
    import torch

    from perfsuite.workloads.training.emulated_pipeline import EmulatedPipeline


class EmulatedStep(Step):
    """Sleeping stages of one rank and one batch, the same in every step."""

    def __init__(self, workload: EmulatedPipeline, rank: Rank) -> None:
        import torch
        import torch.nn.functional as F

        from perfsuite.strategies.pipeline.emulated import SleepingStage
        from perfsuite.strategies.pipeline.pipeline import Edges, Pipeline

        self._workload = workload
        schedule = workload.find_schedule()
        place = rank.shape.coordinates(rank.rank)["pp"]
        action_s = workload.action_ms / 1e3
        self.modules = {
            stage: SleepingStage(workload.features, action_s, seed=stage) for stage in schedule.stages_of(place)
        }
        first = torch.empty(1, workload.features, device="meta")
        between = torch.empty(1, workload.features, device="meta", requires_grad=True)
        edges = Edges(first=first, between=between, last=between)
        self.pipeline = Pipeline(rank, schedule, self.modules, edges, F.mse_loss)
        generator = torch.Generator().manual_seed(1 << 20)
        shape = (workload.num_micro_batches, workload.features)
        self._inputs, self._targets = (torch.randn(shape, generator=generator) for _ in range(2))
        self.loss: torch.Tensor | None = None

    def run(self) -> None:
        """Forward and backward of all micro-batches, gradients anew."""
        for module in self.modules.values():
            module.weight.grad = None
        self.loss = self.pipeline.step(self._inputs, self._targets)

    def problem(self) -> str:
        """What differs from one process that does not sleep; empty when nothing does."""
        import torch.nn.functional as F

        from perfsuite.strategies.pipeline.emulated import SleepingStage

        stages = [
            SleepingStage(self._workload.features, 0.0, seed=stage)
            for stage in range(self.pipeline.schedule.num_stages)
        ]
        x = self._inputs
        for stage in stages:
            x = stage(x)
        loss = F.mse_loss(x, self._targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        pairs = {
            f"gradient of stage {index}": (module.weight.grad, stages[index].weight.grad)
            for index, module in self.modules.items()
        }
        if self.loss is not None:
            pairs["loss"] = (self.loss, loss.detach())
        for what, (got, expected) in pairs.items():
            assert expected is not None
            error = float("inf") if got is None else float((got - expected).norm() / expected.norm())
            if not error <= EXACT_TOLERANCE:
                return (
                    f"{what} differs from one process by {error:.3g}, relative; at most {EXACT_TOLERANCE:g} is rounding"
                )
        return ""

    def close(self) -> None:
        """Free the stages."""
        self.pipeline.close()
        self.modules.clear()
        self.loss = None
