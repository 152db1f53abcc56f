"""Charts with a row per case: stacks, intervals, several figures on one axis, a matrix of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.reports.page.charts.look import (
    BAD,
    GOOD,
    GRID,
    MUTE,
    PALETTE,
    SHAPES,
    SHORT,
    Spec,
    coloured,
    frame,
    rows_axis,
)

Rows = Sequence[Mapping[str, Any]]
WIDTH = 205
"""Pixels of the axis; with the labels a chart is at most 360 wide and needs no smaller letters at 400."""
_LETTER_PX = 6.2
"""Of a figure in letters of 11 pixels."""
_LEAST_REACH = 1.0
"""Relative change up to which every interval is drawn whole."""


def stack(values: Rows, order: Sequence[str], parts: Sequence[str], unit: str) -> Spec:
    """Bars of parts that sum up; ``values`` have ``row``, ``part``, ``place`` (of the part), ``value`` and ``told``."""
    x = {
        "field": "value",
        "type": "quantitative",
        "aggregate": "sum",
        "stack": "zero",
        "axis": {"title": unit, "labelExpr": SHORT, "tickCount": 4},
    }
    return frame(
        {
            "width": WIDTH,
            "height": {"step": 18},
            "data": {"values": list(values)},
            "mark": {"type": "bar", "stroke": "#fdfdfe", "strokeWidth": 0.5},
            "encoding": {
                "y": rows_axis(order),
                "x": x,
                "order": {"field": "place"},
                "color": coloured("part", parts),
                "description": {"field": "told"},
            },
        }
    )


def forest(values: Rows, order: Sequence[str], title: str) -> Spec:
    """A point and its interval per row, where there is one.

    ``values`` have ``row``, ``at``, ``tone`` (bad, good or plain) and ``told``, and ``low`` and ``high`` where known.
    Shapes repeat what colours say: a triangle to the right is slower, one to the left faster.
    """
    reach = max(_LEAST_REACH, *(2 * abs(row["at"]) for row in values))  # of an interval beyond it the end is cut off
    ends = [0.0, *(row["at"] for row in values)]
    for name in ("low", "high"):
        ends += [min(max(row[name], -reach), reach) for row in values if row.get(name) is not None]
    room = (max(ends) - min(ends)) * 0.05 or 0.01
    domain = [min(ends) - room, max(ends) + room]
    axis = {"title": title, "format": "+~p", "tickCount": 4}
    y = rows_axis(order)

    def x(field: str) -> Spec:
        return {"field": field, "type": "quantitative", "axis": axis, "scale": {"domain": domain, "nice": False}}

    tones = {"domain": ["bad", "good", "plain"], "range": [BAD, GOOD, MUTE]}
    shapes = {"domain": ["bad", "good", "plain"], "range": ["triangle-right", "triangle-left", "circle"]}
    colour = {"field": "tone", "type": "nominal", "legend": None, "scale": tones}
    known = [row for row in values if row.get("low") is not None]
    layers: list[Spec] = [
        {
            "data": {"values": [{"zero": 0.0}]},
            "mark": {"type": "rule", "color": MUTE, "aria": False},
            "encoding": {"x": {"field": "zero", "type": "quantitative"}},
        },
        {
            "data": {"values": list(values)},
            "mark": {"type": "point", "filled": True, "size": 50, "opacity": 1},
            "encoding": {
                "y": y,
                "x": x("at"),
                "color": colour,
                "shape": {"field": "tone", "type": "nominal", "legend": None, "scale": shapes},
                "description": {"field": "told"},
            },
        },
    ]
    if known:
        layers.insert(
            1,
            {
                "data": {"values": known},
                "mark": {"type": "rule", "strokeWidth": 2, "clip": True, "aria": False},
                "encoding": {"y": y, "x": x("low"), "x2": {"field": "high"}, "color": colour},
            },
        )
    return frame({"width": WIDTH, "height": {"step": 18}, "layer": layers})


def several(values: Rows, order: Sequence[str], what: Sequence[str], title: str, form: str = "") -> Spec:
    """Several figures of each row on one axis, joined by a line: ``row``, ``what``, ``value``, ``told``."""
    y = rows_axis(order)
    written = {"format": form} if form else {"labelExpr": SHORT}
    x = {"field": "value", "type": "quantitative", "axis": {"title": title, "tickCount": 4, **written}}
    shapes = {"domain": list(what), "range": list(SHAPES[: len(what)])}
    return frame(
        {
            "width": WIDTH,
            "height": {"step": 18},
            "data": {"values": list(values)},
            "layer": [
                {
                    "mark": {"type": "line", "color": GRID, "strokeWidth": 2, "aria": False},
                    "encoding": {"y": y, "x": x, "detail": {"field": "row"}},
                },
                {
                    "mark": {"type": "point", "filled": True, "size": 48, "opacity": 1},
                    "encoding": {
                        "y": y,
                        "x": x,
                        "color": coloured("what", what),
                        "shape": {"field": "what", "type": "nominal", "scale": shapes, "legend": {"title": None}},
                        "description": {"field": "told"},
                    },
                },
            ],
        }
    )


def matrix(values: Rows, first: Sequence[str], second: Sequence[str], titles: tuple[str, str]) -> Spec:
    """A square per pair, its figure in it; ``values`` have ``first``, ``second``, ``value``, ``text`` and ``told``."""
    low, high = (pick(row["value"] for row in values) for pick in (min, max))
    low -= 0.1 * abs(low)
    wide = _LETTER_PX * max(len(row["text"]) for row in values) + 6
    upright = _LETTER_PX * max(map(len, second)) > wide
    places: Mapping[str, Spec] = {
        name: {
            "field": name,
            "type": "nominal",
            "sort": list(order),
            "axis": {"title": title, "labelAngle": angle, "domain": False, "ticks": False},
        }
        for name, order, title, angle in (("first", first, titles[0], 0), ("second", second, titles[1], -90 * upright))
    }
    shade = {"range": ["#eef2fb", PALETTE[0]], "domain": [low, high]}
    colour = {"field": "value", "type": "quantitative", "legend": None, "scale": shade}
    dark = f"datum.value>{low + 0.75 * (high - low)}"  # where white letters stand out more than black ones
    words = {"condition": {"test": dark, "value": "#fdfdfe"}, "value": "#101214"}
    return frame(
        {
            "width": {"step": max(24, wide)},
            "height": {"step": 24},
            "data": {"values": list(values)},
            "encoding": {"y": places["first"], "x": places["second"]},
            "layer": [
                {"mark": "rect", "encoding": {"color": colour, "description": {"field": "told"}}},
                {"mark": {"type": "text", "aria": False}, "encoding": {"text": {"field": "text"}, "color": words}},
            ],
        }
    )


def heat_map(values: Rows, first: Sequence[str], second: Sequence[str], titles: tuple[str, str]) -> Spec:
    """Relative slowdowns (``away``) of ``first`` by ``second``: red is slower, blue faster, grey has no value."""
    colour = {
        "field": "away",
        "type": "quantitative",
        "scale": {"scheme": "redblue", "reverse": True, "domain": [-0.2, 0.2], "clamp": True},
        "legend": None,
    }
    axes = {
        "y": {"field": "first", "type": "nominal", "sort": list(first), "title": titles[0]},
        "x": {
            "field": "second",
            "type": "nominal",
            "sort": list(second),
            "title": titles[1],
            "axis": {"labelAngle": -30},
        },
    }
    paint = {"condition": {"test": "datum.away === null", "value": GRID}, **colour}
    dark = {"test": "abs(datum.away) > 0.12", "value": "#fdfdfe"}
    cells = {"color": paint, "description": {"field": "told"}}
    words = {"text": {"field": "text"}, "color": {"condition": dark, "value": "#101214"}}
    return frame(
        {
            "data": {"values": list(values)},
            "width": {"step": 92},
            "height": {"step": 16},
            "encoding": axes,
            "layer": [
                {"mark": {"type": "rect", "invalid": None}, "encoding": cells},
                {"mark": {"type": "text", "aria": False, "fontSize": 10}, "encoding": words},
            ],
        }
    )
