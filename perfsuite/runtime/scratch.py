"""Temporary directories that are removed even if the process that made them was killed.

A killed process removes nothing. So each scratch directory has a file that its maker locks (flock) as long as it
lives. The next process that makes a directory removes those without a lock. It removes only directories of this user
that have such a file.

Folders with predictable names (``/tmp/perfsuite-data-1000``) are used only if no other user can write to them. Another
user could make them first and put wrong data or code for a compiler's cache there. All ranks of a host choose the same
folder without communication.
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

from perfsuite.base.files import user_cache
from perfsuite.base.writing import why_not_private

PREFIX = "perfsuite-"
LOCK = ".perfsuite-in-use"  # The locked file in a scratch directory.


def keys_home() -> Path:
    """Return the folder of the keys of launches on this host; a process that offers a key checks that it is private."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{os.getuid()}"


def make_directory(purpose: str) -> tuple[Path, Callable[[], None]]:
    """Return a new directory ``perfsuite-<purpose>-...`` of mode 0700, and an idempotent function that removes it.

    First removes the directories of killed processes of this user. Raises OSError if the temporary directory is not
    writable.
    """
    clear()
    draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{purpose}-"))
    lock = -1
    try:
        lock = os.open(draft / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        hold(lock)
        # The lock comes before the name that other processes search for: none can remove it as a leftover.
        directory = draft.rename(draft.with_name(draft.name[1:]))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
        raise

    def remove() -> None:
        nonlocal lock
        if lock >= 0:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
            lock = -1

    return directory, remove


@contextlib.contextmanager
def directory(purpose: str) -> Iterator[Path]:
    """Make a directory as :func:`make_directory` does, and remove it after the block."""
    path, remove = make_directory(purpose)
    try:
        yield path
    finally:
        remove()


def hold(descriptor: int) -> bool:
    """Lock an open file until it is closed or this process ends; return False if a living process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or on a file system without locks: then the directory stays
        return False
    return True


def clear() -> None:
    """Remove the scratch directories and keys of killed processes of this user from the temporary directory."""
    directories = Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*/{LOCK}")
    for file in (*directories, *keys_home().glob("key-*")):
        with contextlib.suppress(OSError):  # removed meanwhile, or owned by another user
            _remove_if_left(file)


def _remove_if_left(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        is_own = os.fstat(descriptor).st_uid == os.lstat(file.parent).st_uid == os.getuid()
        # Meanwhile the name may belong to another file: the key of a launch that has just begun.
        if is_own and hold(descriptor) and os.path.samestat(os.fstat(descriptor), os.lstat(file)):
            if file.name == LOCK:
                shutil.rmtree(file.parent, ignore_errors=True)
            else:
                file.unlink()
    finally:
        os.close(descriptor)


INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # Variable with the folder from which torch's compiler loads compiled code.


def data_folder() -> Path:
    """Return the cache of generated data sets; raise OSError if there is no private folder for it."""
    folder, problems = _private(_data_folders())
    if folder is None:
        raise PermissionError(0, "; ".join(problems))
    return folder


def compiler_variables() -> dict[str, str]:
    """Return variables of ranks that move compiled code to a private folder; empty if it is in one."""
    if os.environ.get(INDUCTOR):
        return {}
    folder, problems = _private(_compiler_folders())
    if folder is None:
        folder = _made_once(tempfile.gettempdir())
    return {INDUCTOR: str(folder)} if problems else {}


@functools.cache
def _made_once(temporary: str) -> Path:
    """Make a folder in the temporary directory; the next run removes it after the end of this process."""
    return make_directory("compiled")[0]


def remarks() -> list[str]:
    """Return why folders of this host are not in their usual places; does not create folders."""
    usual = [next(_data_folders()), *([] if os.environ.get(INDUCTOR) else [next(_compiler_folders())])]
    problems = [(folder, why_not_private(folder)) for folder in usual if os.path.lexists(folder)]
    return [f"{folder} {problem}: perfsuite uses another folder" for folder, problem in problems if problem]


def _private(folders: Iterator[Path]) -> tuple[Path | None, list[str]]:
    """Return the first private folder, and the problems of the folders before it."""
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
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user id of a container without a name
        name = str(os.getuid())
    return re.sub(r'[\\/:*?"<>|]', "_", name)
