"""How the driver reaches rank workers: slots, the commands sent to them and the events that come back.

A *slot* is a place for one rank; slot ``i`` holds rank ``i`` of every case. Commands and messages are JSON objects
(:mod:`perfsuite.runtime.protocol`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Message = dict[str, Any]
WRAPPER = "PERFSUITE_WRAPPER"
"""Variable with a command that starts the workers of a host, for example ``nsys profile -o ranks``.

The command gets the workers' own command as arguments. It must pass on open descriptors and end with that command. The
record of a run contains it.
"""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A message, an exit or a loss at a slot."""

    slot: int
    kind: Literal["message", "exit", "agent_lost"]
    message: Message | None = None  # Message of the worker, for ``kind`` message.
    text: str = ""  # End of the worker (``killed by SIGKILL``, ``exit code 3``), or the lost agent.


@dataclass(frozen=True, kw_only=True)
class Place:
    """Host, cores and devices of a slot."""

    slot: int
    host: str
    local_rank: int
    local_world_size: int  # Slots of the launcher on that host; 0 when the transport starts any number.
    cores: tuple[int, ...]  # Cores that the slot's processes may use; a launcher may bind each rank to its own cores.
    devices: tuple[str, ...] = ()
    """Devices that the slot's processes see; empty if unknown. ``srun --gpus-per-task`` shows each rank another device
    as device 0."""

    def device(self, count: int) -> tuple[int, str]:
        """Return number and name of the rank's device on a host with ``count`` devices, which ranks may share.

        >>> place = Place(slot=3, host="a", local_rank=3, local_world_size=4, cores=(), devices=("GPU-7",))
        >>> import dataclasses
        >>> place.device(1), dataclasses.replace(place, devices=()).device(2)
        ((0, 'a GPU-7'), (1, 'a 1'))
        """
        number = self.local_rank % (len(self.devices) or count)
        return number, f"{self.host} {self.devices[number] if self.devices else number}"


def share_devices(places: Sequence[Place], count: int) -> bool:
    """Return whether ranks at these places share devices, on hosts with ``count`` devices each."""
    return len({place.device(count)[1] for place in places}) < len(places)


class Transport(ABC):
    """Slots of one run. Every call returns within its own deadline."""

    name: str  # One of local, torchrun, openmpi, slurm and env.
    capacity: int | None  # Number of ranks that the launcher gave; None if any number can be started.

    @abstractmethod
    def place(self, slot: int) -> Place:
        """Return the place of ``slot``."""

    @abstractmethod
    def start(self) -> None:
        """Begin to start workers without waiting for them."""

    def preload(self, modules: tuple[str, ...]) -> None:  # noqa: B027  only saves time, and only where workers are forks
        """Import these modules in workers that start from now on."""

    @abstractmethod
    def acquire(self, count: int, *, fresh: bool, env: Mapping[str, str], deadline_s: float) -> bool:
        """Provide a living, idle worker in slots 0 to ``count`` - 1; return True if any is a new process.

        ``fresh`` replaces workers that ran a case before; a non-empty ``env`` starts new interpreters with it. Raises
        RanksFailed with the slots that did not start in ``deadline_s`` seconds, and AgentLost.
        """

    @abstractmethod
    def open_store(self, deadline_s: float) -> tuple[str, int]:
        """Return host and port of a TCPStore that every slot reaches and that a process without a rank serves."""

    @abstractmethod
    def send(self, slot: int, command: Message) -> None:
        """Send one command to the worker of ``slot``; a dead worker causes an ``exit`` event."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait up to ``timeout_s`` for the first."""

    @abstractmethod
    def dump(self, slots: Iterable[int], deadline_s: float) -> dict[int, str]:
        """Return the Python stacks of these workers, also during waits in C++; without one the process's state."""

    @abstractmethod
    def kill(self, slots: Iterable[int]) -> None:
        """End these workers and their children at once; ``acquire`` starts new ones."""

    @abstractmethod
    def log_tail(self, slot: int, lines: int = 20) -> str:
        """Return the last lines of stdout and stderr of the worker of ``slot``."""

    @abstractmethod
    def close(self) -> None:
        """End every worker, agent and helper process, wait for them, and remove their files. Idempotent."""
