"""Seconds of a kernel on one device: a measured point, else between measured points, else by the device's rate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from perfsuite.projection.calibration import Calibration, KernelPoint
from perfsuite.projection.operations import Attention, Matmul, Traffic

_NEIGHBOURS = 4
_HULL = 1.0
"""Logarithm by which the nearest measured size may differ in all its dimensions together: beyond e it is outside."""
_UNIT = 8
_UNALIGNED = 0.7
"""Sizes that are no multiple of it leave the matrix units partly idle."""


@dataclass(kw_only=True)
class KernelTimes:
    """Kernel times in one dtype; counts how they were found."""

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
            for stage in (point.stage,) if point.stage else ("", "forward", "backward_input", "backward_weight"):
                self._points.setdefault((_key(point), stage), []).append(_place(point))

    def matmul(self, product: Matmul, *, wide: bool = False) -> float:
        """Seconds of a product, or of a group of them; ``wide``: in 16 bit whatever the dtype of the layers."""
        dtype = _wide(self.dtype) if wide else self.dtype
        flops = 2.0 * product.groups * product.m * product.n * product.k
        kind = "grouped_matmul" if product.groups > 1 else "matmul"
        points = self._points.get((f"{kind} {dtype}", product.stage))
        if points:
            rate = self._between(points, (product.groups, product.m, product.n, product.k))
            if rate is not None:
                return flops / rate
        self.found["rate"] += 1
        rate = self._rate[dtype]
        if not rate:
            return 0.0
        moved = 2.0 * product.groups * (product.m * product.k + product.k * product.n + product.m * product.n)
        # Half a wave of the device's units is idle on average, whatever the product's size.
        flops *= 1 + self._wave / (product.groups * product.m * product.n)
        return max(flops / (rate * _aligned(product)), moved / self._memory if self._memory else 0.0) + self._kernel_s

    def attention(self, attention: Attention) -> float:
        """Seconds of one attention."""
        kind = "attention_backward" if attention.backward else "attention_forward"
        points = self._points.get((f"{kind} {_wide(self.dtype)}", ""))
        if points and attention.causal:
            size = (attention.batch, attention.queries, attention.heads, attention.features)
            rate = self._between(points, size)
            if rate is not None:
                return attention.flops / rate
        self.found["rate"] += 1
        rate = self._backward_rate if attention.backward else self._attention_rate
        unit = 1.0 if attention.features % _UNIT == 0 else _UNALIGNED
        return attention.flops / (rate * unit) + self._kernel_s if rate else 0.0

    def traffic(self, traffic: Traffic, ratio: float = 1.0) -> float:
        """Seconds of kernels that only read and write, ``ratio`` times the bytes that were counted."""
        moving = ratio * traffic.moved_bytes / self._memory if self._memory else 0.0
        return moving + traffic.kernels * self._kernel_s

    def _between(self, points: Sequence[tuple[tuple[float, ...], float]], size: Sequence[float]) -> float | None:
        """Rate at ``size``, from the nearest points weighted by distance; None outside of what was measured."""
        place = tuple(math.log(max(value, 1e-9)) for value in size)
        near = sorted((math.dist(place, other), rate) for other, rate in points)[:_NEIGHBOURS]
        if near[0][0] < 1e-9:
            self.found["measured"] += 1
            return near[0][1]
        if near[0][0] > _HULL:
            return None
        self.found["between"] += 1
        weights = [1 / distance**2 for distance, _ in near]
        return sum(weight * rate for weight, (_, rate) in zip(weights, near, strict=True)) / sum(weights)


def _aligned(product: Matmul) -> float:
    """Share of the rate that a product of unaligned sizes reaches."""
    return 1.0 if product.n % _UNIT == 0 and product.k % _UNIT == 0 else _UNALIGNED


def _wide(dtype: str) -> str:
    return "bf16" if dtype == "fp8" else dtype


def _key(point: KernelPoint) -> str:
    return f"{point.kind} {point.dtype}"


def _place(point: KernelPoint) -> tuple[tuple[float, ...], float]:
    """(logarithms of its sizes, operations per second)."""
    if point.kind in ("matmul", "grouped_matmul"):
        flops, sizes = 2.0 * math.prod(point.shape), point.shape
    else:
        batch, tokens, heads, _, features = point.shape
        half = 0.5 if point.causal else 1.0
        backward = 2.5 if point.kind == "attention_backward" else 1.0
        flops = 4.0 * batch * heads * tokens**2 * features * half * backward
        sizes = (batch, tokens, heads, features)
    return tuple(math.log(size) for size in sizes), flops / point.time_s
