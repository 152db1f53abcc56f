"""The file of a history: JSON Lines, a line per session.

Lines are independent, so git's ``merge=union`` merges the histories of two branches; a reader sorts them.  An error
prints the line and the reason; a damaged file is never written.

A line is so short that a repository can hold years of sessions.

::

{"schema": 2, "session": "...", "time": "...", "platform": "cpu", "fingerprint": "...", "simulated": false,
 "commit": "...", "dirty": false, "branch": "main", "subject": "...", "environment": {...}, "boot": "...",
 "fields": {"key": {"parameter": digest of its default or 0, ...}, ...}, "own": {"memory": ["GiB", "lower"]},
 "cases": {"test_perf/...": [ln time in seconds, clean share, {"metric": value, ...}, "sum-key"], ...}}

A case's settings are the sum of the digests of its parameters, and the key of its workload's fields.  If one of two
workloads has an additional field, the digest of the field's default is subtracted before the sums are compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from perfsuite.base.errors import BaselineError
from perfsuite.base.files import MOST_BYTES
from perfsuite.base.text import escaped_json
from perfsuite.base.units import plural
from perfsuite.baselines.document import CONFLICT_MARKERS
from perfsuite.baselines.hosts import HostIdentity, host_of
from perfsuite.baselines.runs import MetricMeaning, is_named, moment, rounded
from perfsuite.baselines.store import content, locked, refuse_foreign, replace
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.metrics import is_headline
from perfsuite.record.codec import from_json, plain_json, to_json
from perfsuite.record.result import Result
from perfsuite.record.run import Revision

SCHEMA = 2  # Version of a line; a reader refuses a higher one.
_BULKY = frozenset({"topology", "notes"})
"""Parts of an environment that are long and do not change the speed of a case."""
_LARGEST_LOG = 700.0  # Largest ln of a time that is read; a float can hold the time.
_DIGESTS = 1 << 32  # Number of digests; sums of digests are taken modulo this number.
_OF_REVISION = ("commit", "dirty", "branch", "subject")  # Fields of a line that belong to the revision.
_SETTINGS = re.compile(r"([0-9a-f]{8}(-[0-9a-f]{8})?)?")


class CasePoint(NamedTuple):
    """One case in one session; a tuple, because a history has hundreds of thousands of them."""

    log_time: float  # ln of the median seconds of the clean samples, or of all samples if too few are clean.
    clean_share: float  # Share of samples without an involuntary context switch of a rank.
    metrics: Mapping[str, float]  # Headline metrics and own metrics by name.
    settings: str = ""
    """Sum of the digests of parameters, ranks and backend, and the key of the workload's fields; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class HistorySession:
    """One session of a history."""

    session: str  # Identifier of the pytest session.
    time: str  # Start, UTC, ISO 8601.
    platform: str  # Name of the platform that ran the cases.
    fingerprint: str  # Key of the hardware; equal for all sessions of a history.
    simulated: bool = False  # Whether the device is simulated; such sessions are never compared with real ones.
    revision: Revision = field(default_factory=Revision)  # The measured code; its fields are in the line itself.
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Settings that may differ between runs on the same hardware."""
    boot: str = ""  # Boot of the host; empty if the line has none.
    cases: Mapping[str, CasePoint] = field(default_factory=dict)  # By node id.
    fields: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By key: the parameters of a workload, each with the digest of its default; 0 without a default."""
    own: Mapping[str, MetricMeaning] = field(default_factory=dict)
    """Unit and direction of each own metric by name; the last one if a session has two."""

    @property
    def host(self) -> HostIdentity:
        """The host of the session."""
        return host_of(self.environment, self.boot)

    @property
    def hardware(self) -> tuple[str, str, bool]:
        """Platform, fingerprint and whether it is simulated: equal for all sessions of a history."""
        return self.platform, self.fingerprint, self.simulated


def joined(one: HistorySession, other: HistorySession) -> HistorySession | None:
    """Return one of two lines for one session, preferring the one with a commit; None if their values differ.

    A journal that is added later may lack the commit.
    """
    times, others = ({case: point[:3] for case, point in line.cases.items()} for line in (one, other))
    if one.hardware != other.hardware or times != others:
        return None
    commits = {one.revision.commit, other.revision.commit} - {""}
    if len(commits) > 1 or (one.revision.commit == other.revision.commit and one.revision != other.revision):
        return None
    return one if one.revision.commit or not other.revision.commit else other


def have_equal_settings(case: str, one: HistorySession, other: HistorySession) -> bool:
    """Return whether a case ran with equal settings in two sessions; True if they are not known in both.

    As in :meth:`CaseIdentity.changed`, a parameter of only one side with its default is equal.
    """
    left, right = one.cases[case].settings, other.cases[case].settings
    if left == right or "-" not in left or "-" not in right:
        return True
    (total, _, key), (total_there, _, key_there) = left.partition("-"), right.partition("-")
    fields, fields_there = one.fields.get(key, {}), other.fields.get(key_there, {})
    rest = sum(digest for name, digest in fields.items() if name not in fields_there)
    rest_there = sum(digest for name, digest in fields_there.items() if name not in fields)
    return (int(total, 16) - rest - int(total_there, 16) + rest_there) % _DIGESTS == 0


def session_of(
    results: Iterable[Result], *, session: str, time: str, platform: str, fingerprint: str, revision: Revision
) -> HistorySession:
    """Return the session of these results, without those out of memory and smoke runs."""
    measured = [result for result in results if result.outcome == "measured" and result.measurement is not None]
    environment = measured[-1].environment if measured else {}
    fields: dict[str, Mapping[str, int]] = {}
    plain = json.loads(json.dumps(to_json(environment), default=str))
    first = measured[0].measurement.ranks[0].identity if measured and measured[0].measurement else None
    return HistorySession(
        session=session,
        time=time,
        platform=platform,
        fingerprint=fingerprint,
        simulated=any(result.simulated for result in measured),
        revision=dataclasses.replace(revision, problem=""),
        environment={name: value for name, value in plain.items() if name not in _BULKY},
        boot=first.boot if first is not None else "",
        cases={result.case: point for result in measured if (point := _point(result, fields))},
        fields=fields,
        own={
            record.name: MetricMeaning(unit=record.metric.unit, better=record.metric.better)
            for result in measured
            for record in (result.measurement.records if result.measurement else ())
            if record.metric is not None
        },
    )


def _point(result: Result, fields: dict[str, Mapping[str, int]]) -> CasePoint | None:
    """Return a case's point and add its workload to ``fields``; None for a time below the resolution of the clock."""
    if not result.measurement or min(result.measurement.times_s) <= 0:
        return None
    run = summarise(result)
    return CasePoint(
        log_time=run.location if run.has_clean and run.location is not None else round(math.log(run.median_s), 5),
        clean_share=round(run.clean / run.samples, 3),
        metrics={name: rounded(value, 6) for name, value in run.metrics.items() if is_headline(name)},
        settings=_settings(result, fields),
    )


def _settings(result: Result, fields: dict[str, Mapping[str, int]]) -> str:
    case = case_of(result)
    filled = {**case.unsaid, **case.parameters}
    named = {name: _digest(name, case.defaults[name]) if name in case.defaults else 0 for name in sorted(filled)}
    key = f"{_digest(named):08x}"
    fields[key] = named
    total = _digest(case.workload.rpartition(":")[2], case.world_size, case.backend)
    total += sum(_digest(name, value) for name, value in filled.items())
    return f"{total % _DIGESTS:08x}-{key}"


def _digest(*values: object) -> int:
    return int(hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8], 16)


def line_of(session: HistorySession) -> str:
    """Return the JSON of a session, without the end of the line; fields with their default are left out."""
    plain = to_json(dataclasses.replace(session, cases={}))
    plain.update(plain.pop("revision", {}))
    if session.own:
        plain["own"] = {name: [meaning.unit, meaning.better] for name, meaning in sorted(session.own.items())}
    plain["cases"] = {
        case: [*point[:3], *filter(None, [point.settings])] for case, point in sorted(session.cases.items())
    }
    return escaped_json(json.dumps({"schema": SCHEMA, **plain}, separators=(",", ":"), ensure_ascii=False))


def read_line(line: bytes) -> HistorySession:
    """Return the session of a line.  Raises ValueError with the broken rule."""
    plain = plain_json(line, strict=True)
    schema = plain.pop("schema", None) if isinstance(plain, dict) else None
    if type(schema) is not int:
        raise ValueError("this is not a line of a perfsuite history")
    if schema < 1:
        raise ValueError(f"schema {schema} is not valid: 1 is the first")
    if schema > SCHEMA:
        raise ValueError(f"schema {schema} is newer than {SCHEMA}, the newest that this perfsuite reads")
    own = plain.get("own")
    if isinstance(own, dict):
        plain["own"] = {
            name: dict(zip(("unit", "better"), pair, strict=False)) if isinstance(pair, list) else pair
            for name, pair in own.items()
        }
    plain["revision"] = {name: plain.pop(name) for name in _OF_REVISION if name in plain}
    session = from_json(HistorySession, plain)
    try:
        moment(session.time)
    except ValueError:
        raise ValueError(f"time {session.time!r:.60} is not ISO 8601") from None
    for case, point in session.cases.items():
        fits = abs(point.log_time) <= _LARGEST_LOG and 0 <= point.clean_share <= 1
        if not (fits and all(map(math.isfinite, point.metrics.values())) and _SETTINGS.fullmatch(point.settings)):
            raise ValueError(f"case {case:.80} has values out of range: {point!r:.200}")
    return session


@dataclass(frozen=True, kw_only=True)
class HistoryFile:
    """The contents of a history."""

    path: Path
    sessions: tuple[HistorySession, ...]  # Oldest first by time; a session that two branches added counts once.

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
    path: Path, *, before: datetime | None = None, sessions: Iterable[str] = (), case: str = "", dry_run: bool = False
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
