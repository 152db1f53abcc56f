"""What fits: tables and charts of as many rows as a person reads, with a line that says what is not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from perfsuite.reports.tables.markdown import Grid

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
