"""A pipeline whose stages sleep a known time: the bubble of a schedule without the noise of shared cores.

The runtime, the messages and autograd are real; only the arithmetic is not.  So the measured bubble can be held against
the simulated one and against the formula: it is a test of the measurement, not of the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from perfsuite.base.errors import InvalidParameter, UnsupportedCase
from perfsuite.base.mesh import MeshShape
from perfsuite.record.result import Work
from perfsuite.record.workload import Rank, Step, Workload, Yardstick
from perfsuite.schedules import Schedule, make_schedule
from perfsuite.strategies.base import EXACT_TOLERANCE
from perfsuite.workloads.training import names
from perfsuite.workloads.training.agreement import raise_alike

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class EmulatedPipeline(Workload):
    """Forward, input gradient and weight gradient of every stage sleep ``action_ms`` each."""

    mesh: str
    """Shape of the mesh: pp4."""
    schedule: str = "1f1b"
    """naive, gpipe, 1f1b, interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv or dualpipev."""
    num_micro_batches: int = 8
    """m: parts that the batch is cut into."""
    stages_per_rank: int | None = None
    """v, the interleaving; None: the fewest that the schedule can have."""
    action_ms: float = 5.0
    """Milliseconds of one sleep; a whole backward has two."""
    features: int = 16
    """Width of what passes between stages."""

    metrics = ("step_time_s", "samples_per_s", *names.STAGES)
    preload = ("torch._dynamo", "torch.distributed.pipelining")
    arrivals = False
    aligned: ClassVar[bool] = False
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        if MeshShape.parse(self.mesh).names != ("pp",):
            raise InvalidParameter(f"mesh {self.mesh} is none of an emulated pipeline; give it pp alone, such as pp4")
        if not isinstance(self.num_micro_batches, int) or self.num_micro_batches < 1:
            raise InvalidParameter(
                f"num_micro_batches={self.num_micro_batches!r} is not a count; choose a whole number from 1"
            )
        self.find_schedule()
        if not (isinstance(self.action_ms, (int, float)) and math.isfinite(self.action_ms) and self.action_ms >= 0):
            raise InvalidParameter(f"action_ms={self.action_ms!r} is no time to sleep; choose 0 or more milliseconds")
        if not isinstance(self.features, int) or self.features < 1:
            raise InvalidParameter(f"features={self.features!r} is no size; choose a whole number from 1")

    def layout(self) -> str:
        """The mesh."""
        return self.mesh

    def find_schedule(self) -> Schedule:
        """The orders of all ranks; InvalidParameter names the legal counts."""
        return make_schedule(
            self.schedule,
            ranks=MeshShape.parse(self.mesh).size("pp"),
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.stages_per_rank,
        )

    def work(self, shape: MeshShape) -> Work:
        """Micro-batches of one sample, no arithmetic worth a rate."""
        return Work(samples=float(self.num_micro_batches))

    def build(self, rank: Rank) -> Step:
        """This rank's sleeping stages; UnsupportedCase on an accelerator, whose streams do not wait for a sleep."""
        if rank.device.type != "cpu":
            raise UnsupportedCase(
                f"an emulated pipeline sleeps on the host, which the streams of {rank.device.type} do not wait for; "
                "run it with --perf-platform=cpu"
            )
        return EmulatedStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult on all ranks unless loss and gradients are those of the same stages in one process."""
        # A workload derived from this one may have wrapped the step.
        raise_alike(rank, step.problem() if isinstance(step, EmulatedStep) else "")


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
