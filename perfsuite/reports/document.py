"""What a section of the page is made of: plain data, which the templates write as HTML.

A section is one file of :mod:`perfsuite.reports.page.sections`: the material in, a :class:`Section` out.  Nothing here
holds markup, so no section can forget to escape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Tone = Literal["plain", "warn", "bad", "good"]
"""How much a text asks for attention; it is also said in words, never by colour alone."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A heading, columns and rows of text, and lines below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """One text per column."""
    notes: tuple[str, ...] = ()
    """Shown as a list below the table."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), "a row has a cell per column"


@dataclass(frozen=True, kw_only=True)
class Words:
    """A paragraph."""

    text: str
    tone: Tone = "plain"
    kind: str = "words"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of a list."""

    text: str
    tone: Tone = "plain"
    case: str = ""
    """Anchor of the case that it is about; empty for none."""
    case_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Items:
    """A list."""

    items: Sequence[Item]
    more: str = ""
    """What was left out, in words."""
    kind: str = "items"


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One figure that the page begins with."""

    label: str
    figure: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Figures side by side."""

    tiles: Sequence[Tile]
    kind: str = "tiles"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; a long one is cut, and its last line says so."""

    grid: Grid
    folded: bool = False
    kind: str = "table"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart and the table of what it draws.  Without the renderer the table stands alone."""

    title: str
    spec: Mapping[str, Any]
    """Vega-Lite, the data in it; :mod:`perfsuite.reports.page.charts` makes them."""
    grid: Grid | None = None
    """None where the chart before has the table of both."""
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts side by side."""

    charts: Sequence[Chart]
    small: bool = False
    """Small multiples: more of them in a row."""
    kind: str = "charts"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture that is SVG already, as wide as it needs to be; made by perfsuite and escaped there."""

    title: str
    svg: str
    grid: Grid
    folded: bool = False
    kind: str = "drawing"


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Text as a tool printed it, in letters of one width."""

    title: str
    text: str
    kind: str = "printed"


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """One line of the table of all cases."""

    anchor: str
    name: str
    cells: tuple[tuple[str, float | None], ...]
    """Text of each column, and the number to sort by where the text is one."""
    details: tuple[tuple[str, str], ...] = ()
    """What is folded below the name: label and text."""
    strip: str = ""
    """The samples as the path of a picture 240 wide and 12 high."""
    strip_told: str = ""


OPEN_ROWS = 300
"""Cases of a table that are laid out as the page opens, and of each fold below it."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Rows that are there when they are unfolded."""

    title: str
    rows: Sequence[CaseRow]


@dataclass(frozen=True, kw_only=True)
class CaseTable:
    """Every case, to be filtered and sorted."""

    columns: tuple[str, ...]
    rows: Sequence[CaseRow]
    more: str = ""
    kind: str = "cases"

    @property
    def open_rows(self) -> Sequence[CaseRow]:
        """What stands in the table that is there at once."""
        return self.rows[:OPEN_ROWS]

    @property
    def folds(self) -> Iterator[Fold]:
        """The others, so many at a time: a browser lays out nothing of a fold that is closed."""
        for start in range(OPEN_ROWS, len(self.rows), OPEN_ROWS):
            rows = self.rows[start : start + OPEN_ROWS]
            title = f"{start + 1} to {start + len(rows)}: {rows[0].name} to {rows[-1].name}"
            yield Fold(title=title, rows=rows)


Block = Words | Items | Tiles | Table | Charts | Drawing | Printed | CaseTable


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page."""

    key: str
    """Its anchor."""
    title: str
    blocks: Sequence[Block]


MOST_ROWS = 60
"""Rows of a table; the rest is under All cases."""
MOST_BARS = 16
"""Rows of a chart."""
T = TypeVar("T")


def grid(
    columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), title: str = "", *, of: int = 0
) -> Grid:
    """A table without empty columns, cut after MOST_ROWS rows; ``of``: how many there are, where not all were made.

    >>> grid(["case", "us", "why"], [["a", "1", ""]]).columns
    ('case', 'us')
    """
    kept = [index for index in range(len(columns)) if index == 0 or any(row[index] for row in rows)]
    cut = [tuple(row[index] for index in kept) for row in rows[:MOST_ROWS]]
    left = max(of, len(rows)) - len(cut)
    more = [f"{left} more rows: see All cases"] if left else []
    return Grid(title=title, columns=tuple(columns[index] for index in kept), rows=tuple(cut), notes=(*more, *notes))


def spread_out(members: Sequence[T], most: int = MOST_BARS) -> list[T]:
    """At most so many of a sequence, evenly spread, its first and last among them.

    >>> spread_out([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(members) <= most:
        return list(members)
    return [members[round(index * (len(members) - 1) / (most - 1))] for index in range(most)]


def left_out(shown: int, there: int) -> str:
    """What a chart does not have; empty where it has all.

    >>> left_out(16, 20)
    '16 of 20 are drawn, the table and All cases have the others'
    """
    return "" if shown >= there else f"{shown} of {there} are drawn, the table and All cases have the others"
