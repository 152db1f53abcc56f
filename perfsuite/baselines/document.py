"""The text of a baseline file: JSON in the layout of pytest-benchmark, with sorted keys and one line per run.

Each case has a check over its content, and the rest of the file has another one, so changes by hand are detected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.errors import BaselineError
from perfsuite.base.text import bare_name
from perfsuite.baselines.baseline import (
    KEPT_RUNS,
    REFERENCE_MOST,
    Acceptance,
    Baseline,
    CaseKey,
    Entry,
    Hardware,
    newest,
)
from perfsuite.baselines.runs import QUANTILES, CaseIdentity, RunSummary, moment, rounded
from perfsuite.record.codec import from_json, plain_json, to_json

SCHEMA = 2  # Version of the file format; a reader refuses others.
CONFLICT_MARKERS = ("<<<<<<<", "=======", ">>>>>>>", "|||||||")
"""First characters of the lines that git writes around a conflict."""
_LAYOUT_VERSION = "5.1.0"
"""The pytest-benchmark version whose layout the file follows; fixed, so that an upgrade changes no file."""
_CASE_LISTS = ("benchmarks", "unmeasured")
"""Keys of the lists of cases: with a time, which pytest-benchmark reads, and without, because they never fitted."""
_KEY_DIGITS = 12
_STATS_DIGITS = 6  # Significant digits of ``stats``; the medians have four.
_SHORTEST_S, _LONGEST_S = math.exp(-40), math.exp(40)  # Range of times that can be used in computations.
_OF_SESSION = ("session", "commit", "boot", "environment")  # Fields of a run that the table of sessions has.
_RUN_FIELDS: Mapping[str, Any] = {
    field.name: {} if field.default is dataclasses.MISSING else field.default
    for field in dataclasses.fields(RunSummary)
    if field.name not in _OF_SESSION
}
"""The other fields of a run, each with its default."""


class Fault(ValueError):
    """An error in a baseline file; ``line`` counts from 1."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


# -- baseline to text ------------------------------------------------------------------------------------------------


def dumps(baseline: Baseline) -> str:
    """Return the text of a baseline; equal baselines give equal text.

    Raises TypeError or ValueError for a value that JSON cannot hold.
    """
    environments: dict[str, Any] = {}
    sessions: dict[str, Any] = {}
    keys: dict[tuple[str, str, str, int], str] = {}

    def key_of(run: RunSummary) -> str:
        seen = (run.session, run.commit, run.boot, id(run.environment))
        if seen not in keys:
            environment = _key(run.environment)
            environments[environment] = run.environment
            plain = {"commit": run.commit, "environment": environment, "session": run.session}
            plain.update({"boot": run.boot} if run.boot else {})
            keys[seen] = _key(plain)
            sessions[keys[seen]] = plain
        return keys[seen]

    cases: dict[str, list[str]] = {name: [] for name in _CASE_LISTS}
    for entry in sorted(baseline.entries.values(), key=lambda one: (one.case.node, one.newest.time, one.case.key)):
        reference = {run.key for run in entry.reference}
        runs = [_plain_run(run, key_of(run), is_reference=run.key in reference) for run in entry.kept]
        plain = _plain_case(entry, runs)
        plain["check"] = check_of(plain)
        rows = _block("[", [_canonical(run) for run in runs], "]", 2)
        parts = [f"{json.dumps(name)}: {rows if name == 'runs' else _canonical(plain[name])}" for name in sorted(plain)]
        cases["benchmarks" if "stats" in plain else "unmeasured"].append(_block("{", parts, "}", 1))
    header = {
        "cases": len(baseline.entries),
        "fingerprint": baseline.hardware.fingerprint,
        "hardware": dict(baseline.hardware.key),
        "platform": baseline.hardware.platform,
        "schema": SCHEMA,
        "simulated": baseline.hardware.simulated,
    }
    document: dict[str, Any] = {
        "commit_info": dict(baseline.commit_info),
        "datetime": baseline.newest_time,
        "environments": environments,
        "machine_info": dict(baseline.machine_info),
        "perfsuite": header,
        "sessions": sessions,
        "version": _LAYOUT_VERSION,
    }
    header["check"] = check_of(_header_of(document))
    texts = {name: _canonical(value) for name, value in document.items()}
    texts |= {name: _block("[", cases[name], "]", 0) for name in _CASE_LISTS}
    for name in ("environments", "sessions"):
        table = [f"{json.dumps(key)}: {_canonical(value)}" for key, value in sorted(document[name].items())]
        texts[name] = _block("{", table, "}", 0)
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {texts[name]}" for name in sorted(texts)) + "\n}\n"


def _plain_case(entry: Entry, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    case = entry.case
    name = bare_name(case.node)
    extra = to_json(dataclasses.replace(case, defaults=case.unsaid))
    plain: dict[str, Any] = {
        "fullname": extra.pop("node"),
        "group": extra.pop("group", None),
        "name": name,
        "options": {},
        "param": name.partition("[")[2][:-1] or None,
        "params": extra.pop("parameters"),
        "runs": runs,
        "extra_info": extra,
    }
    for meaning in extra.get("metrics", {}).values():
        meaning.update({"own": True} if "own" in meaning else {})
    if entry.accepted:
        extra["accepted"] = to_json(entry.accepted)
    measured = [run for run in entry.runs if run.quantiles_s]
    if measured:
        plain["stats"] = stats_of([run.median_s for run in measured], iterations=measured[-1].iterations)
    return plain


def _plain_run(run: RunSummary, session: str, *, is_reference: bool) -> dict[str, Any]:
    values = {name: getattr(run, name) for name, usual in _RUN_FIELDS.items() if getattr(run, name) != usual}
    plain = {"run" if name == "ordinal" else name: to_json(value) for name, value in values.items()}
    return {"session": session, **plain, **({"reference": True} if is_reference else {})}


def stats_of(medians_s: Sequence[float], *, iterations: int) -> dict[str, Any]:
    """Return pytest-benchmark's ``stats`` of runs with these medians in seconds; ``rounds`` is the number of runs."""
    from pytest_benchmark.stats import Stats  # takes a tenth of a second to load

    stats: Any = Stats()  # type: ignore[no-untyped-call]
    stats.data = list(medians_s)
    counts = {"rounds", "iqr_outliers", "stddev_outliers", "outliers"}
    plain = {
        name: value if name in counts else rounded(value, _STATS_DIGITS) for name, value in stats.as_dict().items()
    }
    return {**plain, "iterations": iterations}


def check_of(plain: Mapping[str, Any]) -> str:
    """Return the check of a case or a header: CRC-32 of its canonical form without ``check``, eight hex digits."""
    content = _canonical({name: value for name, value in plain.items() if name != "check"})
    return f"{zlib.crc32(content.encode()):08x}"


def _header_of(document: Mapping[str, Any]) -> dict[str, Any]:
    outside = {name: value for name, value in document.items() if name not in (*_CASE_LISTS, "perfsuite")}
    return {**document["perfsuite"], "outside": outside}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _key(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(plain).encode()).hexdigest()[:_KEY_DIGITS]


def _block(opening: str, lines: Sequence[str], closing: str, indent: int) -> str:
    if not lines:
        return opening + closing
    margin = " " * (indent + 1)
    body = ",\n".join(margin + line for line in lines)
    return f"{opening}\n{body}\n{' ' * indent}{closing}"


# -- text to baseline ------------------------------------------------------------------------------------------------


def loads(data: bytes) -> Baseline:
    """Return the baseline in the bytes of a file.  Raises Fault with line and reason.

    The check of a part is compared first.  A part that fails it was changed, so its fields are not checked one by one.
    """
    document = _document(data)
    header = document.get("perfsuite")
    with _part(data, '"perfsuite"'):
        if not isinstance(header, dict):
            origin = "pytest-benchmark's own" if "benchmarks" in document else "not a benchmark file"
            raise ValueError(f'has no "perfsuite" object, so another program wrote the file ({origin})')
        schema = header["schema"]
        if schema != SCHEMA and type(schema) is int:
            rule = f"newer than {SCHEMA}, the newest that this perfsuite knows; upgrade perfsuite"
            if schema < SCHEMA:
                rule = f"older than {SCHEMA}, the only one that this perfsuite reads; store runs anew"
            raise ValueError(f"schema {schema} is {rule}")
        cases = [case for name in _CASE_LISTS for case in document[name]]
        if header["cases"] != len(cases):
            raise ValueError(
                f"the header has cases={header['cases']}, the file has {len(cases)}: it was edited by hand"
            )
        if header["check"] != check_of(_header_of(document)):
            raise ValueError("the header was changed by hand after perfsuite wrote it")
        fields = {name: header[name] for name in ("platform", "fingerprint", "simulated")}
        hardware = from_json(Hardware, {**fields, "key": header["hardware"]})
        environments = document["environments"]
        sessions = {
            key: {**plain, "environment": environments[plain["environment"]]}
            for key, plain in document["sessions"].items()
        }
    entries: dict[CaseKey, Entry] = {}
    for plain in cases:
        mark = plain.get("check") if isinstance(plain, dict) else "benchmarks"
        with _part(data, f'"{mark}"'):
            if plain["check"] != check_of(plain):
                raise ValueError(
                    f"{plain['fullname']} was changed by hand after perfsuite wrote it: its check does not match"
                )
            entry = _entry(plain, sessions)
            if entry.case.key in entries:
                raise ValueError(f"the case {entry.case.node} with these parameters occurs twice")
            entries[entry.case.key] = entry
    return Baseline(
        hardware=hardware, entries=entries, commit_info=document["commit_info"], machine_info=document["machine_info"]
    )


@contextlib.contextmanager
def _part(data: bytes, mark: str) -> Iterator[None]:
    """Name the line of ``mark`` in every error of a part of the file."""
    try:
        yield
    except (ValueError, BaselineError, TypeError, LookupError, AttributeError) as error:
        place = max(data.find(mark.encode()), 0)
        is_clear = isinstance(error, (ValueError, BaselineError))
        reason = str(error) if is_clear else f"it has another form than perfsuite writes ({error!r:.80})"
        raise Fault(reason, line=data.count(b"\n", 0, place) + 1) from None


def _document(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Fault(f"byte 0x{data[error.start]:02x} is not UTF-8: the file is damaged or binary", line) from None
    if not text.strip():
        raise Fault("the file is empty")
    try:
        document = plain_json(text, strict=True)
    except json.JSONDecodeError as error:
        raise Fault(_syntax_reason(text, error), error.lineno) from None
    except ValueError as error:
        raise Fault(str(error)) from None
    if not isinstance(document, dict):
        raise Fault("the file holds JSON that is not an object")
    return document


def _syntax_reason(text: str, error: json.JSONDecodeError) -> str:
    if any(line.startswith(CONFLICT_MARKERS) for line in text.splitlines()):
        return "a git conflict marker; restore both sides to files and use perfsuite baselines merge"
    if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
        return f"the file ends inside a value ({error.msg}): it is truncated"
    return f"not JSON ({error.msg}, column {error.colno})"


def _entry(plain: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]]) -> Entry:
    extra = dict(plain["extra_info"])
    accepted = extra.pop("accepted", None)
    for name, meaning in extra.get("metrics", {}).items():
        if "own" in meaning:
            meaning["own"] = {"name": name, "unit": meaning["unit"], "better": meaning["better"]}
    case = from_json(
        CaseIdentity, {"node": plain["fullname"], "parameters": plain["params"], "group": plain["group"], **extra}
    )
    kept = [_run(run, sessions) for run in plain["runs"]]
    reference = tuple(run for run, fields in zip(kept, plain["runs"], strict=True) if "reference" in fields)
    runs = newest(kept)
    if not runs or len({run.key for run in (*runs, *reference)}) < len(kept) or len(reference) > REFERENCE_MOST:
        most = f"at most {KEPT_RUNS} runs and {REFERENCE_MOST} in its reference"
        raise ValueError(f"{len(kept)} runs, with equal ones or too many; a case has {most}")
    start = None if accepted is None else from_json(Acceptance, accepted)
    return Entry(case=case, runs=runs, accepted=start, reference=reference)


def _run(plain: Mapping[str, Any], sessions: Mapping[str, Mapping[str, Any]]) -> RunSummary:
    fields = {"ordinal" if name == "run" else name: value for name, value in plain.items() if name != "reference"}
    run = from_json(RunSummary, {**fields, **sessions[plain["session"]]})
    times_s, measured = run.quantiles_s, run.outcome == "measured"
    fits = len(times_s) == (len(QUANTILES) if measured else 0) and tuple(sorted(times_s)) == times_s
    fits = fits and all(_SHORTEST_S < time_s < _LONGEST_S for time_s in times_s)
    if not fits or not 0 <= run.clean <= run.samples or (run.location is None) != (run.clean == 0):
        raise ValueError(f"the run of {run.time} has samples that contradict each other")
    moment(run.time)
    return run
