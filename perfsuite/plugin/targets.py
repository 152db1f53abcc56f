"""Files that a run writes at its end: whether they can be written is found out before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.errors import ConfigurationError


def require_writable(path: Path, option: str) -> None:
    """Raise UsageError, which names ``option``, unless the file can be written; its folder is made."""
    from perfsuite import files

    try:
        files.require_writable(path, option, with_folder=True)
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from None
