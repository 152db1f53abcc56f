"""Where the journals of a project are: in its folder ``.perfsuite``, or in the user's cache if that is not writable."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import user_cache, why
from perfsuite.base.writing import WriteFailed, put, why_not_private

FOLDER = ".perfsuite"
_PATTERN = "journal-*.jsonl"


def cache_folder(root: Path) -> Path:
    """The folder in the user's cache that has the journals of the project in ``root``."""
    absolute = os.path.abspath(root)
    digits = hashlib.sha256(os.fsencode(absolute)).hexdigest()[:12]
    return user_cache() / "journals" / f"{Path(absolute).name[:60]}-{digits}"


def usable_folder(root: Path, here: Path) -> tuple[Path, str]:
    """A folder for a new journal, and why it is not the one in ``root``: empty if it is.

    The folders are ``.perfsuite`` in the root directory and in ``here``, the invocation directory, then the user's
    cache.  Raises ConfigurationError if none can be written to.
    """
    problems: list[str] = []
    for folder in dict.fromkeys((root / FOLDER, here / FOLDER, cache_folder(root))):
        problem = _why_not(folder)
        if not problem:
            return folder, "; ".join(problems)
        problems.append(f"{folder} {problem}")
    raise ConfigurationError(f"no place for the journal: {'; '.join(problems)}; name a file by --perf-journal")


def _why_not(folder: Path) -> str:
    """Make a folder for journals; why no file can be made in it, empty if one can."""
    if folder.name != FOLDER:
        return why_not_private(folder.parent.parent) or why_not_private(folder.parent) or why_not_private(folder)
    try:
        if not folder.exists():
            folder.mkdir()
            try:
                put(folder / ".gitignore", b"*\n")  # in other people's repositories too
            except WriteFailed as error:
                folder.rmdir()
                return str(error)
        if _is_foreign(folder):
            return "belongs to another user"
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"cannot be written: {why(error)}"
    return ""


def _is_foreign(folder: Path) -> bool:
    """Whether another user put the folder where everybody can put one, such as in ``/tmp``."""
    return bool(folder.parent.stat().st_mode & 0o002) and os.lstat(folder).st_uid != os.getuid()


def other_places(root: Path, path: Path) -> Iterator[Path]:
    """Where the rest of a run can go whose journal ``path`` was lost: the user's cache, then a new private folder."""
    folder = cache_folder(root)
    if not _why_not(folder):
        yield folder / path.name
    private = None
    with contextlib.suppress(OSError):  # no temporary folder can be written to
        private = Path(tempfile.mkdtemp(prefix="perfsuite-journal-"))
    if private is not None:
        yield private / path.name


def newest(here: Path) -> Path:
    """The newest journal of the project around ``here``; ConfigurationError if there is none."""
    for folder in (here, *here.parents):
        places = [place for place in (folder / FOLDER, cache_folder(folder)) if place.is_dir()]
        journals = [path for place in places if not _is_foreign(place) for path in place.glob(_PATTERN)]
        if journals:
            return max(journals, key=lambda path: path.name)
    raise ConfigurationError(
        f"no journal in {here / FOLDER}, in that folder of a parent directory or in {user_cache() / 'journals'}; "
        "name a journal or a baseline file"
    )
