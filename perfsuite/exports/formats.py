"""Every format of ``perfsuite export``: a new one is a function and a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from perfsuite.exports.openmetrics import as_openmetrics
from perfsuite.exports.row import ExportRow
from perfsuite.exports.services import as_bencher, as_github_action_benchmark, as_otava
from perfsuite.exports.tidy import as_csv, as_json

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
