"""Runs as the input of reports, with the row of their platform; a baseline file gives its newest stored results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfsuite.baselines.baseline import Baseline, Entry, Hardware
from perfsuite.baselines.runs import DIRTY
from perfsuite.metrics import REGISTRY
from perfsuite.record.result import Metric, Result, Work
from perfsuite.record.run import Revision, RunRecord
from perfsuite.reports.ids import kernel_of

if TYPE_CHECKING:
    from perfsuite.platforms import DeviceModel


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run of a journal, of a baseline file or of a session, and the row of its platform."""

    run: RunRecord
    device: DeviceModel | None = None  # None for an unknown platform.
    times_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Median seconds of all runs of a case by node id, the newest last; empty if there is one run."""


@dataclass(frozen=True, kw_only=True)
class StoredResult(Result):
    """A case of a baseline, which keeps quantiles of the samples and no measurement."""

    times_s: tuple[float, ...] = ()  # Median seconds of each run that is kept, the newest last.

    @property
    def median_s(self) -> float:
        """Median seconds per iteration of the newest run."""
        return self.times_s[-1]


def record_of_baseline(baseline: Baseline, name: str) -> RunRecord:
    """Return the newest run of each case; work is computed from stored rates, shares of peaks are missing."""
    hardware, newest = baseline.hardware, baseline.newest
    entries = sorted(baseline.entries.values(), key=lambda entry: entry.case.node)
    commit = newest.commit if newest else ""
    results = (stored_result(entry, hardware) for entry in entries)
    return RunRecord(
        name=name,
        platform=hardware.platform,
        fingerprint=hardware.fingerprint,
        results={result.case: result for result in results},
        session=newest.session if newest else "",
        started_at=newest.time if newest else "",
        versions=baseline.versions,
        revision=Revision(commit=commit.removesuffix(DIRTY), dirty=commit.endswith(DIRTY)),
    )


def stored_result(entry: Entry, hardware: Hardware) -> StoredResult:
    """Return the newest run of a case; work is computed from the stored rates."""
    run, case = entry.newest, entry.case
    times_s = tuple(kept.median_s for kept in entry.runs if kept.quantiles_s)
    time_s = run.median_s if run.quantiles_s else 0.0
    return StoredResult(
        case=case.node,
        workload=case.workload,
        parameters=case.parameters,
        platform=hardware.platform,
        world_size=case.world_size,
        outcome=run.outcome,
        work=_work(entry, time_s),
        metrics=tuple(_metrics(entry)),
        detail="out of memory (a baseline does not keep how much)" if run.outcome == "out_of_memory" else "",
        fingerprint=hardware.fingerprint,
        environment=run.environment,
        simulated=hardware.simulated,
        session=run.session,
        started_at=run.time,
        times_s=times_s,
    )


def _metrics(entry: Entry) -> Iterator[Metric]:
    for name, value in entry.newest.metrics.items():
        meaning, spec = entry.case.metrics.get(name), REGISTRY.get(name)
        source = meaning or spec
        if source is not None:
            convention = spec.convention if spec is not None else ""
            better = spec.better if spec is not None else source.better
            yield Metric(name=name, value=value, unit=source.unit, better=better, convention=convention)


def _work(entry: Entry, time_s: float) -> Work:
    values, parameters = entry.newest.metrics, entry.case.parameters
    dtype = str(parameters.get("dtype", ""))
    if "algbw_gb_per_s" in values:
        size = float(parameters.get("message_bytes") or values["algbw_gb_per_s"] * 1e9 * time_s)
        return Work(collective=kernel_of(entry.case.workload, {}), message_bytes=size, dtype=dtype)
    if "samples_per_s" in values or "tokens_per_s" in values:
        samples, tokens = (round(values.get(f"{what}_per_s", 0.0) * time_s) for what in ("samples", "tokens"))
        return Work(samples=float(samples), tokens=float(tokens), dtype=dtype)
    if "tflops" in values:
        return Work(flops={"exact": values["tflops"] * 1e12 * time_s}, dtype=dtype)
    if "gb_per_s" in values:
        return Work(bytes_moved=values["gb_per_s"] * 1e9 * time_s, memory_path="device", dtype=dtype)
    return Work()
