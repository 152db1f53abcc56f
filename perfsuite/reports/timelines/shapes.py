"""Sizes, colours and SVG shapes of the picture of a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from perfsuite.metrics.pipeline import COMPUTE
from perfsuite.record.step import Timeline
from perfsuite.schedules.schedule import LETTERS

LEFT, RIGHT, TOP, BOTTOM = 70, 160, 88, 44
"""Margins around the lanes, pixels."""
LANE, GAP = 26, 14
"""Height of a lane and of the space below it for the marks of messages, pixels."""
DIGIT = 6.7
"""Width of a letter or digit at 11 pixels; browsers differ by less than 5 %."""
TICK = 5
"""Length of the mark of a message, pixels."""
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

    zero_s: float
    """Start of the first action."""
    length_s: float
    """Duration of the step."""
    width: float
    """Pixels of the whole step."""

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


def rectangle(
    parent: ElementTree.Element, x: float, y: float, width: float, height: float, **style: str
) -> ElementTree.Element:
    """Add a rectangle; a style ``fill_opacity`` becomes ``fill-opacity`` here and below."""
    return _shape(parent, "rect", {"x": x, "y": y, "width": width, "height": height}, style)


def line(parent: ElementTree.Element, x1: float, y1: float, x2: float, y2: float, **style: str) -> ElementTree.Element:
    """Add a straight line."""
    return _shape(parent, "line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2}, style)


def words(parent: ElementTree.Element, x: float, y: float, text: str, **style: str) -> None:
    """Add a text with its baseline at ``y``."""
    _shape(parent, "text", {"x": x, "y": y}, style).text = text


def tooltip(shape: ElementTree.Element, text: str) -> None:
    """Add the text that a browser shows while the pointer is on ``shape``."""
    ElementTree.SubElement(shape, "title").text = text


def hatching(root: ElementTree.Element) -> None:
    """Define the fill ``url(#wait)``."""
    attributes = {"id": "wait", "width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
    pattern = ElementTree.SubElement(
        ElementTree.SubElement(root, "defs"), "pattern", {**attributes, "patternTransform": "rotate(45)"}
    )
    rectangle(pattern, 0, 0, 6, 6, fill="#f0f0f0")
    line(pattern, 0, 0, 0, 6, stroke="#b8b8b8", stroke_width="1.5")


def longest(texts: Iterable[str], size: float = 11) -> float:
    """Return the pixels of the longest text at this font size."""
    return max((len(text) for text in texts), default=0) * DIGIT * size / 11


def _shape(
    parent: ElementTree.Element, tag: str, position: Mapping[str, float], style: Mapping[str, str]
) -> ElementTree.Element:
    attributes = {name: f"{pixels:.2f}" for name, pixels in position.items()}
    return ElementTree.SubElement(
        parent, tag, {**attributes, **{name.replace("_", "-"): value for name, value in style.items()}}
    )
