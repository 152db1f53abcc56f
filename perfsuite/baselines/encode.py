"""Baseline -> document: equal baselines give equal text."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.base.text import bare_name
from perfsuite.baselines import rules
from perfsuite.baselines.baseline import Baseline, Entry
from perfsuite.baselines.decode import SCHEMA
from perfsuite.baselines.runs import RunSummary, rounded
from perfsuite.baselines.text import canonical, check_of, header_of
from perfsuite.record.codec import to_json

LAYOUT_VERSION = "5.1.0"
"""The pytest-benchmark version whose layout the file follows; fixed, so that an upgrade changes no file."""


def encode(baseline: Baseline) -> dict[str, Any]:
    """Return the document of a baseline; equal baselines give equal documents."""
    sources = _Sources()
    measured: list[dict[str, Any]] = []
    unmeasured: list[dict[str, Any]] = []
    for entry in sorted(baseline.entries.values(), key=lambda one: (one.case.node, one.newest.time, one.case.key)):
        plain = _encode_entry(entry, sources)
        (measured if "stats" in plain else unmeasured).append(plain)
    document: dict[str, Any] = {
        "benchmarks": measured,
        "commit_info": dict(baseline.commit_info),
        "datetime": baseline.newest_time,
        "environments": sources.environments,
        "machine_info": dict(baseline.machine_info),
        "perfsuite": {
            "cases": len(baseline.entries),
            "fingerprint": baseline.hardware.fingerprint,
            "hardware": dict(baseline.hardware.key),
            "platform": baseline.hardware.platform,
            "schema": SCHEMA,
            "simulated": baseline.hardware.simulated,
        },
        "sessions": sources.sessions,
        "unmeasured": unmeasured,
        "version": LAYOUT_VERSION,
    }
    document["perfsuite"]["check"] = check_of(header_of(document))
    return document


class _Sources:
    """Sessions and environments that runs refer to, each written once."""

    def __init__(self) -> None:
        self.environments: dict[str, Any] = {}
        self.sessions: dict[str, Any] = {}
        self._keys: dict[tuple[str, str, str, int], tuple[str, Mapping[str, Any]]] = {}

    def key_of(self, run: RunSummary) -> str:
        """Return the key of the run's session, revision and environment; add them to the tables."""
        seen = (run.session, run.commit, run.boot, id(run.environment))
        if seen not in self._keys:  # stores the environment too, so that its id stays unique
            environment = _key(run.environment)
            self.environments[environment] = dict(run.environment)
            plain = {"commit": run.commit, "environment": environment, "session": run.session}
            if run.boot:
                plain["boot"] = run.boot
            key = _key(plain)
            self.sessions[key] = plain
            self._keys[seen] = (key, run.environment)
        return self._keys[seen][0]


def _key(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(plain).encode()).hexdigest()[: rules.KEY_DIGITS]


def _encode_entry(entry: Entry, sources: _Sources) -> dict[str, Any]:
    case = entry.case
    name = bare_name(case.node)
    extra: dict[str, Any] = {
        "backend": case.backend,
        "metrics": {
            key: {"better": meaning.better, "unit": meaning.unit, **({"own": True} if meaning.own else {})}
            for key, meaning in case.metrics.items()
        },
        "workload": case.workload,
        "world_size": case.world_size,
    }
    if case.unsaid:
        extra["defaults"] = dict(case.unsaid)
    if case.training is not None:
        extra["training"] = to_json(case.training)
    if entry.accepted:
        accepted = entry.accepted
        extra["accepted"] = {"reason": accepted.reason, "session": accepted.session, "time": accepted.time}
        if accepted.kind != "accepted":
            extra["accepted"]["kind"] = accepted.kind
    in_reference = {run.key for run in entry.reference}
    plain: dict[str, Any] = {
        "extra_info": extra,
        "fullname": case.node,
        "group": case.group,
        "name": name,
        "options": {},
        "param": name.partition("[")[2][:-1] or None,
        "params": dict(case.parameters),
        "runs": [_encode_run(run, sources, reference=run.key in in_reference) for run in entry.kept],
    }
    medians_s = [run.median_s for run in entry.runs if run.quantiles_s]
    if medians_s:
        iterations = [run.iterations for run in entry.runs if run.quantiles_s][-1]
        plain["stats"] = entry_stats(medians_s, iterations=iterations)
    plain["check"] = check_of(plain)
    return plain


_USUAL = {field.name: field.default for field in dataclasses.fields(RunSummary)}


def _encode_run(run: RunSummary, sources: _Sources, *, reference: bool) -> dict[str, Any]:
    measured = run.outcome == "measured"
    plain: dict[str, Any] = {"session": sources.key_of(run), "time": run.time}
    plain.update({} if measured else {"outcome": run.outcome})
    plain.update({"reference": True} if reference else {})
    optional = rules.MEASURED_OPTIONAL if measured else rules.RUN_OPTIONAL
    for name in (*(rules.SAMPLES if measured else ()), *optional):
        attribute = rules.RUN_NAMES.get(name, name)
        if name != "reference" and (name in rules.SAMPLES or getattr(run, attribute) != _USUAL[attribute]):
            plain[name] = to_json(getattr(run, attribute))
    return plain


DIGITS = 6
"""Significant digits; the medians have four."""


def entry_stats(medians_s: Sequence[float], *, iterations: int) -> dict[str, Any]:
    """Return pytest-benchmark's ``stats`` of runs with these medians in seconds; ``rounds`` is the number of runs.

    Quartiles split an odd number of values by the weighted method (Langford's method 3) and an even number at the
    middle.  Outliers are counted beyond one standard deviation from the mean and beyond 1.5 interquartile ranges from
    the quartiles.

    >>> stats = entry_stats([1.0, 2.0, 3.0, 4.0, 10.0], iterations=1)
    >>> stats["median"], stats["q1"], stats["q3"], stats["outliers"], stats["ops"]
    (3.0, 1.75, 5.5, '1;0', 0.25)
    """
    ordered = sorted(medians_s)
    q1, q3 = _quartiles(ordered)
    iqr = q3 - q1
    mean = statistics.fmean(ordered)
    stddev = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    inside = [value for value in ordered if q1 - 1.5 * iqr <= value <= q3 + 1.5 * iqr]
    beyond_deviation = sum(abs(value - mean) > stddev for value in ordered)
    beyond_quartiles = len(ordered) - len(inside)
    plain = {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": stddev,
        "median": statistics.median(ordered),
        "q1": q1,
        "q3": q3,
        "iqr": iqr,
        "ld15iqr": inside[0],
        "hd15iqr": inside[-1],
        "ops": 1 / mean,
        "total": sum(ordered),
    }
    return {
        **{name: rounded(value, DIGITS) for name, value in plain.items()},
        "rounds": len(ordered),
        "iterations": iterations,
        "stddev_outliers": beyond_deviation,
        "iqr_outliers": beyond_quartiles,
        "outliers": f"{beyond_deviation};{beyond_quartiles}",
    }


def _quartiles(ordered: Sequence[float]) -> tuple[float, float]:
    count = len(ordered)
    if count == 1:
        return ordered[0], ordered[0]
    if count % 2 == 0:
        return statistics.median(ordered[: count // 2]), statistics.median(ordered[count // 2 :])
    whole, rest = divmod(count, 4)
    if rest == 1:
        lower = 0.25 * ordered[whole - 1] + 0.75 * ordered[whole]
        upper = 0.75 * ordered[3 * whole] + 0.25 * ordered[3 * whole + 1]
    else:
        lower = 0.75 * ordered[whole] + 0.25 * ordered[whole + 1]
        upper = 0.25 * ordered[3 * whole + 1] + 0.75 * ordered[3 * whole + 2]
    return lower, upper
