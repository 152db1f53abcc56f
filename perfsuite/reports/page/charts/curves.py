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


def bandwidth(points: Rows, fits: Rows, ranks: Sequence[str], bound: float | None, unit: str) -> Spec:
    """busbw over message size, a colour and shape per rank count.

    ``points`` and ``fits`` have ``bytes``, ``bus``, ``ranks`` and ``told``; ``bound`` is the links' peak.
    """
    sizes = [row["bytes"] for row in points]
    values = [row["bus"] for row in points] + ([bound] if bound else [])
    axis = {"title": "message", "values": _powers(min(sizes), max(sizes), 4), "labelExpr": SIZES}
    x = {"field": "bytes", "type": "quantitative", "scale": {"type": "log", "base": 2, "nice": False}, "axis": axis}
    domain = [min(values) * 0.7, max(values) * 1.4]
    y = {
        "field": "bus",
        "type": "quantitative",
        "scale": {"type": "log", "domain": domain, "nice": False},
        "axis": {"title": f"busbw, {unit}", "labelExpr": SHORT, "values": round_values(*domain)},
    }
    layers: list[Spec] = [
        {
            "data": {"values": list(fits)},
            "mark": {"type": "line", "strokeWidth": 1.5, "clip": True, "aria": False},
            "encoding": {
                "x": x,
                "y": y,
                "color": coloured("ranks", ranks, "ranks"),
                "strokeDash": dashed("ranks", ranks),
            },
        },
        {
            "data": {"values": list(points)},
            "mark": _POINT,
            "encoding": {
                "x": x,
                "y": y,
                "color": coloured("ranks", ranks, "ranks"),
                "shape": shaped("ranks", ranks, "ranks"),
                "description": {"field": "told"},
            },
        },
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
    x = {
        "field": "intensity",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [min(reach) * 0.8, max(reach) * 1.25], "nice": False},
        "axis": {"title": "operations per byte", "labelExpr": SHORT, "values": round_values(min(reach), max(reach))},
    }
    y = {
        "field": "rate",
        "type": "quantitative",
        "scale": {"type": "log", "domain": [min(rates) * 0.6, max(rates) * 1.5], "nice": False},
        "axis": {"title": unit, "labelExpr": SHORT, "values": round_values(min(rates), max(rates))},
    }
    kinds = {"domain": ["published", "nominal", "measured"], "range": [[1, 0], [8, 3], [4, 3]]}
    return frame(
        {
            "width": 290,
            "height": 200,
            "layer": [
                {
                    "data": {"values": list(roofs)},
                    "mark": {"type": "line", "strokeWidth": 1.5, "clip": True, "aria": False},
                    "encoding": {
                        "x": x,
                        "y": y,
                        "color": coloured("dtype", dtypes),
                        "strokeDash": {"field": "kind", "type": "nominal", "legend": None, "scale": kinds},
                    },
                },
                {
                    "data": {"values": list(points)},
                    "mark": _POINT,
                    "encoding": {
                        "x": x,
                        "y": y,
                        "color": coloured("dtype", dtypes),
                        "shape": shaped("dtype", dtypes),
                        "description": {"field": "told"},
                    },
                },
            ],
        }
    )


def scaling(points: Rows, linear: Rows, series: Sequence[str], title: str) -> Spec:
    """Speed-up over ranks, the linear line dashed; rows have ``ranks``, ``speed``, ``series`` and ``told``."""
    ranks = sorted({row["ranks"] for row in (*points, *linear)})
    speeds = [row["speed"] for row in (*points, *linear)]
    x = {
        "field": "ranks",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "domain": [ranks[0] * 0.93, ranks[-1] * 1.07], "nice": False},
        "axis": {"title": "ranks", "values": ranks if len(ranks) < 8 else ranks[:: len(ranks) // 6], "format": "d"},
    }
    y = {
        "field": "speed",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "domain": [min(speeds) * 0.9, max(speeds) * 1.1], "nice": False},
        "axis": {"title": title, "format": "~r", "tickCount": 5},
    }
    colour, dash = coloured("series", series), dashed("series", series)
    return frame(
        {
            "width": 275,
            "height": 190,
            "layer": [
                {
                    "data": {"values": list(linear)},
                    "mark": {"type": "line", "strokeDash": [2, 3], "color": MUTE, "strokeWidth": 1.5, "aria": False},
                    "encoding": {"x": x, "y": y},
                },
                {
                    "data": {"values": list(points)},
                    "mark": {"type": "line", "strokeWidth": 1.5, "aria": False},
                    "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash},
                },
                {
                    "data": {"values": list(points)},
                    "mark": _POINT,
                    "encoding": {
                        "x": x,
                        "y": y,
                        "color": colour,
                        "shape": shaped("series", series),
                        "description": {"field": "told"},
                    },
                },
            ],
        }
    )
