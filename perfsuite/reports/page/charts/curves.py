"""Curves over message sizes, ranks, arithmetic intensity and sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.reports.page.charts import look
from perfsuite.reports.page.charts.look import Spec, frame

Rows = Sequence[Mapping[str, Any]]
_POINT = {"type": "point", "filled": True, "size": 42, "opacity": 1}
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
    """Return a channel of numbers."""
    return {"field": field, "type": "quantitative", "scale": {"nice": False, **scale}, "axis": axis}


def _layer(rows: Rows, mark: Spec, encoding: Spec) -> Spec:
    return {"data": {"values": list(rows)}, "mark": mark, "encoding": encoding}


def _lines(rows: Rows, encoding: Spec, **mark: Any) -> Spec:
    """Return a layer of lines, which a screen reader skips: the points have the same figures."""
    return _layer(rows, {"type": "line", "strokeWidth": 1.5, "aria": False, **mark}, encoding)


def _points(rows: Rows, encoding: Spec) -> Spec:
    """Return a layer of points with their descriptions."""
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
