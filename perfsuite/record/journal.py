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

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import JournalError
from perfsuite.base.files import open_regular, why
from perfsuite.base.units import plural
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
                _require_possible(result)
                results[result.case] = result
                measured[result.case] += 1
                aside["failure"].pop(result.case, None)
                aside["interrupted"].pop(result.case, None)
            elif kind == "projected":
                projection = from_json(Projected, body)
                projections[projection.case] = projection
            elif kind in _WHOLE:
                whole[kind] = _of_the_run(kind, body)
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
        plain = plain_json(line, once=True)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(plain, dict) or len(plain) != 1:
        raise ValueError("not an object with one key")
    ((kind, body),) = plain.items()
    return kind, body


def _require_possible(result: Result) -> None:
    """Raise ValueError for a figure that no run writes: the line was damaged or changed."""
    work, measurement = result.work, result.measurement
    amounts = (work.bytes_moved, work.footprint_bytes, work.message_bytes, work.samples, work.tokens)
    _require_figures(
        (
            ("world_size", [result.world_size], 1),
            ("work", [*amounts, *work.flops.values()], 0),
            *((one.name, [one.value], -math.inf) for one in result.metrics if one.value is not None),
            *((f"peak of {one.name}", [one.peak.value], 0) for one in result.metrics if one.peak is not None),
        )
    )
    if measurement is None:
        return
    if not measurement.times_s or len(measurement.ranks) != result.world_size:
        parts = f"{plural(len(measurement.times_s), 'sample')} and {plural(len(measurement.ranks), 'rank')}"
        raise ValueError(f"the measurement of world_size {result.world_size} has {parts}")
    clock, ranks = measurement.clock, measurement.ranks
    _require_figures(
        (
            ("times_s", measurement.times_s, 0),
            ("yardsticks_s", measurement.yardsticks_s, 0),
            ("iterations", [measurement.iterations], 1),
            ("clock", [clock.resolution_s, clock.cost_s], 0),
            ("ranks", [s for one in ranks for s in (one.median_s, one.min_s, one.max_s, one.cpu_share)], 0),
            ("waits of ranks", [one.waited for one in ranks if one.waited is not None], 0),
            ("threads and memory of ranks", [n for one in ranks for n in (one.threads, one.max_rss_bytes)], 0),
            *((f"record {one.name}", [one.value], -math.inf) for one in measurement.records),
            *((f"span {one.name}", [one.time_s, one.count], -math.inf) for one in measurement.spans),
        )
    )


def _require_figures(figures: Iterable[tuple[str, Collection[float], float]]) -> None:
    for name, values, least in figures:
        if values and not (math.isfinite(sum(values)) and min(values) >= least):
            odd = next(value for value in values if not (math.isfinite(value) and value >= least))
            rule = "finite" if least < 0 else f"finite and at least {least}"
            raise ValueError(f"{name} is {odd!r:.40}, but it must be {rule}")


def _of_the_run(kind: str, body: Any) -> Any:
    record = from_json(_WHOLE[kind], body)
    if kind == "peaks":
        device = (record.memory_bandwidth, record.link, record.host_link)
        _require_figures((kind, [peak.value], 0) for peak in (*record.tflops.values(), *device) if peak)
    return record


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
