"""The picture of a pipeline's timeline: one lane per rank, a box per action with its micro-batch, idle time white."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.etree import ElementTree

from perfsuite.metrics.pipeline import (
    COMPUTE,
    bubble_ratio,
    bubble_to_ideal,
    busy_s,
    in_flight_micro_batches,
    step_bounds_s,
)
from perfsuite.records import Timeline, TimelineEvent
from perfsuite.schedules.catalog import SCHEDULES
from perfsuite.units import format_seconds

_COLOURS = {
    "forward": (66, 133, 244),
    "backward": (52, 168, 83),
    "backward_input": (244, 160, 60),
    "backward_weight": (150, 105, 190),
}
_LABELS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weight",
}
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 74, 30
_LANE, _GAP = 26, 12
"""Height of a lane and of the space under it, where messages leave their ticks; pixels."""
_DIGIT = 6.6
"""Width of one digit of a label, pixels."""


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Seconds to pixels."""

    zero_s: float
    length_s: float
    width: float
    """Pixels for the whole step."""

    def x(self, seconds: float) -> float:
        """Pixels from the left edge; times outside the step lie on its ends."""
        share = float(seconds - self.zero_s) / float(self.length_s)
        return _LEFT + min(max(share, 0), 1) * self.width


def timeline_svg(timeline: Timeline, *, title: str = "") -> str:
    """The picture as an SVG document.

    A rank's later stages are paler, waits are hatched, idle time that is no recorded wait is white; ticks under a lane
    are sends, over it receives.  The right margin has each rank's busy share and most micro-batches in flight.  A box
    names its micro-batch where it is wide enough and says everything in its tooltip.  What lies before the first action
    or after the last is cut off.  Raises InvalidParameter for a timeline without actions.
    """
    zero, end = step_bounds_s(timeline)
    scale = _Scale(zero_s=zero, length_s=end - zero, width=_best_width(timeline, end - zero))
    width = round(_LEFT + scale.width + _RIGHT)
    height = _TOP + timeline.ranks * (_LANE + _GAP) + _BOTTOM
    root = ElementTree.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width} {height}",
            "width": str(width),
            "height": str(height),
            "font-family": "DejaVu Sans, Helvetica, Arial, sans-serif",
            "font-size": "11",
        },
    )
    _add_hatching(root)
    _rectangle(root, 0, 0, width, height, fill="white")
    _add_heading(root, timeline, title)
    _add_axis(root, scale, timeline.ranks)
    busy, in_flight = busy_s(timeline), in_flight_micro_batches(timeline)
    for rank in range(timeline.ranks):
        _add_lane(root, scale, rank, busy[rank], in_flight[rank])
    turns = _turns(timeline)
    for event in timeline.events:
        _add_event(root, scale, event, turns.get((event.rank, event.stage), 0))
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _best_width(timeline: Timeline, length_s: float) -> float:
    """So wide that nine in ten actions can carry their label, within what a browser shows well."""
    lengths = sorted(event.end_s - event.start_s for event in timeline.events if event.kind in COMPUTE)
    short = float(lengths[len(lengths) // 10])
    digits = len(str(max(event.micro_batch for event in timeline.events)))
    wanted = (digits * _DIGIT + 6) * float(length_s) / short if short else 0
    return min(max(wanted, 700), 6000)


def _turns(timeline: Timeline) -> dict[tuple[int, int], int]:
    """(rank, stage) -> the stage's place among the stages of its rank, 0 for the first."""
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE:
            stages.setdefault(event.rank, set()).add(event.stage)
    return {(rank, stage): turn for rank, held in stages.items() for turn, stage in enumerate(sorted(held))}


def _top(rank: int) -> float:
    return _TOP + rank * (_LANE + _GAP)


def _shade(kind: str, turn: int) -> str:
    """The kind's colour, paler with each further stage of the rank."""
    towards_white = 1 - 0.62**turn
    return "#" + "".join(f"{round(part + (255 - part) * towards_white):02x}" for part in _COLOURS[kind])


def _rectangle(
    parent: ElementTree.Element, x: float, y: float, width: float, height: float, **style: str
) -> ElementTree.Element:
    place = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{width:.2f}", "height": f"{height:.2f}"}
    return ElementTree.SubElement(parent, "rect", {**place, **_attributes(style)})


def _text(parent: ElementTree.Element, x: float, y: float, words: str, **style: str) -> None:
    ElementTree.SubElement(parent, "text", {"x": f"{x:.2f}", "y": f"{y:.2f}", **_attributes(style)}).text = words


def _line(parent: ElementTree.Element, x1: float, y1: float, x2: float, y2: float, **style: str) -> None:
    ends = {"x1": f"{x1:.2f}", "y1": f"{y1:.2f}", "x2": f"{x2:.2f}", "y2": f"{y2:.2f}"}
    ElementTree.SubElement(parent, "line", {**ends, **_attributes(style)})


def _attributes(style: dict[str, str]) -> dict[str, str]:
    """Keyword arguments as attributes: ``font_size`` is ``font-size``."""
    return {name.replace("_", "-"): value for name, value in style.items()}


def _add_hatching(root: ElementTree.Element) -> None:
    pattern = ElementTree.SubElement(
        ElementTree.SubElement(root, "defs"),
        "pattern",
        {"id": "wait", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse", "patternTransform": "rotate(45)"},
    )
    _rectangle(pattern, 0, 0, 6, 6, fill="#f4f4f4")
    _line(pattern, 0, 0, 0, 6, stroke="#c4c4c4", stroke_width="1.5")


def _add_heading(root: ElementTree.Element, timeline: Timeline, title: str) -> None:
    """Title, the step's two bubbles, and the legend of the kinds that occur."""
    spec = SCHEDULES.get(timeline.schedule)
    _text(root, _LEFT, 20, title or (spec.title if spec else timeline.schedule), font_size="15", font_weight="bold")
    first, last = step_bounds_s(timeline)
    _text(
        root,
        _LEFT,
        37,
        f"{timeline.source}: step {format_seconds(float(last - first))}, "
        f"bubble_ratio {float(bubble_ratio(timeline)):.3f}, idle / busy {float(bubble_to_ideal(timeline)):.3f}",
        fill="#444444",
    )
    x: float = _LEFT
    kinds = {event.kind for event in timeline.events}
    for kind, label in _LABELS.items():
        if kind in kinds:
            _rectangle(root, x, 45, 12, 12, fill=_shade(kind, 0))
            _text(root, x + 16, 55, label)
            x += 30 + _DIGIT * len(label)
    if "wait" in kinds:
        _rectangle(root, x, 45, 12, 12, fill="url(#wait)")
        _text(root, x + 16, 55, "wait")
        x += 30 + _DIGIT * len("wait")
    remarks = ["paler: a rank's later stages"] if any(_turns(timeline).values()) else []
    if kinds & {"send", "receive"}:
        remarks.append("ticks: received above, sent below")
    _text(root, x, 55, "; ".join(remarks), fill="#444444")


def _add_axis(root: ElementTree.Element, scale: _Scale, ranks: int) -> None:
    """Vertical lines at round times, named under the lanes."""
    bottom = _top(ranks) - _GAP / 2
    rough = float(scale.length_s) / max(4, scale.width / 110)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    for count in range(int(float(scale.length_s) / step * (1 + 1e-9)) + 1):
        x = scale.x(float(scale.zero_s) + count * step)
        _line(root, x, _TOP - 8, x, bottom, stroke="#e2e2e2")
        _text(
            root, x, bottom + 15, format_seconds(count * step) if count else "0", text_anchor="middle", fill="#444444"
        )


def _add_lane(root: ElementTree.Element, scale: _Scale, rank: int, busy: float, in_flight: int) -> None:
    """The frame of a rank's lane, its name and its figures."""
    top = _top(rank)
    _rectangle(root, _LEFT, top, scale.width, _LANE, fill="white", stroke="#bbbbbb")
    _text(root, _LEFT - 8, top + _LANE / 2 + 4, f"rank {rank}", text_anchor="end")
    share = float(busy) / float(scale.length_s)
    _text(
        root, _LEFT + scale.width + 8, top + _LANE / 2 + 4, f"busy {share:.0%}, {in_flight} in flight", fill="#444444"
    )


def _add_event(root: ElementTree.Element, scale: _Scale, event: TimelineEvent, turn: int) -> None:
    """A box for an action or a wait, a tick for a message."""
    top, left, right = _top(event.rank), scale.x(event.start_s), scale.x(event.end_s)
    if event.kind == "send":
        _line(root, left, top + _LANE, left, top + _LANE + 5, stroke="#c0392b")
        return
    if event.kind == "receive":
        _line(root, right, top - 5, right, top, stroke="#2c3e50")
        return
    fill = "url(#wait)" if event.kind == "wait" else _shade(event.kind, turn)
    box = _rectangle(root, left, top, right - left, _LANE, fill=fill, stroke="white", stroke_width="0.8")
    took = format_seconds(float(event.end_s - event.start_s))
    ElementTree.SubElement(
        box, "title"
    ).text = f"{event.kind}, stage {event.stage}, micro-batch {event.micro_batch}: {took}"
    label = str(event.micro_batch)
    if event.kind in COMPUTE and right - left >= len(label) * _DIGIT + 2:
        pale = turn or event.kind == "backward_input"
        _text(
            root,
            (left + right) / 2,
            top + _LANE / 2 + 4,
            label,
            text_anchor="middle",
            fill="#222222" if pale else "white",
        )
