"""The one slot that an agent serves, and that the driver serves for rank 0."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection

from perfsuite.runtime.transports.local import LocalTransport


class OneSlot(LocalTransport):
    """A :class:`LocalTransport` of a single slot whose owner waits for network connections at the same time."""

    layouts = 1

    def waitables(self) -> list[Connection | socket.socket]:
        """What ``multiprocessing.connection.wait`` must watch: when one is ready, ``poll(0)`` may have events."""
        controls = [server.control for server in self._servers.values()]
        links = [child.link for child in self._slots.values() if child.slot == self._first and not child.reported]
        return [*controls, *links] if controls else []
