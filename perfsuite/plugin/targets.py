"""Files that a run writes at its end: whether they can be written is found out before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def require_writable(path: Path, option: str) -> None:
    """Make the folder of ``path`` and open it for writing; UsageError names ``option`` and what to do.

    A file that is there keeps its contents, one that was not is gone again.
    """
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
        if new:
            path.unlink()
    except OSError as error:
        if path.is_dir():
            raise pytest.UsageError(f"{option}: {path} is a folder; name a file in it") from None
        raise pytest.UsageError(f"{option}: {path} cannot be written: {error.strerror}; name another file") from None
