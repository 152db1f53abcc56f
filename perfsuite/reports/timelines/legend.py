"""Title, figures, legend and time axis of the picture of a timeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.etree import ElementTree

from perfsuite.base.units import format_seconds
from perfsuite.metrics.pipeline import bubble_ratio, bubble_to_ideal, step_bounds_s
from perfsuite.record.step import Timeline
from perfsuite.reports.timelines import shapes as draw
from perfsuite.schedules.catalog import SCHEDULES, formula_bubble
from perfsuite.schedules.replay import replay

_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weight",
}
_TITLE_SIZE = 15
_SWATCH = 12
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def heading(timeline: Timeline, title: str) -> str:
    """Return the title (by default the schedule), the source (measured or simulated) and the bubble."""
    spec = SCHEDULES.get(timeline.schedule)
    name = title or (spec.title if spec else timeline.schedule) or "pipeline"
    return f"{name}: {timeline.source}, bubble_ratio {float(bubble_ratio(timeline)):.3f}"


def figures(timeline: Timeline) -> str:
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


def width_of_words(timeline: Timeline, title: str) -> float:
    """Return the pixels that title, figures and legend need right of the left margin."""
    entries = sum(_entry_width(meaning) for _, meaning in _entries(timeline))
    return max(draw.longest([heading(timeline, title)], _TITLE_SIZE), draw.longest([figures(timeline)]), entries)


def _entry_width(meaning: str) -> float:
    return _SWATCH + 4 + 16 + draw.longest([meaning])


def add_heading(root: ElementTree.Element, timeline: Timeline, title: str) -> None:
    """Draw title and figures."""
    draw.words(root, draw.LEFT, 20, heading(timeline, title), font_size=str(_TITLE_SIZE), font_weight="bold")
    draw.words(root, draw.LEFT, 38, figures(timeline), fill=draw.GREY)


def add_legend(root: ElementTree.Element, timeline: Timeline) -> None:
    """Draw the legend."""
    x, y = float(draw.LEFT), 50.0
    for drawn, meaning in _entries(timeline):
        _sample(root, drawn, x, y)
        draw.words(root, x + _SWATCH + 4, y + 10, meaning)
        x += _entry_width(meaning)


def _sample(root: ElementTree.Element, drawn: str, x: float, y: float) -> None:
    middle = x + _SWATCH / 2
    if drawn in _NAMES:
        draw.rectangle(root, x, y, _SWATCH, _SWATCH, fill=draw.shade(drawn, 0))
        draw.words(
            root, middle, y + 10, draw.LETTER[drawn], text_anchor="middle", font_size="10", fill=draw.ink(drawn, 0)
        )
    elif drawn == "paler":
        draw.rectangle(root, x, y, _SWATCH, _SWATCH, fill=draw.shade("forward", 1))
    elif drawn in ("wait", "idle"):
        fill = "url(#wait)" if drawn == "wait" else "white"
        draw.rectangle(root, x, y, _SWATCH, _SWATCH, fill=fill, stroke="#bbbbbb")
    else:
        sent = drawn == "send"
        edge, end = (y + 4, y + 4 + draw.TICK) if sent else (y + 9, y + 9 - draw.TICK)
        draw.line(root, x, edge, x + _SWATCH, edge, stroke="#bbbbbb")
        draw.line(root, middle, edge, middle, end, stroke=draw.SENT if sent else draw.RECEIVED, stroke_width="1.5")


def add_axis(root: ElementTree.Element, scale: draw.Scale, ranks: int) -> None:
    """Draw vertical lines at round times, with numbers and their unit below the lanes."""
    bottom = draw.top_of(ranks) - draw.GAP / 2
    length_s = float(scale.length_s)
    unit_s, unit = next(((size, name) for size, name in _UNITS if length_s >= size), _UNITS[-1])
    step = _round_step(length_s / unit_s / max(4, scale.width / 110))
    for count in range(int(length_s / unit_s / step * (1 + 1e-9)) + 1):
        x = scale.x(float(scale.zero_s) + count * step * unit_s)
        draw.line(root, x, draw.TOP - 8, x, bottom, stroke="#e2e2e2")
        draw.words(root, x, bottom + 15, f"{count * step:.10g}", text_anchor="middle", fill=draw.GREY)
    draw.words(root, draw.LEFT, bottom + 30, f"time since the step's first action, {unit}", fill=draw.GREY)


def _round_step(rough: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least ``rough``.

    >>> _round_step(0.13), _round_step(3), _round_step(7)
    (0.2, 5.0, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
