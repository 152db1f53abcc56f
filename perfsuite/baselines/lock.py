"""One writer at a time: an advisory lock on a side file, and replacing a file as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from perfsuite.errors import BaselineError

DEADLINE_S = 60.0
"""How long a writer waits for the others."""
_POLL_S = 0.02


@contextlib.contextmanager
def locked(path: Path, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Hold the lock of ``path``, the file ``.<name>.lock`` beside it, which exists only while somebody holds it.

    The file is removed while it is still locked, so whoever waited on it finds that its name is gone and starts again;
    a crash leaves a file that nobody has locked, which the next writer takes over.  Raises BaselineError after
    ``deadline_s`` seconds and when the folder cannot be written.
    """
    side = path.with_name(f".{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _acquire(side, time.monotonic() + deadline_s)
    except OSError as error:
        raise BaselineError(
            f"{side} cannot be locked: {error.strerror}; baselines need a folder that can be written and locked"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            side.unlink()
        os.close(descriptor)


def _acquire(side: Path, until: float) -> int:
    while True:
        descriptor = os.open(side, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > until:
                raise BaselineError(
                    f"{side} has been locked by another process for too long; end that process and run again"
                ) from None
            time.sleep(_POLL_S)
            continue
        if _is_named(descriptor, side):
            return descriptor
        os.close(descriptor)


def _is_named(descriptor: int, side: Path) -> bool:
    """Whether ``side`` is still the name of the file that was locked: its last holder may have removed it."""
    try:
        named = side.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_ino, named.st_dev) == (held.st_ino, held.st_dev)


def replace(path: Path, text: str, *, line_end: str = "\n") -> None:
    """Put ``text`` where ``path`` is: a reader sees the old file or the new one, also after a power cut.

    Call it with the lock held.  A symbolic link stays one, and permissions stay what they were.  Halves of characters,
    which UTF-8 lacks, become escapes.  Raises BaselineError.
    """
    target = Path(os.path.realpath(path))
    fresh = target.with_name(f".{target.name}.new")
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        with open(fresh, "w", encoding="utf-8", errors="backslashreplace", newline=line_end) as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, target)
        folder = os.open(target.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise BaselineError(f"{path} cannot be written: {error.strerror}; the file is as it was") from None


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
