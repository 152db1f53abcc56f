"""Draw the timeline of a pipeline: a lane per rank, a box per action with its kind and micro-batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from perfsuite.schedules.catalog import SCHEDULES, formula_bubble
from perfsuite.schedules.replay import replay
from perfsuite.schedules.schedule import LETTERS

LEFT, RIGHT, TOP, BOTTOM = 70, 160, 88, 44  # Margins around the lanes, pixels.
LANE, GAP = 26, 14  # Height of a lane and of the space below it for the marks of messages, pixels.
DIGIT = 6.7  # Width of a letter or digit at 11 pixels; browsers differ by less than 5 %.
TICK = 5  # Length of the mark of a message, pixels.
GREY = "#444444"
SENT, RECEIVED = "#c0392b", "#2c3e50"

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "forward": (66, 133, 244),
    "backward": (52, 168, 83),
    "backward_input": (244, 160, 60),
    "backward_weight": (150, 105, 190),
}
LETTER: Mapping[str, str] = {str(kind): letter for kind, letter in LETTERS.items()}
"""F, B, I or W: repeats the meaning of the colours."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Conversion from seconds to pixels."""

    zero_s: float  # Start of the first action.
    length_s: float  # Duration of the step.
    width: float  # Pixels of the whole step.

    def x(self, seconds: float) -> float:
        """Return the pixels from the left edge; times outside the step are at its ends."""
        share = float(seconds - self.zero_s) / float(self.length_s)
        return LEFT + min(max(share, 0), 1) * self.width


def top_of(rank: int) -> float:
    """Return the upper edge of a rank's lane in pixels."""
    return TOP + rank * (LANE + GAP)


def shade(kind: str, turn: int) -> str:
    """Return the colour of a kind, paler with each later stage of the rank."""
    towards_white = 1 - 0.62**turn
    return "#" + "".join(f"{round(channel + (255 - channel) * towards_white):02x}" for channel in COLOURS[kind])


def ink(kind: str, turn: int) -> str:
    """Return the colour of a text on the colour of a kind."""
    return "#222222" if turn or kind == "backward_input" else "white"


def turns_of(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Return the place of a stage among the stages of its rank, by (rank, stage)."""
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE:
            stages.setdefault(event.rank, set()).add(event.stage)
    return {(rank, stage): turn for rank, held in stages.items() for turn, stage in enumerate(sorted(held))}


def shape(parent: ElementTree.Element, tag: str, text: str = "", tip: str = "", **attributes: float | str) -> None:
    """Add a shape: numbers are pixels, ``fill_opacity`` becomes ``fill-opacity``, ``tip`` is its tooltip."""
    written = {
        name.replace("_", "-"): value if isinstance(value, str) else f"{value:.2f}"
        for name, value in attributes.items()
    }
    element = ElementTree.SubElement(parent, tag, written)
    element.text = text or None
    if tip:
        ElementTree.SubElement(element, "title").text = tip


def hatching(root: ElementTree.Element) -> None:
    """Define the fill ``url(#wait)``."""
    attributes = {"id": "wait", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
    pattern = ElementTree.SubElement(
        ElementTree.SubElement(root, "defs"), "pattern", {**attributes, "patternTransform": "rotate(45)"}
    )
    shape(pattern, "rect", x=0, y=0, width=6, height=6, fill="#f0f0f0")
    shape(pattern, "line", x1=0, y1=0, x2=0, y2=6, stroke="#b8b8b8", stroke_width="1.5")


def longest(texts: Iterable[str], size: float = 11) -> float:
    """Return the pixels of the longest text at this font size."""
    return max((len(text) for text in texts), default=0) * DIGIT * size / 11


_NARROWEST, _WIDEST = 700, 6000  # Minimum and maximum pixels of a step.
_PER_ACTION = 150  # Maximum pixels per action of a rank; long waits would make the picture too wide.


def timeline_svg(timeline: Timeline, *, title: str = "", step_px: float | None = None) -> str:
    """Return the picture as an SVG document.

    A box is an action: colour and letter (F, B, I or W) show its kind, the number its micro-batch; later stages of a
    rank are paler.  A narrow box has no letter, or no text; its tooltip has all.  Waits are hatched, other idle time is
    white.  Marks below a lane are sends, marks above it receives, with a bar for the duration.  The right margin
    has the busy share and the maximum of micro-batches in flight.  ``step_px``: width of the step; by default most
    texts fit into their boxes.  Raises InvalidParameter for a timeline without actions.
    """
    zero, end = step_bounds_s(timeline)
    words = _width_of_words(timeline, title) - RIGHT
    scale = Scale(zero_s=zero, length_s=end - zero, width=max(step_px or _best_width(timeline, end - zero), words))
    width = round(LEFT + scale.width + RIGHT)
    height = TOP + timeline.ranks * (LANE + GAP) + BOTTOM
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
    hatching(root)
    shape(root, "rect", x=0, y=0, width=width, height=height, fill="white")
    style = {"font_size": str(_TITLE_SIZE), "font_weight": "bold"}
    shape(root, "text", _heading(timeline, title), x=LEFT, y=20, **style)
    shape(root, "text", _figures(timeline), x=LEFT, y=38, fill=GREY)
    _add_legend(root, timeline)
    _add_axis(root, scale, timeline.ranks)
    busy, in_flight = busy_s(timeline), in_flight_micro_batches(timeline)
    for rank in range(timeline.ranks):
        share = float(busy[rank]) / float(end - zero)
        _add_lane(root, scale, rank, timeline.name_of(rank), f"busy {share:.0%}, {in_flight[rank]} in flight")
    turns = turns_of(timeline)
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
    wanted = (longest([f"W{most}"]) + 9) * float(length_s) / short if short else _WIDEST
    of_a_rank = max(Counter(event.rank for event in actions).values())
    return min(max(min(wanted, _PER_ACTION * of_a_rank), _NARROWEST), _WIDEST)


def _add_lane(root: ElementTree.Element, scale: Scale, rank: int, name: str, figures: str) -> None:
    top = top_of(rank)
    shape(root, "rect", x=LEFT, y=top, width=scale.width, height=LANE, fill="white", stroke="#bbbbbb")
    line = top + LANE / 2 + 4
    shape(root, "text", name, x=LEFT - 8, y=line, text_anchor="end")
    shape(root, "text", figures, x=LEFT + scale.width + 8, y=line, fill=GREY)


def _add_box(root: ElementTree.Element, scale: Scale, event: TimelineEvent, turn: int) -> None:
    top, left, right = top_of(event.rank), scale.x(event.start_s), scale.x(event.end_s)
    fill = "url(#wait)" if event.kind == "wait" else shade(event.kind, turn)
    size: dict[str, Any] = {"x": left, "y": top, "width": right - left, "height": LANE}
    shape(root, "rect", tip=_tooltip(event), **size, fill=fill, stroke="white", stroke_width="0.8")
    labels = [f"{LETTER[event.kind]}{event.micro_batch}", str(event.micro_batch)] if event.kind in COMPUTE else []
    label = next((text for text in labels if right - left >= longest([text]) + 2), "")
    if label:
        place: dict[str, Any] = {"x": (left + right) / 2, "y": top + LANE / 2 + 4}
        shape(root, "text", label, **place, text_anchor="middle", fill=ink(event.kind, turn))


def _add_message(root: ElementTree.Element, scale: Scale, event: TimelineEvent) -> None:
    """Draw a tick where a message was posted or arrived, and a bar while it blocked the rank."""
    left, right = scale.x(event.start_s), scale.x(event.end_s)
    sent = event.kind == "send"
    at, colour = (left, SENT) if sent else (right, RECEIVED)
    edge, outwards = (top_of(event.rank) + LANE, 1) if sent else (top_of(event.rank), -1)
    tip = _tooltip(event)
    shape(root, "line", tip=tip, x1=at, y1=edge, x2=at, y2=edge + outwards * TICK, stroke=colour)
    if event.end_s > event.start_s:
        y = edge + outwards * TICK / 2
        style = {"stroke": colour, "stroke_width": "2", "stroke_opacity": "0.6"}
        shape(root, "line", tip=tip, x1=left, y1=y, x2=right, y2=y, **style)


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
    spec = SCHEDULES.get(timeline.schedule)
    name = title or (spec.title if spec else timeline.schedule) or "pipeline"
    return f"{name}: {timeline.source}, bubble_ratio {float(bubble_ratio(timeline)):.3f}"


def _figures(timeline: Timeline) -> str:
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
    if any(turns_of(timeline).values()):
        yield "paler", "paler: later stages of the rank"
    if "wait" in kinds:
        yield "wait", "wait"
    yield "idle", "idle, no recorded wait" if "wait" in kinds else "idle"
    if "send" in kinds:
        yield "send", "send"
    if "receive" in kinds:
        yield "receive", "input arrives" if timeline.source == "simulated" else "receive posted"


def _width_of_words(timeline: Timeline, title: str) -> float:
    entries = sum(_entry_width(meaning) for _, meaning in _entries(timeline))
    return max(longest([_heading(timeline, title)], _TITLE_SIZE), longest([_figures(timeline)]), entries)


def _entry_width(meaning: str) -> float:
    return _SWATCH + 4 + 16 + longest([meaning])


def _add_legend(root: ElementTree.Element, timeline: Timeline) -> None:
    x, y = float(LEFT), 50.0
    for drawn, meaning in _entries(timeline):
        _sample(root, drawn, x, y)
        shape(root, "text", meaning, x=x + _SWATCH + 4, y=y + 10)
        x += _entry_width(meaning)


def _sample(root: ElementTree.Element, drawn: str, x: float, y: float) -> None:
    middle = x + _SWATCH / 2
    square: dict[str, Any] = {"x": x, "y": y, "width": _SWATCH, "height": _SWATCH}
    if drawn in _NAMES:
        shape(root, "rect", **square, fill=shade(drawn, 0))
        style = {"text_anchor": "middle", "font_size": "10", "fill": ink(drawn, 0)}
        shape(root, "text", LETTER[drawn], x=middle, y=y + 10, **style)
    elif drawn == "paler":
        shape(root, "rect", **square, fill=shade("forward", 1))
    elif drawn in ("wait", "idle"):
        shape(root, "rect", **square, fill="url(#wait)" if drawn == "wait" else "white", stroke="#bbbbbb")
    else:
        sent = drawn == "send"
        edge, end = (y + 4, y + 4 + TICK) if sent else (y + 9, y + 9 - TICK)
        shape(root, "line", x1=x, y1=edge, x2=x + _SWATCH, y2=edge, stroke="#bbbbbb")
        colour = SENT if sent else RECEIVED
        shape(root, "line", x1=middle, y1=edge, x2=middle, y2=end, stroke=colour, stroke_width="1.5")


def _add_axis(root: ElementTree.Element, scale: Scale, ranks: int) -> None:
    bottom = top_of(ranks) - GAP / 2
    length_s = float(scale.length_s)
    unit_s, unit = next(((size, name) for size, name in _UNITS if length_s >= size), _UNITS[-1])
    step = _round_step(length_s / unit_s / max(4, scale.width / 110))
    for count in range(int(length_s / unit_s / step * (1 + 1e-9)) + 1):
        x = scale.x(float(scale.zero_s) + count * step * unit_s)
        shape(root, "line", x1=x, y1=TOP - 8, x2=x, y2=bottom, stroke="#e2e2e2")
        shape(root, "text", f"{count * step:.10g}", x=x, y=bottom + 15, text_anchor="middle", fill=GREY)
    axis = f"time since the step's first action, {unit}"
    shape(root, "text", axis, x=LEFT, y=bottom + 30, fill=GREY)


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least ``rough``.

    >>> _round_step(0.13), _round_step(3), _round_step(7)
    (0.2, 5.0, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
