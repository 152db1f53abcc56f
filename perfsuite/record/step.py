"""Records of a step: its training, actions of a pipeline's ranks, messages by axis and part, looks at the devices.

:class:`perfsuite.record.result.Work` holds the first; separate builds make the others, which ``Measurement`` holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

COLUMNS = {"columns": True}
"""Metadata of a field with many small records: it is written as one list per field of theirs."""
UNLIKE = "unlike"  # Kind of the control of a step that no control resembles.


@dataclass(frozen=True, kw_only=True)
class Training:
    """The training of one optimizer step as plain data: enough to project it without its workload."""

    model: str  # Name of a configuration of perfsuite.models, with ``overrides``.
    overrides: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "1"  # Shape of the mesh with all its axes: ``pp2-dp4-tp8``.
    strategy: str = "single"  # As the case names it: single, ddp, fsdp, zero1, hybrid, ...
    sharding: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    """State that is sharded across replicas; each value includes those before it (ZeRO 0 to 3)."""
    micro_batch_size: int = 1  # Samples of one forward on one rank.
    num_micro_batches: int = 1  # Micro-batches of a step: accumulation without a pipeline.
    schedule: str = ""  # Of the pipeline; empty without.
    stages_per_rank: int = 1
    dtype: str = "fp32"  # fp32, tf32, bf16, fp16 or fp8.
    checkpointing: Literal["none", "full", "selective"] = "none"
    attention: Literal["auto", "math", "flash"] = "auto"
    compiled: bool = False
    sequence_parallel: bool = False  # Whether activations between tensor-parallel parts are split by tokens.
    overlap: bool = True  # Whether messages of data parallelism overlap with the backward.
    gradient_dtype: str = "fp32"  # Dtype in which gradients are added up and sent.
    narrow: bool = False  # Whether parameters are in a 16-bit dtype; False: autocast alone.
    bucket_bytes: float = 0.0  # Size of the buffer that holds gradients between steps.
    program: Mapping[str, Any] = field(default_factory=dict)
    """Fields of :class:`perfsuite.models.program.Program` that differ from their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineEvent:
    """One action of one rank in a pipeline step."""

    kind: Literal["forward", "backward", "backward_input", "backward_weight", "send", "receive", "wait"]
    """The first four are compute; ``backward`` is both gradients at once."""
    rank: int  # Rank along the pipeline.
    stage: int  # Stage that computed, sent, received or was waited for.
    micro_batch: int
    start_s: float  # Seconds from the step's start, on one clock for all ranks.
    end_s: float  # Equal to ``start_s`` for a send or receive that was only posted.


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The actions of all ranks of a pipeline in one step, measured or simulated."""

    ranks: int  # Ranks of the pipeline, those without an event included.
    events: tuple[TimelineEvent, ...] = field(metadata=COLUMNS)  # Rank by rank, actions in the order they ran.
    source: Literal["measured", "simulated"]
    schedule: str = ""  # Name of the schedule, for titles.
    world_ranks: tuple[int, ...] = ()  # Of several pipelines side by side: which of all ranks each rank of this one is.
    place: str = ""  # Of several pipelines side by side: which one this is, ``of 4 pipelines that of dp 0, tp 1``.

    def name_of(self, rank: int) -> str:
        """Return the name of a pipeline's rank among all ranks."""
        return f"rank {self.world_ranks[rank] if self.world_ranks else rank}"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of one step along one axis of the mesh, by one collective, for one part of the step."""

    axis: str  # Axis of the group, or several joined by dashes: ``tp``, ``dp-ep-cp``.
    collective: str  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, send or receive.
    part: str  # Part of the step that it belongs to: attention, mlp, data, pipeline or other.
    calls: int  # On the rank that has most, as the other two.
    message_bytes: int  # S of all calls together as nccl-tests counts it (perfsuite docs metrics has the table).
    time_s: float  # Seconds of all calls when nothing else runs; an exchange is counted once, with its send.
    ranks: int  # Ranks of the group.
    uneven: bool = False  # The number of bytes depends on the data and differs between ranks.


@dataclass(frozen=True, kw_only=True)
class Component:
    """Time of one part of a step, communication apart from computation."""

    name: str  # attention, mlp, data, pipeline or other.
    compute_s: float  # Seconds in the part without those of the communication it waits for; of the rank that has most.
    communication_s: float  # Seconds of the part's communication when nothing else runs; of the rank that has most.


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Which rank comes last to the first communication of an iteration, from iterations that are not timed."""

    late_rank: int
    lag_s: float  # Median over iterations of the last rank's arrival minus the median arrival of the other ranks.
    iterations: int


@dataclass(frozen=True, kw_only=True)
class SpanTotal:
    """Time in the spans of one name, per iteration."""

    name: str
    time_s: float
    """Seconds in the median sample on its slowest rank: parts that do not overlap and the ``remainder`` sum to it."""
    count: float  # Spans of this name per iteration on one rank.
    slowest_rank: int
    slowest_s: float = 0.0
    """The slowest rank's own median over the samples, also where another rank decides how long the step is."""


@dataclass(frozen=True, kw_only=True)
class DeviceLook:
    """The state of a device at one moment of the timing; None is unknown."""

    device: int  # Index on the driver's host.
    at_s: float  # Seconds since timing began.
    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] | None = None  # Why the clock was held down; empty when it is known not to be.


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which host and device a rank ran on, and the device's state as the last sample ended; None and empty: unknown."""

    boot: str = ""  # Boot of the rank's host, see :func:`perfsuite.platforms.host.boot_of`.
    uuid: str = ""  # Of the device, as the driver names it.
    pci_address: str = ""
    power_cap_w: float | None = None
    clock_mhz: float | None = None  # Clock of the compute units.
    max_clock_mhz: float | None = None
    temperature_c: float | None = None
    ports: tuple[str, ...] = ()
    """Active InfiniBand and RoCE ports of the host with their rates, on the first rank of a host."""


USUAL_UNDER_LOAD = frozenset({"power cap", "sync boost"})  # Throttle reasons of a healthy device under load.
