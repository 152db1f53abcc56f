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
