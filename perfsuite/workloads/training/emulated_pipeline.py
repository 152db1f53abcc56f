"""A pipeline whose stages sleep for a fixed time: the bubble of a schedule without the noise of shared cores.

Runtime, messages and autograd are real, only the arithmetic is not.  So the measured bubble can be compared with the
simulated one and the formula: it tests the measurement, not the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step
from perfsuite.schedules import Schedule, make_schedule
from perfsuite.strategies.base import EXACT_TOLERANCE
from perfsuite.workloads.checks import MeshWorkload, raise_alike, require_counts
from perfsuite.workloads.training.case import STAGES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class EmulatedPipeline(MeshWorkload):
    """Forward, input gradient and weight gradient of every stage sleep ``action_ms`` each."""

    mesh: str  # Shape of the mesh, such as pp4.
    schedule: str = "1f1b"
    """naive, gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipev."""
    num_micro_batches: int = 8  # Micro-batches of the batch (m).
    stages_per_rank: int | None = None  # Interleaving v; None: the smallest that the schedule allows.
    action_ms: float = 5.0  # Milliseconds of one sleep; a whole backward sleeps twice.
    features: int = 16  # Width of the tensors between stages.

    metrics = ("step_time_s", "samples_per_s", *STAGES)
    preload = ("torch._dynamo", "torch.distributed.pipelining")
    arrivals = False
    aligned: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if MeshShape.parse(self.mesh).names != ("pp",):
            raise InvalidParameter(f"mesh {self.mesh} has other axes than pp; give it only pp, such as pp4")
        require_counts(self, "num_micro_batches", "features")
        self.find_schedule()
        if not (isinstance(self.action_ms, (int, float)) and math.isfinite(self.action_ms) and self.action_ms >= 0):
            raise InvalidParameter(f"action_ms={self.action_ms!r} is not a duration; choose 0 or more milliseconds")

    def find_schedule(self) -> Schedule:
        """Return the orders of all ranks; raises InvalidParameter, with the legal counts, if there are none."""
        return make_schedule(
            self.schedule,
            ranks=MeshShape.parse(self.mesh).size("pp"),
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.stages_per_rank,
        )

    def work(self, shape: MeshShape) -> Work:
        """Return micro-batches of one sample, without operations."""
        return Work(samples=float(self.num_micro_batches))

    def build(self, rank: Rank) -> Step:
        """Return this rank's stages; raises UnsupportedCase on an accelerator: its streams ignore a sleep."""
        if rank.device.type != "cpu":
            raise UnsupportedCase(
                f"an emulated pipeline sleeps on the host, which the streams of {rank.device.type} do not wait for; "
                "run it with --perf-platform=cpu"
            )
        return _EmulatedStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult on all ranks unless loss and gradients equal those of the same stages in one process."""
        # A derived workload may have wrapped the step.
        raise_alike(rank, step.problem() if isinstance(step, _EmulatedStep) else "")


class _EmulatedStep(Step):
    """Sleeping stages of one rank and one batch, the same in every step."""

    def __init__(self, workload: EmulatedPipeline, rank: Rank) -> None:
        import torch
        import torch.nn.functional as F

        from perfsuite.strategies.pipeline import Pipeline, SleepingStage

        self._workload = workload
        schedule = workload.find_schedule()
        place = rank.shape.coordinates(rank.rank)["pp"]
        action_s = workload.action_ms / 1e3
        self.modules = {
            stage: SleepingStage(workload.features, action_s, seed=stage) for stage in schedule.stages_of(place)
        }
        first = torch.empty(1, workload.features, device="meta")
        between = torch.empty(1, workload.features, device="meta", requires_grad=True)
        self.pipeline = Pipeline(rank, schedule, self.modules, (first, between, between), F.mse_loss)
        generator = torch.Generator().manual_seed(1 << 20)
        shape = (workload.num_micro_batches, workload.features)
        self._inputs, self._targets = (torch.randn(shape, generator=generator) for _ in range(2))
        self.loss: torch.Tensor | None = None

    def run(self) -> None:
        for module in self.modules.values():
            module.weight.grad = None
        self.loss = self.pipeline.step(self._inputs, self._targets)

    def problem(self) -> str:
        """Return the difference from one process that does not sleep; empty if there is none."""
        import torch.nn.functional as F

        from perfsuite.strategies.pipeline import SleepingStage

        stages = [
            SleepingStage(self._workload.features, 0.0, seed=stage)
            for stage in range(self.pipeline.schedule.num_stages)
        ]
        x = self._inputs
        for stage in stages:
            x = stage(x)
        loss = F.mse_loss(x, self._targets)
        loss.backward()
        pairs = {
            f"gradient of stage {index}": (module.weight.grad, stages[index].weight.grad)
            for index, module in self.modules.items()
        }
        if self.loss is not None:
            pairs["loss"] = (self.loss, loss.detach())
        for name, (got, expected) in pairs.items():
            assert expected is not None
            error = float("inf") if got is None else float((got - expected).norm() / expected.norm())
            if not error <= EXACT_TOLERANCE:
                return (
                    f"{name} has a relative error of {error:.3g} against one process; rounding is {EXACT_TOLERANCE:g}"
                )
        return ""

    def close(self) -> None:
        self.pipeline.close()
        self.modules.clear()
        self.loss = None
