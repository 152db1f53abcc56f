"""A text file for node_exporter's textfile collector or any scraper, written by ``prometheus_client``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from perfsuite.errors import ConfigurationError
from perfsuite.exports.row import TIME, ExportRow, newest
from perfsuite.text import escaped

_LABELS = ("case", "metric", "platform", "fingerprint", "ranks", "unit", "better", "convention", "verdict", "simulated")
_TIME_NAME = "perfsuite_median_seconds"
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


def as_openmetrics(rows: Sequence[ExportRow]) -> str:
    """A gauge per metric with a sample per case: the newest of each.  ConfigurationError without prometheus_client."""
    client = _client()
    registry = client.CollectorRegistry()
    gauges: dict[str, Any] = {}
    for row in newest(rows):
        name = _name(row.metric)
        if name not in gauges:
            about = "time of a case" if row.metric == TIME else escaped(row.metric)
            gauges[name] = client.Gauge(name, f"perfsuite: {about}", _LABELS, registry=registry)
        labels = {label: getattr(row, label) for label in _LABELS}
        gauges[name].labels(**{label: _label(value) for label, value in labels.items()}).set(row.value)
    text: str = client.generate_latest(registry).decode()
    return text


def _name(metric: str) -> str:
    return _TIME_NAME if metric == TIME else f"perfsuite_{_INVALID.sub('_', metric)}"


def _label(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else escaped(str(value))


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        raise ConfigurationError(
            "this format needs the package prometheus_client, which is not installed; pip install 'perfsuite[export]'"
        ) from None
    return prometheus_client
