"""Baseline -> document: equal baselines give equal text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from perfsuite.baselines.baseline import Baseline, CaseKey, Entry
from perfsuite.baselines.decode import SCHEMA
from perfsuite.baselines.entry_stats import entry_stats
from perfsuite.baselines.rules import KEY_DIGITS
from perfsuite.baselines.runs import RunSummary
from perfsuite.baselines.text import canonical, check_of, header_of
from perfsuite.record.codec import to_json

LAYOUT_VERSION = "5.1.0"
"""The pytest-benchmark version whose layout the file follows; fixed, so that an upgrade changes no file."""


def encode(baseline: Baseline) -> dict[str, Any]:
    """The document of a baseline; equal baselines give equal documents."""
    sources = _Sources()
    measured: list[dict[str, Any]] = []
    unmeasured: list[dict[str, Any]] = []
    for entry in sorted(baseline.entries.values(), key=_entry_order):
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
        self._known: dict[tuple[str, str, str, int], tuple[str, Mapping[str, Any]]] = {}

    def key_of(self, run: RunSummary) -> str:
        """Key of the run's session, revision and environment together."""
        seen = (run.session, run.commit, run.boot, id(run.environment))
        if seen not in self._known:  # the mapping is kept beside its id, which nobody else can have while it lives
            environment = _key(run.environment)
            self.environments[environment] = dict(run.environment)
            plain = {"commit": run.commit, "environment": environment, "session": run.session}
            if run.boot:
                plain["boot"] = run.boot
            key = _key(plain)
            self.sessions[key] = plain
            self._known[seen] = (key, run.environment)
        return self._known[seen][0]


def _key(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(plain).encode()).hexdigest()[:KEY_DIGITS]


def _entry_order(entry: Entry) -> tuple[str, str, CaseKey]:
    """By node id, the newest last: of several entries with one node id pytest-benchmark compares with the last."""
    return (entry.case.node, entry.newest.time, entry.case.key)


def _encode_entry(entry: Entry, sources: _Sources) -> dict[str, Any]:
    case = entry.case
    name = case.node.rpartition("::")[2]
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


def _encode_run(run: RunSummary, sources: _Sources, *, reference: bool) -> dict[str, Any]:
    """One line; what is as usual stays out of it."""
    plain: dict[str, Any] = {"session": sources.key_of(run), "time": run.time}
    if run.outcome == "measured":
        plain.update(
            clean=run.clean,
            location=run.location,
            metrics=dict(run.metrics),
            quantiles_s=list(run.quantiles_s),
            samples=run.samples,
        )
    unusual = {
        "outcome": (run.outcome, "measured"),
        "reference": (reference, False),
        "run": (run.ordinal, 0),
        "iterations": (run.iterations, 1),
        "cpu_share": (run.cpu_share, 1.0),
        "throttled": (run.throttled, 0.0),
        "mean": (run.mean, None),
        "clean_mean": (run.clean_mean, None),
        "clean_p95": (run.clean_p95, None),
        "yardstick": (run.yardstick, None),
        "all_yardstick": (run.all_yardstick, None),
        "yardstick_mean": (run.yardstick_mean, None),
        "yardstick_p95": (run.yardstick_p95, None),
        "control": (run.control, ""),
        "process": (run.process, "fresh"),
        "disturbance": (run.disturbance, ""),
    }
    plain.update({name: value for name, (value, usual) in unusual.items() if value != usual})
    return plain
