"""The file of a history: JSON Lines, a line per session, appended under the baseline's lock.

Lines stand for themselves, so git's ``merge=union`` merges two branches' histories; whoever reads sorts.  A file that
cannot be read as it should is named with line and reason, and never written.
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
_NOTHING_CHANGED = "the file is left as it is"


@dataclass(frozen=True, kw_only=True)
class HistoryFile:
    """A history as its file has it."""

    path: Path
    sessions: tuple[HistorySession, ...]
    """Oldest first by time; a session that two branches added counts once."""

    @property
    def hardware(self) -> str:
        """``cpu (cpu-amd-epyc-2c)``; empty without a session."""
        if not self.sessions:
            return ""
        platform, fingerprint, simulated = self.sessions[0].hardware
        return f"{platform} ({fingerprint}{', simulated' if simulated else ''})"


def read(path: Path) -> HistoryFile:
    """The history at ``path``.  Raises HistoryError naming line, reason and what to do."""
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
                f"{path}:{number}: session {session.session} is of {_told(session)}, line {places[first.session]} of "
                f"{_told(first)}; a history holds one hardware: move the line to a file of its own"
            )
        one = joined(sessions.get(session.session, session), session)
        if one is None:
            raise HistoryError(
                f"{path}:{number}: session {session.session} is there twice and differs from line "
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
            f"{path}: is a link to {target}, outside its folder; a history is written in its own folder: put the file "
            "there, or name the file itself"
        )


def in_time(sessions: Iterable[HistorySession]) -> tuple[HistorySession, ...]:
    """Oldest first."""
    return tuple(sorted(sessions, key=lambda session: (moment(session.time), session.session)))


def _told(session: HistorySession) -> str:
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
                f"{path}:{number}: the line is cut short: whoever wrote it was stopped; remove the line and add the "
                "session again with perfsuite history add JOURNAL"
            ) from None
        newer = "update perfsuite" if "is newer" in str(error) else "remove or repair the line"
        raise HistoryError(f"{path}:{number}: {error}; {newer}, {_NOTHING_CHANGED}") from None


def require_fit(path: Path, session: HistorySession) -> bool:
    """Whether the file, where there is one, may take this session's line; False where it has it already.

    Raises HistoryError where the file is a link out of its folder or cannot be read, or holds other hardware or
    another session of that name.
    """
    _refuse_foreign(path)
    if not path.exists():
        return True
    history = read(path)
    if history.sessions and history.sessions[0].hardware != session.hardware:
        raise HistoryError(
            f"{path} is the history of {history.hardware}, this is {_told(session)}; a history holds one hardware: "
            "name another file, or a folder, which gets a file for each"
        )
    for known in history.sessions:
        if known.session == session.session and joined(known, session) is None:
            raise HistoryError(
                f"{path} has session {session.session} with other values; drop it first with perfsuite history prune "
                f"--session {session.session}"
            )
    return all(known.session != session.session for known in history.sessions)


def append(path: Path, session: HistorySession) -> bool:
    """Add a session's line; False where it is there already.  Raises HistoryError, BaselineError for the lock."""
    line = _encoded(session)
    _session(path, 0, line, is_cut=False)  # what could not be read again would damage the history
    with locked(path):
        if not require_fit(path, session):
            return False
        old = _content(path) if path.exists() else b""
        _put(path, old + b"\n" * (not old.endswith(b"\n") and bool(old)) + line)
    return True


def merge(path: Path, others: Sequence[Path]) -> tuple[HistoryFile, int]:
    """Make a file the union of itself and the others; the history and how many sessions are new in it."""
    _refuse_foreign(path)
    with locked(path):
        mine = read(path) if path.exists() else HistoryFile(path=path, sessions=())
        sessions = {session.session: session for session in mine.sessions}
        for other in others:
            for session in read(other).sessions:
                first = next(iter(sessions.values()), session)
                if session.hardware != first.hardware:
                    raise HistoryError(
                        f"{other} is of {_told(session)}, {path} of {_told(first)}; histories of different hardware "
                        "stay in files of their own"
                    )
                one = joined(sessions.get(session.session, session), session)
                if one is None:
                    raise HistoryError(
                        f"{other}: session {session.session} differs from that in {path}; one of them was changed "
                        "after it was measured: drop it with perfsuite history prune --session"
                    )
                sessions[session.session] = one
        merged = HistoryFile(path=path, sessions=in_time(sessions.values()))
        _rewrite(merged)
    return merged, len(merged.sessions) - len(mine.sessions)


@dataclass(frozen=True, kw_only=True)
class Drop:
    """What leaves a history."""

    before: datetime | None = None
    """Sessions that began earlier."""
    sessions: frozenset[str] = frozenset()
    """Sessions by identifier."""
    case: str = ""
    """Cases by a shell pattern of their id, or the id itself."""


def prune(path: Path, drop: Drop, *, dry_run: bool) -> tuple[str, ...]:
    """Drop what is named, and one line for each thing dropped; a session that keeps no case goes."""
    _refuse_foreign(path)
    with locked(path):
        history = read(path)
        kept, said = [], []
        for session in history.sessions:
            named = session.session in drop.sessions
            if named or (drop.before is not None and moment(session.time) < drop.before):
                said.append(f"{session.session}: dropped, {'named' if named else 'too old'}")
                continue
            cases = {case: point for case, point in session.cases.items() if not _is_named(case, drop.case)}
            if len(cases) < len(session.cases):
                said.append(f"{session.session}: {plural(len(session.cases) - len(cases), 'case')} dropped")
            if cases or not session.cases:
                kept.append(replace(session, cases=cases))
        if said and not dry_run:
            _rewrite(HistoryFile(path=path, sessions=tuple(kept)))
    return tuple(said)


def _is_named(case: str, pattern: str) -> bool:
    return bool(pattern) and (case == pattern or fnmatch.fnmatchcase(case, pattern))


def _rewrite(history: HistoryFile) -> None:
    _put(history.path, b"".join(map(_encoded, history.sessions)))


def _encoded(session: HistorySession) -> bytes:
    return f"{line_of(session)}\n".encode(errors="backslashreplace")


def _put(path: Path, data: bytes) -> None:
    _refuse_foreign(path)
    if len(data) > MOST_BYTES:
        raise HistoryError(
            f"{path}: would have {len(data)} bytes, more than the {MOST_BYTES} that are read; {_NOTHING_CHANGED}: drop "
            "sessions with perfsuite history prune"
        )
    try:
        put(path, data, draft="new")
    except WriteFailed as error:
        raise HistoryError(f"{path} {error}") from None
