"""The journal of a run: one line of JSON per finished case, synced to disk before the next case starts.

pytest-benchmark writes its file at the end of a session; the journal is there after a crash, a kill or a power cut.
The first line is a header, every other line a result, a failure, an interrupted case, a skip, the environment of the
results after it, a projection, peaks, what the gate said, or the end::

    {"header": {"schema": 1, "session": "...", "fingerprint": "...", "versions": {...}, ...}}
    {"environment": {"hostname": "...", ...}}
    {"result": {"case": "test_perf/...", ...}}
    {"failure": {"case": "test_perf/...", "message": "..."}}
    {"interrupted": {"case": "test_perf/...", "signal": "SIGTERM"}}
    {"skip": {"case": "test_perf/...", "reason": "..."}}
    {"projected": {"kind": "projected", "case": "test_perf/...", "step_time_s": 0.5, ...}}
    {"peaks": {"tflops": {"fp32": {...}}, ...}}
    {"gate": {"gate": true, "fail_on": [...], "verdicts": [{"case": "...", "name": "pass", ...}, ...]}}
    {"end": {"at": "...", "took_s": 81.2, "exit_status": 0, "warnings": [...]}}

Peaks that had to be measured stand there as often as they were, because that goes on after the last case; results are
read as shares of the last ones.

Only the last line may be damaged: a run that was killed while writing leaves it without its end, and that case counts
as not finished.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfsuite.base import garbage
from perfsuite.base.errors import JournalError
from perfsuite.base.files import open_regular, why
from perfsuite.journal_result import ResultLine, late_result, share_of, split_result
from perfsuite.record.codec import from_json, plain_json
from perfsuite.record.projected import Projected
from perfsuite.record.result import SCHEMA, Peaks, Result
from perfsuite.record.run import GateRecord, Revision, RunEnd, RunRecord


@dataclass(frozen=True, kw_only=True)
class Header:
    """What is true of every case in a journal."""

    session: str
    """Identifier of the pytest session that wrote it."""
    fingerprint: str
    """Key of the hardware; a run resumes only on the same."""
    platform: str
    started_at: str
    """UTC, ISO 8601."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Versions of Python, perfsuite, pytest, pytest-benchmark and torch."""
    revision: Revision = field(default_factory=Revision)
    """What code is measured; empty in journals written before it was kept."""
    arguments: tuple[str, ...] = ()
    """What the command line gave pytest."""
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Journal:
    """What a journal file says."""

    path: Path
    header: Header
    results: Mapping[str, Result]
    """The newest result of each case, by node id."""
    failures: Mapping[str, str]
    """Message of each case that failed and was not measured later."""
    interrupted: Mapping[str, str]
    """Signal that ended the run while this case was running; it was not measured later."""
    skips: Mapping[str, str]
    """Reason of each case that was skipped and not measured."""
    truncated: bool
    """The last line was not complete and is left out."""
    peaks: Peaks | None = None
    """What the results are shares of, where it had to be measured."""
    projections: Mapping[str, Projected] = field(default_factory=dict)
    """What cases would measure, by node id; none of them is a result."""
    gate: GateRecord | None = None
    """What the gate said; None in journals written before it was kept, and of runs that were killed."""
    end: RunEnd | None = None
    """How the run ended; None as for ``gate``."""
    measured: Counter[str] = field(default_factory=Counter)
    """Results of each case, of which the newest is kept."""

    @property
    def record(self) -> RunRecord:
        """The run for reports."""
        header = self.header
        return RunRecord(
            name=self.path.name,
            platform=header.platform,
            fingerprint=header.fingerprint,
            session=header.session,
            started_at=header.started_at,
            versions=header.versions,
            revision=header.revision,
            arguments=header.arguments,
            results=self.results,
            failures={**self.failures, **(self.end.failed if self.end else {})},
            interrupted=self.interrupted,
            skips=self.skips,
            gate=self.gate,
            end=self.end,
            peaks=self.peaks,
        )


_LONGEST_LINE = 1 << 28
"""Bytes: the timeline of a pipeline of 1,000 ranks is less."""
_CASE = re.compile(rb'\{"result":\{"case":("(?:[^"\\]|\\.)*")')
_TOOK = re.compile(rb',"took_s":([\d.]+)')
_TOOK_WITHIN = 100
"""Bytes before the end of a line in which it stands: only the schema comes after it."""
_WHOLE: Mapping[str, Any] = {"peaks": Peaks, "gate": GateRecord, "end": RunEnd}
"""Lines on the run as a whole: the last of a kind counts."""
_SAID: Mapping[str, str] = {"failure": "message", "interrupted": "signal", "skip": "reason"}
"""Lines on a case without a result, and what they say of it."""


@garbage.kept()
def read_journal(path: Path) -> Journal:
    """The journal at ``path``.

    Metrics and measurements are decoded when they are asked for.  Raises JournalError naming the line and the reason
    for anything but a last line without its end: a foreign or hand-broken file, a newer schema; for damage inside a
    measurement when it is asked for.
    """
    truncated = False
    try:
        with open_regular(path) as file:  # line by line: the measurements alone are kept, and they are most of it
            first = file.readline(_LONGEST_LINE)
            if not first.endswith(b"\n"):
                raise JournalError(
                    f"journal {path}, line 1: no complete line; the run that wrote it did not get far enough"
                )
            read = _Lines(path, header=_read_header(path, first))
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=2):
                if line.endswith(b"\n"):
                    read.take(number, line)
                elif len(line) == _LONGEST_LINE:
                    raise _damage(path, number, f"it has more than {_LONGEST_LINE} bytes")
                else:
                    truncated = True
    except OSError as error:
        raise JournalError(f"journal {path} cannot be read: {why(error)}") from None
    return read.journal(truncated=truncated)


class _Lines:
    """What the lines of a journal said so far."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._results: dict[str, Result] = {}
        self._failures: dict[str, str] = {}
        self._interrupted: dict[str, str] = {}
        self._skips: dict[str, str] = {}
        self._projections: dict[str, Projected] = {}
        self._environment: Mapping[str, Any] = {}
        self._whole: dict[str, Any] = {}
        self._measured: Counter[str] = Counter()

    def take(self, number: int, line: bytes) -> None:
        """One line after the header; JournalError for what is none of a journal."""
        parts = split_result(line)
        kind, body = _read_line(self._path, number, parts.light)
        if kind == "result":
            result = _read_result(self._path, number, body, parts, self._environment)
            self._results[result.case] = result
            self._measured[result.case] += 1
            self._failures.pop(result.case, None)
            self._interrupted.pop(result.case, None)
        elif kind == "projected":
            projection = _decode(self._path, number, Projected, body)
            self._projections[projection.case] = projection
        elif kind in _WHOLE:
            self._whole[kind] = _decode(self._path, number, _WHOLE[kind], body)
        elif kind == "environment" and isinstance(body, dict):
            self._environment = body
        elif kind in _SAID and isinstance(body, dict) and {"case", _SAID[kind]} <= set(body):
            told = {"failure": self._failures, "interrupted": self._interrupted, "skip": self._skips}[kind]
            told[str(body["case"])] = str(body[_SAID[kind]])
        else:
            raise _damage(
                self._path, number, f"{kind!r} is not what a line of a journal is; expected result or failure"
            )

    def journal(self, *, truncated: bool) -> Journal:
        """All of it."""
        results, peaks = self._results, self._whole.get("peaks")
        if peaks is not None:
            results = {case: share_of(result, peaks) for case, result in results.items()}
        return Journal(
            path=self._path,
            header=self._header,
            results=results,
            failures=self._failures,
            interrupted=self._interrupted,
            skips={case: reason for case, reason in self._skips.items() if case not in results},
            projections=self._projections,
            truncated=truncated,
            measured=self._measured,
            **self._whole,
        )


def durations_s(path: Path, fingerprint: str) -> dict[str, float]:
    """Seconds that each case of a journal of this hardware took, by node id, read without decoding anything else."""
    took: dict[str, float] = {}
    try:
        with open_regular(path) as file:
            for line in file if f'"fingerprint":{json.dumps(fingerprint)}'.encode() in file.readline() else ():
                case, seconds = _CASE.match(line), _TOOK.search(line, max(0, len(line) - _TOOK_WITHIN))
                if case and seconds:
                    took[json.loads(case[1])] = float(seconds[1])
    except (OSError, ValueError):
        return {}  # foretelling the end is not worth an error
    return took


def _read_header(path: Path, line: bytes) -> Header:
    kind, body = _read_line(path, 1, line)
    if kind != "header" or not isinstance(body, dict):
        raise _damage(path, 1, "this is not the header of a perfsuite journal")
    schema = body.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise JournalError(
            f"journal {path}, line 1: schema {schema} is newer than {SCHEMA}, the newest that this perfsuite reads; "
            "update perfsuite"
        )
    header: Header = _decode(path, 1, Header, body)
    return header


def _read_result(path: Path, number: int, body: Any, line: ResultLine, environment: Mapping[str, Any]) -> Result:
    try:
        if not line.measurement_json or not isinstance(body, dict):
            return dataclasses.replace(from_json(Result, body), environment=environment)
        return late_result(body, line, environment, functools.partial(_damage, path, number))
    except ValueError as error:
        raise _damage(path, number, str(error)) from None


def _read_line(path: Path, number: int, line: bytes) -> tuple[str, Any]:
    try:
        plain = plain_json(line)
    except ValueError as error:
        raise _damage(path, number, f"not JSON ({error})") from None
    if not isinstance(plain, dict) or len(plain) != 1:
        raise _damage(path, number, "not an object with one key")
    ((kind, body),) = plain.items()
    return kind, body


def _decode(path: Path, number: int, kind: Any, body: Any) -> Any:
    try:
        return from_json(kind, body)
    except ValueError as error:
        raise _damage(path, number, str(error)) from None


def _damage(path: Path, number: int, reason: str) -> JournalError:
    return JournalError(f"journal {path}, line {number}: {reason}; remove or repair the line, or start a new run")
