"""What all charts share: colours, letters, measures, and the frame of a specification."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Spec = Mapping[str, Any]

INK, MUTE, GRID = "#1b1e23", "#5b6472", "#e5e7eb"
GOOD, BAD, DOUBT = "#2b8a3e", "#d6292f", "#9a5b00"
PALETTE = ("#3a62c4", "#d9790a", "#1f8f7d", "#c2405f", "#8456c9", "#85684d", "#4d7c0f", "#0e7490")
"""At least 3:1 on white; a series has a shape or a dash of its own besides."""
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")
DASHES = ([1, 0], [5, 2], [2, 2], [6, 2, 2, 2], [8, 3], [1, 3], [4, 4], [3, 1])
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
"""The renderer measures with the first, which it carries in itself."""
LABEL = 26
"""Characters of a label; of a longer one the middle goes, because ids differ at their ends."""
_WIDEST = 190
"""Pixels of a label whose letters may be twice as wide as others; LABEL characters of ASCII fit as they are."""
_ONE_OF_THREE, _ONE_OF_TWO = 14, 24
"""Characters of the longest name in a legend of three columns, and of two."""

_CONFIG: Spec = {
    "background": None,
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTE,
        "titleColor": MUTE,
        "gridColor": GRID,
        "domainColor": GRID,
        "tickColor": GRID,
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
    },
    "legend": {
        "labelColor": INK,
        "titleColor": MUTE,
        "orient": "top",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "columns": 3,
        "symbolStrokeWidth": 0,
    },
    "title": {"color": DOUBT, "fontSize": 11, "fontWeight": "normal", "anchor": "start"},
    "mark": {"tooltip": None},
    "range": {"category": list(PALETTE)},
}
SIZES = (
    "datum.value>=1073741824?format(datum.value/1073741824,'~r')+' GiB':"
    "datum.value>=1048576?format(datum.value/1048576,'~r')+' MiB':"
    "datum.value>=1024?format(datum.value/1024,'~r')+' KiB':datum.value+' B'"
)
"""Labels of an axis of bytes."""
SHORT = "datum.value==0?'0':format(datum.value,'~s')"
"""Labels with a prefix of their own: 500m, 1, 20k."""


def round_values(low: float, high: float) -> list[float]:
    """Where a logarithmic axis has its lines: powers of ten, with 2 and 5 between where there are few.

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


def frame(spec: Spec) -> Spec:
    """A whole specification."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "config": _CONFIG,
        "padding": 4,
        **spec,
    }


def stamped(spec: Spec, text: str) -> Spec:
    """The chart with a line above it that nobody can cut off."""
    return {**spec, "title": {"text": text}}


def shortened(text: str, longest: int = LABEL) -> str:
    """A label without its middle.

    >>> shortened("test_library_setting[cpu-ws2-gpt2-tiny-default]", 20)
    'test_libr...default]'
    """
    if len(text) <= longest:
        return text
    tail = (longest - 3) // 2
    return f"{text[: longest - 3 - tail]}...{text[-tail:]}"


def labels(texts: Sequence[str], longest: int = LABEL) -> list[str]:
    """A label for each text, no two alike: rows of one label would be drawn over each other.

    >>> labels(["a", "a", "b"])
    ['a', 'a (2)', 'b']
    """
    seen: dict[str, int] = {}
    told = []
    for text in texts:
        label = shortened(text, longest)
        seen[label] = seen.get(label, 0) + 1
        told.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return told


def rows_axis(order: Sequence[str]) -> Spec:
    """The y channel of charts with a row per case."""
    limit = 0 if all(map(str.isascii, order)) else _WIDEST  # where to cut labels takes a third of a chart to find out
    axis = {"title": None, "domain": False, "ticks": False, "labelColor": INK, "labelLimit": limit, "grid": False}
    return {"field": "row", "type": "nominal", "sort": list(order), "axis": axis}


def coloured(field: str, series: Sequence[str], title: str | None = None) -> Spec:
    """The colour channel of named series."""
    return _told_apart(field, series, PALETTE, {"title": title, "symbolLimit": 0})


def shaped(field: str, series: Sequence[str], title: str | None = None) -> Spec:
    """The shape channel of the same series."""
    return _told_apart(field, series, SHAPES, {"title": title, "symbolLimit": 0})


def dashed(field: str, series: Sequence[str]) -> Spec:
    """The dash channel of the same series; the legend has the shapes."""
    return _told_apart(field, series, DASHES, None)


def _told_apart(field: str, series: Sequence[str], values: Sequence[object], legend: Spec | None) -> Spec:
    chosen = [values[index % len(values)] for index in range(len(series))]
    longest = max(map(len, series), default=0)
    if legend is not None and longest > _ONE_OF_THREE:  # a legend wider than its chart makes the chart's letters small
        legend = {**legend, "columns": 2 if longest <= _ONE_OF_TWO else 1}
    return {"field": field, "type": "nominal", "legend": legend, "scale": {"domain": list(series), "range": chosen}}
