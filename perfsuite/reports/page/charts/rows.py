"""Charts with a row per case: stacked bars, intervals, several figures on one axis, matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.reports.page.charts import look
from perfsuite.reports.page.charts.look import Spec, frame

Rows = Sequence[Mapping[str, Any]]
WIDTH = 205
"""Pixels of the axis; with its labels a chart fits a phone of 400 pixels without smaller text."""
_STEP: Spec = {"step": 18}
_POINT: Spec = {"type": "point", "filled": True, "size": 50, "opacity": 1}
_CHARACTER_PX = 6.2
"""Width of a digit at 11 pixels."""
_NARROWEST, _WIDEST, _FULL_WIDTH = 54, 110, 1050
"""Pixels of a column of a heat map at least and at most, and of all columns on a page of 1280 pixels."""
_LEAST_REACH = 1.0
"""Intervals up to this relative change are drawn whole."""


def _lines(values: Rows | None, encoding: Spec, **mark: Any) -> Spec:
    """Return a layer of rules or lines, which a screen reader skips; ``values`` None: the data of the chart."""
    data = {} if values is None else {"data": {"values": list(values)}}
    return {**data, "mark": {"strokeWidth": 2, "aria": False, **mark}, "encoding": encoding}


def stack(values: Rows, order: Sequence[str], parts: Sequence[str], unit: str) -> Spec:
    """Return stacked bars; ``values`` have ``row``, ``part``, ``place`` (of the part), ``value`` and ``tip``."""
    axis = {"title": unit, "format": look.NUMBER, "tickCount": 4}
    x = {"field": "value", "type": "quantitative", "aggregate": "sum", "stack": "zero", "axis": axis}
    encoding = {"y": look.rows_axis(order), "x": x, "order": {"field": "place"}, "color": look.coloured("part", parts)}
    return frame(
        width=WIDTH,
        height=_STEP,
        data={"values": list(values)},
        mark={"type": "bar", "stroke": "#fdfdfe", "strokeWidth": 0.5},
        encoding={**encoding, "description": {"field": "tip"}},
    )


def forest(values: Rows, order: Sequence[str], title: str) -> Spec:
    """Return a point per row, with its interval where there is one.

    ``values`` have ``row``, ``at``, ``tone`` (bad, good or plain) and ``tip``, and perhaps ``low`` and ``high``.
    Shapes repeat the colours: a triangle to the right is slower, one to the left is faster.
    """
    reach = max(_LEAST_REACH, *(2 * abs(row["at"]) for row in values))  # an interval is cut off beyond it
    ends = [0.0, *(row["at"] for row in values)]
    for name in ("low", "high"):
        ends += [min(max(row[name], -reach), reach) for row in values if row.get(name) is not None]
    room = (max(ends) - min(ends)) * 0.05 or 0.01
    scale = {"domain": [min(ends) - room, max(ends) + room], "nice": False}
    axis = {"title": title, "format": "+~p", "tickCount": 4}
    place = {"y": look.rows_axis(order), "color": _tone("range", [look.BAD, look.GOOD, look.MUTE])}

    def x(field: str) -> Spec:
        return {"field": field, "type": "quantitative", "axis": axis, "scale": scale}

    layers = [_lines([{"zero": 0.0}], {"x": {"field": "zero", "type": "quantitative"}}, type="rule", color=look.MUTE)]
    if intervals := [row for row in values if row.get("low") is not None]:
        layers.append(_lines(intervals, {**place, "x": x("low"), "x2": {"field": "high"}}, type="rule", clip=True))
    shape = _tone("range", ["triangle-right", "triangle-left", "circle"])
    points = {**place, "x": x("at"), "shape": shape, "description": {"field": "tip"}}
    layers.append({"data": {"values": list(values)}, "mark": _POINT, "encoding": points})
    return frame(width=WIDTH, height=_STEP, layer=layers)


def _tone(name: str, values: Sequence[str]) -> Spec:
    scale = {"domain": ["bad", "good", "plain"], name: values}
    return {"field": "tone", "type": "nominal", "legend": None, "scale": scale}


def several(values: Rows, order: Sequence[str], series: Sequence[str], title: str, form: str = look.NUMBER) -> Spec:
    """Return several figures of each row on one axis, joined by a line.

    ``values`` have ``row``, ``what`` (one of ``series``), ``value`` and ``tip``.
    """
    axis = {"title": title, "tickCount": 4, "format": form, "labelOverlap": True}
    place = {"y": look.rows_axis(order), "x": {"field": "value", "type": "quantitative", "axis": axis}}
    shapes = {"domain": list(series), "range": list(look.SHAPES[: len(series)])}
    points = {
        **place,
        "color": look.coloured("what", series),
        "shape": {"field": "what", "type": "nominal", "scale": shapes, "legend": {"title": None}},
        "description": {"field": "tip"},
    }
    layers = [
        _lines(None, {**place, "detail": {"field": "row"}}, type="line", color=look.GRID),
        {"mark": _POINT, "encoding": points},
    ]
    return frame(width=WIDTH, height=_STEP, data={"values": list(values)}, layer=layers)


def matrix(values: Rows, first: Sequence[str], second: Sequence[str], titles: tuple[str, str]) -> Spec:
    """Return a square per pair with its figure in it.

    ``values`` have ``first``, ``second``, ``value``, ``text`` and ``tip``; a larger value is darker.
    """
    low, high = (pick(row["value"] for row in values) for pick in (min, max))
    low, high = low - 0.1 * abs(low), high if high > low else low + 1.0
    wide = _CHARACTER_PX * max(len(row["text"]) for row in values) + 6
    upright = _CHARACTER_PX * max(map(len, second)) > wide
    shade = {"range": ["#eef2fb", look.PALETTE[0]], "domain": [low, high]}
    colour = {"field": "value", "type": "quantitative", "legend": None, "scale": shade}
    dark = f"datum.value>{low + 0.75 * (high - low)}"
    axes = {
        "y": _names("first", first, titles[0], labelAngle=0),
        "x": _names("second", second, titles[1], labelAngle=-90 * upright),
    }
    return _squares(values, axes, (max(24, wide), 24), colour, dark)


def heat_map(values: Rows, first: Sequence[str], second: Sequence[str], titles: tuple[str, str]) -> Spec:
    """Return relative slowdowns (``away``) of ``first`` by ``second``: red is slower, blue is faster.

    A cell without a value is grey.
    """
    scale = {"scheme": "redblue", "reverse": True, "domain": [-0.2, 0.2], "clamp": True}
    colour = {"field": "away", "type": "quantitative", "scale": scale, "legend": None}
    paint = {"condition": {"test": "datum.away === null", "value": look.GRID}, **colour}
    axes = {
        "y": _names("first", first, titles[0]),
        "x": _names("second", second, titles[1], orient="top", labelAngle=-30),
    }
    wide = max(_NARROWEST, min(_WIDEST, _FULL_WIDTH // len(second)))
    return _squares(values, axes, (wide, 17), paint, "abs(datum.away) > 0.12", invalid=None)


def _names(field: str, order: Sequence[str], title: str, **axis: Any) -> Spec:
    shown = {"title": title or None, "domain": False, "ticks": False, "labelLimit": 0, **axis}
    return {"field": field, "type": "nominal", "sort": list(order), "axis": shown}


def _squares(values: Rows, axes: Spec, size_px: tuple[float, float], colour: Spec, dark: str, **mark: Any) -> Spec:
    """Return coloured squares with texts: white letters where the test ``dark`` holds."""
    words = {"condition": {"test": dark, "value": "#fdfdfe"}, "value": "#101214"}
    return frame(
        width={"step": size_px[0]},
        height={"step": size_px[1]},
        data={"values": list(values)},
        encoding=axes,
        layer=[
            {"mark": {"type": "rect", **mark}, "encoding": {"color": colour, "description": {"field": "tip"}}},
            {"mark": {"type": "text", "aria": False}, "encoding": {"text": {"field": "text"}, "color": words}},
        ],
    )
