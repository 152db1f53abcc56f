"""Colours, fonts, labels and units that all charts share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Spec = Mapping[str, Any]

INK, MUTE, GRID = "#1b1e23", "#5b6472", "#e5e7eb"
GOOD, BAD, DOUBT = "#2b8a3e", "#d6292f", "#9a5b00"
PALETTE = ("#3a62c4", "#d9790a", "#1f8f7d", "#c2405f", "#8456c9", "#85684d", "#4d7c0f", "#0e7490")
"""Each has a contrast of at least 3:1 on white; shapes and dashes repeat the difference of colours."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
DASHES = ([1, 0], [5, 2], [2, 2], [6, 2, 2, 2], [8, 3], [1, 3], [4, 4], [3, 1])
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # The renderer ships the first font and measures texts with it.
SHOWN_PX, MEASURED_PX = 11, 13
"""Font size on the page, and the size at which the renderer reserves space.

The browser may use a wider font, such as DejaVu Sans; at equal sizes its labels would be cut.
"""
LABEL = 28  # Maximum characters of a label; a longer label loses its middle, because ids differ at their ends.
_WIDEST_PX = 220  # Maximum width of a label that has characters outside ASCII.
_ONE_OF_THREE, _ONE_OF_TWO = 14, 24  # Maximum characters of a name in a legend of three columns, and of two columns.
NUMBER = ",~r"
"""Format of an axis: ``0.05``, ``20``, ``1,000``; never an SI prefix such as ``500m``, which looks like a unit."""

_TEXT: Spec = {
    "titleColor": MUTE,
    "labelFontSize": MEASURED_PX,
    "titleFontSize": MEASURED_PX,
    "titleFontWeight": "normal",
}
_CONFIG: Spec = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {**_TEXT, "labelColor": MUTE, "gridColor": GRID, "domainColor": GRID, "tickColor": GRID},
    "legend": {**_TEXT, "labelColor": INK, "orient": "top", "columns": 3, "labelLimit": 0, "symbolStrokeWidth": 0},
    "title": {"color": DOUBT, "fontSize": MEASURED_PX, "fontWeight": "normal", "anchor": "start"},
    "mark": {"tooltip": None},
    "range": {"category": list(PALETTE)},
}
SIZES = (
    "datum.value>=1073741824?format(datum.value/1073741824,'~r')+' GiB':"
    "datum.value>=1048576?format(datum.value/1048576,'~r')+' MiB':"
    "datum.value>=1024?format(datum.value/1024,'~r')+' KiB':datum.value+' B'"
)
"""Label expression of an axis of bytes."""


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit for times of about this length, and its seconds.

    >>> time_unit(0.25), time_unit(2e-5)
    (('ms', 0.001), ('us', 1e-06))
    """
    return ("us", 1e-6) if seconds < 1e-3 else ("ms", 1e-3) if seconds < 1 else ("s", 1.0)


def round_values(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic axis: powers of ten, with 2 and 5 between them where there are few.

    >>> round_values(0.9, 150), round_values(70, 600)
    ([1.0, 10.0, 100.0], [100.0, 200.0, 500.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0,), (1.0, 2.0, 5.0)):
        marks = [factor * 10.0**power for power in powers for factor in factors]
        inside = [value for value in marks if low <= value <= high]
        if len(inside) > 2:
            break
    return inside[:: -(-len(inside) // 6)] if inside else [low, high]


def frame(**spec: Any) -> Spec:
    """Return a whole specification with the common configuration."""
    return {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "config": _CONFIG, "padding": 4, **spec}


def labels(texts: Sequence[str], longest: int = LABEL) -> list[str]:
    """Return a different label of at most ``longest`` characters for each text.

    Rows with equal labels would be drawn over each other.  Where cut labels are equal, the part that differs is kept.

    >>> labels(["a", "a", "b"])
    ['a', 'a (2)', 'b']
    >>> labels(["matmul_everywhere ws2-256x256-bf16", "matmul_everywhere ws8-256x256-bf16"], 26)
    ['matmul_...ws2-256x256-bf16', 'matmul_...ws8-256x256-bf16']
    """
    cut: dict[str, set[str]] = {}
    for text in texts:
        cut.setdefault(shortened(text, longest), set()).add(text)
    seen: dict[str, int] = {}
    unique = []
    for text in texts:
        label = shortened(text, longest)
        if len(cut[label]) > 1:
            letters = enumerate(zip(*cut[label], strict=False))
            differs = next((at for at, column in letters if len(set(column)) > 1), 0)
            tail = text[max(text.rfind(mark, 0, differs) for mark in "[- ") + 1 :][: longest - 3]
            label = f"{text[: longest - 3 - len(tail)]}...{tail}"
        seen[label] = seen.get(label, 0) + 1
        unique.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return unique


def shortened(text: str, longest: int = LABEL) -> str:
    """Return the text without its middle where it is longer than ``longest``.

    >>> shortened("test_library_setting[cpu-ws2-gpt2-tiny-default]", 20)
    'test_libr...default]'
    """
    if len(text) <= longest:
        return text
    tail = (longest - 3) // 2
    return f"{text[: longest - 3 - tail]}...{text[-tail:]}"


def rows_axis(order: Sequence[str]) -> Spec:
    """Return the y channel of charts with a row per case."""
    limit = 0 if all(map(str.isascii, order)) else _WIDEST_PX  # a limit costs a third of the drawing time
    axis = {"title": None, "domain": False, "ticks": False, "labelColor": INK, "labelLimit": limit, "grid": False}
    return {"field": "row", "type": "nominal", "sort": list(order), "axis": axis}


def coloured(field: str, series: Sequence[str], title: str | None = None) -> Spec:
    """Return the colour channel of named series."""
    return _channel(field, series, PALETTE, {"title": title, "symbolLimit": 0})


def shaped(field: str, series: Sequence[str], title: str | None = None) -> Spec:
    """Return the shape channel of the same series."""
    return _channel(field, series, SHAPES, {"title": title, "symbolLimit": 0})


def dashed(field: str, series: Sequence[str]) -> Spec:
    """Return the dash channel of the same series, without a legend."""
    return _channel(field, series, DASHES, None)


def _channel(field: str, series: Sequence[str], values: Sequence[object], legend: Spec | None) -> Spec:
    chosen = [values[index % len(values)] for index in range(len(series))]
    longest = max(map(len, series), default=0)
    if legend is not None and longest > _ONE_OF_THREE:  # a legend wider than its chart shrinks the text of the chart
        legend = {**legend, "columns": 2 if longest <= _ONE_OF_TWO else 1}
    return {"field": field, "type": "nominal", "legend": legend, "scale": {"domain": list(series), "range": chosen}}
