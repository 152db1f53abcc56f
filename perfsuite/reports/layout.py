"""Columns of text for a terminal: aligned, and folded where they are wider than it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perfsuite.base.text import folded, printable
from perfsuite.reports.document import Grid

_GAP = "  "


def fit(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines no wider than ``width``: a wider one goes on below, two columns further in.

    Only a word that is wider by itself, such as an id or a path, stays whole.

    >>> list(fit(["  peak of a link", "short"], 10))
    ['  peak of', '    a link', 'short']
    """
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield from [line] if len(line) <= width else folded(line, width, indent)


def grid_lines(grids: Iterable[Grid], width: int | None = None) -> list[str]:
    """Tables below each other, each with its title and its notes; nothing of one without rows or notes."""
    lines: list[str] = []
    for grid in grids:
        table = lay_out(grid.columns, grid.rows, width) if grid.rows else []
        told = [
            *([printable(grid.title)] if grid.title else []),
            *table,
            *(f"  {printable(note)}" for note in grid.notes),
        ]
        lines += ["", *told] if told else []
    return lines


def lay_out(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Columns two spaces apart, the first to the left, the others to the right; a heading may have two lines.

    A table wider than ``width`` is told in blocks of columns, each with the first one again; where that leaves too
    little room, the first column's cells stand on lines of their own.
    """
    table = _table(headings, rows)
    widths = [max(len(row[index]) for row in table) for index in range(len(headings))]
    if width is None or sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
        return _lines(table, widths, range(len(headings)))
    beside = widths[0] + len(_GAP) + max(widths[1:], default=0) <= width and 2 * widths[0] <= width
    blocks = list(_blocks(widths, width - widths[0] if beside else width))
    lines: list[str] = []
    for number, block in enumerate(blocks):
        lines += [""] if number else []
        lines += _lines(table, widths, (0, *block)) if beside else _below(table, widths, block)
    return lines


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    first = [heading.partition("\n")[0] for heading in headings]
    second = [heading.partition("\n")[2] for heading in headings]
    return [first, *([second] if any(second) else []), *rows]


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Columns but the first, as many together as fit; a column wider than the room stands alone."""
    block: list[int] = []
    used = 0
    for index in range(1, len(widths)):
        taken = widths[index] + len(_GAP)
        if block and used + taken > room:
            yield block
            block, used = [], 0
        block.append(index)
        used += taken
    if block:
        yield block


def _lines(table: Sequence[Sequence[str]], widths: Sequence[int], columns: Sequence[int]) -> list[str]:
    return [
        _GAP.join(row[index].rjust(widths[index]) if index else row[0].ljust(widths[0]) for index in columns).rstrip()
        for row in table
    ]


def _below(table: Sequence[Sequence[str]], widths: Sequence[int], block: Sequence[int]) -> list[str]:
    """The first column's cells on lines of their own, the others below them."""
    cells = [_GAP.join(["", *(row[index].rjust(widths[index]) for index in block)]).rstrip() for row in table]
    return [line for row, below in zip(table, cells, strict=True) for line in (row[0], below) if line]
