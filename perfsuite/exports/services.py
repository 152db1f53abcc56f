"""What programs that follow performance read: Bencher's metric format, github-action-benchmark, Apache Otava."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from perfsuite.exports.row import TIME, ExportRow, newest
from perfsuite.text import cell_text, json_text


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
