"""Records of the inside of a step: actions of a pipeline's ranks, messages by axis and part, looks at the devices.

Separate builds make them; :class:`perfsuite.record.result.Measurement` holds them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from perfsuite.record.codec import COLUMNS


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
