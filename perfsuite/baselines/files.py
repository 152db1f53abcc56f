"""The bytes of a baseline file: where it may lie, how large it may be, how its lines end, and its text put in place."""

from __future__ import annotations

import os
from pathlib import Path

from perfsuite.base.errors import BaselineError
from perfsuite.base.files import WriteFailed, put, why
from perfsuite.base.files import content as read_content

MAX_BYTES = 128 << 20
"""Larger files are refused unread.  10,000 cases with 24 runs each, the most that is kept of one, are 98 MiB."""
_HEAD_BYTES = 4096


def content(path: Path, *, folder: Path | None, links: bool) -> bytes:
    """What a file holds.  BaselineError when it lies elsewhere (:func:`refuse_foreign`), is too large or unreadable."""
    refuse_foreign(path, folder=folder, links=links)
    try:
        return read_content(path, MAX_BYTES)
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {why(error)}") from None


def refuse_foreign(path: Path, *, folder: Path | None, links: bool) -> None:
    """BaselineError when a symbolic link leads from ``path`` out of its baselines folder, unless ``links`` allows it.

    A link in a repository may name any file of whoever runs the tests.  Without ``folder`` it is the file's own.
    """
    inside = Path(os.path.realpath(folder or path.parent))
    target = Path(os.path.realpath(path))
    if not links and not target.is_relative_to(inside):
        raise BaselineError(
            f"{path}: is a link to {target}, outside {inside}; a baseline is read and written in its own folder: put "
            "the file there, name the file itself, or allow links (ini key perf_baselines_links = true, "
            "perfsuite baselines --links)"
        )


def write(path: Path, text: str) -> None:
    """Put a text in place of a file, its lines ending as they did.  Call it with the lock held.

    Raises BaselineError when it would be too large to be read, or cannot be written.
    """
    data = text.encode(errors="backslashreplace").replace(b"\n", _line_end(path))
    if len(data) > MAX_BYTES:
        raise BaselineError(
            f"{path}: would have {len(data)} bytes, more than the {MAX_BYTES} that a baseline may have; the file is as "
            "it was: drop cases with perfsuite baselines prune"
        )
    try:
        put(path, data, draft="new")
    except WriteFailed as error:
        raise BaselineError(f"{path} {error}") from None


def _line_end(path: Path) -> bytes:
    """How the first line of a file ends; a newline where there is no file or no line."""
    try:
        with open(path, "rb") as file:
            first, newline, _ = file.read(_HEAD_BYTES).partition(b"\n")
    except OSError:
        return b"\n"
    return b"\r\n" if newline and first.endswith(b"\r") else b"\n"
