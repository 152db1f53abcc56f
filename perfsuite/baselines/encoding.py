"""Baseline -> document: equal baselines give equal text."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from perfsuite.baselines.baseline import Baseline, CaseKey, Entry
from perfsuite.baselines.document import canonical, check_of, header_of
from perfsuite.baselines.entry_stats import entry_stats
from perfsuite.baselines.runs import Run
from perfsuite.baselines.schema import SCHEMA

LAYOUT_VERSION = "5.1.0"
"""The pytest-benchmark version whose layout the file follows; fixed, so that an upgrade changes no file."""


def encode(baseline: Baseline) -> dict[str, Any]:
    """The document of a baseline; equal baselines give equal documents."""
    environments: dict[str, Any] = {}
    measured: list[dict[str, Any]] = []
    unmeasured: list[dict[str, Any]] = []
    for entry in sorted(baseline.entries.values(), key=_entry_order):
        for run in entry.runs:
            environments[_environment_key(run.environment)] = dict(run.environment)
        plain = _encode_entry(entry)
        (measured if "stats" in plain else unmeasured).append(plain)
    document: dict[str, Any] = {
        "benchmarks": measured,
        "commit_info": dict(baseline.commit_info),
        "datetime": baseline.newest_time,
        "environments": environments,
        "machine_info": dict(baseline.machine_info),
        "perfsuite": {
            "cases": len(baseline.entries),
            "fingerprint": baseline.hardware.fingerprint,
            "hardware": dict(baseline.hardware.key),
            "platform": baseline.hardware.platform,
            "schema": SCHEMA,
            "simulated": baseline.hardware.simulated,
        },
        "unmeasured": unmeasured,
        "version": LAYOUT_VERSION,
    }
    document["perfsuite"]["check"] = check_of(header_of(document))
    return document


def _entry_order(entry: Entry) -> tuple[str, str, CaseKey]:
    """By node id, the newest last: of several entries with one node id pytest-benchmark compares with the last."""
    return (entry.case.node, entry.newest.time, entry.case.key)


def _environment_key(environment: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(canonical(environment).encode()):08x}"


def _encode_entry(entry: Entry) -> dict[str, Any]:
    case = entry.case
    name = case.node.rpartition("::")[2]
    extra: dict[str, Any] = {
        "backend": case.backend,
        "metrics": {key: {"better": each.better, "unit": each.unit} for key, each in case.metrics.items()},
        "workload": case.workload,
        "world_size": case.world_size,
    }
    if entry.accepted:
        accepted = entry.accepted
        extra["accepted"] = {"reason": accepted.reason, "session": accepted.session, "time": accepted.time}
    plain: dict[str, Any] = {
        "extra_info": extra,
        "fullname": case.node,
        "group": case.group,
        "name": name,
        "options": {},
        "param": name.partition("[")[2][:-1] or None,
        "params": dict(case.parameters),
        "runs": [_encode_run(run) for run in entry.runs],
    }
    medians_s = [run.median_s for run in entry.runs if run.quantiles_s]
    if medians_s:
        iterations = [run.iterations for run in entry.runs if run.quantiles_s][-1]
        plain["stats"] = entry_stats(medians_s, iterations=iterations)
    plain["check"] = check_of(plain)
    return plain


def _encode_run(run: Run) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "environment": _environment_key(run.environment),
        "run": run.ordinal,
        "session": run.session,
        "time": run.time,
    }
    if run.outcome == "measured":
        plain.update(
            clean=run.clean,
            cpu_share=run.cpu_share,
            iterations=run.iterations,
            location=run.location,
            metrics=dict(run.metrics),
            quantiles_s=list(run.quantiles_s),
            samples=run.samples,
        )
        if run.yardstick is not None:
            plain["yardstick"] = run.yardstick
    else:
        plain["outcome"] = run.outcome
    optional = {"commit": run.commit, "disturbance": run.disturbance}
    plain.update({name: value for name, value in optional.items() if value})
    if run.process != "fresh":
        plain["process"] = run.process
    return plain
