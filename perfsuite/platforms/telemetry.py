"""State of the devices during a measurement: clocks, throttling, power, temperature, other processes.

The libraries are optional. An unreadable value is None and printed as ``unknown``, never as clean.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from perfsuite.record.step import USUAL_UNDER_LOAD

T = TypeVar("T")
R = TypeVar("R", bound="HandleTelemetry")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One reading of one device; None is unknown."""

    index: int
    clock_mhz: float | None = None  # Clock of the compute units.
    max_clock_mhz: float | None = None
    throttle: tuple[str, ...] | None = None  # Reasons of a reduced clock (``thermal``); empty without one.
    utilisation_percent: float | None = None  # Recent share of time in which the device ran a kernel.
    power_w: float | None = None
    power_cap_w: float | None = None
    temperature_c: float | None = None
    processes: tuple[int, ...] | None = None  # Processes on the device, by the driver's numbers.

    def __str__(self) -> str:
        throttle = "unknown" if self.throttle is None else ", ".join(self.throttle) or "none"
        return (
            f"device {self.index}: clock {_number(self.clock_mhz, ' MHz')} of {_number(self.max_clock_mhz, ' MHz')}, "
            f"throttled by {throttle}, power {_number(self.power_w, ' W')} of "
            f"{_number(self.power_cap_w, ' W')}, {_number(self.temperature_c, ' °C')}, "
            f"processes {_number(None if self.processes is None else len(self.processes), '')}"
        )


def _number(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.4g}{unit}"


class Telemetry(ABC):
    """A reader of the devices of one machine."""

    source: str  # Library of the readings; empty without one.

    @abstractmethod
    def read(self) -> tuple[Reading, ...]:
        """Return one reading per device."""

    def close(self) -> None:  # noqa: B027  an optional hook, not a forgotten abstract method
        """Release the library."""


class HandleTelemetry(Telemetry):
    """A reader by a vendor's library, the module ``source``, with a handle for each device."""

    shut_down: ClassVar[str]  # The library's function that releases it.

    def __init__(self, library: Any, devices: Sequence[Any]) -> None:
        self._library = library
        self._handles = self._open(devices)

    @classmethod
    def open(cls: type[R], devices: Sequence[Any], library: Any = None) -> R | None:
        """Return a reader of these devices; None without the library, its driver or a device."""
        with contextlib.suppress(Exception):  # missing library, driver not loaded: errors without a common base
            return cls(library or importlib.import_module(cls.source), devices)
        return None

    @abstractmethod
    def _open(self, devices: Sequence[Any]) -> list[Any]:
        """Initialise the library and return a handle for each device."""

    def read(self) -> tuple[Reading, ...]:
        """Return one reading per device."""
        return tuple(self._reading(index, handle) for index, handle in enumerate(self._handles))

    @abstractmethod
    def _reading(self, index: int, handle: Any) -> Reading:
        """Return the reading of one device."""

    def close(self) -> None:
        """Release the library."""
        with contextlib.suppress(Exception):
            getattr(self._library, self.shut_down)()


class Unread(Telemetry):
    """A reader without a library: every value is unknown."""

    source = ""

    def __init__(self, *, count: int) -> None:
        self._count = count

    def read(self) -> tuple[Reading, ...]:
        """Return readings without values."""
        return tuple(Reading(index=index) for index in range(self._count))


def attempt(read: Callable[[], T]) -> T | None:
    """Return the result of ``read``, or None: vendors' libraries raise for every query that they do not support.

    >>> attempt(lambda: 1980.0), attempt(lambda: 1 / 0)
    (1980.0, None)
    """
    with contextlib.suppress(Exception):
        return read()
    return None


def family_of_processes(roots: Iterable[int]) -> frozenset[int]:
    """Return ``roots`` and all their descendants on this host, which are the run's own processes."""
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
    """Return how many processes on the device do not belong to the run; None if unknown.

    ``own`` are the run's process numbers, ``contexts`` how many of its processes use the device. A driver outside of
    the run's container has other process numbers; then every process beyond ``contexts`` belongs to another program.

    >>> reading = Reading(index=0, processes=(4711, 4712))
    >>> [other_processes(reading, own, users) for own, users in (((4711,), 1), ((7,), 1), ((7, 8), 2), ((7,), 3))]
    [1, 1, 0, None]
    """
    if reading.processes is None:
        return None
    strangers = [number for number in reading.processes if number not in own]
    if len(strangers) < len(reading.processes) or not contexts:
        return len(strangers)
    return len(strangers) - contexts if len(strangers) >= contexts else None


def disturbance(readings: Sequence[Reading], own: Collection[int] = (), contexts: Mapping[int, int] = {}) -> str:
    """Return one line about throttled or shared devices; empty if none is known, which does not mean all are clean.

    The power cap does not count (USUAL_UNDER_LOAD). ``contexts``: by device, see :func:`other_processes`.

    >>> disturbance([Reading(index=1, throttle=("power cap", "thermal"), processes=(7, 8))])
    'device 1 is throttled (thermal) and shared with 2 other processes'
    """
    sentences = []
    for reading in readings:
        states = []
        if held := sorted(frozenset(reading.throttle or ()) - USUAL_UNDER_LOAD):
            states.append(f"throttled ({', '.join(held)})")
        if others := other_processes(reading, own, contexts.get(reading.index, 0)):
            states.append(f"shared with {others} other process{'es' if others > 1 else ''}")
        if states:
            sentences.append(f"device {reading.index} is {' and '.join(states)}")
    return "; ".join(sentences)
