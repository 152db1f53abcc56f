"""The time of one case over sessions: points, levels, where they changed, and where the environment did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.reports.page.charts.look import BAD, DOUBT, GOOD, GRID, MUTE, PALETTE, Spec, frame

Rows = Sequence[Mapping[str, Any]]


def over_sessions(
    points: Rows, levels: Rows, changes: Rows, environment: Rows, axes: tuple[Sequence[str], str]
) -> Spec:
    """A chart as wide as a column.

    ``points`` have ``at`` (place of the session), ``value`` and ``told``; ``levels`` have ``begin``, ``end`` and
    ``value``; ``changes`` have ``begin``, ``at``, ``tone`` (bad or good), ``label`` and ``told``; ``environment`` has
    ``at`` and ``told``; ``axes`` has a short name for every session, and the unit of the values.
    """
    names, unit = axes
    values = [row["value"] for row in (*points, *levels)]
    room = (max(values) - min(values)) * 0.08 or abs(max(values)) * 0.01 or 0.01
    bottom, top = min(values) - room, max(values) + 3 * room
    x, y = _across(names), _upward(unit, bottom, top)
    tone = {"domain": ["bad", "good"], "range": [BAD, GOOD]}
    colour = {"field": "tone", "type": "nominal", "legend": None, "scale": tone}
    passages = [row for row in changes if row["begin"] < row["at"]]
    layers: list[Spec] = [
        {
            "data": {"values": passages},
            "mark": {"type": "rect", "color": GRID, "opacity": 0.7, "aria": False},
            "encoding": {"x": {**x, "field": "begin"}, "x2": {"field": "at"}},
        },
        {
            "data": {"values": list(points)},
            "mark": {"type": "point", "filled": True, "size": 16, "opacity": 1, "color": MUTE},
            "encoding": {"x": x, "y": y, "description": {"field": "told"}},
        },
        {
            "data": {"values": list(levels)},
            "mark": {"type": "rule", "color": PALETTE[0], "strokeWidth": 2, "aria": False},
            "encoding": {"x": {**x, "field": "begin"}, "x2": {"field": "end"}, "y": y},
        },
        {
            "data": {"values": list(changes)},
            "mark": {"type": "rule", "strokeDash": [4, 3], "strokeWidth": 1.5},
            "encoding": {"x": x, "color": colour, "description": {"field": "told"}},
        },
        *(_label(row, x, top, len(names) - 1) for row in changes),
    ]
    if environment:
        layers.append(
            {
                "data": {"values": [{**row, "value": bottom} for row in environment]},
                "mark": {"type": "point", "filled": True, "shape": "triangle-up", "size": 70, "color": DOUBT},
                "encoding": {"x": x, "y": y, "description": {"field": "told"}},
            }
        )
    return frame({"width": 265, "height": 130, "layer": [layer for layer in layers if layer["data"]["values"]]})


def _across(names: Sequence[str]) -> Spec:
    """The sessions, three of them named."""
    last = len(names) - 1
    ticks = sorted({0, last // 3, 2 * last // 3}) if last > 2 else list(range(last + 1))
    return {
        "field": "at",
        "type": "quantitative",
        "scale": {"domain": [-0.5, last + 0.5], "nice": False},
        "axis": {
            "title": "sessions in the order of their commits",
            "values": ticks,
            "labelExpr": f"{_texts(names)}[datum.value]",
            "labelAlign": "left",
            "labelFlush": False,
            "grid": False,
        },
    }


def _upward(unit: str, bottom: float, top: float) -> Spec:
    return {
        "field": "value",
        "type": "quantitative",
        "scale": {"domain": [bottom, top], "zero": False, "nice": False},
        "axis": {"title": unit, "format": "~g", "tickCount": 4},
    }


def _label(row: Mapping[str, Any], x: Spec, top: float, last: int) -> Spec:
    """The commit of a change at the top of its line, on the side that has room."""
    left = row["at"] > last / 2
    place = {"align": "right" if left else "left", "dx": -4 if left else 4, "dy": 6}
    return {
        "data": {"values": [{**row, "top": top}]},
        "mark": {
            "type": "text",
            "fontSize": 11,
            "color": BAD if row["tone"] == "bad" else GOOD,
            "aria": False,
            **place,
        },
        "encoding": {"x": x, "y": {"field": "top", "type": "quantitative"}, "text": {"field": "label"}},
    }


def _texts(names: Sequence[str]) -> str:
    """The names as a list of Vega's expressions."""
    return "[" + ",".join("'" + "".join(filter(str.isalnum, name)) + "'" for name in names) + "]"
