"""A baseline file as a run: the newest stored run of each of its cases."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.baselines.baseline import Baseline, Entry
from perfsuite.metrics import REGISTRY
from perfsuite.records import Metric, Result, Work
from perfsuite.reports.tables.settings import class_of
from perfsuite.run_record import Revision, RunRecord


@dataclass(frozen=True, kw_only=True)
class StoredResult(Result):
    """A case of a baseline, which keeps quantiles of the samples and no measurement."""

    stored_s: float = 0.0
    """Median of the newest run, seconds."""

    @property
    def median_s(self) -> float:
        """Median seconds per iteration of the newest run."""
        return self.stored_s


def record_of_baseline(baseline: Baseline, name: str) -> RunRecord:
    """The newest run of each case; work is what follows from the stored rates, shares of peaks are not stored."""
    hardware = baseline.hardware
    entries = sorted(baseline.entries.values(), key=lambda entry: entry.case.node)
    newest = baseline.newest
    commit = newest.commit if newest else ""
    results = (_result(entry, hardware.platform, hardware.fingerprint, hardware.simulated) for entry in entries)
    return RunRecord(
        name=name,
        platform=hardware.platform,
        fingerprint=hardware.fingerprint,
        results={result.case: result for result in results},
        session=newest.session if newest else "",
        started_at=newest.time if newest else "",
        versions=baseline.versions,
        revision=Revision(commit=commit.partition("-")[0], dirty=commit.endswith("-dirty")),
    )


def _result(entry: Entry, platform: str, fingerprint: str, simulated: bool) -> Result:
    run, case = entry.newest, entry.case
    time_s = run.median_s if run.quantiles_s else 0.0
    metrics = tuple(
        Metric(
            name=name,
            value=value,
            unit=case.metrics[name].unit if name in case.metrics else REGISTRY[name].unit,
            better=REGISTRY[name].better,
            convention=REGISTRY[name].convention,
        )
        for name, value in run.metrics.items()
        if name in REGISTRY
    )
    return StoredResult(
        case=case.node,
        workload=case.workload,
        parameters=case.parameters,
        platform=platform,
        world_size=case.world_size,
        outcome=run.outcome,
        work=_work(entry, time_s),
        metrics=metrics,
        fingerprint=fingerprint,
        environment=run.environment,
        simulated=simulated,
        session=run.session,
        started_at=run.time,
        stored_s=time_s,
    )


def _work(entry: Entry, time_s: float) -> Work:
    values, parameters = entry.newest.metrics, entry.case.parameters
    dtype = str(parameters.get("dtype", ""))
    name = class_of(entry.case.workload)
    if "algbw_gb_per_s" in values:
        snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
        size = float(parameters.get("message_bytes") or values["algbw_gb_per_s"] * 1e9 * time_s)
        return Work(collective=snake, message_bytes=size, dtype=dtype)
    if "samples_per_s" in values or "tokens_per_s" in values:
        samples, tokens = (round(values.get(f"{what}_per_s", 0.0) * time_s) for what in ("samples", "tokens"))
        return Work(samples=float(samples), tokens=float(tokens), dtype=dtype)
    if "tflops" in values:
        return Work(flops={"exact": values["tflops"] * 1e12 * time_s}, dtype=dtype)
    if "gb_per_s" in values:
        return Work(bytes_moved=values["gb_per_s"] * 1e9 * time_s, memory_path="device", dtype=dtype)
    return Work()
