"""Draw the timeline of a pipeline: a lane per rank, a box per action with its kind and micro-batch."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from perfsuite.base.units import format_seconds
from perfsuite.metrics.pipeline import COMPUTE, busy_s, in_flight_micro_batches, step_bounds_s
from perfsuite.record.step import Timeline, TimelineEvent
from perfsuite.reports.timelines import legend
from perfsuite.reports.timelines import shapes as draw

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
    words = legend.width_of_words(timeline, title) - draw.RIGHT
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
            "aria-label": legend.heading(timeline, title),
        },
    )
    draw.hatching(root)
    draw.rectangle(root, 0, 0, width, height, fill="white")
    legend.add_heading(root, timeline, title)
    legend.add_legend(root, timeline)
    legend.add_axis(root, scale, timeline.ranks)
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
    draw.rectangle(root, draw.LEFT, top, scale.width, draw.LANE, fill="white", stroke="#bbbbbb")
    line = top + draw.LANE / 2 + 4
    draw.words(root, draw.LEFT - 8, line, name, text_anchor="end")
    draw.words(root, draw.LEFT + scale.width + 8, line, figures, fill=draw.GREY)


def _add_box(root: ElementTree.Element, scale: draw.Scale, event: TimelineEvent, turn: int) -> None:
    """Draw an action or a wait."""
    top, left, right = draw.top_of(event.rank), scale.x(event.start_s), scale.x(event.end_s)
    fill = "url(#wait)" if event.kind == "wait" else draw.shade(event.kind, turn)
    box = draw.rectangle(root, left, top, right - left, draw.LANE, fill=fill, stroke="white", stroke_width="0.8")
    draw.tooltip(box, _tooltip(event))
    labels = [f"{draw.LETTER[event.kind]}{event.micro_batch}", str(event.micro_batch)] if event.kind in COMPUTE else []
    label = next((text for text in labels if right - left >= draw.longest([text]) + 2), "")
    if label:
        middle = (left + right) / 2
        draw.words(root, middle, top + draw.LANE / 2 + 4, label, text_anchor="middle", fill=draw.ink(event.kind, turn))


def _add_message(root: ElementTree.Element, scale: draw.Scale, event: TimelineEvent) -> None:
    """Draw a tick where a message was posted or arrived, and a bar while it blocked the rank."""
    left, right = scale.x(event.start_s), scale.x(event.end_s)
    sent = event.kind == "send"
    at, colour = (left, draw.SENT) if sent else (right, draw.RECEIVED)
    edge, outwards = (draw.top_of(event.rank) + draw.LANE, 1) if sent else (draw.top_of(event.rank), -1)
    tick = draw.line(root, at, edge, at, edge + outwards * draw.TICK, stroke=colour)
    draw.tooltip(tick, _tooltip(event))
    if event.end_s > event.start_s:
        y = edge + outwards * draw.TICK / 2
        bar = draw.line(root, left, y, right, y, stroke=colour, stroke_width="2", stroke_opacity="0.6")
        draw.tooltip(bar, _tooltip(event))


def _tooltip(event: TimelineEvent) -> str:
    took = format_seconds(float(event.end_s - event.start_s))
    return f"{event.kind}, stage {event.stage}, micro-batch {event.micro_batch}: {took}"
