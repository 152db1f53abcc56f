"""Project the same job on more devices, up to 100,000: step time, binding resource and cost of failures.

Data parallelism grows; the axes within a replica stay. The latency of a ring grows with its ranks. If it outweighs the
bytes, parameters are sharded within groups (:data:`GROUPS`) and copied between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from perfsuite.base.errors import InvalidParameter, PerfsuiteError
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics.spec import efficiency
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.job import TrainingJob
from perfsuite.projection.memory import memory_of
from perfsuite.projection.step import Projection, project, projector_of
from perfsuite.record.step import Training

LLAMA3_MTBF_DEVICE_H = 50_700.0
"""Device-hours per unexpected interruption: 419 in 54 days on 16,384 H100 (arXiv:2407.21783, section 3.3.4)."""

GROUPS = (8, 16, 32, 64, 128, 256, 512)
"""Sizes of groups within which parameters may be sharded."""


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One world of a curve."""

    projection: Projection
    layout: str
    global_batch: int
    tokens_per_s: float
    efficiency: float = 1.0
    """Throughput per device relative to the first point."""
    note: str = ""


def worlds_between(first: int, last: int) -> list[int]:
    """Return ``first``, its doublings and ``last``.

    >>> worlds_between(8, 100)
    [8, 16, 32, 64, 100]
    """
    if not 1 <= first <= last:
        raise InvalidParameter(f"a curve from {first} to {last} devices is empty; write for example 8..1024")
    count = int(math.log2(last / first)) + 1
    doubled = [first * 2**index for index in range(count)]
    return doubled if doubled[-1] == last else [*doubled, last]


def curve(
    job: TrainingJob, calibration: Calibration, worlds: list[int], *, weak: bool
) -> tuple[list[CurvePoint], list[str]]:
    """Return the points of a curve and the reasons for missing worlds.

    ``weak``: the batch of a replica stays, instead of the whole batch.
    """
    points: list[CurvePoint] = []
    missing = []
    for world in worlds:
        try:
            grown, note = _grown(job, calibration, world, weak=weak)
            projected = project(grown, calibration, simulated=calibration.simulated)
        except PerfsuiteError as error:
            missing.append(f"{world}: {error}")
            continue
        point = CurvePoint(
            projection=projected,
            layout=str(grown.layout),
            global_batch=grown.layout.global_batch,
            tokens_per_s=grown.layout.global_batch * grown.architecture.tokens / projected.step_time_s,
            note=note,
        )
        first = points[0] if points else point
        share = efficiency(point.tokens_per_s / first.tokens_per_s, world, first.projection.world_size)
        points.append(dataclasses.replace(point, efficiency=share))
    return points, missing


def _grown(job: TrainingJob, calibration: Calibration, world: int, *, weak: bool) -> tuple[TrainingJob, str]:
    """Return the job on ``world`` devices and a note; parameters are sharded within groups if that is faster."""
    layout = job.layout
    inner = layout.world_size // layout.dp
    if world % inner:
        raise InvalidParameter(f"a replica has {inner} devices, which do not divide {world}; choose a multiple")
    replicas = world // inner
    before = layout.shape.replicas // layout.dp
    batch = layout.global_batch if not weak else layout.global_batch // layout.dp * replicas
    spread = replicas * before * layout.micro_batch_size
    if batch % spread:
        raise InvalidParameter(f"a batch of {batch} does not divide by {spread} samples of all replicas")
    rest = {axis: size for axis, size in layout.shape.axes if not axis.startswith("dp")}
    training = dataclasses.replace(job.training, num_micro_batches=batch // spread)
    flat = dataclasses.replace(training, layout=str(MeshShape.of(dp=replicas, **rest)))
    if layout.sharding != "parameters":
        return dataclasses.replace(job, training=flat), ""
    return _within_groups(job, calibration, flat, replicas, rest)


def _within_groups(
    job: TrainingJob, calibration: Calibration, flat: Training, replicas: int, rest: Mapping[str, int]
) -> tuple[TrainingJob, str]:
    """Shard parameters over all replicas, or within the groups that give the fastest step that fits."""
    jobs = {0: dataclasses.replace(job, training=flat)}
    for group in GROUPS:
        if group < replicas and replicas % group == 0:
            shape = MeshShape.of(dp_replicate=replicas // group, dp_shard=group, **rest)
            jobs[group] = dataclasses.replace(job, training=dataclasses.replace(flat, layout=str(shape)))
    fitting = {
        group: one
        for group, one in jobs.items()
        if memory_of(one.architecture, one.layout, one.implementation, job.capacity).fits
    } or {0: jobs[0]}
    projector = projector_of(job, calibration)
    best = min(fitting, key=lambda group: projector.step(fitting[group].layout, simulated=False).seconds)
    return fitting[best], f"parameters shared within groups of {best}" if best else ""


def goodput(world: int, step_time_s: float, *, mtbf_device_h: float, checkpoint_s: float) -> float:
    """Return the share of time left after failures and checkpoints, with the best interval of checkpoints.

    Young's interval is sqrt(2 x write time x MTBF / N). A failure costs the write time and half an interval. Source:
    Young 1974; Daly 2006.

    >>> round(goodput(16384, 10.0, mtbf_device_h=50_700, checkpoint_s=30.0), 2)
    0.93
    """
    between_s = mtbf_device_h * 3600 / world
    interval_s = max(step_time_s, math.sqrt(2 * checkpoint_s * between_s))
    return max(0.0, 1 - checkpoint_s / interval_s - interval_s / (2 * between_s))
