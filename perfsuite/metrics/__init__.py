"""The registry of metrics, with one file of formulas per family, and the metrics of a measured case."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from perfsuite.base.errors import InvalidParameter, did_you_mean
from perfsuite.metrics import collective, compute, memory, pairs, pipeline, traffic, training
from perfsuite.metrics.collective import AlphaBeta, fit_alpha_beta
from perfsuite.metrics.spec import MetricSpec, MetricValue, unknown
from perfsuite.metrics.training import TIMED
from perfsuite.record.result import Measurement, Metric, Peaks, Result, Work

if TYPE_CHECKING:
    from perfsuite.record.run import RunRecord

__all__ = [
    "REGISTRY",
    "TIMED",
    "AlphaBeta",
    "MetricSpec",
    "MetricValue",
    "derive",
    "find",
    "fit_alpha_beta",
    "is_headline",
    "read_run",
    "rederive",
]

_FAMILIES = (compute, memory, collective, pairs, pipeline, training, traffic)
REGISTRY: Mapping[str, MetricSpec] = MappingProxyType(
    {spec.name: spec for family in _FAMILIES for spec in family.METRICS}
)
"""Immutable; a new metric is one entry in its family's METRICS."""
assert len(REGISTRY) == sum(len(family.METRICS) for family in _FAMILIES), "two metrics have one name"


def find(name: str) -> MetricSpec:
    """Return a metric by name; InvalidParameter names the nearest ones."""
    spec = REGISTRY.get(name)
    if spec is None:
        raise InvalidParameter(f"metric {name!r} is not in the registry; {did_you_mean(name, sorted(REGISTRY))}")
    return spec


def derive(names: Iterable[str], *, work: Work, measurement: Measurement, peaks: Peaks) -> tuple[Metric, ...]:
    """Return the metrics of one case in the order of ``names``, then the user's own metrics.  An unknown value, and an
    unknown peak, is None with the reason as the note. Raises InvalidParameter for a name that is not in the registry.
    """
    own = (
        Metric(name=own.name, value=entry.value, unit=own.unit, better=own.better, convention=own.convention)
        for entry in measurement.records
        if (own := entry.metric) is not None
    )
    return (*(_derive_one(find(name), work, measurement, peaks) for name in names), *own)


def is_headline(name: str) -> bool:
    """Whether a metric has a column in the terminal's table; metrics outside of the registry have one."""
    return name not in REGISTRY or REGISTRY[name].headline


def read_run(path: Path) -> RunRecord:
    """Read a journal; shares of measured peaks are shares of the last peaks in it.  Raises JournalError as
    :func:`perfsuite.record.journal.read_journal` does.
    """
    from perfsuite.record.journal import read_journal  # most users of metrics read no journal

    run = read_journal(path)
    if run.peaks is None:
        return run
    peaks = run.peaks
    return dataclasses.replace(run, results={case: rederive(result, peaks) for case, result in run.results.items()})


def rederive(result: Result, peaks: Peaks) -> Result:
    """Return the result with the metrics that are shares of measured peaks derived again, from ``peaks``."""
    newest = (*peaks.tflops.values(), peaks.memory_bandwidth)
    measured = {metric.name: metric.peak in newest for metric in result.metrics if _is_of_measured_peak(metric)}
    if result.measurement is None or all(measured.values()):
        return result
    metrics = tuple(
        _derive_one(REGISTRY[metric.name], result.work, result.measurement, peaks)
        if _is_of_measured_peak(metric) and metric.name in REGISTRY
        else metric
        for metric in result.metrics
    )
    return dataclasses.replace(result, metrics=metrics)


def _is_of_measured_peak(metric: Metric) -> bool:
    return metric.peak is not None and metric.peak.kind == "measured"


def _derive_one(spec: MetricSpec, work: Work, measurement: Measurement, peaks: Peaks) -> Metric:
    if spec.deterministic or (not measurement.smoke and measurement.median_s > 0):
        reached = spec.compute(work, measurement, peaks)
    elif measurement.smoke:  # its one iteration is the first, and its communication was watched meanwhile
        reached = unknown("the case was run once and not measured")
    else:
        clock = measurement.clock.name
        reached = unknown(f"the median time is {measurement.median_s} s: too short for the clock {clock}")
    return Metric(
        name=spec.name,
        value=reached.value,
        unit=reached.unit or spec.unit,
        better=spec.better,
        convention=reached.convention or spec.convention,
        peak=reached.peak,
        note=reached.note,
    )
