"""A page that shows the pictures of a folder of timelines; it needs neither script nor style of its own."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from perfsuite.base.files import write_file
from perfsuite.base.text import printable

INDEX = "index.html"
_HEAD = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>timelines</title>'
    '<meta name="viewport" content="width=device-width,initial-scale=1"></head>\n<body><h1>Timelines</h1>\n'
)


def write_index(pictures: Iterable[tuple[str, Path, Path]], folder: Path) -> Path:
    """Write the page of cases with their trace and picture, all in ``folder``; its path.

    Raises ConfigurationError when it cannot be written.  The same cases give the same bytes.
    """
    path = folder / INDEX
    write_file(path, f"{_HEAD}{''.join(_entry(*picture) for picture in pictures)}</body></html>\n")
    return path


def _entry(case: str, trace: Path, picture: Path) -> str:
    name = escape(printable(case))
    shown = f'<a href="{escape(picture.name)}"><img src="{escape(picture.name)}" alt="timeline of {name}"></a>'
    return f'<h2>{name}</h2>\n<p>{shown}</p>\n<p><a href="{escape(trace.name)}">trace for ui.perfetto.dev</a></p>\n'
