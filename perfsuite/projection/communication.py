"""Price a message: by a measured line of an equal group, else by a ring over links and network.

A ring of n ranks moves S (n - 1) / n per rank; all_reduce moves twice that. Inside a node it uses the links. At a
node's border it uses the network, which concurrent groups share. Each rank and node of the ring adds a latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from perfsuite.base.collectives import busbw_factor
from perfsuite.projection.calibration import Calibration, CollectiveLine
from perfsuite.projection.layout import Group


class Seconds(NamedTuple):
    """Seconds by resource."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all resources."""
        return self[0] + self[1] + self[2] + self[3] + self[4]

    @property
    def work(self) -> float:
        """Return the seconds that the device itself works."""
        return self[0] + self[1] + self[2]

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """Return the sum with ``times`` times ``other``."""
        a, b, c, d, e = other
        return Seconds(
            self[0] + times * a, self[1] + times * b, self[2] + times * c, self[3] + times * d, self[4] + times * e
        )

    def waiting(self, message: Seconds, seconds: float) -> Seconds:
        """Return the sum with ``seconds`` of an exposed message."""
        return self.plus(message, seconds / message.total) if message.total else self


NONE = Seconds()


_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


@dataclass(kw_only=True)
class Links:
    """Prices messages between the devices of a node and between nodes."""

    calibration: Calibration
    devices_per_node: int

    def __post_init__(self) -> None:
        value = self.calibration.value
        self._link, self._link_s = value("link_gb_per_s") * 1e9, value("link_us") * 1e-6
        self._network, self._network_s = value("network_gb_per_s") * 1e9, value("network_us") * 1e-6
        self._by_size = {ranks: value(f"link_{ranks}_gb_per_s") * 1e9 or self._link for ranks in (2, 4, 8)}
        self._priced: dict[object, Seconds] = {}
        self._lines: dict[str, list[CollectiveLine]] = {}
        for line in self.calibration.collectives:
            self._lines.setdefault(line.collective, []).append(line)

    def seconds(
        self, collective: str, message_bytes: float, group: Group | None, calls: int = 1, copies: int = 1
    ) -> Seconds:
        """Return the seconds of ``calls`` collectives of ``message_bytes`` over a group.

        An all_to_all contains ``copies`` of each token, and sends one of them to each node that needs any.
        """
        if group is None or group.ranks == 1 or not message_bytes:
            return NONE
        key = (collective, message_bytes, group, copies)
        if key not in self._priced:
            self._priced[key] = self._seconds(collective, message_bytes, group, copies)
        one = self._priced[key]
        return one if calls == 1 else NONE.plus(one, calls)

    def _seconds(self, collective: str, message_bytes: float, group: Group, copies: int) -> Seconds:
        line = self._line(collective, group)
        if line is not None:
            factor = busbw_factor(collective, group.ranks) if collective in _PASSES else 1.0
            took = line.alpha_us * 1e-6 + message_bytes * factor / (line.beta_gb_per_s * 1e9)
            return Seconds(link=took) if group.nodes == 1 else Seconds(network=took)
        if collective in ("send_recv", "ring"):
            return self._point_to_point(message_bytes, group)
        passes = _PASSES[collective]
        moved = passes * message_bytes * (group.ranks - 1) / group.ranks
        hops = group.nodes if group.nodes > 1 else 0
        latency = passes * ((group.ranks - 1 - max(0, hops - 1)) * self._link_s + hops * self._network_s)
        if collective == "all_reduce":  # by a tree of nodes where the ring is long, as NCCL does since 2.4
            tree = 2 * (math.ceil(math.log2(group.nodes)) * self._network_s + (group.per_node - 1) * self._link_s)
            latency = min(latency, tree)
        inside = moved / self._by_size.get(group.per_node, self._link) if self._link else 0.0
        if group.nodes == 1:
            return Seconds(link=inside + latency)
        crossing = moved
        if collective == "all_to_all":  # a node's ranks send all that is for other nodes, each its own part
            nodes = (group.nodes - 1) * (1 - (1 - 1 / group.nodes) ** copies)  # other nodes with an expert of a token
            crossing = message_bytes / copies * group.per_node * nodes
        outside = crossing * group.concurrent / self._network if self._network else 0.0
        return Seconds(network=outside + latency) if outside >= inside else Seconds(link=inside + latency)

    def _point_to_point(self, message_bytes: float, group: Group) -> Seconds:
        """Price a message to the neighbour along an axis; the ranks of a node share the network."""
        if group.nodes == 1:
            return Seconds(link=message_bytes / self._link + self._link_s if self._link else 0.0)
        senders = min(group.stride, self.devices_per_node) if group.per_node == 1 else group.concurrent
        share = self._network / senders if senders else self._network
        return Seconds(network=message_bytes / share + self._network_s if share else 0.0)

    def _line(self, collective: str, group: Group) -> CollectiveLine | None:
        """Return the measured line of a group with the same placement."""
        for line in self._lines.get(collective, ()):
            if (line.ranks, line.nodes) == (group.ranks, group.nodes) and line.stride == group.stride:
                return line
        alike = [
            line for line in self._lines.get(collective, ()) if (line.ranks, line.nodes) == (group.ranks, group.nodes)
        ]
        return alike[0] if alike else None
