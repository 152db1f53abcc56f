"""A pipeline whose stages sleep a known time: the bubble of a schedule without the noise of shared cores.

The runtime, the messages and autograd are real; only the arithmetic is not.  So the measured bubble can be held against
the simulated one and against the formula: it is a test of the measurement, not of the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfsuite.errors import InvalidParameter, UnsupportedCase
from perfsuite.mesh import MeshShape
from perfsuite.records import Work
from perfsuite.workload import Rank, Step, Yardstick
from perfsuite.workloads.training.pipeline_case import TIMELINE_METRICS, PipelineCase, raise_alike


@dataclass(frozen=True, kw_only=True)
class EmulatedPipeline(PipelineCase):
    """Forward, input gradient and weight gradient of every stage sleep ``action_ms`` each."""

    action_ms: float = 5.0
    """Milliseconds of one sleep; a whole backward has two."""
    features: int = 16
    """Width of what passes between stages."""

    axes: ClassVar[tuple[str, ...]] = ("pp",)
    metrics: ClassVar[tuple[str, ...]] = ("step_time_s", "samples_per_s", *TIMELINE_METRICS)
    yardstick: ClassVar[Yardstick] = "compute"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.action_ms, (int, float)) and math.isfinite(self.action_ms) and self.action_ms >= 0):
            raise InvalidParameter(f"action_ms={self.action_ms!r} is no time to sleep; choose 0 or more milliseconds")
        if not isinstance(self.features, int) or self.features < 1:
            raise InvalidParameter(f"features={self.features!r} is no size; choose a whole number from 1")

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
        from perfsuite.workloads.training.emulated_steps import EmulatedStep

        return EmulatedStep(self, rank)

    def check(self, rank: Rank, step: Step) -> None:
        """Raise WrongResult on all ranks unless loss and gradients are those of the same stages in one process."""
        from perfsuite.workloads.training.emulated_steps import EmulatedStep

        # A workload derived from this one may have wrapped the step.
        raise_alike(rank, step.problem() if isinstance(step, EmulatedStep) else "")
