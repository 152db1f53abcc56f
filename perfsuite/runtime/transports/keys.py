"""The secret that proves to the driver and its agents that they belong to one launch, and where one host's meet.

``PERFSUITE_KEY`` holds it, or ``PERFSUITE_KEY_FILE`` names a file that only its owner can read.  A launch on one host
needs neither: the driver leaves a fresh key in a private directory, which a process of another user cannot read.  The
same file names the socket of that driver.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from perfsuite.base.errors import LaunchError
from perfsuite.runtime.scratch import hold, keys_home, make_directory
from perfsuite.runtime.transports.launchers import Launch

KEY = "PERFSUITE_KEY"
KEY_FILE = "PERFSUITE_KEY_FILE"
SHORTEST_KEY = 16
"""Characters; a key that fits into a few guesses is none."""
_MAKE_FILE = "make one: (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' > FILE)"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a process must know to meet the others of its launch."""

    key: bytes
    socket: Path = Path()
    """Where the driver of a launch on one host listens."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The driver's :class:`Meeting`, and what it has put where the agents look for it."""

    meeting: Meeting
    file: Path | None = None
    """The file that was made for this launch; None between hosts, where the key is the user's."""
    content: bytes = b""
    lock: IO[bytes] | None = None
    """The file, held as long as it is offered: nobody takes it for one that a killed driver left."""
    remove: Callable[[], None] = lambda: None
    """Removes the directory of the socket."""

    def discard(self) -> None:
        """Remove the file unless another launch has replaced it.  Idempotent."""
        self.remove()
        if self.lock is not None:
            self.lock.close()
        if self.file is not None:
            with contextlib.suppress(OSError):
                if self.file.read_bytes() == self.content:
                    self.file.unlink()


def offer_meeting(launch: Launch, environ: Mapping[str, str]) -> Offer:
    """On the driver: the user's key, or on a single host a new one, put where the agents look for it.

    Raises LaunchError for several hosts without a key and for a key that others could know.
    """
    given = _given_key(environ)
    if not launch.single_host:
        return Offer(meeting=Meeting(key=_require_key(launch, given)))
    fresh = secrets.token_hex(32)
    try:
        file = _automatic_file(launch)
        directory, remove = make_directory("driver")
        socket = directory / "socket"
        content = json.dumps({"key": None if given else fresh, "socket": str(socket)}).encode()
        # Written beside and renamed: an agent sees the whole file or none, one left by a killed driver is replaced.
        fd, draft = tempfile.mkstemp(dir=file.parent)  # mode 0600
        hold(fd)
        stream = os.fdopen(fd, "wb", buffering=0)
        stream.write(content)
        os.replace(draft, file)
    except OSError as problem:
        raise LaunchError(
            f"no key can be written under {tempfile.gettempdir()} ({problem.strerror}): processes of a launch prove "
            "by it that they belong together; make the directory writable, or set TMPDIR"
        ) from None
    meeting = Meeting(key=given or fresh.encode(), socket=socket)
    return Offer(meeting=meeting, file=file, content=content, lock=stream, remove=remove)


def find_meeting(launch: Launch, environ: Mapping[str, str]) -> Meeting | None:
    """On an agent: what the driver offers; None as long as the driver of a single host has not offered anything.

    Raises LaunchError as :func:`offer_meeting` does.
    """
    given = _given_key(environ)
    if not launch.single_host:
        return Meeting(key=_require_key(launch, given))
    file = _automatic_file(launch)
    try:
        offered = json.loads(_read_private(file, os.O_NOFOLLOW))
        socket, key = Path(offered["socket"]), given or os.fsencode(offered["key"] or "")
    except (OSError, ValueError, TypeError, KeyError):  # nobody has offered anything, or another version did
        return None
    if not key:
        raise LaunchError(
            f"the driver has a key of its own in {KEY} or {KEY_FILE}, and rank {launch.rank} has none: "
            "give all processes of the launch the same one, or none"
        )
    return Meeting(key=key, socket=socket)


def _given_key(environ: Mapping[str, str]) -> bytes | None:
    if environ.get(KEY):
        return _long_enough(os.fsencode(environ[KEY].strip()), KEY)
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


def _require_key(launch: Launch, given: bytes | None) -> bytes:
    if given is None:
        raise LaunchError(
            f"{launch.launcher} gave ranks on several hosts, and neither {KEY} nor {KEY_FILE} is set: control over a "
            f"network needs a key; set {KEY_FILE} on all hosts to a shared file of mode 0600 ({_MAKE_FILE})"
        )
    return given


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
    return directory / f"key-{hashlib.sha256(os.fsencode(launch.run_id)).hexdigest()[:16]}"
