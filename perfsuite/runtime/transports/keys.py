"""The secret that proves that driver and agents belong to one launch, and the socket at which those of one host meet.

``PERFSUITE_KEY`` holds the key, or ``PERFSUITE_KEY_FILE`` names a private file with it. A launch on one host needs
neither: the driver writes a fresh key and the name of its socket to a file in a private directory.
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
SHORTEST_KEY = 16  # Least number of characters; a shorter key can be guessed.
_MAKE_FILE = "make one: (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' > FILE)"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Key and socket of a launch."""

    key: bytes
    socket: Path = Path()  # Socket of the driver of a launch on one host.


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The driver's :class:`Meeting`, and the file from which agents read it."""

    meeting: Meeting
    file: Path | None = None  # File of this launch; None between hosts, where the user provides the key.
    content: bytes = b""
    lock: IO[bytes] | None = None  # The file, locked while it is offered, so that no process removes it.
    remove: Callable[[], None] = lambda: None  # Removes the directory of the socket.

    def discard(self) -> None:
        """Remove the file unless another launch has replaced it. Idempotent."""
        self.remove()
        if self.lock is not None:
            self.lock.close()
        if self.file is not None:
            with contextlib.suppress(OSError):
                if self.file.read_bytes() == self.content:
                    self.file.unlink()


def offer_meeting(launch: Launch, environ: Mapping[str, str]) -> Offer:
    """Return the driver's offer: the user's key, or on a single host a new key in a file for the agents.

    Raises LaunchError for several hosts without a key, and for a key that other users could read.
    """
    user_key = _user_key(environ)
    if not launch.single_host:
        return Offer(meeting=Meeting(key=_require_key(launch, user_key)))
    fresh = secrets.token_hex(32)
    try:
        file = _automatic_file(launch)
        with contextlib.ExitStack() as on_failure:
            directory, remove = make_directory("driver")
            on_failure.callback(remove)
            socket = directory / "socket"
            content = json.dumps({"key": None if user_key else fresh, "socket": str(socket)}).encode()
            # A rename shows agents the whole file or none, and replaces the file of a killed driver.
            fd, draft = tempfile.mkstemp(dir=file.parent)  # mode 0600
            on_failure.callback(os.unlink, draft)
            stream = on_failure.enter_context(os.fdopen(fd, "wb", buffering=0))
            hold(fd)
            stream.write(content)
            os.replace(draft, file)
            on_failure.pop_all()
    except OSError as problem:
        raise LaunchError(
            f"no key can be written under {tempfile.gettempdir()} ({problem.strerror}): processes of a launch need it "
            "to recognise each other; make the directory writable, or set TMPDIR"
        ) from None
    meeting = Meeting(key=user_key or fresh.encode(), socket=socket)
    return Offer(meeting=meeting, file=file, content=content, lock=stream, remove=remove)


def find_meeting(launch: Launch, environ: Mapping[str, str]) -> Meeting | None:
    """Return the driver's offer to an agent, None before it is written; raise LaunchError as offer_meeting does."""
    user_key = _user_key(environ)
    if not launch.single_host:
        return Meeting(key=_require_key(launch, user_key))
    file = _automatic_file(launch)
    try:
        offered = json.loads(_read_private(file, os.O_NOFOLLOW))
        socket, key = Path(offered["socket"]), user_key or os.fsencode(offered["key"] or "")
    except (OSError, ValueError, TypeError, KeyError):  # no offer yet, or one of another version
        return None
    if not key:
        raise LaunchError(
            f"the driver has its own key in {KEY} or {KEY_FILE}, and rank {launch.rank} has none: "
            "set the same key for all processes of the launch, or for none"
        )
    return Meeting(key=key, socket=socket)


def _user_key(environ: Mapping[str, str]) -> bytes | None:
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


def _require_key(launch: Launch, key: bytes | None) -> bytes:
    if key is None:
        raise LaunchError(
            f"{launch.launcher} started ranks on several hosts, and neither {KEY} nor {KEY_FILE} is set: control over "
            f"a network needs a key; set {KEY_FILE} on all hosts to a shared file of mode 0600 ({_MAKE_FILE})"
        )
    return key


def _read_private(file: Path, flags: int = 0) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    with os.fdopen(fd, "rb") as stream:
        _require_private(os.fstat(fd), file)
        return stream.read(1 << 16)


def _require_private(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid():
        raise LaunchError(
            f"{path} belongs to user id {status.st_uid}, not to yours ({os.getuid()}): its owner could read the key; "
            "use a file that you own"
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
        raise LaunchError(f"{directory} is not a directory, but the key of a launch goes there; remove it or set {KEY}")
    _require_private(status, directory)
    return directory / f"key-{hashlib.sha256(os.fsencode(launch.run_id)).hexdigest()[:16]}"
