"""Constants of a device out of its own cases: products, attention, memory, launches, messages.

Nothing is fitted to steps: each constant follows from cases of one kind, which its source names.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from perfsuite.collectives import busbw_factor
from perfsuite.mesh import MeshShape
from perfsuite.metrics import fit_alpha_beta
from perfsuite.projection.calibration import CollectiveLine, Constant, KernelPoint
from perfsuite.projection.layout import Layout
from perfsuite.projection.observation import Observation

ONE_CASE = 0.05
"""Relative error of a constant that stands on one case: what medians of one machine differ by from day to day."""
_LARGE = 8.0
"""Products within this factor of the one with most operations tell the sustained rate."""
_BEYOND_CACHE = 4.0
_MOVED: Mapping[str, float] = MappingProxyType({"MemoryCopy": 2.0, "MemoryTriad": 3.0})
"""Bytes read and written over those of a buffer."""
COLLECTIVES: Mapping[str, str] = MappingProxyType(
    {
        "AllReduce": "all_reduce",
        "AllGather": "all_gather",
        "ReduceScatter": "reduce_scatter",
        "AllToAll": "all_to_all",
        "SendRecv": "send_recv",
    }
)
"""By class of the workload."""
_PASSES: Mapping[str, float] = MappingProxyType({"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0})
"""Times that a ring is gone round, best known first."""


def kernel_points(observations: Iterable[Observation]) -> tuple[KernelPoint, ...]:
    """Products and attention of one rank; of several backends the fastest, which torch would choose."""
    fastest: dict[tuple[object, ...], KernelPoint] = {}
    for seen in observations:
        point = _point(seen)
        if point is None or seen.host_bound or seen.world_size > 1:
            continue
        key = (point.kind, point.dtype, point.shape, point.causal)
        if key not in fastest or point.time_s < fastest[key].time_s:
            fastest[key] = point
    return tuple(fastest.values())


def _point(seen: Observation) -> KernelPoint | None:
    given = seen.parameters
    if seen.kind == "Matmul":
        shape = (1, given["m"], given["n"], given["k"])
        return KernelPoint(kind="matmul", dtype=_dtype(seen), shape=shape, time_s=seen.time_s, source=seen.case)
    if seen.kind == "ScaledMatmul":
        shape = (1, given["m"], given["n"], given["k"])
        return KernelPoint(kind="matmul", dtype="fp8", shape=shape, time_s=seen.time_s, source=seen.case)
    if seen.kind == "Attention":
        names = ("batch_size", "sequence_length", "heads", "kv_heads", "head_width")
        backward = given.get("direction", "forward") == "backward"
        return KernelPoint(
            kind="attention_backward" if backward else "attention_forward",
            dtype=str(given.get("dtype", "bf16")),
            shape=tuple(given[name] for name in names),
            time_s=seen.time_s,
            source=seen.case,
            causal=given.get("causal", True),
        )
    return None


def _dtype(seen: Observation) -> str:
    return str(seen.parameters.get("dtype", "fp32"))


def constants_of(observations: Sequence[Observation], points: Sequence[KernelPoint]) -> dict[str, Constant]:
    """Device constants by name, those that these cases tell."""
    constants = _memory(observations)
    kernel = constants.get("kernel_us")
    kernel_s = kernel.value * 1e-6 if kernel else 0.0
    for prefix, kind in (
        ("matmul", "matmul"),
        ("attention", "attention_forward"),
        ("attention_backward", "attention_backward"),
    ):
        for dtype in sorted({point.dtype for point in points if point.kind == kind}):
            alike = [point for point in points if (point.kind, point.dtype) == (kind, dtype)]
            rate = _sustained(alike, kernel_s)
            if rate is not None:
                constants[f"{prefix}_{dtype}_tflops"] = rate
    return constants


def operations(point: KernelPoint) -> float:
    """Of a kernel; a causal mask leaves half of attention, a backward computes the scores again.

    >>> point = KernelPoint(kind="matmul", dtype="bf16", shape=(1, 2, 3, 4), time_s=1.0)
    >>> operations(point)
    48.0
    """
    if point.kind in ("matmul", "grouped_matmul"):
        return 2.0 * math.prod(point.shape)
    batch, tokens, heads, _, features = point.shape
    pairs = batch * heads * tokens**2 * (0.5 if point.causal else 1.0)
    return 4.0 * pairs * features * (2.5 if point.kind == "attention_backward" else 1.0)


def _sustained(points: Sequence[KernelPoint], kernel_s: float) -> Constant | None:
    most = max(operations(point) for point in points)
    large = [point for point in points if operations(point) * _LARGE >= most and point.time_s > 2 * kernel_s]
    if not large:
        return None
    rates = sorted(operations(point) / (point.time_s - kernel_s) / 1e12 for point in large)
    middle = statistics.median(rates)
    spread = (rates[-1] - rates[0]) / 2 / middle if len(rates) > 1 else ONE_CASE
    return Constant(value=middle, unit="TFLOPS", source=_cases(large), relative_error=round(spread, 4))


def _memory(observations: Sequence[Observation]) -> dict[str, Constant]:
    """Bandwidth from how time grows with bytes, and what a kernel takes without any."""
    streams = [seen for seen in observations if seen.kind in _MOVED and seen.world_size == 1]
    sized = sorted((_MOVED[seen.kind] * seen.parameters["buffer_bytes"], seen) for seen in _beyond_cache(streams))
    constants = {}
    if sized:
        bytes_moved, largest = sized[-1]
        smaller = [(size, seen) for size, seen in sized if size * _LARGE <= bytes_moved and seen.kind == largest.kind]
        cases = [largest]
        slope_s = largest.time_s / bytes_moved
        if smaller:
            size, small = smaller[0]
            slope_s = (largest.time_s - small.time_s) / (bytes_moved - size)
            cases.append(small)
            if slope_s > 0:
                rest = max(0.0, small.time_s - size * slope_s) * 1e6
                constants["kernel_us"] = Constant(value=rest, unit="us", source=_cases(cases), relative_error=0.5)
        if slope_s > 0:
            ends = [size / seen.time_s for size, seen in sized if size * _LARGE > bytes_moved]
            spread = (max(ends) - min(ends)) / 2 * slope_s if len(ends) > 1 else ONE_CASE
            constants["memory_gb_per_s"] = Constant(
                value=1e-9 / slope_s, unit="GB/s", source=_cases(cases), relative_error=round(spread, 4)
            )
    return constants


def _beyond_cache(streams: Iterable[Observation]) -> list[Observation]:
    return [
        seen
        for seen in streams
        if not seen.host_bound and seen.parameters["buffer_bytes"] > _BEYOND_CACHE * seen.cache_bytes
    ]


# -- messages ----------------------------------------------------------------------------------------------------


def collective_lines(observations: Iterable[Observation]) -> tuple[CollectiveLine, ...]:
    """Alpha and beta of every collective, for every kind of group that was measured at two sizes or more."""
    points: dict[tuple[str, int, int, int, int], dict[float, Observation]] = {}
    for seen in observations:
        kind = _collective(seen)
        if kind is not None:
            known = points.setdefault(kind, {})
            size = float(seen.parameters["message_bytes"])
            if size not in known or seen.time_s < known[size].time_s:
                known[size] = seen
    lines = (_line(key, known) for key, known in points.items())
    return tuple(line for line in lines if line is not None)


def _collective(seen: Observation) -> tuple[str, int, int, int, int] | None:
    """(collective, ranks, nodes, stride, concurrent groups) of the group that sent."""
    if seen.kind in COLLECTIVES:
        return (COLLECTIVES[seen.kind], seen.world_size, seen.hosts, 1, 1)
    if seen.kind == "AxisCollective":
        given, per_node = seen.parameters, max(1, seen.world_size // seen.hosts)
        group = Layout(shape=MeshShape.parse(given["mesh"])).groups(per_node)[given["axis"]]
        return (given["collective"], group.ranks, group.nodes, group.stride, group.concurrent)
    return None


def _line(key: tuple[str, int, int, int, int], known: Mapping[float, Observation]) -> CollectiveLine | None:
    collective, ranks, nodes, stride, concurrent = key
    points = sorted((size, seen.time_s) for size, seen in known.items())
    fitted = _fit(points)
    if fitted is None:
        return None
    alpha_s, bytes_per_s, misfit = fitted
    factor = busbw_factor(collective, ranks)
    return CollectiveLine(
        collective=collective,
        ranks=ranks,
        alpha_us=alpha_s * 1e6,
        beta_gb_per_s=bytes_per_s * factor / 1e9,
        nodes=nodes,
        stride=stride,
        concurrent=concurrent,
        relative_error=round(misfit, 4),
        source=_cases(known.values()),
    )


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """(alpha in seconds, bytes per second, misfit) of (bytes, seconds); None where no line fits."""
    if len(points) < 2:
        return None
    if len(points) == 2:
        (small, first_s), (large, last_s) = points
        if last_s <= first_s:
            return None
        slope = (last_s - first_s) / (large - small)
        return max(0.0, first_s - slope * small), 1 / slope, ONE_CASE
    try:
        fit = fit_alpha_beta(points)
    except ValueError:
        return None
    return fit.alpha_us * 1e-6, fit.beta_gb_per_s * 1e9, fit.misfit


def link_constants(lines: Sequence[CollectiveLine]) -> dict[str, Constant]:
    """Rings within a node, and over several; the widest group of neighbours that was measured tells."""
    constants: dict[str, Constant] = {}
    plain = [line for line in lines if line.stride == 1 and line.concurrent == 1 and line.collective in _PASSES]
    inside = _widest(line for line in plain if line.nodes == 1)
    if inside is not None:
        hops = _PASSES[inside.collective] * (inside.ranks - 1)
        constants["link_gb_per_s"] = _of_line(inside.beta_gb_per_s, "GB/s", inside)
        constants["link_us"] = _of_line(inside.alpha_us / hops, "us", inside)
    for ranks in (2, 4, 8):
        narrower = _widest(line for line in plain if (line.nodes, line.ranks) == (1, ranks))
        if narrower is not None:
            constants[f"link_{ranks}_gb_per_s"] = _of_line(narrower.beta_gb_per_s, "GB/s", narrower)
    across = _widest(line for line in plain if line.nodes > 1)
    if across is not None:
        link_us = constants["link_us"].value if inside is not None else 0.0
        within = (across.ranks - across.nodes) * link_us
        rest = across.alpha_us / _PASSES[across.collective] - within
        constants["network_gb_per_s"] = _of_line(across.beta_gb_per_s, "GB/s", across)
        constants["network_us"] = _of_line(max(0.0, rest / across.nodes), "us", across)
    return constants


def _widest(lines: Iterable[CollectiveLine]) -> CollectiveLine | None:
    return max(lines, key=lambda line: (line.ranks, -list(_PASSES).index(line.collective)), default=None)


def _of_line(value: float, unit: str, line: CollectiveLine) -> Constant:
    return Constant(value=value, unit=unit, source=line.source, relative_error=line.relative_error)


def _cases(cases: Iterable[Observation | KernelPoint]) -> str:
    """Their ids, the first three."""
    names = [case.case if isinstance(case, Observation) else case.source for case in cases]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
