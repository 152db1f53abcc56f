"""A session in a history: one line of JSON, so short that a repository can hold years of sessions.

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
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perfsuite.base.text import escaped_json
from perfsuite.baselines.hosts import HostIdentity, host_of
from perfsuite.baselines.runs import MetricMeaning, moment, rounded
from perfsuite.baselines.summarise import case_of, summarise
from perfsuite.metrics import is_headline
from perfsuite.record.codec import to_json
from perfsuite.record.result import Result
from perfsuite.record.run import Revision

SCHEMA = 2
"""Version of a line; a reader refuses a higher one."""
_BULKY = frozenset({"topology", "notes"})
"""Parts of an environment that are long and do not change the speed of a case."""
_LARGEST_LOG = 700.0
"""Largest ln of a time that is read; a float can hold the time."""
_DIGESTS = 1 << 32
"""Number of digests; sums of digests are taken modulo this number."""
_TEXTS = ("session", "time", "platform", "fingerprint", "commit", "branch", "subject", "boot")


class CasePoint(NamedTuple):
    """One case in one session; a tuple, because a history has hundreds of thousands of them."""

    log_time: float
    """ln of the median seconds of the clean samples, or of all samples if too few are clean."""
    clean_share: float
    """Share of samples without an involuntary context switch of a rank."""
    metrics: Mapping[str, float]
    """Headline metrics and own metrics by name."""
    settings: str = ""
    """Sum of the digests of parameters, ranks and backend, and the key of the workload's fields.

    Empty in the oldest lines.  Lines of the next version have no key and are compared only with each other.
    """


@dataclass(frozen=True, kw_only=True)
class HistorySession:
    """One session of a history."""

    session: str
    """Identifier of the pytest session."""
    time: str
    """Start, UTC, ISO 8601."""
    platform: str
    fingerprint: str
    """Key of the hardware; equal for all sessions of a history."""
    simulated: bool = False
    """Whether the device is simulated; such sessions are never compared with real ones."""
    revision: Revision = field(default_factory=Revision)
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Settings that may differ between runs on the same hardware."""
    boot: str = ""
    """Boot of the host; empty if the line has none."""
    cases: Mapping[str, CasePoint] = field(default_factory=dict)
    """By node id."""
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
    """Return whether a case ran with equal settings in two sessions; True if a line has no settings.

    As in :meth:`CaseIdentity.changed`, a parameter of only one side with its default is equal.
    """
    left, right = one.cases[case].settings, other.cases[case].settings
    if left == right or not left or not right or ("-" in left) != ("-" in right):
        return True
    (total, fields), (total_there, fields_there) = _read_settings(one, left), _read_settings(other, right)
    total -= sum(digest for name, digest in fields.items() if name not in fields_there)
    total_there -= sum(digest for name, digest in fields_there.items() if name not in fields)
    return "-" in left and (total - total_there) % _DIGESTS == 0


def _read_settings(session: HistorySession, settings: str) -> tuple[int, Mapping[str, int]]:
    total, _, key = settings.partition("-")
    return int(total, 16), session.fields.get(key, {})


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
        log_time=(run.location if run.has_clean and run.location is not None else round(math.log(run.median_s), 5)),
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
    """Return the JSON of a session, without the end of the line."""
    revision = session.revision
    own = {name: [meaning.unit, meaning.better] for name, meaning in sorted(session.own.items())}
    plain = {
        "schema": SCHEMA,
        "session": session.session,
        "time": session.time,
        "platform": session.platform,
        "fingerprint": session.fingerprint,
        "simulated": session.simulated,
        "commit": revision.commit,
        "dirty": revision.dirty,
        "branch": revision.branch,
        "subject": revision.subject,
        "environment": session.environment,
        **({"boot": session.boot} if session.boot else {}),
        **({"fields": session.fields} if session.fields else {}),
        **({"own": own} if own else {}),
        "cases": {case: [*point[:3], *filter(None, [point.settings])] for case, point in sorted(session.cases.items())},
    }
    return escaped_json(json.dumps(plain, separators=(",", ":"), ensure_ascii=False))


def read_line(line: bytes) -> HistorySession:
    """Return the session of a line.  Raises ValueError with the broken rule."""
    try:
        plain = json.loads(line, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
    if not isinstance(plain, dict) or type(plain.get("schema")) is not int:
        raise ValueError("this is not a line of a perfsuite history")
    if plain["schema"] > SCHEMA:
        raise ValueError(f"schema {plain['schema']} is newer than {SCHEMA}, the newest that this perfsuite reads")
    if plain["schema"] < 1:
        raise ValueError(f"schema {plain['schema']} is not valid: schemas begin with 1")
    plain = {"fields": {}, "boot": "", **plain}
    for name in _TEXTS:
        if not isinstance(plain.get(name), str):
            raise ValueError(f"{name} is {plain.get(name)!r:.60}, not a text")
    for name in ("environment", "cases", "fields"):
        if not isinstance(plain.get(name), dict):
            raise ValueError(f"{name} is {plain.get(name)!r:.60}, not an object")
    for name in ("simulated", "dirty"):
        if not isinstance(plain.get(name), bool):
            raise ValueError(f"{name} is {plain.get(name)!r:.60}, not true or false")
    try:
        moment(plain["time"])
    except ValueError:
        raise ValueError(f"time {plain['time']!r:.60} is not ISO 8601") from None
    return HistorySession(
        session=plain["session"],
        time=plain["time"],
        platform=plain["platform"],
        fingerprint=plain["fingerprint"],
        simulated=plain["simulated"],
        revision=Revision(
            commit=plain["commit"], dirty=plain["dirty"], branch=plain["branch"], subject=plain["subject"]
        ),
        environment=plain["environment"],
        boot=plain["boot"],
        own=_read_own(plain.get("own", {})),
        cases={case: _read_point(case, values) for case, values in plain["cases"].items()},
        fields={key: _read_fields(key, values) for key, values in plain["fields"].items()},
    )


def _read_own(plain: Any) -> Mapping[str, MetricMeaning]:
    metrics = plain.items() if isinstance(plain, dict) else [("own", plain)]
    for name, value in metrics:
        pair = value if isinstance(value, list) and len(value) == 2 else ("", "")
        if not isinstance(pair[0], str) or pair[1] not in ("higher", "lower", "neither"):
            raise ValueError(f"own metric {name:.80} is {value!r:.60}, not [unit, better]")
    return {name: MetricMeaning(unit=value[0], better=value[1]) for name, value in metrics}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _read_fields(key: str, values: Any) -> Mapping[str, int]:
    if isinstance(values, dict) and all(type(digest) is int and 0 <= digest < _DIGESTS for digest in values.values()):
        return values
    raise ValueError(f"fields {key:.80} are {values!r:.60}, not digests of defaults by name")


def _read_point(case: str, values: Any) -> CasePoint:
    if isinstance(values, list) and len(values) in (3, 4):
        log_time, clean_share, metrics, settings = (*values, "")[:4]
        numbers = (log_time, clean_share, *metrics.values()) if isinstance(metrics, dict) else ("",)
        fits = all(type(number) in (float, int) and abs(number) <= sys.float_info.max for number in numbers)
        fits = (
            fits and isinstance(settings, str) and re.fullmatch(r"([0-9a-f]{8}(-[0-9a-f]{8})?)?", settings) is not None
        )
        if fits and abs(log_time) <= _LARGEST_LOG and 0 <= clean_share <= 1:
            return CasePoint(log_time, clean_share, metrics, settings)
    raise ValueError(f"case {case:.80} is {values!r:.60}, not [ln time, clean share, metrics]")
