"""Markdown tables that are aligned in the source too."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import east_asian_width

from perfsuite.base.text import escaped
from perfsuite.reports.document import Grid

_NUMBER = re.compile(r"-?[\d.]+(e-?\d+)?( \[[MRX?]+\])?( vs .*| \(base\))?")
"""A figure, its label, its base."""

_TAG_OR_LINK = re.compile(r"<(?=[A-Za-z/!?])|(?<!\\)\](?=\()")
_NEITHER = {"<": "&lt;", "]": "]\\"}


def markdown(grid: Grid, level: int = 3) -> list[str]:
    r"""The grid as lines of Markdown, ending with an empty one.

    >>> print("\n".join(markdown(Grid(title="T", columns=("card", "x/s"), rows=(("1 x 8", "12.5"),)))))
    ### T
    <BLANKLINE>
    | card  |  x/s |
    | ----- | ---: |
    | 1 x 8 | 12.5 |
    <BLANKLINE>
    """
    table = [[escape(cell) for cell in row] for row in (grid.columns, *grid.rows)]
    widths = [max(3, *(_width(row[index]) for row in table)) for index in range(len(grid.columns))]
    right = [_is_right(grid.rows, index) for index in range(len(grid.columns))]
    lines = [f"{'#' * level} {escape(grid.title)}", ""]
    for index, row in enumerate(table):
        cells = []
        for cell, width, to_right in zip(row, widths, right, strict=True):
            room = " " * (width - _width(cell))
            cells.append(room + cell if to_right else cell + room)
        lines.append(f"| {' | '.join(cells)} |")
        if index == 0:
            rule = [
                "-" * (width - 1) + (":" if to_right else "-") for width, to_right in zip(widths, right, strict=True)
            ]
            lines.append(f"| {' | '.join(rule)} |")
    lines.append("")
    if grid.notes:
        lines += [f"- {escape(note)}" for note in grid.notes]
        lines.append("")
    return lines


def _width(text: str) -> int:
    """Columns that a terminal shows the text in: two for each Chinese character."""
    return len(text) + (0 if text.isascii() else sum(east_asian_width(letter) in "WF" for letter in text))


def escape(text: str) -> str:
    r"""Text for one cell or list item, which is neither a tag nor a link.

    >>> print(escape("a | b <i>[c](d)"))
    a \| b &lt;i>[c]\(d)
    """
    return _TAG_OR_LINK.sub(lambda match: _NEITHER[match[0]], escaped(" ".join(text.split()))).replace("|", "\\|")


def _is_right(rows: Sequence[Sequence[str]], column: int) -> bool:
    cells = [row[column] for row in rows if row[column]]
    return bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)
