"""The file of a history: JSON Lines, a line per session, appended under the baseline's lock.

Lines are independent, so git's ``merge=union`` merges the histories of two branches; a reader sorts them.  An error
prints the line and the reason; a damaged file is never written.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from perfsuite.base.errors import HistoryError
from perfsuite.base.files import MOST_BYTES, WriteFailed, content, foreign_target, put, why
from perfsuite.base.units import plural
from perfsuite.baselines.lock import locked
from perfsuite.baselines.runs import moment
from perfsuite.history.session import HistorySession, joined, line_of, read_line

_CONFLICT = (b"<<<<<<<", b"=======", b">>>>>>>", b"|||||||")
_NOTHING_CHANGED = "the file was not changed"


@dataclass(frozen=True, kw_only=True)
class HistoryFile:
    """The contents of a history."""

    path: Path
    sessions: tuple[HistorySession, ...]
    """Oldest first by time; a session that two branches added counts once."""

    @property
    def hardware(self) -> str:
        """Platform and fingerprint such as ``cpu (cpu-amd-epyc-2c)``; empty without a session."""
        return _hardware(self.sessions[0]) if self.sessions else ""


def read(path: Path) -> HistoryFile:
    """Return the history at ``path``.  Raises HistoryError with line, reason and remedy."""
    data = _content(path)
    sessions: dict[str, HistorySession] = {}
    places: dict[str, int] = {}
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        session = _session(path, number, line, is_cut=number == len(lines))
        first = next(iter(sessions.values()), session)
        if session.hardware != first.hardware:
            raise HistoryError(
                f"{path}:{number}: session {session.session} is of {_hardware(session)}, line {places[first.session]} "
                f"of {_hardware(first)}; a history holds one hardware: move the line to another file"
            )
        one = joined(sessions.get(session.session, session), session)
        if one is None:
            raise HistoryError(
                f"{path}:{number}: session {session.session} occurs twice and differs from line "
                f"{places[session.session]}; one of them was changed after it was measured: remove that line"
            )
        sessions[session.session] = one
        places.setdefault(session.session, number)
    return HistoryFile(path=path, sessions=in_time(sessions.values()))


def _content(path: Path) -> bytes:
    try:
        return content(path)
    except OSError as error:
        raise HistoryError(f"{path}: cannot be read: {why(error)}; give a history that --perf-history wrote") from None


def _refuse_foreign(path: Path) -> None:
    target = foreign_target(path)
    if target is not None:
        raise HistoryError(
            f"{path}: is a link to {target}, outside its folder; a history is written in its own folder: move the file "
            "there, or give the path of the file"
        )


def in_time(sessions: Iterable[HistorySession]) -> tuple[HistorySession, ...]:
    """Return the sessions, oldest first."""
    return tuple(sorted(sessions, key=lambda session: (moment(session.time), session.session)))


def _hardware(session: HistorySession) -> str:
    platform, fingerprint, simulated = session.hardware
    return f"{platform} ({fingerprint}{', simulated' if simulated else ''})"


def _session(path: Path, number: int, line: bytes, *, is_cut: bool) -> HistorySession:
    if line.startswith(_CONFLICT):
        raise HistoryError(
            f"{path}:{number}: a conflict marker of git; keep the lines of both sides and remove the markers, and let "
            f"git do it from now on: {path.name} merge=union in .gitattributes"
        )
    try:
        return read_line(line)
    except ValueError as error:
        if is_cut:
            raise HistoryError(
                f"{path}:{number}: the line is incomplete, because its writer was stopped; remove the line and add the "
                "session again with perfsuite history add JOURNAL"
            ) from None
        newer = "update perfsuite" if "is newer" in str(error) else "remove or repair the line"
        raise HistoryError(f"{path}:{number}: {error}; {newer}, {_NOTHING_CHANGED}") from None


def require_fit(path: Path, session: HistorySession) -> bool:
    """Return whether the file, which may not exist yet, lacks this session.

    Raises HistoryError if the file is a link out of its folder, cannot be read, or holds other hardware or another
    session of that name.
    """
    _refuse_foreign(path)
    if not path.exists():
        return True
    history = read(path)
    if history.sessions and history.sessions[0].hardware != session.hardware:
        raise HistoryError(
            f"{path} is the history of {history.hardware}, this is {_hardware(session)}; a history holds one hardware: "
            "give another file, or a folder, which gets a file for each"
        )
    same = next((old for old in history.sessions if old.session == session.session), None)
    if same is not None and joined(same, session) is None:
        raise HistoryError(
            f"{path} has session {session.session} with other values; drop it first with perfsuite history prune "
            f"--session {session.session}"
        )
    return same is None


def append(path: Path, session: HistorySession) -> bool:
    """Add a session's line; return False if the file has it.  Raises HistoryError, or BaselineError for the lock."""
    line = _encoded(session)
    _session(path, 0, line, is_cut=False)  # raises for a line that could not be read again
    with locked(path):
        if not require_fit(path, session):
            return False
        old = _content(path) if path.exists() else b""
        _put(path, old + b"\n" * (not old.endswith(b"\n") and bool(old)) + line)
    return True


def merge(path: Path, others: Sequence[Path]) -> tuple[HistoryFile, int]:
    """Add the sessions of other files to ``path``; return the history and the number of new sessions."""
    _refuse_foreign(path)
    with locked(path):
        old = read(path).sessions if path.exists() else ()
        sessions = {session.session: session for session in old}
        for other in others:
            for session in read(other).sessions:
                first = next(iter(sessions.values()), session)
                if session.hardware != first.hardware:
                    raise HistoryError(
                        f"{other} is of {_hardware(session)}, {path} of {_hardware(first)}; keep histories of "
                        "different hardware in separate files"
                    )
                one = joined(sessions.get(session.session, session), session)
                if one is None:
                    raise HistoryError(
                        f"{other}: session {session.session} differs from that in {path}; one of them was changed "
                        "after it was measured: drop it with perfsuite history prune --session"
                    )
                sessions[session.session] = one
        merged = HistoryFile(path=path, sessions=in_time(sessions.values()))
        _put(path, b"".join(map(_encoded, merged.sessions)))
    return merged, len(merged.sessions) - len(old)


@dataclass(frozen=True, kw_only=True)
class Drop:
    """The sessions and cases to remove from a history."""

    before: datetime | None = None
    """Drop sessions that began earlier."""
    sessions: frozenset[str] = frozenset()
    """Identifiers of sessions."""
    case: str = ""
    """A shell pattern of case ids, or an id."""


def prune(path: Path, drop: Drop, *, dry_run: bool) -> tuple[str, ...]:
    """Remove sessions and cases; return one line per removal.  Sessions left without cases are removed."""
    _refuse_foreign(path)
    with locked(path):
        kept, lines = [], []
        for session in read(path).sessions:
            named = session.session in drop.sessions
            if named or (drop.before is not None and moment(session.time) < drop.before):
                lines.append(f"{session.session}: dropped, {'by its id' if named else 'too old'}")
                continue
            cases = {
                case: point
                for case, point in session.cases.items()
                if not drop.case or not (case == drop.case or fnmatch.fnmatchcase(case, drop.case))
            }
            if len(cases) < len(session.cases):
                lines.append(f"{session.session}: {plural(len(session.cases) - len(cases), 'case')} dropped")
            if cases or not session.cases:
                kept.append(replace(session, cases=cases))
        if lines and not dry_run:
            _put(path, b"".join(map(_encoded, kept)))
    return tuple(lines)


def _encoded(session: HistorySession) -> bytes:
    return f"{line_of(session)}\n".encode(errors="backslashreplace")


def _put(path: Path, data: bytes) -> None:
    _refuse_foreign(path)
    if len(data) > MOST_BYTES:
        raise HistoryError(
            f"{path}: would have {len(data)} bytes, but at most {MOST_BYTES} can be read; {_NOTHING_CHANGED}: drop "
            "sessions with perfsuite history prune"
        )
    try:
        put(path, data, draft="new")
    except WriteFailed as error:
        raise HistoryError(f"{path} {error}") from None
