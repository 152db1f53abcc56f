"""Files with measurements, a baseline or a history: read as a whole, and replaced by one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from perfsuite.base import files, writing
from perfsuite.base.errors import BaselineError

DEADLINE_S = 60.0  # Seconds that a writer waits for other writers.
_POLL_S = 0.02


@contextlib.contextmanager
def locked(path: Path, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Hold the lock of ``path``: the file ``.<name>.lock`` in the same folder, which exists only while it is locked.

    The file is removed while it is still locked; a waiting writer then sees that the name is gone and starts again.  A
    crash leaves an unlocked file, which the next writer uses.  Raises BaselineError after ``deadline_s`` seconds, and
    if the folder cannot be written.
    """
    side = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(side, time.monotonic() + deadline_s)
    except OSError as error:
        raise BaselineError(
            f"{side} cannot be locked: {files.why(error)}; use a folder that can be written and locked"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the next writer uses a side file that could not be removed
            side.unlink()
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _acquire(side: Path, until: float) -> int:
    while True:
        made = not side.exists()
        descriptor = os.open(side, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, side):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(descriptor)
                raise BaselineError(
                    f"{side} has been locked by another process for too long; end that process and run again"
                ) from None
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks: no other process holds it
            os.close(descriptor)
            if made:
                side.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def _is_named(descriptor: int, side: Path) -> bool:
    """Return whether ``side`` is still the locked file: its last holder may have removed it."""
    try:
        named = side.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_ino, named.st_dev) == (held.st_ino, held.st_dev)


def content(path: Path, most_bytes: int, remedy: str) -> bytes:
    """Return the bytes of a file.  Raises BaselineError if it is too large or cannot be read."""
    try:
        return files.content(path, most_bytes)
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {files.why(error)}; {remedy}") from None


def refuse_foreign(path: Path, folder: Path | None = None, *, remedy: str = "") -> None:
    """Raise BaselineError if ``path`` is a symbolic link out of ``folder`` (default: its own)."""
    target = files.foreign_target(path, folder)
    if target is not None:
        raise BaselineError(
            f"{path}: is a link to {target}, outside {folder or path.parent}; results are stored in their own folder: "
            f"move the file there, or give the path of the file{remedy}"
        )


def replace(path: Path, data: bytes, most_bytes: int, remedy: str) -> None:
    """Replace a file; the caller holds its lock.  Raises BaselineError if it is too large to be read again."""
    if len(data) > most_bytes:
        raise BaselineError(
            f"{path}: would have {len(data)} bytes, but at most {most_bytes} can be read; the file was not changed: "
            f"{remedy}"
        )
    try:
        writing.put(path, data, draft="new")
    except writing.WriteFailed as error:
        raise BaselineError(f"{path} {error}") from None
