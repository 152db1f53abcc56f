"""Draw the timeline of a pipeline: a lane per rank, a box per action with its kind and micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from perfsuite.base.units import format_seconds
from perfsuite.metrics.pipeline import (
    COMPUTE,
    bubble_ratio,
    bubble_to_ideal,
    busy_s,
    in_flight_micro_batches,
    step_bounds_s,
)
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.reports.timelines import shapes as draw
from perfsuite.schedules.catalog import SCHEDULES, formula_bubble
from perfsuite.schedules.replay import replay

_NARROWEST, _WIDEST = 700, 6000
"""Minimum and maximum pixels of a step."""
_PER_ACTION = 150
"""Maximum pixels per action of a rank; long waits would make the picture too wide."""


def timeline_svg(timeline: Timeline, *, title: str = "", step_px: float | None = None) -> str:
    """Return the picture as an SVG document.

    A box is an action: colour and letter (F, B, I or W) show its kind, the number its micro-batch; later stages of a
    rank are paler.  A narrow box has no letter, or no text; its tooltip has all.  Waits are hatched, other idle time is
    white.  Marks below a lane are sends, marks above it receives, with a bar for the duration.  The right margin
    has the busy share and the maximum of micro-batches in flight.  ``step_px``: width of the step; by default most
    texts fit into their boxes.  Raises InvalidParameter for a timeline without actions.
    """
    zero, end = step_bounds_s(timeline)
    words = _width_of_words(timeline, title) - draw.RIGHT
    scale = draw.Scale(zero_s=zero, length_s=end - zero, width=max(step_px or _best_width(timeline, end - zero), words))
    width = round(draw.LEFT + scale.width + draw.RIGHT)
    height = draw.TOP + timeline.ranks * (draw.LANE + draw.GAP) + draw.BOTTOM
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "width": str(width),
            "height": str(height),
            "font-family": "DejaVu Sans, Helvetica, Arial, sans-serif",
            "font-size": "11",
            "role": "img",
            "aria-label": _heading(timeline, title),
        },
    )
    draw.hatching(root)
    draw.shape(root, "rect", x=0, y=0, width=width, height=height, fill="white")
    _add_heading(root, timeline, title)
    _add_legend(root, timeline)
    _add_axis(root, scale, timeline.ranks)
    busy, in_flight = busy_s(timeline), in_flight_micro_batches(timeline)
    for rank in range(timeline.ranks):
        share = float(busy[rank]) / float(end - zero)
        _add_lane(root, scale, rank, timeline.name_of(rank), f"busy {share:.0%}, {in_flight[rank]} in flight")
    turns = draw.turns_of(timeline)
    for event in timeline.events:
        if event.kind in ("send", "receive"):
            _add_message(root, scale, event)
        else:
            _add_box(root, scale, event, turns.get((event.rank, event.stage), 0))
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _best_width(timeline: Timeline, length_s: float) -> float:
    """Return the width at which letter and number fit into three of four boxes, within the limits."""
    actions = [event for event in timeline.events if event.kind in COMPUTE]
    short = float(sorted(event.end_s - event.start_s for event in actions)[len(actions) // 4])
    most = max(event.micro_batch for event in actions)
    wanted = (draw.longest([f"W{most}"]) + 9) * float(length_s) / short if short else _WIDEST
    of_a_rank = max(Counter(event.rank for event in actions).values())
    return min(max(min(wanted, _PER_ACTION * of_a_rank), _NARROWEST), _WIDEST)


def _add_lane(root: ElementTree.Element, scale: draw.Scale, rank: int, name: str, figures: str) -> None:
    """Draw the frame of a rank's lane, its name and its figures."""
    top = draw.top_of(rank)
    draw.shape(root, "rect", x=draw.LEFT, y=top, width=scale.width, height=draw.LANE, fill="white", stroke="#bbbbbb")
    line = top + draw.LANE / 2 + 4
    draw.shape(root, "text", name, x=draw.LEFT - 8, y=line, text_anchor="end")
    draw.shape(root, "text", figures, x=draw.LEFT + scale.width + 8, y=line, fill=draw.GREY)


def _add_box(root: ElementTree.Element, scale: draw.Scale, event: TimelineEvent, turn: int) -> None:
    """Draw an action or a wait."""
    top, left, right = draw.top_of(event.rank), scale.x(event.start_s), scale.x(event.end_s)
    fill = "url(#wait)" if event.kind == "wait" else draw.shade(event.kind, turn)
    size: dict[str, Any] = {"x": left, "y": top, "width": right - left, "height": draw.LANE}
    draw.shape(root, "rect", tip=_tooltip(event), **size, fill=fill, stroke="white", stroke_width="0.8")
    labels = [f"{draw.LETTER[event.kind]}{event.micro_batch}", str(event.micro_batch)] if event.kind in COMPUTE else []
    label = next((text for text in labels if right - left >= draw.longest([text]) + 2), "")
    if label:
        place: dict[str, Any] = {"x": (left + right) / 2, "y": top + draw.LANE / 2 + 4}
        draw.shape(root, "text", label, **place, text_anchor="middle", fill=draw.ink(event.kind, turn))


def _add_message(root: ElementTree.Element, scale: draw.Scale, event: TimelineEvent) -> None:
    """Draw a tick where a message was posted or arrived, and a bar while it blocked the rank."""
    left, right = scale.x(event.start_s), scale.x(event.end_s)
    sent = event.kind == "send"
    at, colour = (left, draw.SENT) if sent else (right, draw.RECEIVED)
    edge, outwards = (draw.top_of(event.rank) + draw.LANE, 1) if sent else (draw.top_of(event.rank), -1)
    tip = _tooltip(event)
    draw.shape(root, "line", tip=tip, x1=at, y1=edge, x2=at, y2=edge + outwards * draw.TICK, stroke=colour)
    if event.end_s > event.start_s:
        y = edge + outwards * draw.TICK / 2
        style = {"stroke": colour, "stroke_width": "2", "stroke_opacity": "0.6"}
        draw.shape(root, "line", tip=tip, x1=left, y1=y, x2=right, y2=y, **style)


def _tooltip(event: TimelineEvent) -> str:
    took = format_seconds(float(event.end_s - event.start_s))
    return f"{event.kind}, stage {event.stage}, micro-batch {event.micro_batch}: {took}"


# -- title, figures, legend and time axis ------------------------------------------------------------------------------

_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weight",
}
_TITLE_SIZE = 15
_SWATCH = 12
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def _heading(timeline: Timeline, title: str) -> str:
    """Return the title (by default the schedule), the source (measured or simulated) and the bubble."""
    spec = SCHEDULES.get(timeline.schedule)
    name = title or (spec.title if spec else timeline.schedule) or "pipeline"
    return f"{name}: {timeline.source}, bubble_ratio {float(bubble_ratio(timeline)):.3f}"


def _figures(timeline: Timeline) -> str:
    """Return schedule, counts and length of the step, and both bubbles with the expected ones."""
    first, last = step_bounds_s(timeline)
    spec = SCHEDULES.get(timeline.schedule)
    phrases = [spec.title if spec else timeline.schedule] if timeline.schedule else []
    expected = []
    again = replay(timeline)
    schedule = again.schedule
    if schedule is None:  # outside the catalog, without an expected bubble
        phrases.append(f"p={timeline.ranks}")
    else:
        phrases.append(f"p={schedule.ranks} v={schedule.stages_per_rank} m={schedule.num_micro_batches}")
        if again.simulated and timeline.source == "measured":
            expected.append(f"simulated with the same durations {float(bubble_ratio(again.simulated)):.3f}")
        formula = formula_bubble(schedule)
        expected += [] if formula is None else [f"formula for equal stages {formula:.3f}"]
    phrases += [timeline.place] if timeline.place else []
    phrases.append(f"step {format_seconds(float(last - first))}")
    phrases += [f"bubble_ratio {', '.join(expected)}"] if expected else []
    phrases.append(f"bubble_to_ideal (idle / busy) {float(bubble_to_ideal(timeline)):.3f}")
    return "; ".join(phrases)


def _entries(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Yield sample and meaning of everything that occurs in ``timeline``."""
    kinds = {event.kind for event in timeline.events}
    yield from ((kind, name) for kind, name in _NAMES.items() if kind in kinds)
    if any(draw.turns_of(timeline).values()):
        yield "paler", "paler: later stages of the rank"
    if "wait" in kinds:
        yield "wait", "wait"
    yield "idle", "idle, no recorded wait" if "wait" in kinds else "idle"
    if "send" in kinds:
        yield "send", "send"
    if "receive" in kinds:
        yield "receive", "input arrives" if timeline.source == "simulated" else "receive posted"


def _width_of_words(timeline: Timeline, title: str) -> float:
    """Return the pixels that title, figures and legend need right of the left margin."""
    entries = sum(_entry_width(meaning) for _, meaning in _entries(timeline))
    return max(draw.longest([_heading(timeline, title)], _TITLE_SIZE), draw.longest([_figures(timeline)]), entries)


def _entry_width(meaning: str) -> float:
    return _SWATCH + 4 + 16 + draw.longest([meaning])


def _add_heading(root: ElementTree.Element, timeline: Timeline, title: str) -> None:
    """Draw title and figures."""
    style = {"font_size": str(_TITLE_SIZE), "font_weight": "bold"}
    draw.shape(root, "text", _heading(timeline, title), x=draw.LEFT, y=20, **style)
    draw.shape(root, "text", _figures(timeline), x=draw.LEFT, y=38, fill=draw.GREY)


def _add_legend(root: ElementTree.Element, timeline: Timeline) -> None:
    """Draw the legend."""
    x, y = float(draw.LEFT), 50.0
    for drawn, meaning in _entries(timeline):
        _sample(root, drawn, x, y)
        draw.shape(root, "text", meaning, x=x + _SWATCH + 4, y=y + 10)
        x += _entry_width(meaning)


def _sample(root: ElementTree.Element, drawn: str, x: float, y: float) -> None:
    middle = x + _SWATCH / 2
    square: dict[str, Any] = {"x": x, "y": y, "width": _SWATCH, "height": _SWATCH}
    if drawn in _NAMES:
        draw.shape(root, "rect", **square, fill=draw.shade(drawn, 0))
        style = {"text_anchor": "middle", "font_size": "10", "fill": draw.ink(drawn, 0)}
        draw.shape(root, "text", draw.LETTER[drawn], x=middle, y=y + 10, **style)
    elif drawn == "paler":
        draw.shape(root, "rect", **square, fill=draw.shade("forward", 1))
    elif drawn in ("wait", "idle"):
        draw.shape(root, "rect", **square, fill="url(#wait)" if drawn == "wait" else "white", stroke="#bbbbbb")
    else:
        sent = drawn == "send"
        edge, end = (y + 4, y + 4 + draw.TICK) if sent else (y + 9, y + 9 - draw.TICK)
        draw.shape(root, "line", x1=x, y1=edge, x2=x + _SWATCH, y2=edge, stroke="#bbbbbb")
        colour = draw.SENT if sent else draw.RECEIVED
        draw.shape(root, "line", x1=middle, y1=edge, x2=middle, y2=end, stroke=colour, stroke_width="1.5")


def _add_axis(root: ElementTree.Element, scale: draw.Scale, ranks: int) -> None:
    """Draw vertical lines at round times, with numbers and their unit below the lanes."""
    bottom = draw.top_of(ranks) - draw.GAP / 2
    length_s = float(scale.length_s)
    unit_s, unit = next(((size, name) for size, name in _UNITS if length_s >= size), _UNITS[-1])
    step = _round_step(length_s / unit_s / max(4, scale.width / 110))
    for count in range(int(length_s / unit_s / step * (1 + 1e-9)) + 1):
        x = scale.x(float(scale.zero_s) + count * step * unit_s)
        draw.shape(root, "line", x1=x, y1=draw.TOP - 8, x2=x, y2=bottom, stroke="#e2e2e2")
        draw.shape(root, "text", f"{count * step:.10g}", x=x, y=bottom + 15, text_anchor="middle", fill=draw.GREY)
    axis = f"time since the step's first action, {unit}"
    draw.shape(root, "text", axis, x=draw.LEFT, y=bottom + 30, fill=draw.GREY)


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least ``rough``.

    >>> _round_step(0.13), _round_step(3), _round_step(7)
    (0.2, 5.0, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
