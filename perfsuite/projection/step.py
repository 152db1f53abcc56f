"""The projection of one step: its time by resource, its memory, what binds it, and how sure all that is."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from perfsuite.projection.calibration import Calibration
from perfsuite.projection.job import Job
from perfsuite.projection.memory import MemoryBreakdown
from perfsuite.records import Training

Resource = Literal["matmul", "attention", "memory", "link", "network", "bubble", "straggler", "host"]
RESOURCES: tuple[Resource, ...] = ("matmul", "attention", "memory", "link", "network", "bubble", "straggler", "host")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step; all of them sum to it."""

    name: str
    resource: Resource
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Flag:
    """What one must know to read a projection."""

    name: str
    """memory-limit, host-bound, outside, software, network, tensor-across-nodes, stand-in."""
    text: str


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What a case would measure; never a Result, a baseline or a verdict."""

    training: Training
    platform: str
    world_size: int
    step_time_s: float
    low_s: float
    high_s: float
    """Ends of the 80 % band of :attr:`regime`."""
    parts: tuple[Part, ...]
    memory: MemoryBreakdown
    bubble_ratio: float
    regime: str
    band_source: str
    flags: tuple[Flag, ...] = ()
    calibration: str = ""
    """Where the constants come from, in one line."""
    lower_bound: bool = False
    """Memory at its limit, or the host: the step takes this long or longer."""

    @functools.cached_property
    def by_resource(self) -> dict[Resource, float]:
        """Seconds by resource."""
        totals: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
        for part in self.parts:
            totals[part.resource] += part.seconds
        return totals

    @property
    def binding(self) -> Resource:
        """The resource that most of the step waits for."""
        return max(RESOURCES, key=lambda resource: self.by_resource[resource])


def project(job: Job, calibration: Calibration) -> Projection:
    """The step of ``job`` on what ``calibration`` knows.

    This is the products of the model alone, for now.
    """
    rate = calibration.value(f"matmul_{job.training.dtype}_tflops") * 1e12
    samples = job.layout.global_batch
    seconds = 3 * job.architecture.forward_flops * samples / job.layout.world_size / rate
    return Projection(
        training=job.training,
        platform=job.device.name,
        world_size=job.layout.world_size,
        step_time_s=seconds,
        low_s=0.5 * seconds,
        high_s=2 * seconds,
        parts=(Part(name="products", resource="matmul", seconds=seconds),),
        memory=MemoryBreakdown(parameters=0, gradients=0, optimizer=0, activations=0),
        bubble_ratio=0.0,
        regime=calibration.regime,
        band_source="none yet",
    )
