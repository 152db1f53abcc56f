"""The journal of a run: one line of JSON per finished case, synced to disk before the next case starts.

pytest-benchmark writes its file at the end of a session; the journal is there after a crash, a kill or a power cut.
The first line is a header, every other line a result, a failure, an interrupted case, a skip, the environment of the
results after it, a projection, peaks, the gate's verdicts, or the end::

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

Peaks are measured several times, also after the last case; the last ones count.  The shares in a result use the peaks
of the time when its case ended (:func:`perfsuite.metrics.read_run` derives them again).

Only the last line may be damaged: a run that was killed while writing leaves it without its end, and that case counts
as not finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import JournalError
from perfsuite.base.files import open_regular, why
from perfsuite.record.codec import from_json, plain_json
from perfsuite.record.result import SCHEMA, Peaks, Result
from perfsuite.record.run import GateRecord, Header, Projected, RunEnd, RunRecord

_LONGEST_LINE = 1 << 28  # Bytes: the timeline of a pipeline of 1,000 ranks is less.
_WHOLE: Mapping[str, Any] = {"peaks": Peaks, "gate": GateRecord, "end": RunEnd}
"""Lines on the run as a whole: the last of a kind counts."""
_ASIDE: Mapping[str, str] = {"failure": "message", "interrupted": "signal", "skip": "reason"}
"""Lines on a case without a result, each with the key of its text."""


def read_journal(path: Path) -> RunRecord:
    """Read the journal at ``path``: metrics are as they were written.

    Raises JournalError naming the line and the reason for anything but a last line without its end: a foreign or
    hand-broken file, a newer schema.
    """
    header: Header | None = None
    environment: Mapping[str, Any] = {}
    results: dict[str, Result] = {}
    measured: Counter[str] = Counter()
    aside: dict[str, dict[str, str]] = {kind: {} for kind in _ASIDE}
    projections: dict[str, Projected] = {}
    whole: dict[str, Any] = {}
    truncated = False
    for number, line in enumerate(_lines(path), start=1):
        if not line.endswith(b"\n"):
            if header is not None and len(line) == _LONGEST_LINE:
                raise _damage(path, number, f"it has more than {_LONGEST_LINE} bytes")
            truncated = True
            break
        try:
            kind, body = _kind_and_body(line)
            if header is None:
                header = _header(path, kind, body)
            elif kind == "result":
                result = from_json(Result, {**body, "environment": environment} if isinstance(body, dict) else body)
                results[result.case] = result
                measured[result.case] += 1
                aside["failure"].pop(result.case, None)
                aside["interrupted"].pop(result.case, None)
            elif kind == "projected":
                projection = from_json(Projected, body)
                projections[projection.case] = projection
            elif kind in _WHOLE:
                whole[kind] = from_json(_WHOLE[kind], body)
            elif kind == "environment" and isinstance(body, dict):
                environment = body
            elif kind in _ASIDE and isinstance(body, dict) and {"case", _ASIDE[kind]} <= set(body):
                aside[kind][str(body["case"])] = str(body[_ASIDE[kind]])
            else:
                raise ValueError(f"{kind!r} is not a line of a journal; expected result or failure")
        except ValueError as error:
            raise _damage(path, number, str(error)) from None
    if header is None:
        raise JournalError(f"journal {path}, line 1: no complete line; the run that wrote it did not get far enough")
    end: RunEnd | None = whole.get("end")
    return RunRecord(
        **vars(header),
        name=path.name,
        path=path,
        results=results,
        measured=measured,
        failures={**aside["failure"], **(end.failed if end else {})},
        case_errors=aside["failure"],
        interrupted=aside["interrupted"],
        skips={case: reason for case, reason in aside["skip"].items() if case not in results},
        projections=projections,
        truncated=truncated,
        **whole,
    )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            yield from iter(lambda: file.readline(_LONGEST_LINE), b"")
    except OSError as error:
        raise JournalError(f"journal {path} cannot be read: {why(error)}") from None


def _kind_and_body(line: bytes) -> tuple[str, Any]:
    try:
        plain = plain_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(plain, dict) or len(plain) != 1:
        raise ValueError("not an object with one key")
    ((kind, body),) = plain.items()
    return kind, body


def _header(path: Path, kind: str, body: Any) -> Header:
    if kind != "header" or not isinstance(body, dict):
        raise ValueError("this is not the header of a perfsuite journal")
    schema = body.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise JournalError(
            f"journal {path}, line 1: schema {schema} is newer than {SCHEMA}, the newest that this perfsuite reads; "
            "update perfsuite"
        )
    return from_json(Header, body)


def durations_s(path: Path, fingerprint: str) -> dict[str, float]:
    """Seconds that each case of a journal of this hardware took, by node id; empty for a damaged journal."""
    try:
        run = read_journal(path)
    except JournalError:
        return {}  # an estimate of the time left is not worth an error
    took = {case: result.took_s for case, result in run.results.items() if result.took_s}
    return took if run.fingerprint == fingerprint else {}


def _damage(path: Path, number: int, reason: str) -> JournalError:
    return JournalError(f"journal {path}, line {number}: {reason}; remove or repair the line, or start a new run")
