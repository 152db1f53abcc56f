"""Tidy rows: one figure with all its context, from journals, baselines and histories."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perfsuite.baselines.baseline import Baseline, flattened
from perfsuite.history.file import HistoryFile
from perfsuite.metrics import REGISTRY
from perfsuite.record.own_metrics import Better
from perfsuite.record.run import Revision, RunRecord

TIME = "median_s"
"""Metric of the time, which every measured case has."""
_TIME: Mapping[str, Any] = {
    "metric": TIME,
    "unit": "s",
    "better": "lower",
    "convention": "median of the samples, seconds per iteration, the slowest rank",
}
_PARTS = ("hostname", "kernel", "python", "governor", "container", "driver", "packages", "variables")
"""Exported parts of an environment."""


@dataclass(frozen=True, kw_only=True)
class ExportRow:
    """One figure."""

    case: str
    metric: str
    value: float
    unit: str
    better: Better
    convention: str
    ranks: int | None
    """None in a history, which does not store it."""
    platform: str
    fingerprint: str
    simulated: bool
    session: str
    time: str
    """UTC, ISO 8601."""
    commit: str
    branch: str
    dirty: bool | None
    verdict: str
    """Verdict of the gate; empty without one."""
    environment: Mapping[str, str]
    """Facts that may differ on the same hardware, by dotted name."""


def environment_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the exported parts of an environment on one level.

    >>> environment_of({"kernel": "6.1", "packages": {"torch": "2.13.0"}, "notes": ["long"]})
    {'kernel': '6.1', 'packages.torch': '2.13.0'}
    """
    parts = {name: environment[name] for name in _PARTS if environment.get(name)}
    return {name: str(value) for name, value in flattened(parts).items()}


def rows_of_run(run: RunRecord, *, simulated: bool) -> Iterator[ExportRow]:
    """Yield the rows of a journal."""
    verdicts = run.gate.by_case if run.gate else {}
    for case, result in run.results.items():
        if result.outcome != "measured" or result.measurement is None:
            continue
        figure = functools.partial(
            ExportRow,
            case=case,
            ranks=result.world_size,
            platform=result.platform,
            fingerprint=result.fingerprint or run.fingerprint,
            simulated=simulated or result.simulated,
            session=result.session or run.session,
            time=result.started_at or run.started_at,
            **_revision(run.revision),
            verdict=verdicts[case].name if case in verdicts else "",
            environment=environment_of(result.environment),
        )
        yield figure(**_TIME, value=result.measurement.median_s)
        for metric in result.metrics:
            if metric.value is not None and math.isfinite(metric.value):
                name, unit, how = metric.name, metric.unit, metric.convention
                yield figure(metric=name, value=metric.value, unit=unit, better=metric.better, convention=how)


def rows_of_baseline(baseline: Baseline) -> Iterator[ExportRow]:
    """Yield the newest run of each case of a baseline."""
    hardware = baseline.hardware
    for _, entry in sorted(baseline.entries.items()):
        run = entry.newest
        if not run.quantiles_s:
            continue
        figure = functools.partial(
            ExportRow,
            case=entry.case.node,
            ranks=entry.case.world_size,
            platform=hardware.platform,
            fingerprint=hardware.fingerprint,
            simulated=hardware.simulated,
            session=run.session,
            time=run.time,
            commit=run.commit.removesuffix("-dirty"),
            branch="",
            dirty=run.commit.endswith("-dirty") if run.commit else None,
            verdict="",
            environment=environment_of(run.environment),
        )
        yield figure(**_TIME, value=run.median_s)
        for name, value in run.metrics.items():
            meaning, spec = entry.case.metrics.get(name), REGISTRY.get(name)
            if meaning is not None:
                how = spec.convention if spec else ""
                yield figure(metric=name, value=value, unit=meaning.unit, better=meaning.better, convention=how)


def rows_of_history(history: HistoryFile) -> Iterator[ExportRow]:
    """Yield every case of every session of a history."""
    for session in history.sessions:
        figure = functools.partial(
            ExportRow,
            ranks=None,
            platform=session.platform,
            fingerprint=session.fingerprint,
            simulated=session.simulated,
            session=session.session,
            time=session.time,
            **_revision(session.revision),
            verdict="",
            environment=environment_of(session.environment),
        )
        for case, point in session.cases.items():
            yield figure(case=case, **_TIME, value=math.exp(point.log_time))
            for name, value in point.metrics.items():
                spec, own = REGISTRY.get(name), session.own.get(name)
                if declared := own or spec:
                    unit, better, how = declared.unit, declared.better, spec.convention if spec and not own else ""
                    yield figure(case=case, metric=name, value=value, unit=unit, better=better, convention=how)


def _revision(revision: Revision) -> dict[str, Any]:
    dirty = revision.dirty if revision.commit else None
    return {"commit": revision.commit, "branch": revision.branch, "dirty": dirty}


def newest(rows: Iterable[ExportRow]) -> list[ExportRow]:
    """Return the newest row of each metric of a case on one hardware, for formats without time."""
    last: dict[tuple[str, str, str], ExportRow] = {}
    for row in sorted(rows, key=lambda row: row.time):
        last[row.fingerprint, row.case, row.metric] = row
    return list(last.values())
