"""Fit alpha and beta of collectives from a device's cases, by placement of the groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.mesh import MeshShape
from perfsuite.metrics import fit_alpha_beta
from perfsuite.projection.calibration import CollectiveLine, Constant
from perfsuite.projection.device_constants import ONE_CASE, named
from perfsuite.projection.layout import Layout
from perfsuite.projection.observation import Observation

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
    points = sorted((size, seen.time_s) for size, seen in by_size.items())
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
