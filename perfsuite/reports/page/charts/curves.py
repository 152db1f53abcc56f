"""Curves over sizes, ranks and arithmetic intensity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.reports.page.charts.look import MUTE, SHORT, SIZES, Spec, coloured, dashed, frame, round_values, shaped

Rows = Sequence[Mapping[str, Any]]
_POINT = {"type": "point", "filled": True, "size": 42, "opacity": 1}


def _powers(low: float, high: float, most: int = 5) -> list[float]:
    """Powers of two from ``low`` to ``high``, so many that their labels do not touch.

    >>> _powers(1024, 16 * 2**20, 4)
    [1024.0, 16384.0, 262144.0, 4194304.0]
    """
    exponents = [e for e in range(64) if low <= 2.0**e <= high]
    step = max(1, -(-len(exponents) // most))
    return [2.0**e for e in exponents[::step]]


def _logarithmic(field: str, axis: Spec, **scale: Any) -> Spec:
    """A channel of numbers on a logarithmic scale that ends where ``scale`` says."""
    return {"field": field, "type": "quantitative", "scale": {"type": "log", **scale, "nice": False}, "axis": axis}


def _lines(rows: Rows, encoding: Spec, **mark: Any) -> Spec:
    """A layer of lines; a reader hears the points, not them."""
    return {
        "data": {"values": list(rows)},
        "mark": {"type": "line", "strokeWidth": 1.5, "aria": False, **mark},
        "encoding": encoding,
    }


def _points(rows: Rows, encoding: Spec) -> Spec:
    """A layer of points, each of which says what it is."""
    return {
        "data": {"values": list(rows)},
        "mark": _POINT,
        "encoding": {**encoding, "description": {"field": "told"}},
    }


def bandwidth(points: Rows, fits: Rows, ranks: Sequence[str], bound: float | None, unit: str) -> Spec:
    """busbw over message size, a colour and shape per rank count.

    ``points`` and ``fits`` have ``bytes``, ``bus``, ``ranks`` and ``told``; ``bound`` is the links' peak.
    """
    sizes = [row["bytes"] for row in points]
    values = [row["bus"] for row in points] + ([bound] if bound else [])
    domain = [min(values) * 0.7, max(values) * 1.4]
    sized = {"title": "message", "values": _powers(min(sizes), max(sizes), 4), "labelExpr": SIZES}
    rated = {"title": f"busbw, {unit}", "labelExpr": SHORT, "values": round_values(*domain)}
    place = {"x": _logarithmic("bytes", sized, base=2), "y": _logarithmic("bus", rated, domain=domain)}
    place["color"] = coloured("ranks", ranks, "ranks")
    layers = [
        _lines(fits, {**place, "strokeDash": dashed("ranks", ranks)}, clip=True),
        _points(points, {**place, "shape": shaped("ranks", ranks, "ranks")}),
    ]
    if bound:
        layers.append(_level(bound, "bus"))
    return frame({"width": 255, "height": 150, "layer": layers})


def _level(value: float, field: str) -> Spec:
    """A horizontal line at a peak."""
    return {
        "data": {"values": [{field: value}]},
        "mark": {"type": "rule", "color": MUTE, "strokeDash": [2, 3], "strokeWidth": 1.5},
        "encoding": {"y": {"field": field, "type": "quantitative"}},
    }


def roofline(points: Rows, roofs: Rows, dtypes: Sequence[str], unit: str) -> Spec:
    """Products over their arithmetic intensity; roofs end at each dtype's peak, dashed where it was measured here.

    ``points`` have ``intensity``, ``rate``, ``dtype`` and ``told``; ``roofs`` have ``kind`` besides.
    """
    rates = [row["rate"] for row in (*points, *roofs)]
    reach = [row["intensity"] for row in (*points, *roofs)]
    intensity = {"title": "operations per byte", "labelExpr": SHORT, "values": round_values(min(reach), max(reach))}
    rated = {"title": unit, "labelExpr": SHORT, "values": round_values(min(rates), max(rates))}
    place = {
        "x": _logarithmic("intensity", intensity, domain=[min(reach) * 0.8, max(reach) * 1.25]),
        "y": _logarithmic("rate", rated, domain=[min(rates) * 0.6, max(rates) * 1.5]),
        "color": coloured("dtype", dtypes),
    }
    kinds = {"domain": ["published", "nominal", "measured"], "range": [[1, 0], [8, 3], [4, 3]]}
    dash = {"field": "kind", "type": "nominal", "legend": None, "scale": kinds}
    layers = [
        _lines(roofs, {**place, "strokeDash": dash}, clip=True),
        _points(points, {**place, "shape": shaped("dtype", dtypes)}),
    ]
    return frame({"width": 290, "height": 200, "layer": layers})


def scaling(points: Rows, linear: Rows, series: Sequence[str], title: str) -> Spec:
    """Speed-up over ranks, the linear line dashed; rows have ``ranks``, ``speed``, ``series`` and ``told``."""
    ranks = sorted({row["ranks"] for row in (*points, *linear)})
    speeds = [row["speed"] for row in (*points, *linear)]
    counted = {"title": "ranks", "values": ranks if len(ranks) < 8 else ranks[:: len(ranks) // 6], "format": "d"}
    gained = {"title": title, "format": "~r", "tickCount": 5}
    place = {
        "x": _logarithmic("ranks", counted, base=2, domain=[ranks[0] * 0.93, ranks[-1] * 1.07]),
        "y": _logarithmic("speed", gained, base=2, domain=[min(speeds) * 0.9, max(speeds) * 1.1]),
    }
    named = {**place, "color": coloured("series", series)}
    layers = [
        _lines(linear, place, strokeDash=[2, 3], color=MUTE),
        _lines(points, {**named, "strokeDash": dashed("series", series)}),
        _points(points, {**named, "shape": shaped("series", series)}),
    ]
    return frame({"width": 275, "height": 190, "layer": layers})
