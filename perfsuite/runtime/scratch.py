"""Directories in the temporary directory that end with the process that made them, however it ends.

A process that is killed removes nothing.  So every scratch directory has a file that its maker keeps locked as long as
it lives, by an flock that the kernel gives back at its end; whoever makes the next directory removes those that nobody
holds.  Only what belongs to this user and has that file is touched.

Folders with predictable names (``/tmp/perfsuite-data-1000``) are used only where no other user can put anything into
them: whoever comes first makes them, and could leave wrong data there, or code that a compiler's cache would run.  All
ranks of a host come to the same answer without asking each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from perfsuite.base.files import user_cache, why_not_private

PREFIX = "perfsuite-"
LOCK = ".perfsuite-in-use"
"""The locked file in a scratch directory."""


def keys_home() -> Path:
    """Where keys of launches on this host lie; whoever offers one checks that it is private."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{os.getuid()}"


def make_directory(purpose: str) -> tuple[Path, Callable[[], None]]:
    """A new directory ``perfsuite-<purpose>-...`` of mode 0700, and how to remove it (idempotent).

    First removes what killed processes of this user left.  Raises OSError where the temporary directory cannot be
    written to.
    """
    clear()
    draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{purpose}-"))
    lock = os.open(draft / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    hold(lock)
    # Locked before it has a name that others look for: nobody can take it for a dead process's.
    directory = draft.rename(draft.with_name(draft.name[1:]))

    def remove() -> None:
        nonlocal lock
        if lock >= 0:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
            lock = -1

    return directory, remove


@contextlib.contextmanager
def directory(purpose: str) -> Iterator[Path]:
    """:func:`make_directory` for the length of a block."""
    path, remove = make_directory(purpose)
    try:
        yield path
    finally:
        remove()


def hold(descriptor: int) -> bool:
    """Lock an open file until it is closed or this process ends; False when a living process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or on a file system without locks: then nobody can tell, and it stays
        return False
    return True


def clear() -> None:
    """Remove the scratch directories and keys that killed processes of this user left in the temporary directory."""
    directories = Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*/{LOCK}")
    for file in (*directories, *keys_home().glob("key-*")):
        with contextlib.suppress(OSError):  # gone, or not ours
            _remove_if_left(file)


def _remove_if_left(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mine = os.fstat(descriptor).st_uid == os.lstat(file.parent).st_uid == os.getuid()
        # The name may have come to stand for another file meanwhile: the key of a launch that has just begun.
        if mine and hold(descriptor) and os.path.samestat(os.fstat(descriptor), os.lstat(file)):
            if file.name == LOCK:
                shutil.rmtree(file.parent, ignore_errors=True)
            else:
                file.unlink()
    finally:
        os.close(descriptor)


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
