"""What the devices did while something was timed: clocks, throttling, power, temperature, other processes.

The libraries that tell are optional.  A value that cannot be read is None and printed as ``unknown``, never as clean.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from perfsuite.record.step import USUAL_UNDER_LOAD

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
    processes: tuple[int, ...] | None = None
    """Numbers of the processes on the device, as its driver numbers them."""

    def __str__(self) -> str:
        throttle = None if self.throttle is None else ", ".join(self.throttle) or "none"
        return (
            f"device {self.index}: clock {_number(self.clock_mhz, ' MHz')} of {_number(self.max_clock_mhz, ' MHz')}, "
            f"throttled by {throttle or 'unknown'}, power {_number(self.power_w, ' W')} of "
            f"{_number(self.power_cap_w, ' W')}, {_number(self.temperature_c, ' °C')}, "
            f"processes {_number(None if self.processes is None else len(self.processes), '')}"
        )


def _number(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.4g}{unit}"


class Telemetry(ABC):
    """A reader of the devices of one machine."""

    source: str
    """The library that tells; empty when none does."""

    @abstractmethod
    def read(self) -> tuple[Reading, ...]:
        """One reading per device."""

    def close(self) -> None:  # noqa: B027  an optional hook, not a forgotten abstract method
        """Let go of the library."""


class HandleTelemetry(Telemetry):
    """A reader by a vendor's library that has a handle for each device."""

    def __init__(self, library: Any, handles: Sequence[Any]) -> None:
        self._library = library
        self._handles = handles

    def read(self) -> tuple[Reading, ...]:
        """One reading per device."""
        return tuple(self._reading(index, handle) for index, handle in enumerate(self._handles))

    @abstractmethod
    def _reading(self, index: int, handle: Any) -> Reading:
        """The reading of one device."""


class Unread(Telemetry):
    """No library tells anything: every value is unknown."""

    source = ""

    def __init__(self, *, count: int) -> None:
        self._count = count

    def read(self) -> tuple[Reading, ...]:
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


def other_processes(reading: Reading, own: Collection[int], contexts: int) -> int | None:
    """Return how many processes on the device are not the run's; None where that cannot be known.

    ``own`` are the run's process numbers, ``contexts`` how many of its processes use the device.  A driver outside of
    the run's container numbers processes otherwise.  There only the count tells: what exceeds ``contexts`` is
    another's.

    >>> ours = Reading(index=0, processes=(4711, 4712))
    >>> [other_processes(ours, own, contexts) for own, contexts in (((4711,), 1), ((7,), 1), ((7, 8), 2), ((7,), 3))]
    [1, 1, 0, None]
    """
    if reading.processes is None:
        return None
    strangers = [number for number in reading.processes if number not in own]
    if len(strangers) < len(reading.processes) or not contexts:
        return len(strangers)
    return len(strangers) - contexts if len(strangers) >= contexts else None


def disturbance(readings: Sequence[Reading], own: Collection[int] = (), contexts: Mapping[int, int] = {}) -> str:
    """One line naming devices held down or shared; empty when none is known to be (which is not: all are clean).

    The power cap is no disturbance: USUAL_UNDER_LOAD.  ``contexts``: by device, see :func:`other_processes`.

    >>> disturbance([Reading(index=1, throttle=("power cap", "thermal"), processes=(7, 8))])
    'device 1 is throttled (thermal) and shared with 2 other processes'
    """
    sentences = []
    for reading in readings:
        said = []
        if held := sorted(frozenset(reading.throttle or ()) - USUAL_UNDER_LOAD):
            said.append(f"throttled ({', '.join(held)})")
        if others := other_processes(reading, own, contexts.get(reading.index, 0)):
            said.append(f"shared with {others} other process{'es' if others > 1 else ''}")
        if said:
            sentences.append(f"device {reading.index} is {' and '.join(said)}")
    return "; ".join(sentences)
