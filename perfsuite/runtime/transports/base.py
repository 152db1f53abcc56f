"""How the driver reaches rank workers: slots, the commands it sends them and the events that come back.

A *slot* is a place for one rank; slot ``i`` holds rank ``i`` of every case.  A command is a JSON object with a ``verb``
(see :mod:`perfsuite.runtime.protocol`); so is every message of a worker.  Nothing is pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
WRAPPER = "PERFSUITE_WRAPPER"
"""Variable with a command that is put before the one that starts the workers of a host, ``nsys profile -o ranks`` say.

It must pass on open descriptors and end with the command; the record of a run names it.
"""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened at a slot."""

    slot: int
    kind: Literal["message", "exit", "agent_lost"]
    message: Message | None = None
    """The worker's message when ``kind`` is message."""
    text: str = ""
    """How the worker ended (``killed by SIGKILL``, ``exit code 3``), or which agent is lost."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a slot is."""

    slot: int
    host: str
    local_rank: int
    local_world_size: int
    """Slots on that host that the launcher gave; 0 when the transport gives as many as are asked for."""
    cores: tuple[int, ...]
    """Cores that the slot's processes may use; a launcher may have bound each of its ranks to cores of its own."""
    devices: tuple[str, ...] = ()
    """Which devices the slot's processes see, by number; empty where that is not told.  ``srun --gpus-per-task`` shows
    each of its ranks another one as device 0."""

    def device(self, count: int) -> tuple[int, str]:
        """Number and name of the device of this slot's rank, where a host has ``count``, ranks of which share devices.

        >>> place = Place(slot=3, host="a", local_rank=3, local_world_size=4, cores=(), devices=("GPU-7",))
        >>> import dataclasses
        >>> place.device(1), dataclasses.replace(place, devices=()).device(2)
        ((0, 'a GPU-7'), (1, 'a 1'))
        """
        number = self.local_rank % (len(self.devices) or count)
        return number, f"{self.host} {self.devices[number] if self.devices else number}"


def share_devices(places: Sequence[Place], count: int) -> bool:
    """Whether ranks at these places share devices, as far as their hosts, of ``count`` devices each, tell."""
    return len({place.device(count)[1] for place in places}) < len(places)


class Transport(ABC):
    """Slots of one run.  Every call returns within a deadline of its own."""

    name: str
    """local, torchrun, openmpi, slurm or env."""
    capacity: int | None
    """Ranks that the launcher gave; None when as many as asked for can be started."""

    @abstractmethod
    def place(self, slot: int) -> Place:
        """Where ``slot`` is."""

    @abstractmethod
    def start(self) -> None:
        """Begin to start workers without waiting for them."""

    def preload(self, modules: tuple[str, ...]) -> None:  # noqa: B027  only saves time, and only where workers are forks
        """Have these modules imported in workers started from now on."""

    @abstractmethod
    def acquire(self, count: int, *, fresh: bool, env: Mapping[str, str], deadline_s: float) -> bool:
        """Have a living, idle worker in slots 0 to ``count`` - 1; True when any of them is a new process.

        ``fresh`` replaces workers that ran a case before; a non-empty ``env`` starts new interpreters with it.
        Raises RanksFailed naming slots that did not come up in ``deadline_s`` seconds, AgentLost.
        """

    @abstractmethod
    def open_store(self, deadline_s: float) -> tuple[str, int]:
        """Host and port of a TCPStore that a process without a rank serves, reachable from every slot."""

    @abstractmethod
    def send(self, slot: int, command: Message) -> None:
        """Hand one command to the worker of ``slot``; a dead worker shows as an ``exit`` event."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Event]:
        """Events since the last call; waits up to ``timeout_s`` for the first."""

    @abstractmethod
    def dump(self, slots: Iterable[int], deadline_s: float) -> dict[int, str]:
        """Python stacks of all threads of these workers, taken while they are stuck; works inside C++ waits.

        Where none can be taken, what the kernel says of the process.
        """

    @abstractmethod
    def kill(self, slots: Iterable[int]) -> None:
        """End these workers and their children at once; ``acquire`` starts new ones."""

    @abstractmethod
    def log_tail(self, slot: int, lines: int = 20) -> str:
        """The last lines that the worker of ``slot`` wrote to its stdout and stderr."""

    @abstractmethod
    def close(self) -> None:
        """End every worker, agent and helper process, wait for their end, remove what was put on disk.  Idempotent."""
