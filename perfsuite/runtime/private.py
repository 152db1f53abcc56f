"""Folders with predictable names in the temporary directory, used only where no other user can put anything into them.

Whoever comes first makes ``/tmp/perfsuite-data-1000``: another user of the host could leave wrong data there, or code
that a compiler's cache would run.  All ranks of a host come to the same answer without asking each other.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from perfsuite.base.files import user_cache, why_not_private
from perfsuite.runtime.scratch import make_directory

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch's compiler keeps what it compiled, and runs it from."""


def data_folder() -> Path:
    """The cache of generated data sets; OSError where there is no private folder for it."""
    folder, problems = _private(_data_folders())
    if folder is None:
        raise PermissionError(0, "; ".join(problems))
    return folder


def compiler_variables() -> dict[str, str]:
    """What ranks get in their environment so that compiled code comes from a private folder; empty where it does."""
    if os.environ.get(INDUCTOR):
        return {}
    folder, problems = _private(_compiler_folders())
    if folder is None:
        folder = _made_once(tempfile.gettempdir())
    return {INDUCTOR: str(folder)} if problems else {}


@functools.cache
def _made_once(temporary: str) -> Path:
    """A new folder in the temporary directory; removed by the next run, when this process has ended."""
    return make_directory("compiled")[0]


def remarks() -> list[str]:
    """Why folders of this host are not where they usually are; the usual ones are not made for it."""
    usual = [next(_data_folders()), *([] if os.environ.get(INDUCTOR) else [next(_compiler_folders())])]
    problems = [(folder, why_not_private(folder)) for folder in usual if os.path.lexists(folder)]
    return [f"{folder} {problem}: it is not used, another folder is" for folder, problem in problems if problem]


def _private(folders: Iterator[Path]) -> tuple[Path | None, list[str]]:
    """The first folder that is private, and what is wrong with those before it."""
    problems: list[str] = []
    for folder in folders:
        problem = why_not_private(folder)
        if not problem:
            return folder, problems
        problems.append(f"{folder} {problem}")
    return None, problems


def _data_folders() -> Iterator[Path]:
    yield Path(tempfile.gettempdir()) / f"perfsuite-data-{os.getuid()}"
    yield user_cache() / "data"


def _compiler_folders() -> Iterator[Path]:
    yield Path(tempfile.gettempdir()) / f"torchinductor_{_user()}"
    yield user_cache() / "compiled"


def _user() -> str:
    """The user's name as torch writes it there."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user id that has no name
        name = str(os.getuid())
    return re.sub(r'[\\/:*?"<>|]', "_", name)
