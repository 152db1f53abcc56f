"""Derive the constants of a device from its cases: products, attention, memory, launches, collectives by placement.

No constant is fitted to steps. Each one follows from cases of one kind, which its source names.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.mesh import MeshShape
from perfsuite.base.text import listed
from perfsuite.metrics import fit_alpha_beta
from perfsuite.projection.calibration import CollectiveLine, Constant, KernelPoint, product_bytes
from perfsuite.projection.layout import Layout
from perfsuite.projection.observation import Observation

ONE_CASE = 0.05
"""Relative error of a constant from one case: the day-to-day change of medians on one machine."""
_LARGE = 8.0
"""Products within this factor of the largest one give the sustained rate."""
_BEYOND_CACHE = 4.0
_MOVED: Mapping[str, float] = MappingProxyType({"MemoryCopy": 2.0, "MemoryTriad": 3.0})
"""Bytes read and written, relative to the size of a buffer."""


def kernel_points(observations: Iterable[Observation]) -> tuple[KernelPoint, ...]:
    """Return the products and attention kernels of one rank; of several backends the fastest one."""
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
    fields = seen.parameters
    if seen.kind in ("Matmul", "ScaledMatmul"):
        dtype = "fp8" if seen.kind == "ScaledMatmul" else str(fields.get("dtype", "fp32"))
        shape = (1, fields["m"], fields["n"], fields["k"])
        return KernelPoint(kind="matmul", dtype=dtype, shape=shape, time_s=seen.time_s, source=seen.case)
    if seen.kind == "Attention":
        names = ("batch_size", "sequence_length", "heads", "kv_heads", "head_width")
        backward = fields.get("direction", "forward") == "backward"
        return KernelPoint(
            kind="attention_backward" if backward else "attention_forward",
            dtype=str(fields.get("dtype", "bf16")),
            shape=tuple(fields[name] for name in names),
            time_s=seen.time_s,
            source=seen.case,
            causal=fields.get("causal", True),
        )
    return None


def constants_of(observations: Sequence[Observation], points: Sequence[KernelPoint]) -> dict[str, Constant]:
    """Return the device constants that these cases determine, by name."""
    constants = {**_memory(observations), **_kernel(observations)}
    kernel = constants.get("kernel_us")
    kernel_s = kernel.value * 1e-6 if kernel else 0.0
    memory = constants.get("memory_gb_per_s")
    wave = _wave([point for point in points if point.kind == "matmul" and not _is_moving(point, memory)], kernel_s)
    if wave is not None:
        constants["wave_outputs"] = wave
    for prefix, kind in (
        ("matmul", "matmul"),
        ("attention", "attention_forward"),
        ("attention_backward", "attention_backward"),
    ):
        for dtype in sorted({point.dtype for point in points if point.kind == kind}):
            alike = [point for point in points if (point.kind, point.dtype) == (kind, dtype)]
            rate = _sustained(alike, kernel_s, wave.value if wave and kind == "matmul" else 0.0)
            if rate is not None:
                constants[f"{prefix}_{dtype}_tflops"] = rate
    return constants


def least_squares(rows: Sequence[tuple[float, float, float]], alike: float = 0.0) -> tuple[float, float] | None:
    """Return (x, y) with the least squares of a x + b y - c over rows (a, b, c).

    None if 1 - squared cosine of the columns a and b is at most ``alike``: then no row separates the two.

    >>> least_squares([(1.0, 0.0, 2.0), (0.0, 1.0, 3.0), (1.0, 1.0, 5.0)])
    (2.0, 3.0)
    """
    first, both, second = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    determinant = first * second - both**2
    if determinant <= alike * first * second:
        return None
    left, right = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    return (left * second - right * both) / determinant, (right * first - left * both) / determinant


def _wave(points: Sequence[KernelPoint], kernel_s: float) -> Constant | None:
    """Fit the number of outputs whose time is lost to idle units.

    An operation takes 1 / rate x (1 + wave / outputs) seconds. Relative errors are squared over the products of the
    most frequent dtype. Returns None below three different numbers of outputs.
    """
    by_dtype: dict[str, list[KernelPoint]] = {}
    for point in points:
        if point.time_s > 2 * kernel_s:
            by_dtype.setdefault(point.dtype, []).append(point)
    most = max(by_dtype.values(), key=len, default=[])
    places = [(1 / _outputs(point), (point.time_s - kernel_s) / point.flops) for point in most]
    if len({place for place, _ in places}) < 3:
        return None
    # Relative: on a machine that is not quiet the smallest products are off the most.
    level, slope = least_squares([(1 / seconds, place / seconds, 1.0) for place, seconds in places]) or (0.0, 0.0)
    if level <= 0:
        return None
    return Constant(value=max(0.0, slope / level), unit="outputs", source=named(most), relative_error=0.5)


def _is_moving(point: KernelPoint, memory: Constant | None) -> bool:
    """Return whether a product waits for memory, so that its time does not depend on idle units."""
    return memory is not None and product_bytes(point.shape, point.dtype) / (memory.value * 1e9) > 0.5 * point.time_s


def _outputs(point: KernelPoint) -> float:
    batch, m, n, _ = point.shape
    return float(batch * m * n)


def _sustained(points: Sequence[KernelPoint], kernel_s: float, wave: float) -> Constant | None:
    most = max(point.flops for point in points)
    large = [point for point in points if point.flops * _LARGE >= most and point.time_s > 2 * kernel_s]
    if not large:
        return None
    rates = sorted(
        point.flops * (1 + (wave / _outputs(point) if wave else 0.0)) / (point.time_s - kernel_s) / 1e12
        for point in large
    )
    middle = statistics.median(rates)
    spread = (rates[-1] - rates[0]) / 2 / middle if len(rates) > 1 else ONE_CASE
    return Constant(value=middle, unit="TFLOPS", source=named(large), relative_error=round(spread, 4))


def _memory(observations: Sequence[Observation]) -> dict[str, Constant]:
    """Fit time over bytes: the slope gives the bandwidth, the intercept the time of an empty kernel."""
    streams = [seen for seen in observations if seen.kind in _MOVED and seen.world_size == 1 and not seen.host_bound]
    beyond = [seen for seen in streams if seen.parameters["buffer_bytes"] > _BEYOND_CACHE * seen.cache_bytes]
    cached = f" (within {_BEYOND_CACHE:g} x the cache)" if streams and not beyond else ""
    moved = ((_MOVED[seen.kind] * seen.parameters["buffer_bytes"], seen) for seen in beyond or streams)
    sized = sorted(moved, key=lambda pair: pair[0])
    if not sized:
        return {}
    bytes_moved, largest = sized[-1]
    smaller = [(size, seen) for size, seen in sized if size * _LARGE <= bytes_moved and seen.kind == largest.kind]
    size, small = smaller[0] if smaller else (0.0, None)
    slope_s = (largest.time_s - (small.time_s if small else 0.0)) / (bytes_moved - size)
    if slope_s <= 0:
        return {}
    source = named([largest, small] if small else [largest])
    ends = [size / seen.time_s for size, seen in sized if size * _LARGE > bytes_moved]
    spread = (max(ends) - min(ends)) / 2 * slope_s if len(ends) > 1 else ONE_CASE
    error = 0.5 if cached else round(spread, 4)
    rate = Constant(value=1e-9 / slope_s, unit="GB/s", source=source + cached, relative_error=error)
    if small is None:
        return {"memory_gb_per_s": rate}
    rest_us = max(0.0, small.time_s - size * slope_s) * 1e6
    kernel = Constant(value=rest_us, unit="us", source=source, relative_error=0.5)
    return {"kernel_us": kernel, "memory_gb_per_s": rate}


def _kernel(observations: Iterable[Observation]) -> dict[str, Constant]:
    """Return the time of the smallest kernel whose launch is hidden."""
    smallest = [seen for seen in observations if seen.kind == "KernelLaunch" and not seen.host_bound]
    if not smallest:
        return {}
    value = statistics.median(seen.time_s for seen in smallest) * 1e6
    return {"kernel_us": Constant(value=value, unit="us", source=named(smallest), relative_error=ONE_CASE)}


def named(cases: Iterable[Observation | KernelPoint]) -> str:
    """Return the first three ids of the cases."""
    return listed([case.case if isinstance(case, Observation) else case.source for case in cases], 3)


COLLECTIVES: Mapping[str, str] = MappingProxyType(
    {
        "AllReduce": "all_reduce",
        "AllGather": "all_gather",
        "ReduceScatter": "reduce_scatter",
        "AllToAll": "all_to_all",
        "SendRecv": "send_recv",
    }
)
_PASSES: Mapping[str, float] = MappingProxyType({"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0})
"""Passes round a ring, in order of preference."""


def collective_lines(observations: Iterable[Observation]) -> tuple[CollectiveLine, ...]:
    """Return alpha and beta of every collective for every kind of group measured at two sizes or more."""
    points: dict[tuple[str, int, int, int, int], dict[float, Observation]] = {}
    for seen in observations:
        kind = _collective(seen)
        if kind is not None:
            of_kind = points.setdefault(kind, {})
            size = float(seen.parameters["message_bytes"])
            if size not in of_kind or seen.time_s < of_kind[size].time_s:
                of_kind[size] = seen
    lines = (_line(key, by_size) for key, by_size in points.items())
    return tuple(line for line in lines if line is not None)


def _collective(seen: Observation) -> tuple[str, int, int, int, int] | None:
    """Return (collective, ranks, nodes, stride, concurrent groups) of a case."""
    if seen.kind in COLLECTIVES:
        return (COLLECTIVES[seen.kind], seen.world_size, seen.hosts, 1, 1)
    if seen.kind == "AxisCollective":
        fields, per_node = seen.parameters, max(1, seen.world_size // seen.hosts)
        group = Layout(shape=MeshShape.parse(fields["mesh"])).groups(per_node)[fields["axis"]]
        return (fields["collective"], group.ranks, group.nodes, group.stride, group.concurrent)
    return None


def _line(key: tuple[str, int, int, int, int], by_size: Mapping[float, Observation]) -> CollectiveLine | None:
    collective, ranks, nodes, stride, concurrent = key
    fitted = _fit(sorted((size, seen.time_s) for size, seen in by_size.items()))
    if fitted is None:
        return None
    alpha_s, bytes_per_s, misfit = fitted
    return CollectiveLine(
        collective=collective,
        ranks=ranks,
        alpha_us=alpha_s * 1e6,
        beta_gb_per_s=bytes_per_s * busbw_factor(collective, ranks) / 1e9,
        nodes=nodes,
        stride=stride,
        concurrent=concurrent,
        relative_error=round(misfit, 4),
        source=named(by_size.values()),
    )


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Return (alpha in seconds, bytes per second, misfit) of (bytes, seconds); None if no line fits."""
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
    """Return the constants of rings within a node and across nodes, from the widest measured group of neighbours."""
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
