"""RESULTS as subcommands take them: journals, baseline files and, where they are of use, histories."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import open_regular, why
from perfsuite.baselines.baseline import Baseline
from perfsuite.metrics import read_run
from perfsuite.record.codec import plain_json
from perfsuite.record.run import RunRecord

_LONGEST_HEADER = 1 << 24


def read_results(path: Path) -> RunRecord | Baseline:
    """A journal or a baseline file; PerfsuiteError when it is neither, or damaged."""
    require_file(path, "a journal or a baseline file")
    first = first_object(path)
    is_journal = path.suffix == ".jsonl" if first is None else "header" in first
    if is_journal:
        return read_run(path)
    from perfsuite.baselines import store

    return store.read(path)


def require_file(path: Path, kinds: str) -> None:
    """Raise ConfigurationError, which names the kinds of files that are of use, unless there is a file."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is no file; give {kinds}")


def first_object(path: Path) -> Mapping[str, Any] | None:
    """The JSON object on the first line; None where there is none: a baseline file has no object on one line alone."""
    try:
        with open_regular(path) as file:
            first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {why(error)}") from None
    try:
        plain = plain_json(first)
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else {}
