"""One writer at a time: an advisory lock on a side file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from perfsuite.base.errors import BaselineError
from perfsuite.base.files import why

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
            f"{side} cannot be locked: {why(error)}; its folder must be one that can be written and locked"
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a side file that stays is taken over by the next writer
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
        except OSError:  # a file system without locks: nobody else holds it either
            os.close(descriptor)
            if made:
                side.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def _is_named(descriptor: int, side: Path) -> bool:
    """Whether ``side`` is still the name of the file that was locked: its last holder may have removed it."""
    try:
        named = side.stat()
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return (named.st_ino, named.st_dev) == (held.st_ino, held.st_dev)
