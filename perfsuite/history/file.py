"""The file of a history: JSON Lines, a line per session.

Lines are independent, so git's ``merge=union`` merges the histories of two branches; a reader sorts them.  An error
prints the line and the reason; a damaged file is never written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from perfsuite.base.errors import BaselineError
from perfsuite.base.files import MOST_BYTES
from perfsuite.base.units import plural
from perfsuite.baselines.document import CONFLICT_MARKERS
from perfsuite.baselines.files import content, locked, refuse_foreign, replace
from perfsuite.baselines.runs import is_named, moment
from perfsuite.history.session import HistorySession, joined, line_of, read_line


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
    """Return the history at ``path``.  Raises BaselineError with line, reason and remedy."""
    sessions: dict[str, HistorySession] = {}
    lines = _content(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            _add(sessions, _session(f"{path}:{number}", line, is_cut=number == len(lines)), f"{path}:{number}")
    return _in_time(path, sessions)


def _content(path: Path) -> bytes:
    return content(path, MOST_BYTES, "give a history that --perf-history wrote")


def _add(sessions: dict[str, HistorySession], session: HistorySession, where: object) -> bool:
    """Add a session to the sessions of a file; return whether it is new.

    Raises BaselineError, which begins with ``where``, for other hardware or other values.
    """
    first = next(iter(sessions.values()), session)
    if session.hardware != first.hardware:
        raise BaselineError(
            f"{where}: session {session.session} is of {_hardware(session)}, the history is of {_hardware(first)}; a "
            "history holds one hardware: use another file, or a folder, which gets a file for each"
        )
    is_new = session.session not in sessions
    one = session if is_new else joined(sessions[session.session], session)
    if one is None:
        raise BaselineError(
            f"{where}: session {session.session} occurs twice with different values; one of them was changed after it "
            f"was measured: remove its line, or use perfsuite history prune --session {session.session}"
        )
    sessions[session.session] = one
    return is_new


def _in_time(path: Path, sessions: dict[str, HistorySession]) -> HistoryFile:
    ordered = sorted(sessions.values(), key=lambda session: (moment(session.time), session.session))
    return HistoryFile(path=path, sessions=tuple(ordered))


def _hardware(session: HistorySession) -> str:
    platform, fingerprint, simulated = session.hardware
    return f"{platform} ({fingerprint}{', simulated' if simulated else ''})"


def _session(where: str, line: bytes, *, is_cut: bool) -> HistorySession:
    if line.startswith(tuple(marker.encode() for marker in CONFLICT_MARKERS)):
        raise BaselineError(
            f"{where}: a conflict marker of git; keep the lines of both sides and remove the markers, and let git do "
            "it from now on: *.jsonl merge=union in .gitattributes"
        )
    try:
        return read_line(line)
    except ValueError as error:
        if is_cut:
            raise BaselineError(
                f"{where}: the line is incomplete, because its writer was stopped; remove the line and add the session "
                "again with perfsuite history add JOURNAL"
            ) from None
        newer = "update perfsuite" if "is newer" in str(error) else "remove or repair the line"
        raise BaselineError(f"{where}: {error}; {newer}, the file was not changed") from None


def require_fit(path: Path, session: HistorySession) -> bool:
    """Return whether the file, which may not exist yet, lacks this session.

    Raises BaselineError if the file is a link out of its folder, cannot be read, or holds other hardware or another
    session of that name.
    """
    return _add(_sessions(path), session, path)


def _sessions(path: Path) -> dict[str, HistorySession]:
    """Return the sessions of a file to change, by identifier; empty without a file."""
    refuse_foreign(path)
    return {one.session: one for one in read(path).sessions} if path.exists() else {}


def append(path: Path, session: HistorySession) -> bool:
    """Add a session's line; return False if the file has it.  Raises BaselineError."""
    line = _encoded(session)
    _session(str(path), line, is_cut=False)  # raises for a line that could not be read again
    with locked(path):
        if not require_fit(path, session):
            return False
        old = _content(path) if path.exists() else b""
        _replace(path, old + b"\n" * (not old.endswith(b"\n") and bool(old)) + line)
    return True


def merge(path: Path, others: Sequence[Path]) -> tuple[HistoryFile, int]:
    """Add the sessions of other files to ``path``; return the history and the number of new sessions."""
    refuse_foreign(path)
    with locked(path):
        sessions = _sessions(path)
        new = sum(_add(sessions, session, other) for other in others for session in read(other).sessions)
        merged = _in_time(path, sessions)
        _replace(path, b"".join(map(_encoded, merged.sessions)))
    return merged, new


def prune(
    path: Path,
    *,
    before: datetime | None = None,
    sessions: Iterable[str] = (),
    case: str = "",
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Remove sessions and cases; return one line per removal.  Sessions left without cases are removed.

    ``before`` removes sessions that began earlier, ``sessions`` those with these identifiers, and ``case`` removes
    cases by a shell pattern of their id or by the id.
    """
    refuse_foreign(path)
    with locked(path):
        kept, lines = [], []
        for session in read(path).sessions:
            named = session.session in sessions
            if named or (before is not None and moment(session.time) < before):
                lines.append(f"{session.session}: dropped, {'by its id' if named else 'too old'}")
                continue
            cases = {node: point for node, point in session.cases.items() if not is_named(node, case)}
            if len(cases) < len(session.cases):
                lines.append(f"{session.session}: {plural(len(session.cases) - len(cases), 'case')} dropped")
            if cases or not session.cases:
                kept.append(dataclasses.replace(session, cases=cases))
        if lines and not dry_run:
            _replace(path, b"".join(map(_encoded, kept)))
    return tuple(lines)


def _encoded(session: HistorySession) -> bytes:
    return f"{line_of(session)}\n".encode(errors="backslashreplace")


def _replace(path: Path, data: bytes) -> None:
    replace(path, data, MOST_BYTES, "drop sessions with perfsuite history prune")
