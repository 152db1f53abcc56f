"""Read files, and find those that come with the package."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from perfsuite.base.errors import PerfsuiteError


def why(error: OSError) -> str:
    """Return the reason of a system error: ``No space left on device``."""
    return error.strerror or str(error) or type(error).__name__


MOST_BYTES = 1 << 30  # Default limit of the bytes of a file that is read as a whole.


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raise OSError for a folder, a device and a pipe, which might block for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")


def content(path: Path, most_bytes: int = MOST_BYTES, *, pipe: bool = False) -> bytes:
    """Return the bytes of a regular file, or with ``pipe`` of a pipe; raise OSError if there are more."""
    with open(path, "rb") if pipe else open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most_bytes else file.read(most_bytes + 1)
        if max(size, len(data)) > most_bytes:
            raise OSError(errno.EFBIG, f"it has {max(size, len(data))} bytes; the limit is {most_bytes}")
        return data


def decoded(data: bytes, errors: str) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark; raise OSError for a gzip file."""
    if data.startswith(b"\x1f\x8b"):
        raise OSError(errno.EINVAL, "it is compressed; unpack it first, for example with gunzip")
    return data.decode("utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig", errors)


def foreign_target(path: Path, folder: Path | None = None) -> Path | None:
    """Return the target of a link in a repository outside of ``folder`` (default: its own); None without one."""
    target = Path(os.path.realpath(path))
    return None if target.is_relative_to(os.path.realpath(folder or path.parent)) else target


def user_cache() -> Path:
    """Return ``$XDG_CACHE_HOME/perfsuite`` or ``~/.cache/perfsuite``; it may not exist."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named if os.path.isabs(named) else os.path.expanduser("~/.cache")) / "perfsuite"


def shipped(checkout: str, installed: str, pattern: str, failure: type[PerfsuiteError]) -> Path:
    """Return the folder of data files that come with the package.

    It is ``checkout`` in a checkout, else ``share/perfsuite/<installed>`` in a folder above the package: an
    environment, a user's own folder or one named by pip's ``--target``. Raises ``failure`` if no file fits.
    """
    package = Path(__file__).parents[1]
    for place in (package.parent / checkout, *(up / "share" / "perfsuite" / installed for up in package.parents)):
        if any(place.glob(pattern)):
            return place
    raise failure(
        f"no {pattern} in {package.parent / checkout} or in share/perfsuite/{installed} of a folder above {package}; "
        "reinstall perfsuite"
    )
