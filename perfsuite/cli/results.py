"""Read the RESULTS of subcommands: journals and baseline files."""

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
    """Return the contents of a journal or a baseline file.  Raises PerfsuiteError if it is neither, or damaged."""
    require_file(path, "a journal or a baseline file")
    first = first_object(path)
    is_journal = path.suffix == ".jsonl" if first is None else "header" in first
    if is_journal:
        return read_run(path)
    from perfsuite.baselines import store

    return store.read(path)


def require_file(path: Path, kinds: str) -> None:
    """Raise ConfigurationError with the accepted ``kinds`` of files unless ``path`` is a file."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file; give {kinds}")


def first_object(path: Path) -> Mapping[str, Any] | None:
    """Return the JSON object on the first line; None without one: a baseline file has no object on its first line."""
    try:
        with open_regular(path) as file:
            first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {why(error)}; correct the path or the permissions") from None
    try:
        plain = plain_json(first)
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else {}
