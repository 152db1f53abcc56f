"""How a projection is printed: as a table for a person, as JSON for a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.units import format_seconds, gib, significant
from perfsuite.projection.calibration import Calibration
from perfsuite.projection.job import Job
from perfsuite.projection.memory import MemoryBreakdown
from perfsuite.projection.scaling import CurvePoint, goodput
from perfsuite.projection.step import RESOURCES, Projection, used_constants
from perfsuite.record.codec import to_json
from perfsuite.record.result import Metric

_COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "logits", "temporary", "updating")


SIMULATED = "calibrated on simulated devices: it says nothing of real ones"


def lines(
    found: Projection, metrics: Sequence[Metric], gains: Mapping[str, float], job: Job, calibration: Calibration
) -> Iterator[str]:
    """The table of one projection."""
    layout = job.layout
    schedule = f", {layout.schedule} x {layout.stages_per_rank}" if layout.schedule else ""
    yield (
        f"{found.training.model} on {found.world_size} x {found.platform}, {layout}, {found.training.dtype}, "
        f"{layout.num_micro_batches} micro-batches of {layout.micro_batch_size}{schedule}: projected"
    )
    if calibration.simulated:
        yield SIMULATED
    bound = "at least " if found.lower_bound else ""
    band = f"{format_seconds(found.low_s)} to {format_seconds(found.high_s)}"
    yield f"step time        {bound}{format_seconds(found.step_time_s)}   80 % band {band}"
    yield f"                 {found.regime}; {found.band_source}"
    for metric in metrics:
        value = "unknown" if metric.value is None else f"{significant(metric.value)} {metric.unit}"
        note = f"   {metric.convention}" if metric.convention not in ("aggregate", "per device") else ""
        yield f"{metric.name:27} {value}{note}{f'   {metric.note}' if metric.value is None else ''}"
    if found.training.schedule:
        yield f"bubble_ratio                {found.bubble_ratio:.3f}"
    yield from _memory_lines(found.memory)
    yield "the step by resource"
    for resource in RESOURCES:
        seconds = found.by_resource[resource]
        if seconds:
            gain = f"   1 % more gains {gains[resource]:.2f} %" if resource in gains else ""
            yield f"  {resource:10} {format_seconds(seconds):>10}  {100 * seconds / found.step_time_s:5.1f} %{gain}"
    yield f"binding          {found.binding}"
    for flag in found.flags:
        yield f"note             {flag.name}: {flag.text}"
    yield f"constants        {found.calibration}"
    used = {name: calibration.constants[name] for name in used_constants(calibration, found.training.dtype)}
    for name, constant in {**used, **calibration.traits}.items():
        error = f" +-{100 * constant.relative_error:.0f} %" if constant.relative_error else ""
        yield f"  {name:24} {significant(constant.value):>8} {constant.unit:7}{error}  {constant.source}"


def _memory_lines(memory: MemoryBreakdown) -> Iterator[str]:
    share = f" of {gib(memory.capacity):.1f} GiB, {100 * memory.share:.0f} %" if memory.share else ""
    yield f"memory           {gib(memory.total):.2f} GiB{share}"
    parts = [(name, getattr(memory, name)) for name in (*_COMPONENTS, "communication")]
    apart = "" if memory.total >= sum(size for _, size in parts) else ", not all at once"
    yield "                 " + ", ".join(f"{name} {gib(size):.2f}" for name, size in parts if size) + apart


def projection_json(found: Projection, metrics: Sequence[Metric], gains: Mapping[str, float]) -> dict[str, Any]:
    """Everything; ``kind`` tells it from a result."""
    return {
        "kind": "projected",
        **to_json(found),
        "by_resource": dict(found.by_resource),
        "binding": found.binding,
        "memory_total_bytes": found.memory.total,
        "metrics": [to_json(metric) for metric in metrics],
        "elasticities": dict(gains),
    }


def curve_lines(
    points: Sequence[CurvePoint], missing: Sequence[str], mtbf: float | None, checkpoint_s: float
) -> Iterator[str]:
    """The table of a curve."""
    good = "  goodput" if mtbf else ""
    titles = f"{'devices':>8} {'layout':28} {'step':>10} {'80 % band':>23} {'tokens/s':>12} {'efficiency':>10}"
    yield f"{titles}  binding{good}"
    for point in points:
        found = point.projection
        bound = ">=" if found.lower_bound else ""
        band = f"{format_seconds(found.low_s)} to {format_seconds(found.high_s)}"
        share = _goodput(point, mtbf, checkpoint_s)
        yield (
            f"{found.world_size:>8} {point.layout:28} {bound + format_seconds(found.step_time_s):>10} {band:>23} "
            f"{point.tokens_per_s:>12.0f} {100 * point.efficiency:>8.1f} %  {found.binding}"
            f"{'' if share is None else f'  {100 * share:.1f} %'}{f'  {point.note}' if point.note else ''}"
        )
    for line in missing:
        yield f"left out {line}"


def _goodput(point: CurvePoint, mtbf: float | None, checkpoint_s: float) -> float | None:
    if mtbf is None:
        return None
    found = point.projection
    return goodput(found.world_size, found.step_time_s, mtbf_device_h=mtbf, checkpoint_s=checkpoint_s)


def point_json(point: CurvePoint, mtbf: float | None, checkpoint_s: float) -> dict[str, Any]:
    """One point of a curve."""
    found = point.projection
    return {
        "world_size": found.world_size,
        "layout": point.layout,
        "global_batch": point.global_batch,
        "step_time_s": found.step_time_s,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "tokens_per_s": point.tokens_per_s,
        "efficiency": point.efficiency,
        "binding": found.binding,
        "goodput": _goodput(point, mtbf, checkpoint_s),
        "note": point.note,
        "flags": [flag.name for flag in found.flags],
    }
