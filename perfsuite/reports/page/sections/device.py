"""Device: roofline by dtype, memory bandwidth, one kernel on every device, topology."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perfsuite.base.units import format_seconds, readable_rate, scaled
from perfsuite.metrics.spec import on_every_device
from perfsuite.record.result import Result
from perfsuite.record.workload import ITEM_BYTES
from perfsuite.reports.devices import every_device_grid
from perfsuite.reports.document import (
    MOST_BARS,
    MOST_ROWS,
    Block,
    Chart,
    Charts,
    Printed,
    Section,
    Table,
    grid_of,
    left_out,
    spread_out,
)
from perfsuite.reports.families import drawable, marked, share_of_peak
from perfsuite.reports.ids import words_of
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels
from perfsuite.reports.page.sections.training import short
from perfsuite.statistics.robust import median

_MOST_DEVICES = 16
_MOST_POINTS = 120  # Maximum points of a roofline.
_OUT = {"int8": 4}  # Bytes of an element of the product, for dtypes where they differ from those of the factors.


def section(material: Material) -> Section | None:
    """Return the section; None without any figure of a device."""
    products = [case for case in material.measured if case.values.get("tflops") and case.world_size == 1]
    streams = [case for case in material.measured if case.values.get("gb_per_s") and case.world_size == 1]
    blocks: list[Block] = []
    charts = [chart for chart in (_roofline(products, streams, material), _bandwidth(streams)) if chart]
    if charts:
        blocks.append(Charts(charts=charts))
    blocks += _every_device(material)
    if material.runs and (topology := material.runs[-1].run.environment.get("topology")):
        blocks.append(Printed(title="Topology", text=str(topology)))
    return Section(key="device", title="Device", blocks=blocks) if blocks else None


def _roofline(products: Sequence[Result], streams: Sequence[Result], material: Material) -> Chart | None:
    if not products:
        return None
    calm, disturbed = drawable(products)
    shaped = [(case, figure) for case in calm if (figure := _intensity(case)) is not None]
    drawn = spread_out(shaped, _MOST_POINTS)
    unit, per_tflops = readable_rate([case.values["tflops"] for case, _ in drawn], "TFLOPS")
    points: list[dict[str, Any]] = []
    for case, intensity in drawn:
        rate, dtype = case.values["tflops"] * per_tflops, str(case.parameters.get("dtype"))
        tip = f"{words_of(case.case)}: {_rate(case)} {share_of_peak(case.metric('tflops'), case)}".strip()
        points.append({"intensity": intensity, "rate": rate, "dtype": dtype, "tip": tip})
    columns: dict[str, Callable[[Result], str]] = {
        "case": lambda case: case.name,
        "dtype": lambda case: str(case.parameters.get("dtype", "")),
        "rate": lambda case: marked(case, _rate(case)),
        "share of peak": lambda case: share_of_peak(case.metric("tflops"), case),
        "time": lambda case: marked(case, format_seconds(case.median_s, 3)),
        "operations per byte": lambda case: f"{figure:.3g}" if (figure := _intensity(case)) else "",
    }
    table = grid_of(products, columns, [*_peak_notes(products, "tflops"), *disturbed])
    if not points:
        return Chart(title="Products", spec={}, grid=table)
    dtypes = list(dict.fromkeys(point["dtype"] for point in points))
    roofs, legend = _roofs(points, products, streams, material, per_tflops)
    caption = "; ".join(filter(None, (legend, left_out(len(points), len(shaped)))))
    spec = rows.roofline(points, roofs, dtypes, unit.replace("FLOPS", "OPS") if _is_integer(dtypes) else unit)
    return Chart(title="Roofline by dtype", spec=spec, grid=table, caption=caption)


def _is_integer(dtypes: Sequence[str]) -> bool:
    return all(dtype.startswith("int") for dtype in dtypes)


def _rate(case: Result) -> str:
    integer = _is_integer([str(case.parameters.get("dtype"))])
    return scaled(case.values["tflops"] * 1e12, "OPS" if integer else "FLOPS")


def _intensity(case: Result) -> float | None:
    """Return operations per byte where each matrix moves once; None for another kind of product."""
    sides = [case.parameters.get(name) for name in ("m", "k", "n")]
    item = ITEM_BYTES.get(str(case.parameters.get("dtype")))
    if item is None or not all(isinstance(side, int) and side > 0 for side in sides):
        return None
    m, k, n = (float(side) for side in sides if side is not None)
    moved = (m * k + k * n) * item + m * n * _OUT.get(str(case.parameters.get("dtype")), item)
    return 2 * m * k * n / moved


def _roofs(
    points: Sequence[Mapping[str, Any]],
    products: Sequence[Result],
    streams: Sequence[Result],
    material: Material,
    per_tflops: float,
) -> tuple[list[dict[str, Any]], str]:
    """Return a line per dtype with a peak (slope of the memory, then the peak), and the legend in words."""
    memory = next((peak for case in streams if (peak := case.peak("gb_per_s"))), None)
    device = material.runs[-1].device if material.runs else None
    memory = memory or (device.memory_bandwidth if device else None)
    low = min(point["intensity"] for point in points) / 4
    high = max(point["intensity"] for point in points) * 1.5
    roofs = []
    kinds = set()
    for dtype in dict.fromkeys(point["dtype"] for point in points):
        of_case = (case.peak("tflops") for case in products if case.parameters.get("dtype") == dtype)
        peak = next(filter(None, of_case), None) or (device.tflops.get(dtype) if device else None)
        if peak is None:
            continue
        kinds.add(peak.kind)
        for step in range(33):
            x = low * (high / low) ** (step / 32)
            tflops = min(peak.value, x * memory.value / 1e3 if memory else peak.value)
            roofs.append({"dtype": dtype, "intensity": x, "rate": tflops * per_tflops, "kind": peak.kind})
    legend = {
        "published": "solid: published peaks",
        "nominal": "long dashes: nominal peaks",
        "measured": "dashed: peaks measured on this machine, which a result may exceed",
    }
    lines = [text for kind, text in legend.items() if kind in kinds] or ["no peak is known"]
    slope = f"slope: memory bandwidth, {scaled(memory.value * 1e9, 'B/s')} ({memory.kind})" if memory else ""
    return roofs, "; ".join(filter(None, (*lines, slope)))


def _peak_notes(cases: Sequence[Result], name: str) -> list[str]:
    peaks = dict.fromkeys(
        f"peak {peak.value:.4g} {peak.unit} ({peak.kind}): {peak.source}"
        for case in cases[:MOST_ROWS]
        if (peak := case.peak(name))
    )
    return list(peaks)[:6]


def _bandwidth(streams: Sequence[Result]) -> Chart | None:
    if not streams:
        return None
    calm, disturbed = drawable(streams)
    drawn = spread_out(calm, MOST_BARS)
    names = labels(list(map(short, drawn)))
    unit, times = readable_rate([case.values["gb_per_s"] for case in drawn], "GB/s")
    values = []
    for row, case in zip(names, drawn, strict=True):
        reached = case.values["gb_per_s"]
        tip = f"{case.name}: {scaled(reached * 1e9, 'B/s')} {share_of_peak(case.metric('gb_per_s'), case)}".strip()
        values.append({"row": row, "what": "measured", "value": reached * times, "tip": tip})
        if peak := case.peak("gb_per_s"):
            values.append({"row": row, "what": f"{peak.kind} peak", "value": peak.value * times, "tip": peak.source})
    kinds = list(dict.fromkeys(str(value["what"]) for value in values))
    columns: dict[str, Callable[[Result], str]] = {
        "case": lambda case: case.name,
        "bandwidth": lambda case: marked(case, scaled(case.values["gb_per_s"] * 1e9, "B/s")),
        "share of peak": lambda case: share_of_peak(case.metric("gb_per_s"), case),
        "time": lambda case: marked(case, format_seconds(case.median_s, 3)),
        "remark": lambda case: case.metric("gb_per_s").note,
    }
    table = grid_of(streams, columns, [*_peak_notes(streams, "gb_per_s"), *disturbed])
    cached = any("cache-resident" in case.metric("gb_per_s").note for case in drawn)
    caption = "above the peak: data in a cache, see the table" if cached else ""
    caption = "; ".join(filter(None, (caption, left_out(len(drawn), len(calm)))))
    spec = rows.several(values, names, kinds, unit) if drawn else {}
    return Chart(title="Memory and host link", spec=spec, grid=table, caption=caption)


def _every_device(material: Material) -> list[Block]:
    """Return the chart of kernels that ran on all devices at once: each device against the median device."""
    spread = list(filter(on_every_device, material.measured))[:MOST_BARS]
    if not spread:
        return []
    values: list[dict[str, Any]] = []
    names = labels(list(map(short, spread)))
    for row, case in zip(names, spread, strict=True):
        ranks = case.measurement.ranks if case.measurement else ()
        middle_s = median([rank.median_s for rank in ranks])
        for rank in ranks:
            name, off = rank.device.rpartition(":")[2], rank.median_s / middle_s - 1
            tip = f"{case.name} on {name}: {off:+.1%} of the median device's time"
            values.append({"first": row, "second": name, "value": off, "text": f"{100 * off:+.0f}", "tip": tip})
    columns = list(dict.fromkeys(str(value["second"]) for value in values))
    spec = rows.matrix(values, names, columns, ("", "device"))
    shown = every_device_grid(spread)
    if len(columns) > _MOST_DEVICES:
        return [Table(grid=shown)]
    return [Charts(charts=[Chart(title="Time of each device against the median device, %", spec=spec, grid=shown)])]
