"""The record of a case that ran: its work, the measurement of its ranks, and its metrics, all in a Result."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import isabs
from typing import Any, Literal

from perfsuite.base.errors import InvalidParameter
from perfsuite.record.own_metrics import Better, OwnMetric, Reduce
from perfsuite.record.step import Arrival, Component, DeviceLook, Identity, SpanTotal, Timeline, Traffic, Training

SCHEMA = 1  # Version of the JSON form; a reader refuses a higher one.

ABOVE_MEASURED_PEAK = "above the measured peak"  # Printed instead of a share or utilisation.


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The highest possible rate of a device, with its source."""

    value: float  # In ``unit``, dense, per device.
    unit: str  # ``TFLOPS``, ``TOPS``, ``GB/s``, ``GiB`` or ``devices``.
    source: str  # A data sheet, a report, or how it was measured.
    kind: Literal["published", "measured", "nominal"] = "published"
    """nominal: published at a clock that devices exceed. Only a published peak makes a result impossible."""

    def share(self, value: float) -> float | None:
        """Return value / peak, 0 to 1; None above a measured peak.

        >>> Peak(value=4.0, unit="TFLOPS", source="probe", kind="measured").share(3.0)
        0.75
        """
        unknown = self.value <= 0 or (self.kind == "measured" and value > self.value)
        return None if unknown else value / self.value


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """The peaks of a case's device, which shares are of."""

    tflops: Mapping[str, Peak] = field(default_factory=dict)
    """Dense compute peak by short dtype name, TFLOPS or TOPS per device."""
    memory_bandwidth: Peak | None = None  # GB/s, reads plus writes.
    link: Peak | None = None  # GB/s per direction between devices of one node.
    host_link: Peak | None = None  # GB/s per direction between host and device.
    unknown: str = ""  # Why there are no peaks, for an unknown device.


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one iteration, summed over all ranks unless a field says otherwise."""

    flops: Mapping[str, float] = field(default_factory=dict)
    """Floating-point (or integer) operations by convention; plain kernels have the one convention ``exact``."""
    dtype: str = ""  # The dtype whose peak bounds ``flops``: fp32, tf32, bf16, fp16, int8, fp64.
    bytes_moved: float = 0.0
    """Bytes read and written in device memory by each rank, or copied over the host link by each rank."""
    memory_path: Literal["", "device", "host_to_device", "device_to_host"] = ""
    """The path whose bandwidth limits ``bytes_moved``."""
    footprint_bytes: float = 0.0
    """Distinct bytes of device memory that one iteration touches on each rank; 0: unknown."""
    collective: str = ""  # Name of the collective, such as all_reduce; empty for other workloads.
    message_bytes: float = 0.0
    """Size S of the collective as nccl-tests counts it (perfsuite docs metrics has the table)."""
    samples: float = 0.0  # Training samples processed.
    tokens: float = 0.0  # Tokens processed.
    training: Training | None = None  # The training step as data, for projections; None for other workloads.


@dataclass(frozen=True, kw_only=True)
class ClockFacts:
    """The clock that took the samples."""

    name: str  # ``perf_counter``, ``cuda.Event``, ``musa.Event``, ...
    resolution_s: float  # Smallest step that the clock was seen to make.
    cost_s: float  # Seconds that reading it twice adds to a sample.


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The report of one rank about itself and its timings."""

    rank: int  # Number of the rank, from 0.
    host: str  # Name of its host.
    device: str  # Device as torch names it, e.g. ``cpu`` or ``musa:3``.
    threads: int  # Intra-op threads of the rank, read after the last sample.
    cores: tuple[int, ...] | None  # Cores to which the rank is pinned; None: all.
    median_s: float  # Median seconds per iteration of this rank alone.
    min_s: float  # Shortest seconds per iteration of a sample of this rank.
    max_s: float  # Longest seconds per iteration of a sample of this rank.
    cpu_share: float
    """CPU time of the thread over wall time of the samples; below 0.98 in pure computation the core was shared."""
    waited: float | None = None
    """Share of the time of the samples in which its thread with the most waits waited for a core; None: unknown, or the
    iterations run on a device.
    """
    max_rss_bytes: int  # Largest resident set of the process in this case.
    cache_bytes: int = 0  # Last-level cache of the rank's device; 0 if it is unknown.
    utilisation_percent: float | None = None
    """Share of the last moments in which the device ran a kernel; None: unknown."""
    throttle: tuple[str, ...] | None = None
    """Reasons of a throttled clock at the end of the last sample; None: unknown."""
    identity: Identity | None = None  # Identifiers of its host and device; None: unknown.
    launch_s: float | None = None
    """Median seconds of the host to start one iteration; close to ``median_s``: launch-bound."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the process that the case had changed during its samples, with their values."""
    instruments: tuple[str, ...] = ()
    """Tracers, profilers and debug settings that slowed the process, each with the remedy."""
    throttled: float | None = None
    """Share of the periods of its CPU quota in which it was throttled during the samples; None: no quota is known."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A number that a workload recorded with ``rank.record``."""

    name: str
    value: float
    unit: str
    reduce: Reduce
    metric: OwnMetric | None = None
    """Its meaning as a metric of the case; None for numbers that only formulas and reports use."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The reports of the ranks of one case.

    A sample is one timing: ``iterations`` back-to-back iterations between two readings of the clock.
    """

    times_s: tuple[float, ...]  # Seconds per iteration by sample, the maximum over ranks.
    involuntary_switches: tuple[int, ...] = ()
    """Involuntary context switches by sample, the maximum over ranks; empty: none, or unknown."""
    yardsticks_s: tuple[float, ...] = ()
    """Seconds of the control right after each sample, the maximum over ranks; empty without a control."""
    iterations: int  # k: iterations in each sample.
    control: str = ""  # Kind of the control that was timed after each sample; empty without one.
    warmup_iterations: int  # Iterations of the warm-up.
    warmup_steady: bool  # Whether the warm-up reached a steady time before its limit.
    warmup_s: float = 0.0  # Seconds of the warm-up on rank 0.
    aligned: bool
    """Whether a barrier preceded each sample; training steps run without."""
    clock: ClockFacts  # The clock that took the samples.
    ranks: tuple[RankFacts, ...]  # One report for each rank, in order.
    backend: str  # Process-group backend: gloo, nccl, mccl.
    process: Literal["fresh", "reused"]  # Whether the rank processes were started for this run alone.
    transport: str  # local, torchrun, openmpi or slurm.
    arrival: Arrival | None = None  # The rank that comes last to the first communication; None: not measured.
    looks: tuple[DeviceLook, ...] = ()
    """Readings of clock, power and temperature on the driver's host during timing; empty on a CPU."""
    spans: tuple[SpanTotal, ...] = ()  # Times of the spans that the step recorded.
    records: tuple[Record, ...] = ()  # Numbers that the step recorded with ``rank.record``.
    timeline: Timeline | None = None  # The pipeline step nearest to the median; None without a pipeline.
    traffic: tuple[Traffic, ...] = ()
    """The messages of a step, from the build ``traffic``; empty without it and on one rank."""
    components: tuple[Component, ...] = ()  # Times of the parts of that step.
    failed_builds: Mapping[str, str] = field(default_factory=dict)
    """Error of each failed build without timing, by name (``memory``, ``exposed``, ...)."""
    peak_memory_bytes: int | None = None
    """Peak of allocated device memory since the build, the maximum over ranks; None: unknown."""
    smoke: bool = False  # Whether the case ran once without timing (``--benchmark-disable``).
    imports: Mapping[str, str] = field(default_factory=dict)
    """In an arm: file of each imported module of the project, relative to the arm's tree, absolute outside of it."""

    def __post_init__(self) -> None:
        for name in ("involuntary_switches", "yardsticks_s"):
            count = len(getattr(self, name))
            if count not in (0, len(self.times_s)):
                raise InvalidParameter(f"{name} has {count} values for {len(self.times_s)} samples; give one for each")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def instruments(self) -> tuple[str, ...]:
        """Tracers, profilers and debug settings of all ranks; such times are not comparable with others."""
        return tuple(dict.fromkeys(name for rank in self.ranks for name in rank.instruments))

    @functools.cached_property
    def median_s(self) -> float:
        """Median of the samples, seconds per iteration."""
        return statistics.median(self.times_s)

    @property
    def slowest_rank(self) -> int:
        """The rank with the largest median of its own; where ranks wait for each other, see ``arrival``."""
        return max(self.ranks, key=lambda rank: rank.median_s).rank

    @property
    def rank_spread(self) -> float:
        """Largest over smallest rank median, minus 1."""
        medians = [rank.median_s for rank in self.ranks]
        return max(medians) / min(medians) - 1 if min(medians) > 0 else 0.0

    @property
    def disturbed_share(self) -> float:
        """Share of samples during which a rank was switched out."""
        return sum(count > 0 for count in self.involuntary_switches) / len(self.times_s)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number with its meaning."""

    name: str  # Name in the metric registry; ends in the unit.
    value: float | None  # None: unknown; ``note`` then gives the reason.
    unit: str  # Unit of the value, such as ``GB/s``; empty for a pure number.
    better: Better  # Direction of an improvement: higher, lower or neither.
    convention: str = ""  # How it was counted, e.g. ``exact`` FLOPs or ``nccl-tests`` bandwidth.
    peak: Peak | None = None  # The peak of ``share_of_peak``, or of a utilisation in percent.
    note: str = ""  # Reason why the value is unknown or needs care; else empty.

    @property
    def share_of_peak(self) -> float | None:
        """value / peak, 0 to 1; None if one is unknown, or above a measured peak."""
        if self.value is None or self.peak is None:
            return None
        return self.value / 100 if self.unit == "percent" else self.peak.share(self.value)

    @property
    def is_above_measured_peak(self) -> bool:
        """Whether the value is above a measured peak."""
        return self.value is not None and self.peak is not None and self.share_of_peak is None

    @property
    def exceeds_measured_peak(self) -> bool:
        """Whether it is above a measured peak, or has no value for that reason."""
        return self.is_above_measured_peak or (self.peak is not None and self.note == ABOVE_MEASURED_PEAK)

    @property
    def moves_with_peak(self) -> bool:
        """Whether the value changes if a higher peak is measured later: never stored or judged."""
        return self.unit == "percent" and self.peak is not None and self.peak.kind == "measured"


@dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """One case, run once in one set of processes."""

    case: str  # pytest node id, relative to the root directory.
    workload: str  # ``module:Class`` or ``module:function``.
    parameters: Mapping[str, Any]
    """Fields of the workload, or keyword arguments of the function, as in JSON."""
    platform: str  # Name of the platform that ran the case, such as ``s4000``.
    world_size: int  # Number of ranks.
    outcome: Literal["measured", "out_of_memory", "smoke"]  # How the case ended; smoke: run once without timing.
    work: Work  # FLOPs, bytes and messages of one iteration.
    metrics: tuple[Metric, ...] = ()  # The figures that follow from times and work.
    measurement: Measurement | None = None  # None when the case ran out of memory.
    detail: str = ""  # For out_of_memory: ``OOM at X GiB of Y``.
    fingerprint: str = ""  # Key of the hardware, see platforms.fingerprint.
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Facts that may differ between runs on the same hardware."""
    simulated: bool = False  # True on a simulated device; such results are never compared with real ones.
    session: str = ""  # Identifier of the pytest session.
    started_at: str = ""  # UTC, ISO 8601.
    defaults: Mapping[str, Any] = field(default_factory=dict)  # Default values of the parameters.
    took_s: float = 0.0  # Seconds of the case with all its builds; 0 if unknown.
    schema: int = SCHEMA  # Version of this form.

    def __repr__(self) -> str:  # a failed assertion of a test prints it
        return f"Result(case={self.case!r}, outcome={self.outcome!r}, values={dict(self.values)})"

    @property
    def name(self) -> str:
        """The node id without its file."""
        return self.case.partition("::")[2] or self.case

    @property
    def median_s(self) -> float:
        """Median seconds per iteration; ValueError without samples."""
        if self.measurement is None:
            raise ValueError(f"{self.case} has no samples: {self.outcome} {self.detail}".strip())
        return self.measurement.median_s

    @property
    def instruments(self) -> tuple[str, ...]:
        """Tracers, profilers and debug settings that slowed the ranks."""
        return self.measurement.instruments if self.measurement is not None else ()

    @property
    def foreign_imports(self) -> Mapping[str, str]:
        """Modules of the project that were imported from outside of the checkout: name -> file."""
        imports = self.measurement.imports if self.measurement is not None else {}
        return {name: file for name, file in imports.items() if isabs(file)}

    @property
    def above_peak(self) -> tuple[Metric, ...]:
        """Metrics above a measured peak."""
        return tuple(metric for metric in self.metrics if metric.peak and metric.exceeds_measured_peak)

    def peak(self, name: str) -> Peak | None:
        """Return the peak of a metric; None: no metric of this name, or no peak."""
        return next((metric.peak for metric in self.metrics if metric.name == name), None)

    @functools.cached_property
    def values(self) -> Mapping[str, float]:
        """Metrics that have a value, by name."""
        return {metric.name: metric.value for metric in self.metrics if metric.value is not None}

    def metric(self, name: str) -> Metric:
        """Return a metric by name; KeyError lists the names."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        raise KeyError(f"{name} is not a metric of {self.case}; it has {', '.join(m.name for m in self.metrics)}")
