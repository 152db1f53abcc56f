"""Price a kernel: by its measurement, by measured neighbours, or by the rates of the device; and price a message.

Between measured kernels the ratio of measured time to the time by rates is interpolated. A memory-bound product
therefore does not change the price of a compute-bound one.

A message takes the time of a measured line of an equal group, else of a ring over links and network. A ring of n ranks
moves S (n - 1) / n per rank; all_reduce moves twice that. Inside a node it uses the links. At a node's border it uses
the network, which concurrent groups share. Each rank and node of the ring adds a latency.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from perfsuite.base.collectives import busbw_factor
from perfsuite.projection.calibration import Calibration, CollectiveLine, KernelPoint, product_bytes
from perfsuite.projection.layout import Group
from perfsuite.projection.operations import BlockAttention, MatmulKernel, MemoryKernels

_NEIGHBOURS = 4
_HULL = 1.0
"""Largest distance of a measured size, in logarithms over all dimensions: beyond a factor e it is outside."""
_UNIT = 8
_UNALIGNED = 0.7
"""Relative rate of products whose sizes are not aligned and leave matrix units partly idle."""


@dataclass(kw_only=True)
class KernelTimes:
    """Prices kernels in one dtype, and counts the kernels by method."""

    calibration: Calibration
    dtype: str
    found: Counter[str] = field(default_factory=Counter)
    """measured, between or rate -> kernels."""

    def __post_init__(self) -> None:
        value = self.calibration.value
        self._rate = {dtype: value(f"matmul_{dtype}_tflops") * 1e12 for dtype in (self.dtype, _wide(self.dtype))}
        self._attention_rate = value(f"attention_{_wide(self.dtype)}_tflops") * 1e12
        self._backward_rate = value(f"attention_backward_{_wide(self.dtype)}_tflops") * 1e12 or self._attention_rate
        self._memory = value("memory_gb_per_s") * 1e9
        self._kernel_s = value("kernel_us") * 1e-6
        self._wave = value("wave_outputs")
        self._points: dict[tuple[str, str], list[tuple[tuple[float, ...], float]]] = {}
        for point in self.calibration.kernels:
            placed = self._place(point)
            if placed is None:
                continue
            for stage in (point.stage,) if point.stage else ("", "forward", "backward_input", "backward_weight"):
                self._points.setdefault((f"{point.kind} {point.dtype}", stage), []).append(placed)

    def matmul(self, product: MatmulKernel, *, wide: bool = False) -> float:
        """Return the seconds of a product or a group of products; ``wide``: in 16 bits for any dtype of the layers."""
        dtype = _wide(self.dtype) if wide else self.dtype
        kind = "grouped_matmul" if product.groups > 1 else "matmul"
        size = (product.groups, product.m, product.n, product.k)
        return self._near(self._points.get((f"{kind} {dtype}", product.stage), ()), size, self._product_s(size, dtype))

    def _product_s(self, size: Sequence[float], dtype: str) -> float:
        """Return the longer of the times for operations and for traffic, by the rates of the device."""
        groups, m, n, k = size
        rate = self._rate[dtype]
        if not rate:
            return 0.0
        moved = product_bytes(size, dtype)
        # On average half a wave of the device's units is idle, for any size of product.
        flops = 2.0 * groups * m * n * k * (1 + self._wave / (groups * m * n))
        return max(flops / (rate * _aligned(n, k)), moved / self._memory if self._memory else 0.0) + self._kernel_s

    def attention(self, attention: BlockAttention) -> float:
        """Seconds of one attention."""
        kind = "attention_backward" if attention.backward else "attention_forward"
        points = self._points.get((f"{kind} {_wide(self.dtype)}", ""), ()) if attention.causal else ()
        by_rate = self._attention_s(attention.flops, attention.features, backward=attention.backward)
        return self._near(points, (attention.batch, attention.queries, attention.heads, attention.features), by_rate)

    def _attention_s(self, flops: float, features: float, *, backward: bool) -> float:
        rate = self._backward_rate if backward else self._attention_rate
        return flops / (rate * _aligned(features)) + self._kernel_s if rate else 0.0

    def traffic(self, traffic: MemoryKernels, ratio: float = 1.0) -> float:
        """Return the seconds of memory-bound kernels that move ``ratio`` times the counted bytes."""
        moving = ratio * traffic.moved_bytes / self._memory if self._memory else 0.0
        return moving + traffic.kernels * self._kernel_s

    def _near(self, points: Sequence[tuple[tuple[float, ...], float]], size: Sequence[float], by_rate: float) -> float:
        """Interpolate measured time over ``by_rate`` from the nearest points; outside of them return ``by_rate``."""
        place = tuple(math.log(max(value, 1e-9)) for value in size)
        near = sorted((math.dist(place, other), ratio) for other, ratio in points)[:_NEIGHBOURS]
        if not near or near[0][0] > _HULL:
            self.found["rate"] += 1
            return by_rate
        if near[0][0] < 1e-9:
            self.found["measured"] += 1
            return near[0][1] * by_rate
        self.found["between"] += 1
        weights = [1 / distance**2 for distance, _ in near]
        ratio = sum(weights) / sum(weight / ratio for weight, (_, ratio) in zip(weights, near, strict=True))
        return ratio * by_rate

    def _place(self, point: KernelPoint) -> tuple[tuple[float, ...], float] | None:
        """Return (logarithms of the sizes, measured time over time by rates); None without a rate."""
        if point.kind in ("matmul", "grouped_matmul"):
            sizes: tuple[int, ...] = point.shape
            by_rate = self._product_s(sizes, point.dtype) if point.dtype in self._rate else 0.0
        else:
            *sizes_of_keys, _, features = point.shape
            sizes = (*sizes_of_keys, features)
            by_rate = self._attention_s(point.flops, features, backward=point.kind == "attention_backward")
        return (tuple(math.log(size) for size in sizes), point.time_s / by_rate) if by_rate else None


def _aligned(*sizes: float) -> float:
    """Return the share of the rate that a product of these sizes reaches."""
    return _UNALIGNED if any(size % _UNIT for size in sizes) else 1.0


def _wide(dtype: str) -> str:
    return "bf16" if dtype == "fp8" else dtype


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
        """Return the measured line of a group with as many ranks and nodes, and the same stride if there is one."""
        lines = self._lines.get(collective, ())
        alike = (line for line in lines if (line.ranks, line.nodes) == (group.ranks, group.nodes))
        return min(alike, key=lambda line: line.stride != group.stride, default=None)
