"""What the device can do: products under the roofs of their dtypes, memory bandwidth, one kernel on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfsuite.base.units import format_seconds, scaled
from perfsuite.metrics.spec import on_every_device
from perfsuite.record.result import Peak, Result
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
    Words,
    grid,
    left_out,
    spread_out,
)
from perfsuite.reports.families import share_of_peak
from perfsuite.reports.ids import test_of, words_of
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts import curves, rows
from perfsuite.reports.page.charts.look import labels
from perfsuite.statistics.robust import median

_MOST_DEVICES = 16
_MOST_POINTS = 120
"""Of a roofline."""
_OUT = {"int8": 4}
"""Bytes of a product's result where they are not those of its factors."""


def section(material: Material) -> Section | None:
    """Roofline, bandwidth, devices beside each other, topology."""
    products = [case for case in material.measured if case.values.get("tflops") and case.world_size == 1]
    streams = [case for case in material.measured if case.values.get("gb_per_s") and case.world_size == 1]
    blocks: list[Block] = []
    charts = [chart for chart in (_roofline(products, streams, material), _bandwidth(streams)) if chart]
    if charts:
        blocks.append(Charts(charts=charts))
    blocks += _every_device(material)
    for run in (one.run for one in material.runs[-1:]):
        if run.environment.get("topology"):
            blocks.append(Printed(title="Topology", text=str(run.environment["topology"])))
    return Section(key="device", title="Device", blocks=blocks) if blocks else None


def _roofline(products: Sequence[Result], streams: Sequence[Result], material: Material) -> Chart | None:
    """Products with a known shape; a table of the others."""
    if not products:
        return None
    points: list[dict[str, Any]] = []
    shaped = [case for case in products if _intensity(case) is not None]
    for case in spread_out(shaped, _MOST_POINTS):
        intensity = _intensity(case)
        if intensity is not None:
            rate = case.values["tflops"] * 1e12
            dtype = str(case.parameters.get("dtype"))
            share = share_of_peak(case.metric("tflops"), case)
            told = f"{words_of(case.case)}: {scaled(rate, _unit(dtype))} {share}".strip()
            points.append({"intensity": intensity, "rate": rate, "dtype": dtype, "told": told})
    table = grid(
        ("case", "dtype", "rate", "share of peak", "time", "operations per byte"),
        [
            (
                case.name,
                str(case.parameters.get("dtype", "")),
                scaled(case.values["tflops"] * 1e12, _unit(str(case.parameters.get("dtype")))),
                share_of_peak(case.metric("tflops"), case),
                format_seconds(case.median_s, 3),
                f"{figure:.3g}" if (figure := _intensity(case)) else "",
            )
            for case in products[:MOST_ROWS]
        ],
        _peak_notes(products[:MOST_ROWS], "tflops"),
        of=len(products),
    )
    if not points:
        return Chart(title="Products", spec={}, grid=table)
    dtypes = list(dict.fromkeys(point["dtype"] for point in points))
    roofs, said = _roofs(points, products, streams, material)
    caption = "; ".join(filter(None, (said, left_out(len(points), len(shaped)))))
    spec = curves.roofline(points, roofs, dtypes, "operations per second")
    return Chart(title="Products under the roofs of their dtypes", spec=spec, grid=table, caption=caption)


def _unit(dtype: str) -> str:
    return "OPS" if dtype.startswith("int") else "FLOPS"


def _intensity(case: Result) -> float | None:
    """Operations per byte where each matrix travels once; None for another kind of product."""
    sides = [case.parameters.get(name) for name in ("m", "k", "n")]
    item = ITEM_BYTES.get(str(case.parameters.get("dtype")))
    if item is None or not all(isinstance(side, int) and side > 0 for side in sides):
        return None
    m, k, n = (float(side) for side in sides if side is not None)
    moved = (m * k + k * n) * item + m * n * _OUT.get(str(case.parameters.get("dtype")), item)
    return 2 * m * k * n / moved


def _roofs(
    points: Sequence[dict[str, Any]], products: Sequence[Result], streams: Sequence[Result], material: Material
) -> tuple[list[dict[str, Any]], str]:
    """A bent line per dtype with a peak, and what the lines are."""
    memory = next((peak for case in streams if (peak := case.peak("gb_per_s"))), None)
    device = material.runs[-1].device if material.runs else None
    memory = memory or (device.memory_bandwidth if device else None)
    low = min(point["intensity"] for point in points) / 4
    high = max(point["intensity"] for point in points) * 1.5
    roofs = []
    kinds = set()
    for dtype in dict.fromkeys(point["dtype"] for point in points):
        peak = _peak_of(dtype, products, device.tflops if device else {})
        if peak is None:
            continue
        kinds.add(peak.kind)
        for step in range(33):
            x = low * (high / low) ** (step / 32)
            y = min(peak.value * 1e12, x * memory.value * 1e9 if memory else peak.value * 1e12)
            roofs.append({"dtype": dtype, "intensity": x, "rate": y, "kind": peak.kind})
    said = {"published": "solid roofs are published peaks", "nominal": "long dashes are nominal peaks"}
    said["measured"] = "dashed roofs are the best of probes on this machine, which a result may pass"
    told = [text for kind, text in said.items() if kind in kinds] or ["no peak is known"]
    slope = f"slope: {scaled(memory.value * 1e9, 'B/s')} of memory ({memory.kind})" if memory else ""
    return roofs, "; ".join(filter(None, (*told, slope)))


def _peak_of(dtype: str, products: Sequence[Result], published: Any) -> Peak | None:
    of_case = (case.peak("tflops") for case in products if case.parameters.get("dtype") == dtype)
    return next((peak for peak in of_case if peak), None) or published.get(dtype)


def _peak_notes(cases: Sequence[Result], name: str) -> list[str]:
    peaks = dict.fromkeys(
        f"peak {peak.value:.4g} {peak.unit} ({peak.kind}): {peak.source}" for case in cases if (peak := case.peak(name))
    )
    return list(peaks)[:6]


def _bandwidth(streams: Sequence[Result]) -> Chart | None:
    if not streams:
        return None
    drawn = spread_out(streams, MOST_BARS)
    names = labels([f"{test_of(case.case).removeprefix('test_')} {words_of(case.case)}" for case in drawn])
    values = []
    kinds: dict[str, None] = {"reached": None}
    for row, case in zip(names, drawn, strict=True):
        reached = case.values["gb_per_s"] * 1e9
        told = f"{case.name}: {scaled(reached, 'B/s')} {share_of_peak(case.metric('gb_per_s'), case)}".strip()
        values.append({"row": row, "what": "reached", "value": reached, "told": told})
        if peak := case.peak("gb_per_s"):
            what = f"{peak.kind} peak"
            kinds[what] = None
            values.append({"row": row, "what": what, "value": peak.value * 1e9, "told": peak.source})
    table = grid(
        ("case", "bandwidth", "share of peak", "time", "remark"),
        [
            (
                case.name,
                scaled(case.values["gb_per_s"] * 1e9, "B/s"),
                share_of_peak(case.metric("gb_per_s"), case),
                format_seconds(case.median_s, 3),
                next((metric.note for metric in case.metrics if metric.name == "gb_per_s"), ""),
            )
            for case in streams[:MOST_ROWS]
        ],
        _peak_notes(streams[:MOST_ROWS], "gb_per_s"),
        of=len(streams),
    )
    cached = any("cache-resident" in row[-1] for row in table.rows)
    caption = "a bandwidth above the peak is that of a cache: the table says which" if cached else ""
    caption = "; ".join(filter(None, (caption, left_out(len(drawn), len(streams)))))
    spec = rows.several(values, names, list(kinds), "bytes per second")
    return Chart(title="Memory kernels and links", spec=spec, grid=table, caption=caption)


def _every_device(material: Material) -> list[Block]:
    """One kernel on all devices at once: each device over the median one."""
    spread = list(filter(on_every_device, material.measured))[:MOST_BARS]
    if not spread:
        return []
    values: list[dict[str, Any]] = []
    names = labels([words_of(case.case).removeprefix(f"{case.platform}-") for case in spread], 20)
    for row, case in zip(names, spread, strict=True):
        ranks = case.measurement.ranks if case.measurement else ()
        middle_s = median([rank.median_s for rank in ranks])
        offs = [(rank.device.rpartition(":")[2], rank.median_s / middle_s - 1) for rank in ranks]
        for name, off in offs[:_MOST_DEVICES]:
            told = f"{case.name} on {name}: {off:+.1%} of the median device's time"
            values.append({"first": row, "second": name, "value": off, "text": f"{100 * off:+.0f}", "told": told})
    columns = list(dict.fromkeys(str(value["second"]) for value in values))
    spec = rows.matrix(values, names, columns, ("", "device"))
    shown = every_device_grid(spread)
    chart = Chart(title="Each device beside the median one, % of time", spec=spec, grid=shown)
    few = len(columns) <= _MOST_DEVICES
    note = [] if few else [Words(text=f"{_MOST_DEVICES} devices are drawn")]
    return [Charts(charts=[chart]) if few else Table(grid=shown), *note]
