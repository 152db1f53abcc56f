"""Charts: stacked bars, intervals, figures on one axis and matrices with a row per case; curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.reports.changes import CaseChange
from perfsuite.reports.page.charts import look
from perfsuite.reports.page.charts.look import Spec, frame

Rows = Sequence[Mapping[str, Any]]
WIDTH = 205  # Pixels of the axis; with its labels a chart fits a phone of 400 pixels without smaller text.
_STEP: Spec = {"step": 18}
_POINT: Spec = {"type": "point", "filled": True, "size": 50, "opacity": 1}
_CHARACTER_PX = 6.2  # Width of a digit at 11 pixels.
_NARROWEST, _WIDEST, _FULL_WIDTH = 54, 110, 1050
"""Pixels of a column of a heat map at least and at most, and of all columns on a page of 1280 pixels."""
_LEAST_REACH = 1.0  # Intervals up to this relative change are drawn whole.


def _lines(values: Rows | None, encoding: Spec, **mark: Any) -> Spec:
    """Return a layer of rules or lines, which a screen reader skips; ``values`` None: the data of the chart."""
    data = {} if values is None else {"data": {"values": list(values)}}
    return {**data, "mark": {"type": "line", "strokeWidth": 1.5, "aria": False, **mark}, "encoding": encoding}


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


def changes(found: Sequence[CaseChange], order: Sequence[str], tips: Sequence[str]) -> Spec:
    """Return a forest of changes of a time, with a name and a tip each."""
    values = [
        {"row": row, "at": one.effect, "low": one.low, "high": one.high, "tone": one.tone, "tip": tip}
        for row, one, tip in zip(order, found, tips, strict=True)
    ]
    return forest(values, order, "change of the time; right is slower")


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
    place = {"y": look.rows_axis(order), "color": _tone([look.BAD, look.GOOD, look.MUTE])}

    def x(field: str) -> Spec:
        return {"field": field, "type": "quantitative", "axis": axis, "scale": scale}

    layers = [_lines([{"zero": 0.0}], {"x": {"field": "zero", "type": "quantitative"}}, type="rule", color=look.MUTE)]
    if intervals := [row for row in values if row.get("low") is not None]:
        layers.append(_lines(intervals, {**place, "x": x("low"), "x2": {"field": "high"}}, type="rule", clip=True))
    shape = _tone(["triangle-right", "triangle-left", "circle"])
    points = {**place, "x": x("at"), "shape": shape, "description": {"field": "tip"}}
    layers.append({"data": {"values": list(values)}, "mark": _POINT, "encoding": points})
    return frame(width=WIDTH, height=_STEP, layer=layers)


def _tone(values: Sequence[str]) -> Spec:
    scale = {"domain": ["bad", "good", "plain"], "range": values}
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
        _lines(None, {**place, "detail": {"field": "row"}}, color=look.GRID),
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


_DOTTED = {"strokeDash": [2, 3], "color": look.MUTE}
_TIP = {"description": {"field": "tip"}}


def _powers(low: float, high: float, most: int = 5) -> list[float]:
    """Return at most ``most`` powers of two from ``low`` to ``high``, evenly spaced.

    >>> _powers(1024, 16 * 2**20, 4)
    [1024.0, 16384.0, 262144.0, 4194304.0]
    """
    exponents = [e for e in range(64) if low <= 2.0**e <= high]
    step = max(1, -(-len(exponents) // most))
    return [2.0**e for e in exponents[::step]]


def _number(field: str, axis: Spec, **scale: Any) -> Spec:
    return {"field": field, "type": "quantitative", "scale": {"nice": False, **scale}, "axis": axis}


def _layer(rows: Rows, mark: Spec, encoding: Spec) -> Spec:
    return {"data": {"values": list(rows)}, "mark": mark, "encoding": encoding}


def _points(rows: Rows, encoding: Spec) -> Spec:
    return _layer(rows, _POINT, {**encoding, **_TIP})


def bandwidth(points: Rows, fits: Rows, ranks: Sequence[str], bound: float | None, unit: str) -> Spec:
    """Return busbw over message size, with a colour and a shape per number of ranks.

    ``points`` and ``fits`` have ``bytes``, ``bus``, ``ranks`` and ``tip``; ``bound`` is the peak of the links.
    """
    sizes = [row["bytes"] for row in points]
    values = [row["bus"] for row in points] + ([bound] if bound else [])
    domain = [min(values) * 0.7, max(values) * 1.4]
    sized = {"title": "message", "values": _powers(min(sizes), max(sizes), 4), "labelExpr": look.SIZES}
    rated = {"title": f"busbw, {unit}", "format": look.NUMBER, "values": look.round_values(*domain)}
    place = {
        "x": _number("bytes", sized, type="log", base=2),
        "y": _number("bus", rated, type="log", domain=domain),
        "color": look.coloured("ranks", ranks, "ranks"),
    }
    layers = [
        _lines(fits, {**place, "strokeDash": look.dashed("ranks", ranks)}, clip=True),
        _points(points, {**place, "shape": look.shaped("ranks", ranks, "ranks")}),
    ]
    if bound:
        level = {"y": {"field": "bus", "type": "quantitative"}}
        layers.append(_layer([{"bus": bound}], {"type": "rule", "strokeWidth": 1.5, **_DOTTED}, level))
    return frame(width=255, height=150, layer=layers)


def roofline(points: Rows, roofs: Rows, dtypes: Sequence[str], unit: str) -> Spec:
    """Return products over their arithmetic intensity, under a roof per dtype; a roof of a measured peak is dashed.

    ``points`` have ``intensity``, ``rate``, ``dtype`` and ``tip``; ``roofs`` also have ``kind``.
    """
    rates = [row["rate"] for row in (*points, *roofs)]
    reach = [row["intensity"] for row in (*points, *roofs)]
    ticks = {name: look.round_values(min(values), max(values)) for name, values in (("x", reach), ("y", rates))}
    intensity = {"title": "operations per byte", "format": look.NUMBER, "values": ticks["x"]}
    rated = {"title": unit, "format": look.NUMBER, "values": ticks["y"]}
    place = {
        "x": _number("intensity", intensity, type="log", domain=[min(reach) * 0.8, max(reach) * 1.25]),
        "y": _number("rate", rated, type="log", domain=[min(rates) * 0.6, max(rates) * 1.5]),
        "color": look.coloured("dtype", dtypes),
    }
    kinds = {"domain": ["published", "nominal", "measured"], "range": [[1, 0], [8, 3], [4, 3]]}
    dash = {"field": "kind", "type": "nominal", "legend": None, "scale": kinds}
    layers = [
        _lines(roofs, {**place, "strokeDash": dash}, clip=True),
        _points(points, {**place, "shape": look.shaped("dtype", dtypes)}),
    ]
    return frame(width=290, height=200, layer=layers)


def scaling(points: Rows, linear: Rows, series: Sequence[str], title: str) -> Spec:
    """Return speed-up over ranks with a dotted linear line; rows have ``ranks``, ``speed``, ``series``, ``tip``."""
    ranks = sorted({row["ranks"] for row in (*points, *linear)})
    speeds = [row["speed"] for row in (*points, *linear)]
    counted = {"title": "ranks", "values": ranks if len(ranks) < 8 else ranks[:: len(ranks) // 6], "format": "d"}
    gained = {"title": title, "format": "~r", "tickCount": 5}
    place = {
        "x": _number("ranks", counted, type="log", base=2, domain=[ranks[0] * 0.93, ranks[-1] * 1.07]),
        "y": _number("speed", gained, type="log", base=2, domain=[min(speeds) * 0.9, max(speeds) * 1.1]),
    }
    named = {**place, "color": look.coloured("series", series)}
    layers = [
        _lines(linear, place, **_DOTTED),
        _lines(points, {**named, "strokeDash": look.dashed("series", series)}),
        _points(points, {**named, "shape": look.shaped("series", series)}),
    ]
    return frame(width=275, height=190, layer=layers)


def over_sessions(
    points: Rows, levels: Rows, changes: Rows, environment: Rows, axes: tuple[Sequence[str], str]
) -> Spec:
    """Return one case over sessions: points, levels, and where the level or the environment changed.

    ``points`` have ``at`` (place of the session), ``value`` and ``tip``; ``levels`` have ``begin``, ``end`` and
    ``value``; ``changes`` have ``begin``, ``at``, ``tone`` (bad or good), ``label`` and ``tip``; ``environment`` has
    ``at`` and ``tip``; ``axes`` has a short name for every session, and the unit of the values.
    """
    names, unit = axes
    values = [row["value"] for row in (*points, *levels)]
    room = (max(values) - min(values)) * 0.08 or abs(max(values)) * 0.01 or 0.01
    bottom, top = min(values) - room, max(values) + 3 * room
    x = _sessions(names)
    y = _number("value", {"title": unit, "format": look.NUMBER, "tickCount": 4}, domain=[bottom, top], zero=False)
    span = {"x": {**x, "field": "begin"}}
    tone = {"domain": ["bad", "good"], "range": [look.BAD, look.GOOD]}
    colour = {"field": "tone", "type": "nominal", "legend": None, "scale": tone}
    gradual = [row for row in changes if row["begin"] < row["at"]]
    level = {"type": "rule", "color": look.PALETTE[0], "strokeWidth": 2, "aria": False}
    grey = {"type": "rect", "color": look.GRID, "opacity": 0.7, "aria": False}
    place = {"x": x, "y": y, **_TIP}
    layers = [
        _layer(gradual, grey, {**span, "x2": {"field": "at"}}),
        _layer(points, {**_POINT, "size": 16, "color": look.MUTE}, place),
        _layer(levels, level, {**span, "x2": {"field": "end"}, "y": y}),
        _layer(changes, {"type": "rule", "strokeDash": [4, 3], "strokeWidth": 1.5}, {"x": x, "color": colour, **_TIP}),
        *(_label(row, x, top, len(names) - 1) for row in changes),
        _layer(
            [{**row, "value": bottom} for row in environment],
            {**_POINT, "shape": "triangle-up", "size": 70, "color": look.DOUBT},
            place,
        ),
    ]
    return frame(width=265, height=130, layer=[layer for layer in layers if layer["data"]["values"]])


def _sessions(names: Sequence[str]) -> Spec:
    """Return the x channel of sessions; at most three have a label."""
    last = len(names) - 1
    texts = ",".join("'" + "".join(filter(str.isalnum, name)) + "'" for name in names)
    axis = {
        "title": "sessions in the order of their commits",
        "values": sorted({0, last // 3, 2 * last // 3}) if last > 2 else list(range(last + 1)),
        "labelExpr": f"[{texts}][datum.value]",
        "labelAlign": "left",
        "labelFlush": False,
        "grid": False,
    }
    return _number("at", axis, domain=[-0.5, last + 0.5])


def _label(row: Mapping[str, Any], x: Spec, top: float, last: int) -> Spec:
    """Return the commit of a change at the top of its line, on the side that has space."""
    left = row["at"] > last / 2
    place = {"align": "right" if left else "left", "dx": -4 if left else 4, "dy": 6}
    colour = look.BAD if row["tone"] == "bad" else look.GOOD
    mark = {"type": "text", "fontSize": look.SHOWN_PX, "color": colour, "aria": False, **place}
    y = {"field": "top", "type": "quantitative"}
    return _layer([{**row, "top": top}], mark, {"x": x, "y": y, "text": {"field": "label"}})
