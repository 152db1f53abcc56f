"""One stored result as calibration reads it: case, times and software.

Results of journals and entries of baseline files have the same content. Workloads are identified by class name, because
this package does not import them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfsuite.metrics.spec import HOST_BOUND
from perfsuite.record.result import Result
from perfsuite.record.step import Training

_LIBRARIES = ("torch", "torch_musa", "torch_npu", "cuda", "rocm", "cudnn", "mudnn", "nccl", "rccl", "mccl", "deepspeed")
"""Libraries whose versions change times, in the order of the key."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The times and values of one case."""

    case: str
    kind: str
    """Class of the workload: Matmul, AllReduce, TrainStep, ..."""
    parameters: Mapping[str, Any]
    platform: str
    world_size: int
    time_s: float
    """Median seconds of an iteration."""
    software: str
    simulated: bool = False
    fingerprint: str = ""
    hosts: int = 1
    launch_s: float | None = None
    """Host seconds to start an iteration; None without a measurement and on a CPU."""
    rank_times_s: tuple[float, ...] = ()
    """Medians of the ranks; empty if only their maximum was stored."""
    cache_bytes: int = 0
    training: Training | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    """Metrics and records by name."""

    @property
    def host_bound(self) -> bool:
        """Return whether starting an iteration takes as long as the iteration."""
        return self.launch_s is not None and self.launch_s > HOST_BOUND * self.time_s

    @classmethod
    def of(cls, result: Result) -> Observation | None:
        """Return the observation of a result; None for a result without times."""
        measurement = result.measurement
        if measurement is None or measurement.smoke or result.outcome != "measured":
            return None
        queued = [rank for rank in measurement.ranks if rank.device != "cpu"]
        launches = [rank.launch_s for rank in queued if rank.launch_s is not None]
        values = {record.name: record.value for record in measurement.records}
        values |= {metric.name: metric.value for metric in result.metrics if metric.value is not None}
        return cls(
            case=result.case,
            kind=kind_of(result.workload),
            parameters=result.parameters,
            platform=result.platform,
            world_size=result.world_size,
            time_s=result.median_s,
            software=software_key(result.environment),
            simulated=result.simulated,
            fingerprint=result.fingerprint,
            hosts=len({rank.host for rank in measurement.ranks}),
            launch_s=statistics.median(launches) if launches else None,
            rank_times_s=tuple(rank.median_s for rank in measurement.ranks),
            cache_bytes=max(rank.cache_bytes for rank in measurement.ranks),
            training=result.work.training,
            values=values,
        )


def kind_of(workload: str) -> str:
    """Return the class in ``module:Class``.

    >>> kind_of("perfsuite.workloads.matmul:Matmul")
    'Matmul'
    """
    return workload.rpartition(":")[2]


def software_key(environment: Mapping[str, Any]) -> str:
    """Return the versions that change times in one line, or ``unknown``.

    Versions recorded by the ranks take precedence over installed ones.

    >>> software_key({"packages": {"torch": "2.13.0", "numpy": "2.4"}, "worker": {"nccl": "2.21.5"}})
    'torch 2.13.0, nccl 2.21.5'
    """
    worker, packages = environment.get("worker"), environment.get("packages")
    versions: dict[str, Any] = {}
    for source in (packages, worker, worker.get("versions") if isinstance(worker, Mapping) else None):
        if isinstance(source, Mapping):
            versions |= {str(name).replace("-", "_"): version for name, version in source.items()}
    found = [f"{name} {versions[name]}" for name in _LIBRARIES if isinstance(versions.get(name), str)]
    return ", ".join(found) or "unknown"
