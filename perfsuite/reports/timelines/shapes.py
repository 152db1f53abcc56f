"""What the picture of a timeline is drawn with: its measures, its colours, and rectangles, lines and words as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from xml.etree import ElementTree

from perfsuite.metrics.pipeline import COMPUTE
from perfsuite.record.step import Timeline
from perfsuite.schedules.schedule import LETTERS

LEFT, RIGHT, TOP, BOTTOM = 70, 160, 88, 44
"""Margins round the lanes, pixels."""
LANE, GAP = 26, 14
"""Height of a lane and of the space under it, where messages leave their marks; pixels."""
DIGIT = 6.7
"""Width of one letter or digit at the normal size, pixels; browsers differ by less than 5 %."""
TICK = 5
"""Length of a message's mark, pixels."""
GREY = "#444444"
SENT, RECEIVED = "#c0392b", "#2c3e50"

COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "forward": (66, 133, 244),
        "backward": (52, 168, 83),
        "backward_input": (244, 160, 60),
        "backward_weight": (150, 105, 190),
    }
)

LETTER: Mapping[str, str] = MappingProxyType({str(kind): letter for kind, letter in LETTERS.items()})
"""F, B, I or W: what an action is, also for those who cannot tell the colours apart."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Seconds to pixels."""

    zero_s: float
    """Start of the first action."""
    length_s: float
    """The step's T."""
    width: float
    """Pixels for the whole step."""

    def x(self, seconds: float) -> float:
        """Pixels from the left edge; times outside the step lie on its ends."""
        share = float(seconds - self.zero_s) / float(self.length_s)
        return LEFT + min(max(share, 0), 1) * self.width


def top_of(rank: int) -> float:
    """Upper edge of the rank's lane, pixels."""
    return TOP + rank * (LANE + GAP)


def shade(kind: str, turn: int) -> str:
    """The kind's colour, paler with each further stage of the rank."""
    towards_white = 1 - 0.62**turn
    return "#" + "".join(f"{round(channel + (255 - channel) * towards_white):02x}" for channel in COLOURS[kind])


def ink(kind: str, turn: int) -> str:
    """The colour of words on the kind's colour."""
    return "#222222" if turn or kind == "backward_input" else "white"


def turns_of(timeline: Timeline) -> dict[tuple[int, int], int]:
    """(rank, stage) -> the stage's place among the stages of its rank, 0 for the first."""
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        if event.kind in COMPUTE:
            stages.setdefault(event.rank, set()).add(event.stage)
    return {(rank, stage): turn for rank, held in stages.items() for turn, stage in enumerate(sorted(held))}


def rectangle(
    parent: ElementTree.Element, x: float, y: float, width: float, height: float, **style: str
) -> ElementTree.Element:
    """A rectangle; ``fill_opacity="0.5"`` becomes ``fill-opacity``, here and below."""
    return _shape(parent, "rect", {"x": x, "y": y, "width": width, "height": height}, style)


def line(parent: ElementTree.Element, x1: float, y1: float, x2: float, y2: float, **style: str) -> ElementTree.Element:
    """A straight line."""
    return _shape(parent, "line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2}, style)


def words(parent: ElementTree.Element, x: float, y: float, text: str, **style: str) -> None:
    """Text whose baseline is at ``y``."""
    _shape(parent, "text", {"x": x, "y": y}, style).text = text


def tooltip(shape: ElementTree.Element, text: str) -> None:
    """What a browser shows when the pointer rests on ``shape``."""
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
    """Pixels that the longest of ``texts`` needs at this font size."""
    return max((len(text) for text in texts), default=0) * DIGIT * size / 11


def _shape(
    parent: ElementTree.Element, tag: str, position: Mapping[str, float], style: Mapping[str, str]
) -> ElementTree.Element:
    attributes = {name: f"{pixels:.2f}" for name, pixels in position.items()}
    return ElementTree.SubElement(
        parent, tag, {**attributes, **{name.replace("_", "-"): value for name, value in style.items()}}
    )
