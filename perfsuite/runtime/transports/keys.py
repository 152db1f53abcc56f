"""The secret that proves to the driver and its agents that they belong to one launch.

``PERFSUITE_KEY`` holds it, or ``PERFSUITE_KEY_FILE`` names a file that only its owner can read.  A launch on one host
needs neither: the driver leaves a fresh key in a private directory, which a process of another user cannot read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from perfsuite.errors import LaunchError
from perfsuite.runtime.scratch import hold, keys_home
from perfsuite.runtime.transports.launchers import Launch

KEY = "PERFSUITE_KEY"
KEY_FILE = "PERFSUITE_KEY_FILE"
SHORTEST_KEY = 16
"""Characters; a key that fits into a few guesses is none."""
_MAKE_FILE = "make one: (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' > FILE)"


@dataclass(frozen=True, kw_only=True)
class OfferedKey:
    """The driver's key."""

    key: bytes
    file: Path | None = None
    """The file that was made for this launch, to be removed by :meth:`discard`; None for a key of the user's."""
    lock: IO[bytes] | None = None
    """The file, held as long as the key is offered: nobody takes it for one that a killed driver left."""

    def discard(self) -> None:
        """Remove the file unless another launch has replaced it.  Idempotent."""
        if self.lock is not None:
            self.lock.close()
        if self.file is not None:
            with contextlib.suppress(OSError):
                if self.file.read_bytes() == self.key:
                    self.file.unlink()


def offer_key(launch: Launch, environ: Mapping[str, str]) -> OfferedKey:
    """On the driver: the user's key, or on a single host a new one, put where the agents look for it.

    Raises LaunchError for several hosts without a key and for a key that others could know.
    """
    given = _given_key(environ)
    if given is not None:
        return OfferedKey(key=given)
    _require_single_host(launch)
    key = secrets.token_hex(32).encode()
    try:
        file = _automatic_file(launch)
        # Written beside and renamed: an agent sees the whole key or none, a key left by a killed driver is replaced.
        fd, draft = tempfile.mkstemp(dir=file.parent)  # mode 0600
        hold(fd)
        stream = os.fdopen(fd, "wb", buffering=0)
        stream.write(key)
        os.replace(draft, file)
    except OSError as problem:
        raise LaunchError(
            f"no key can be written under {tempfile.gettempdir()} ({problem.strerror}): processes of a launch prove "
            f"by it that they belong together; make the directory writable, or set TMPDIR or {KEY}"
        ) from None
    return OfferedKey(key=key, file=file, lock=stream)


def find_key(launch: Launch, environ: Mapping[str, str]) -> bytes | None:
    """On an agent: the key, or None as long as the driver of a single host has not offered one.

    Raises LaunchError as :func:`offer_key` does.
    """
    given = _given_key(environ)
    if given is not None:
        return given
    _require_single_host(launch)
    file = _automatic_file(launch)
    return _read_private(file, os.O_NOFOLLOW) if file.exists() else None


def _given_key(environ: Mapping[str, str]) -> bytes | None:
    if environ.get(KEY):
        return _long_enough(environ[KEY].strip().encode(), KEY)
    if not environ.get(KEY_FILE):
        return None
    file = Path(environ[KEY_FILE])
    try:
        return _long_enough(_read_private(file).strip(), f"{KEY_FILE}={file}")
    except OSError as problem:
        raise LaunchError(
            f"{KEY_FILE}={file} cannot be read ({problem.strerror}): every process of the launch needs it; {_MAKE_FILE}"
        ) from None


def _long_enough(key: bytes, source: str) -> bytes:
    if len(key) < SHORTEST_KEY:
        raise LaunchError(
            f"{source} has {len(key)} characters: a key needs at least {SHORTEST_KEY}; "
            f"take the output of: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return key


def _require_single_host(launch: Launch) -> None:
    if not launch.single_host:
        raise LaunchError(
            f"{launch.launcher} gave ranks on several hosts, and neither {KEY} nor {KEY_FILE} is set: control over a "
            f"network needs a key; set {KEY_FILE} on all hosts to a shared file of mode 0600 ({_MAKE_FILE})"
        )


def _read_private(file: Path, flags: int = 0) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    with os.fdopen(fd, "rb") as stream:
        _require_private(os.fstat(fd), file)
        return stream.read(1 << 16)


def _require_private(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid():
        raise LaunchError(
            f"{path} belongs to user id {status.st_uid}, not to yours ({os.getuid()}): its owner would know the key; "
            "use a file of your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        wanted = 0o700 if stat.S_ISDIR(status.st_mode) else 0o600
        raise LaunchError(
            f"{path} has mode {mode:04o}: others could read or replace the key; run 'chmod {wanted:04o} {path}'"
        )


def _automatic_file(launch: Launch) -> Path:
    directory = keys_home()
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise LaunchError(f"{directory} is no directory: the key of a launch goes there; remove it or set {KEY}")
    _require_private(status, directory)
    return directory / f"key-{hashlib.sha256(launch.run_id.encode()).hexdigest()[:16]}"
