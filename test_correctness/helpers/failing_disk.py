"""A disk on which the n-th operation below one folder fails, as SQLite tests its own journal."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES)
BY_PATH = ("open", "mkdir", "replace", "rename", "unlink", "truncate")
BY_DESCRIPTOR = ("write", "fsync", "close", "ftruncate", "fchmod")


class FailingDisk:
    """Counts the operations on files below ``folder``, and fails the one with the number ``at``, from 0.

    ``lasting``: those after it fail too, but for what takes nothing on a disk: closing and removing.  ``short``: a
    write does not fail but takes half of its bytes.
    """

    def __init__(self, folder: Path, at: int = -1, *, error: int = 0, lasting: bool = False, short: bool = False):
        self.folder, self.at, self.error, self.lasting, self.short = str(folder), at, error, lasting, short
        self.calls: list[str] = []

    @contextmanager
    def mounted(self) -> Iterator[FailingDisk]:
        with pytest.MonkeyPatch.context() as patch:
            for name in BY_PATH:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name), str))
            for name in BY_DESCRIPTOR:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name), path_of))
            patch.setattr(fcntl, "flock", self._wrapped("flock", fcntl.flock, path_of))
            yield self

    def _wrapped(self, name: str, real: Callable[..., Any], place: Callable[[Any], str]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            if not place(first).startswith(self.folder):
                return real(first, *rest, **options)
            number = len(self.calls)
            self.calls.append(name)
            fails = number == self.at or (self.lasting and 0 <= self.at < number and name not in ("close", "unlink"))
            if fails and self.short and name == "write":
                return real(first, bytes(rest[0])[: max(len(rest[0]) // 2, 1)])
            if fails and not self.short:
                if name == "close":
                    real(first)  # the kernel lets go of it all the same
                raise OSError(self.error, os.strerror(self.error))
            return real(first, *rest, **options)

        return call


def path_of(descriptor: int) -> str:
    """The file that a descriptor is of."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def every_fault(folder: Path, act: Callable[[], object]) -> Iterator[FailingDisk]:
    """A disk for every operation that ``act`` does on files below ``folder``, once, lasting and short."""
    with FailingDisk(folder).mounted() as whole:
        act()
    for at, name in enumerate(whole.calls):
        error = ERRORS[at % len(ERRORS)]
        yield FailingDisk(folder, at, error=error)
        yield FailingDisk(folder, at, error=error, lasting=True)
        if name == "write":
            yield FailingDisk(folder, at, short=True)
