"""Text for a terminal: aligned columns, folded to its width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from perfsuite.base.text import folded, padded, printable
from perfsuite.reports.document import Grid

_GAP = "  "
_NUMBER = re.compile(r"[-+~±]?\d")
_BAR = re.compile(r"(?<!\\)\|")


def fit(lines: Iterable[str], width: int) -> Iterator[str]:
    """Yield lines no wider than ``width``: a wider one goes on below, two columns further in.

    Only a word that is wider by itself, such as an id or a path, stays whole.

    >>> list(fit(["  peak of a link", "short"], 10))
    ['  peak of', '    a link', 'short']
    """
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield from folded(line, width, indent)


def fit_markdown(text: str, width: int) -> Iterator[str]:
    """Yield the lines of Markdown for a terminal: tables in blocks of columns that fit, other lines folded."""
    table: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("| "):
            cells = [cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                table.append(cells)
        else:
            if table:
                yield from fit(lay_out(table[0], table[1:], width), width)
                table = []
            yield from fit([line], width)


def grid_lines(grids: Iterable[Grid], width: int | None = None) -> list[str]:
    """Return tables below each other, each with its title and notes."""
    lines: list[str] = []
    for grid in grids:
        title = [printable(grid.title)] if grid.title else []
        table = lay_out(grid.columns, grid.rows, width) if grid.rows else []
        text = [*title, *table, *(f"  {printable(note)}" for note in grid.notes)]
        lines += ["", *text] if text else []
    return lines


def lay_out(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return columns two spaces apart, numbers to the right; a heading may have two lines.

    A table wider than ``width`` is printed in blocks of columns, each with the first one again, or with the number of
    the row where first cells are equal; if first cells are wide, they are on lines of their own.
    """
    parts = [heading.partition("\n") for heading in headings]
    below = [[second for _, _, second in parts]] if any(second for _, _, second in parts) else []
    cells = [[first for first, _, _ in parts], *below, *rows]
    table: list[Sequence[str]] = [list(map(padded, row)) for row in cells]
    widths = [max(len(row[index]) for row in table) for index in range(len(headings))]
    right = [bool(index) and any(_NUMBER.match(row[index]) for row in rows) for index in range(len(headings))]
    if width is None or sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
        return _lines(table, widths, right, range(len(headings)))
    if len({row[0] for row in rows}) < len(rows):
        return lay_out(("#", *headings), [(str(number), *row) for number, row in enumerate(rows, 1)], width)
    beside = widths[0] + len(_GAP) + max(widths[1:], default=0) <= width and 2 * widths[0] <= width
    blocks = list(_blocks(widths, width - widths[0] if beside else width))
    lines: list[str] = []
    for number, block in enumerate(blocks):
        lines += [""] if number else []
        texts = _lines(table, widths, right, (0, *block)) if beside else _below(table, widths, right, block)
        lines += filter(None, texts)  # a block without headings of two lines has an empty one
    return lines


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
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


def _lines(
    table: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool], columns: Sequence[int]
) -> list[str]:
    pads = {index: str.rjust if right[index] else str.ljust for index in columns}
    lines = (_GAP.join(pad(row[index], widths[index]) for index, pad in pads.items()) for row in table)
    return [line.rstrip().replace("\0", "") for line in lines]


def _below(
    table: Sequence[Sequence[str]], widths: Sequence[int], right: Sequence[bool], block: Sequence[int]
) -> list[str]:
    """The first column's cells on lines of their own, the others below them."""
    firsts = (row[0].replace("\0", "") for row in table)
    cells = (f"{_GAP}{line}" for line in _lines(table, widths, right, block))
    return [line for lines in zip(firsts, cells, strict=True) for line in lines if line.strip()]
