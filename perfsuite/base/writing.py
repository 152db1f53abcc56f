"""Write files completely or not at all, in folders that other users cannot write to.

Only :func:`put` replaces a file; :func:`write_file` does so for a file that a user named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import why

_NAME_BYTES = 200  # Bytes of a file's name in its draft's name: most file systems allow 255.


class WriteFailed(Exception):
    """A file was not written, or a power cut may lose it; ``str()`` continues a sentence that begins with the file."""


def put(path: Path, data: bytes, *, draft: str = "") -> None:
    """Replace the file ``path`` by ``data``: a reader sees the old file or the new one, also after a power cut.

    A symbolic link stays a link, permissions stay the same, and pipes and devices are written directly. ``draft`` ends
    the name of the draft; default: the process id. Raises WriteFailed, and leaves no draft.
    """
    existed = os.path.exists(path)
    try:
        if _is_stream(path):
            _fill(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), data, sync=False)
            return
        target = Path(os.path.realpath(path))
        name = target.name.encode(errors="surrogateescape")[:_NAME_BYTES].decode(errors="ignore")
        fresh = target.with_name(f".{name}.{draft or os.getpid()}")
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        with contextlib.suppress(FileNotFoundError):  # the draft of a killed writer, or another user's link
            fresh.unlink()
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            _fill(descriptor, data, mode=mode)
            os.replace(fresh, target)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
    except OSError as error:
        raise _not_written(error, existed) from None
    try:
        _sync_folder(target.parent)
    except OSError as error:
        raise WriteFailed(f"was written, but a power cut may lose it: {why(error)}") from None


def append(path: Path, data: bytes) -> None:
    """Add ``data`` to a file to which other programs append; raise WriteFailed, and keep the old length then."""
    existed = os.path.exists(path)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        end = os.fstat(descriptor).st_size
        try:
            _fill(descriptor, data, sync=False)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, end) if existed else path.unlink()
            raise
    except OSError as error:
        raise _not_written(error, existed) from None


def _not_written(error: OSError, existed: bool) -> WriteFailed:
    return WriteFailed(f"cannot be written: {why(error)}{'; the file is unchanged' if existed else ''}")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data`` to an open file."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _fill(descriptor: int, data: bytes, *, mode: int | None = None, sync: bool = True) -> None:
    """Write, sync and close; raise the first OSError, and close the file in any case."""
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(descriptor)
        raise
    os.close(descriptor)  # network file systems report an exceeded quota here


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system on which folders cannot be synced
            raise
    finally:
        os.close(descriptor)


def _is_stream(path: Path) -> bool:
    """Return whether ``path`` is a pipe, a device or an open file such as ``/dev/stdout``."""
    absolute = os.path.abspath(path)
    named = absolute.startswith(("/dev/", "/proc/")) and not absolute.startswith("/dev/shm/")
    return path.exists() and (named or not path.is_file())


def write_file(path: Path, text: str, *, option: str = "") -> None:
    """Write text to a file of ``option``, half surrogates as escapes; raise ConfigurationError on failure."""
    try:
        put(path, text.encode("utf-8", "backslashreplace"))
    except WriteFailed as error:
        raise ConfigurationError(
            f"{f'{option}: ' if option else ''}{path} {error}; free some space or name another file"
        ) from None


def require_writable(path: Path, option: str, *, with_folder: bool = False) -> None:
    """Raise ConfigurationError unless :func:`write_file` can write to ``path``; ``with_folder`` makes the folder."""
    try:
        if path.is_dir():
            raise ConfigurationError(f"{option}: {path} is a folder; name a file in it")
        if with_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with path.open("ab"):
                pass
        if not _is_stream(path):
            with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):
                pass
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be written: {why(error)}; name another file") from None


def make_folder(folder: Path) -> None:
    """Make ``folder`` unless it exists; raise ConfigurationError on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"folder {folder} cannot be made: {why(error)}; name another one") from None


def why_not_private(folder: Path) -> str:
    """Make a folder of mode 0700 if there is none; return why other users could write to it, or an empty text.

    A folder of this user that others can only read gets mode 0700. A folder to which others could write is refused,
    because it may already contain their files.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status, around = os.lstat(folder), folder.parent.stat()
        problem = _why_not_private(status)
        if not problem and around.st_mode & 0o002 and not around.st_mode & stat.S_ISVTX:
            problem = f"is in {folder.parent}, where other users can replace it"
        if not problem and status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        return f"cannot be made: {why(error)}"
    return problem if problem or os.access(folder, os.W_OK | os.X_OK) else "cannot be written to"


def _why_not_private(status: os.stat_result) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return "is a symbolic link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
    if status.st_uid != os.getuid():
        return f"belongs to user id {status.st_uid}, not to yours ({os.getuid()})"
    if status.st_mode & 0o022:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}: other users can write to it"
    return ""
