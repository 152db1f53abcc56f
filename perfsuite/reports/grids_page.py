"""Grids as one HTML file of tables: no script and no style of elements, so that it is whole under any policy."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from perfsuite.reports.tables.markdown import Grid
from perfsuite.text import plain

_STYLE = (
    ":root{color-scheme:light dark}body{font-family:sans-serif;margin:1rem auto;max-width:75rem;padding:0 1rem}"
    "table{border-collapse:collapse;display:block;overflow-x:auto}th,td{border-bottom:1px solid;padding:.3rem .6rem;"
    "text-align:left;vertical-align:top}"
)


def grids_page(title: str, grids: Sequence[Grid]) -> str:
    """The page; every text is escaped."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    body = "\n".join(line for grid in grids for line in _table(grid))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body><h1>{_text(title)}</h1>\n{body}\n</body></html>\n"
    )


def _table(grid: Grid) -> Iterator[str]:
    yield f"<h2>{_text(grid.title)}</h2>"
    if grid.rows:
        heads = "".join(f'<th scope="col">{_text(name)}</th>' for name in grid.columns)
        yield f"<table><thead><tr>{heads}</tr></thead>"
        yield "<tbody>"
        for row in grid.rows:
            yield f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>"
        yield "</tbody></table>"
    if grid.notes:
        yield f"<ul>{''.join(f'<li>{_text(note)}</li>' for note in grid.notes)}</ul>"


def _text(text: str) -> str:
    return html.escape(plain(text))
