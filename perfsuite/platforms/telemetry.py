"""What the devices did while something was timed: clocks, throttling, power, temperature, other processes.

The libraries that tell are optional.  A value that cannot be read is None and printed as ``unknown``, never as clean.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from perfsuite.records import RankFacts
from perfsuite.step_records import DeviceLook
from perfsuite.units import plural

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at one device; None is unknown."""

    index: int
    clock_mhz: float | None = None
    """Clock of the compute units."""
    max_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None
    """Why the clock is held down (``thermal``, ``power cap``, ``hardware``); empty when it is known not to be."""
    utilisation_percent: float | None = None
    """Share of its last moments in which the device ran any kernel."""
    power_w: float | None = None
    power_cap_w: float | None = None
    temperature_c: float | None = None
    other_processes: int | None = None
    """Processes on the device besides those named to :meth:`Telemetry.read`."""

    def __str__(self) -> str:
        throttle = None if self.throttle is None else ", ".join(self.throttle) or "none"
        return (
            f"device {self.index}: clock {_number(self.clock_mhz, ' MHz')} of {_number(self.max_clock_mhz, ' MHz')}, "
            f"throttled by {throttle or 'unknown'}, power {_number(self.power_w, ' W')} of "
            f"{_number(self.power_cap_w, ' W')}, {_number(self.temperature_c, ' °C')}, "
            f"other processes {_number(self.other_processes, '')}"
        )


def _number(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.4g}{unit}"


class Telemetry(ABC):
    """A reader of the devices of one machine."""

    source: str
    """The library that tells; empty when none does."""
    counts_processes: ClassVar[bool] = True
    """Whether readings tell of processes on the device, so that it matters which are one's own."""

    @abstractmethod
    def read(self, own: Collection[int] = ()) -> tuple[Reading, ...]:
        """One reading per device; ``own`` are process ids that do not count as others.

        A container numbers its processes in its own way and the driver in the host's: read before the ranks start,
        when every process on a device is somebody else's.
        """

    def close(self) -> None:  # noqa: B027  an optional hook, not a forgotten abstract method
        """Let go of the library."""


class Unread(Telemetry):
    """No library tells anything: every value is unknown."""

    source = ""
    counts_processes = False

    def __init__(self, *, count: int) -> None:
        self._count = count

    def read(self, own: Collection[int] = ()) -> tuple[Reading, ...]:
        """Readings without values."""
        return tuple(Reading(index=index) for index in range(self._count))


def attempt(read: Callable[[], T]) -> T | None:
    """What ``read`` returns, or None: a vendor's library raises errors of its own for every query it does not support.

    >>> attempt(lambda: 1980.0), attempt(lambda: 1 / 0)
    (1980.0, None)
    """
    with contextlib.suppress(Exception):
        return read()
    return None


def family_of_processes(roots: Iterable[int]) -> frozenset[int]:
    """``roots`` and all their descendants on this host: processes that are no strangers on a device."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as status:
                after_name = status.read().rpartition(b")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(after_name[1]), []).append(int(name))
    tree, waiting = set(), [*roots]
    while waiting:
        pid = waiting.pop()
        tree.add(pid)
        waiting += children.get(pid, ())
    return frozenset(tree)


USUAL_UNDER_LOAD = frozenset({"power cap", "sync boost"})
"""What holds clocks of a healthy device down while it computes: a run under its power cap is like those before it."""


def held_down(looks: Iterable[DeviceLook]) -> str:
    """One line naming devices that were throttled while samples were taken; empty when none is known to have been.

    >>> held_down([DeviceLook(device=0, at_s=at, throttle=("thermal",) if at else ("power cap",)) for at in (0.0, 0.5)])
    'device 0 was throttled (thermal) in 1 of 2 looks while it was timed'
    """
    devices: dict[int, list[frozenset[str]]] = {}
    for look in looks:
        devices.setdefault(look.device, []).append(frozenset(look.throttle or ()) - USUAL_UNDER_LOAD)
    return "; ".join(
        f"device {device} was throttled ({', '.join(sorted(frozenset().union(*seen)))}) in {sum(map(bool, seen))} of "
        f"{plural(len(seen), 'look')} while it was timed"
        for device, seen in devices.items()
        if any(seen)
    )


def held_down_elsewhere(ranks: Sequence[RankFacts]) -> str:
    """One line naming ranks beside other hosts than rank 0's, where the driver is, whose devices were throttled."""
    said = []
    for rank in ranks:
        reasons = sorted(set(rank.throttle or ()) - USUAL_UNDER_LOAD)
        if reasons and rank.host != ranks[0].host:
            said.append(f"rank {rank.rank} ({rank.device} of {rank.host}) was throttled ({', '.join(reasons)})")
    return "; ".join(said)


def disturbance(readings: tuple[Reading, ...]) -> str:
    """One line naming devices held down or shared; empty when none is known to be (which is not: all are clean).

    >>> disturbance((Reading(index=0), Reading(index=1, throttle=("thermal",), other_processes=2)))
    'device 1 is throttled (thermal) and shared with 2 other processes'
    """
    sentences = []
    for reading in readings:
        said = []
        if reading.throttle:
            said.append(f"throttled ({', '.join(reading.throttle)})")
        if reading.other_processes:
            plural = "es" if reading.other_processes > 1 else ""
            said.append(f"shared with {reading.other_processes} other process{plural}")
        if said:
            sentences.append(f"device {reading.index} is {' and '.join(said)}")
    return "; ".join(sentences)
