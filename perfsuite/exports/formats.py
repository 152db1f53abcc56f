"""Rows with one figure and its context, and the formats of ``perfsuite export``: a function and a row in FORMATS."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import cell_text, escaped, json_text
from perfsuite.base.units import plural
from perfsuite.baselines.baseline import Baseline, flattened
from perfsuite.baselines.runs import DIRTY
from perfsuite.history.file import HistoryFile
from perfsuite.metrics import REGISTRY
from perfsuite.record.own_metrics import Better
from perfsuite.record.run import Revision, RunRecord

TIME = "median_s"  # Metric of the time, which every measured case has.
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
    ranks: int | None = None  # None in a history, which does not store it.
    platform: str
    fingerprint: str
    simulated: bool
    session: str
    time: str  # UTC, ISO 8601.
    commit: str
    branch: str = ""
    dirty: bool | None
    verdict: str = ""  # Verdict of the gate; empty without one.
    environment: Mapping[str, str]  # Facts that may differ on the same hardware, by dotted name.


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
            commit=run.commit.removesuffix(DIRTY),
            dirty=run.commit.endswith(DIRTY) if run.commit else None,
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
            platform=session.platform,
            fingerprint=session.fingerprint,
            simulated=session.simulated,
            session=session.session,
            time=session.time,
            **_revision(session.revision),
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


Exported = tuple[str, int, str]
"""Text of a file, number of its figures (a format may hold only the newest ones, or only times), and a remark."""


# JSON and CSV: a row per figure.

SCHEMA = 1


def as_json(rows: Sequence[ExportRow]) -> Exported:
    """Return ``{"perfsuite_rows": 1, "rows": [...]}``."""
    plain = {"perfsuite_rows": SCHEMA, "rows": [dataclasses.asdict(row) for row in rows]}
    return json_text(plain), len(rows), ""


def as_csv(rows: Sequence[ExportRow]) -> Exported:
    """Return a header and a line per figure, with a column per part of the environment; no cell is a formula."""
    names = [field.name for field in dataclasses.fields(ExportRow) if field.name != "environment"]
    parts = sorted({part for row in rows for part in row.environment})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(cell_text(f"environment.{part}") for part in parts)])
    for row in rows:
        cells = [*(getattr(row, name) for name in names), *(row.environment.get(part, "") for part in parts)]
        writer.writerow([cell_text(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue(), len(rows), ""


# Input of programs that track performance: Bencher's metric format, github-action-benchmark, Apache Otava.


def as_bencher(rows: Sequence[ExportRow]) -> Exported:
    """Return the Bencher metric format: case -> measure -> value.

    Source: bencher.dev/docs/reference/bencher-metric-format.
    """
    cases: dict[str, dict[str, dict[str, float]]] = {}
    for row in newest(rows):
        cases.setdefault(row.case, {})[row.metric.replace("_", "-")] = {"value": row.value}
    return json_text(cases), sum(map(len, cases.values())), ""


def as_github_action_benchmark(rows: Sequence[ExportRow]) -> Exported:
    """Return ``customSmallerIsBetter``: only times, because a file has one direction for all.

    Source: github.com/benchmark-action/github-action-benchmark, README, "customSmallerIsBetter".
    """
    entries = [
        {"name": row.case, "unit": row.unit, "value": row.value, "extra": f"{row.convention}; {row.fingerprint}"}
        for row in newest(rows)
        if row.metric == TIME
    ]
    return json_text(entries), len(entries), ""


def as_otava(rows: Sequence[ExportRow]) -> Exported:
    """Return CSV with a line per session and a column of seconds per case.

    Otava rejects a file with an empty cell. A case missing in a session gets the time of the previous session, of the
    same branch if possible. Otava fills gaps of other sources in the same way. The column ``filled`` lists such cases.
    Source: Apache Otava, docs/CSV.md: ``type: csv``, ``time_column: time``, ``attributes: [commit, branch]``; and
    otava/analysis.py, fill_missing.
    """
    times = [row for row in rows if row.metric == TIME]
    cases = sorted({row.case for row in times})
    sessions: dict[str, dict[str, ExportRow]] = {}
    for row in sorted(times, key=lambda row: (row.time, row.session)):
        sessions.setdefault(row.session, {})[row.case] = row
    lines = list(sessions.values())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time", "commit", "branch", *map(cell_text, cases), "filled"])
    gaps = 0
    for index, measured in enumerate(lines):
        first = next(iter(measured.values()))
        missing = [case for case in cases if case not in measured]
        seconds = [measured[case].value if case in measured else _nearest(lines, index, case) for case in cases]
        about = [cell_text(first.time), cell_text(first.commit), cell_text(first.branch)]
        writer.writerow([*about, *seconds, cell_text("; ".join(missing))])
        gaps += len(missing)
    note = f"{plural(gaps, 'cell')} of cases that a session lacks repeat another session (column filled)"
    return text.getvalue(), sum(map(len, lines)), note if gaps else ""


def _nearest(lines: Sequence[Mapping[str, ExportRow]], index: int, case: str) -> float:
    """Return the time of the previous session, else of the next one; sessions of the same branch first."""
    branch = next(iter(lines[index].values())).branch
    places = [place for place, measured in enumerate(lines) if case in measured]
    best = min(places, key=lambda place: (lines[place][case].branch != branch, place > index, abs(place - index)))
    return lines[best][case].value


# A text file for a scraper or node_exporter's textfile collector, written by ``prometheus_client``.

_LABELS = ("case", "metric", "platform", "fingerprint", "ranks", "unit", "better", "convention", "verdict", "simulated")
_TIME_NAME = "perfsuite_median_seconds"
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


def as_openmetrics(rows: Sequence[ExportRow]) -> Exported:
    """Return a gauge per metric with a sample per case, the newest of each.

    Raises ConfigurationError without prometheus_client. The text ends with ``# EOF`` as OpenMetrics 1.0 requires;
    Prometheus' own text format reads that as a comment.
    """
    try:
        import prometheus_client as client
        from prometheus_client.openmetrics import exposition
    except ImportError:
        raise ConfigurationError(
            "this format needs the package prometheus_client, which is not installed; pip install 'perfsuite[export]'"
        ) from None
    registry = client.CollectorRegistry()
    gauges: dict[str, Any] = {}
    for row in newest(rows):
        name = _TIME_NAME if row.metric == TIME else f"perfsuite_{_INVALID.sub('_', row.metric)}"
        if name not in gauges:
            about = "time of a case" if row.metric == TIME else escaped(row.metric)
            gauges[name] = client.Gauge(name, f"perfsuite: {about}", _LABELS, registry=registry)
        labels = {label: str(getattr(row, label)) for label in _LABELS}
        labels["ranks"] = "" if row.ranks is None else labels["ranks"]
        labels["simulated"] = labels["simulated"].lower()
        gauges[name].labels(**{label: escaped(text) for label, text in labels.items()}).set(row.value)
    write: Callable[[Any], bytes] = exposition.generate_latest
    return write(registry).decode(), sum(len(family.samples) for family in registry.collect()), ""


EXPORTS: Mapping[str, Callable[[Sequence[ExportRow]], Exported]] = {
    "json": as_json,
    "csv": as_csv,
    "openmetrics": as_openmetrics,
    "bencher": as_bencher,
    "github-action-benchmark": as_github_action_benchmark,
    "otava": as_otava,
}
"""Formats by name."""
