"""The parts of a page as plain data; templates turn them into HTML.

A section is a function in :mod:`perfsuite.reports.page.sections`: material in, a :class:`Section` out.  Blocks hold no
markup, so a section cannot forget to escape a text.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Tone = Literal["plain", "warn", "bad", "good"]
"""How urgent a text is; the text also says it in words, never by colour alone."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of texts with a title and notes."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]  # One text per column.
    notes: tuple[str, ...] = ()  # Shown as a list below the table.

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), "a row has a cell per column"


@dataclass(frozen=True, kw_only=True)
class Words:
    """A paragraph, with a command at its end where there is one."""

    text: str
    tone: Tone = "plain"
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One line of a list."""

    text: str
    tone: Tone = "plain"
    case: str = ""  # Anchor of the case on the page; empty without one.
    case_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Items:
    """A list."""

    items: Sequence[Item]
    more: str = ""  # A sentence about the items that were left out.


Tile = tuple[str, str, str]  # A headline figure: label, figure and note.


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Figures side by side."""

    tiles: Sequence[Tile]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; a long one is cut, and its last line says so."""

    grid: Grid
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart and the table of its figures.  Without the renderer the table stands alone."""

    title: str
    spec: Mapping[str, Any]  # A Vega-Lite specification with its data, made by :mod:`perfsuite.reports.page.charts`.
    grid: Grid | None = None  # None where the chart before has the table of both.
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Charts:
    """Charts side by side."""

    charts: Sequence[Chart]
    wide: bool = False  # Each chart has a row of its own and keeps its size; a narrow screen scrolls it.


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A picture in SVG that perfsuite made and escaped itself; it keeps its size."""

    title: str
    svg: str
    grid: Grid
    folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Printed:
    """The output of a tool, in a monospaced font."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class CaseRow:
    """One line of the table of all cases."""

    anchor: str
    name: str
    cells: tuple[tuple[str, float | None], ...]  # Text of each column, and the number to sort by.
    details: tuple[tuple[str, str], ...] = ()  # Label and text of each line that is folded below the name.
    strip: str = ""  # The samples as an SVG path, 240 wide and 12 high.
    strip_tip: str = ""


OPEN_ROWS = 300  # Cases in the open part of the table, and in each fold below it.


@dataclass(frozen=True, kw_only=True)
class CaseTable:
    """All cases, with a filter and sorting."""

    columns: tuple[str, ...]
    rows: Sequence[CaseRow]
    more: str = ""

    @property
    def open_rows(self) -> Sequence[CaseRow]:
        """Return the rows that are shown at once."""
        return self.rows[:OPEN_ROWS]

    @property
    def folds(self) -> Iterator[tuple[str, Sequence[CaseRow]]]:
        """Yield title and rows of each fold below; a browser lays out a fold only when it is opened."""
        for start in range(OPEN_ROWS, len(self.rows), OPEN_ROWS):
            rows = self.rows[start : start + OPEN_ROWS]
            yield f"{start + 1} to {start + len(rows)}: {rows[0].name} to {rows[-1].name}", rows


Block = Words | Items | Tiles | Table | Charts | Drawing | Printed | CaseTable


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page."""

    key: str  # Its anchor.
    title: str
    blocks: Sequence[Block]


MOST_ROWS = 60  # Maximum rows of a table; the others are under All cases.
MOST_BARS = 16  # Maximum rows of a chart.
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def grid(
    columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = (), title: str = "", *, of: int = 0
) -> Grid:
    """Return a table without empty columns, cut after MOST_ROWS rows.

    ``of``: the number of rows there are, where ``rows`` has only the first of them.

    >>> grid(["case", "us", "why"], [["a", "1", ""]]).columns
    ('case', 'us')
    """
    kept = [index for index in range(len(columns)) if index == 0 or any(row[index] for row in rows)]
    cut = [tuple(row[index] for index in kept) for row in rows[:MOST_ROWS]]
    left = max(of, len(rows)) - len(cut)
    more = [f"{left} more rows: see All cases"] if left else []
    return Grid(title=title, columns=tuple(columns[index] for index in kept), rows=tuple(cut), notes=(*more, *notes))


def grid_of(
    members: Sequence[T], columns: Mapping[str, Callable[[T], str]], notes: Sequence[str] = (), title: str = ""
) -> Grid:
    """Return a table with a row for each of the first MOST_ROWS members."""
    rows = [[cell(member) for cell in columns.values()] for member in members[:MOST_ROWS]]
    return grid(list(columns), rows, notes, title, of=len(members))


def spread_out(members: Sequence[T], most: int = MOST_BARS) -> list[T]:
    """Return at most ``most`` members, evenly spread, with the first and the last.

    >>> spread_out([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(members) <= most:
        return list(members)
    return [members[round(index * (len(members) - 1) / (most - 1))] for index in range(most)]


def grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Return the values of each key, in order of appearance.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def left_out(shown: int, there: int) -> str:
    """Return a sentence about the members that a chart lacks; empty where it has all of them.

    >>> left_out(16, 20)
    '16 of 20 are drawn; the table and All cases have the others'
    """
    return "" if shown >= there else f"{shown} of {there} are drawn; the table and All cases have the others"
