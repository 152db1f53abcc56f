"""Files that somebody asked for: written whole or not at all, and refused before the work where they cannot be."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from perfsuite.errors import ConfigurationError


def write_file(path: Path, text: str, *, option: str = "") -> None:
    """Write ``text`` to a file beside ``path`` and move it there; ConfigurationError, and nothing left, on failure.

    What is no file, such as a pipe or ``/dev/stdout``, is written to as it is.  Half a character, which UTF-8 lacks,
    becomes an escape.  ``option`` is what named the file.
    """
    in_place = path.exists() and not path.is_file()
    draft = path if in_place else path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        if not in_place:
            draft.replace(path)
    except OSError as error:
        if not in_place:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{f'{option}: ' if option else ''}{path} cannot be written: {error.strerror}; "
            "make room or name another place"
        ) from None


def require_writable(path: Path, option: str, *, with_folder: bool = False) -> None:
    """Raise ConfigurationError, which names ``option``, unless :func:`write_file` can write to ``path``.

    A file that is there keeps its contents, and none is left that was not; ``with_folder`` makes the folder.
    """
    if path.is_dir():
        raise ConfigurationError(f"{option}: {path} is a folder; name a file in it")
    try:
        if with_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") if path.exists() else tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be written: {error.strerror}; name another file") from None


def make_folder(folder: Path) -> None:
    """Make ``folder`` unless it is there; ConfigurationError when that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"folder {folder} cannot be made: {error.strerror}; name another one") from None
