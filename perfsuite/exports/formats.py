"""Every format of ``perfsuite export``: a new one is a function and a row here."""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import cell_text, escaped, json_text
from perfsuite.exports.row import TIME, ExportRow, newest

# JSON and CSV: a row per figure.

SCHEMA = 1


def as_json(rows: Sequence[ExportRow]) -> str:
    """``{"perfsuite_rows": 1, "rows": [...]}``."""
    plain = {"perfsuite_rows": SCHEMA, "rows": [dataclasses.asdict(row) for row in rows]}
    return json_text(plain)


def as_csv(rows: Sequence[ExportRow]) -> str:
    """A header and a line per figure; a column per part of the environment; no cell is a formula."""
    names = [field.name for field in dataclasses.fields(ExportRow) if field.name != "environment"]
    parts = sorted({part for row in rows for part in row.environment})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*names, *(cell_text(f"environment.{part}") for part in parts)])
    for row in rows:
        cells = [getattr(row, name) for name in names]
        writer.writerow([*map(_cell, cells), *(_cell(row.environment.get(part, "")) for part in parts)])
    return text.getvalue()


def _cell(value: object) -> object:
    return cell_text(value) if isinstance(value, str) else value


# What programs that follow performance read: Bencher's metric format, github-action-benchmark, Apache Otava.


def as_bencher(rows: Sequence[ExportRow]) -> str:
    """Bencher metric format: case -> measure -> value.  Source: bencher.dev/docs/reference/bencher-metric-format."""
    cases: dict[str, dict[str, dict[str, float]]] = {}
    for row in newest(rows):
        cases.setdefault(row.case, {})[row.metric.replace("_", "-")] = {"value": row.value}
    return json_text(cases)


def as_github_action_benchmark(rows: Sequence[ExportRow]) -> str:
    """``customSmallerIsBetter``: the times, because a file of it has one direction for all.

    Source: github.com/benchmark-action/github-action-benchmark, README, "customSmallerIsBetter".
    """
    entries = [
        {"name": row.case, "unit": row.unit, "value": row.value, "extra": f"{row.convention}; {row.fingerprint}"}
        for row in newest(rows)
        if row.metric == TIME
    ]
    return json_text(entries)


def as_otava(rows: Sequence[ExportRow]) -> str:
    """CSV with a line per session and a column of seconds per case.

    Source: Apache Otava, docs/CSV.md: ``type: csv``, ``time_column: time``, ``attributes: [commit, branch]``.
    """
    times = [row for row in rows if row.metric == TIME]
    cases = sorted({row.case for row in times})
    sessions: dict[str, dict[str, ExportRow]] = {}
    for row in sorted(times, key=lambda row: (row.time, row.session)):
        sessions.setdefault(row.session, {})[row.case] = row
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time", "commit", "branch", *map(cell_text, cases)])
    for measured in sessions.values():
        first = next(iter(measured.values()))
        seconds = [measured[case].value if case in measured else "" for case in cases]
        writer.writerow([cell_text(first.time), cell_text(first.commit), cell_text(first.branch), *seconds])
    return text.getvalue()


# A text file for node_exporter's textfile collector or any scraper, written by ``prometheus_client``.

_LABELS = ("case", "metric", "platform", "fingerprint", "ranks", "unit", "better", "convention", "verdict", "simulated")
_TIME_NAME = "perfsuite_median_seconds"
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


def as_openmetrics(rows: Sequence[ExportRow]) -> str:
    """A gauge per metric with a sample per case: the newest of each.  ConfigurationError without prometheus_client."""
    try:
        import prometheus_client as client
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
    text: str = client.generate_latest(registry).decode()
    return text


EXPORTS: Mapping[str, Callable[[Sequence[ExportRow]], str]] = MappingProxyType(
    {
        "json": as_json,
        "csv": as_csv,
        "openmetrics": as_openmetrics,
        "bencher": as_bencher,
        "github-action-benchmark": as_github_action_benchmark,
        "otava": as_otava,
    }
)
"""Name -> text of the rows."""
