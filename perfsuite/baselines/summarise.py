"""Turn a result into the identity of its case and the summary of its run."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

from perfsuite.baselines.runs import (
    QUANTILES,
    TELEMETRY_UNKNOWN,
    CaseIdentity,
    MetricMeaning,
    RunSummary,
    enough_clean,
    quantile,
    rounded,
)
from perfsuite.record.codec import to_json
from perfsuite.record.describe import held_down, held_down_elsewhere
from perfsuite.record.result import Measurement, Result

_SAMPLE_OPTIONS = ("perf-cache-flush", "perf-sustain", "perf-warmup")
"""Options that change the meaning of a sample, by their names in the environment of a run."""
_GLANCED = ("workload", "parameters", "defaults", "world_size", "environment")


def case_of(result: Result, *, backend: str = "") -> CaseIdentity:
    """Return the identity of a result's case; ``backend`` is used for a result without a measurement."""
    records = result.measurement.records if result.measurement else ()
    own = {record.name: record.metric for record in records}
    return dataclasses.replace(
        _undecoded(result),
        backend=result.measurement.backend if result.measurement else backend,
        metrics={
            metric.name: MetricMeaning(unit=metric.unit, better=metric.better, own=own.get(metric.name))
            for metric in result.metrics
            if not metric.moves_with_peak
        },
    )


def _undecoded(result: Result) -> CaseIdentity:
    return CaseIdentity(
        node=result.case,
        world_size=result.world_size,
        backend="",
        parameters=_plain(result.parameters),
        workload=result.workload,
        defaults=_plain(result.defaults),
        training=result.work.training,
    )


def _plain(values: Mapping[str, Any]) -> Any:
    """Return values as a file has them."""
    return json.loads(json.dumps(to_json(values), default=str))


def changed_settings(before: Result, after: Result, *, glance: bool = False) -> str:
    """Return the settings that differ between two results of one case id, ``n: 128 -> 256``; empty if comparable.

    ``glance``: compare only settings that need no decoding, for thousands of results.
    """
    identity = _undecoded if glance else case_of
    if glance and all(getattr(before, name) == getattr(after, name) for name in _GLANCED):
        return ""
    options = [result.environment.get("options") or {} for result in (before, after)]
    changed = [
        *identity(after).changed(identity(before)),
        *((f"--{name}", *(values.get(name, "not given") for values in reversed(options))) for name in _SAMPLE_OPTIONS),
    ]
    settings = [f"{name}: {then} -> {now}" for name, now, then in changed if now != then]
    own = {} if glance else case_of(after).changed_metrics(case_of(before))
    return "; ".join([*settings, *own.values()])


def summarise(
    result: Result, *, ordinal: int = 0, commit: str = "", boot: str = "", disturbance: str = ""
) -> RunSummary:
    """Return the summary of a result for a baseline.

    A sample is clean without an involuntary context switch of a rank, or if its time is virtual.  ``disturbance`` is
    the telemetry after the run; the result has the telemetry during the samples.  Raises ValueError for a smoke run and
    for times that are not positive.
    """
    if result.outcome == "smoke" or (result.measurement is not None and result.measurement.smoke):
        raise ValueError(f"{result.case} was a smoke run (--benchmark-disable); its time was not measured")
    run = RunSummary(
        session=result.session,
        time=result.started_at,
        ordinal=ordinal,
        disturbance=disturbance,
        commit=commit,
        boot=boot,
        environment=_plain(result.environment),
    )
    if result.measurement is None:
        return dataclasses.replace(run, outcome="out_of_memory")
    ranks = result.measurement.ranks
    return dataclasses.replace(
        run,
        **_times(result, result.measurement),
        iterations=result.measurement.iterations,
        control=result.measurement.control,
        cpu_share=1.0 if result.simulated else round(min([1.0, *(rank.cpu_share for rank in ranks)]), 3),
        waited=None if result.simulated else _largest([rank.waited for rank in ranks]),
        throttled=0.0 if result.simulated else round(max([0.0, *(rank.throttled or 0.0 for rank in ranks)]), 2),
        metrics={
            metric.name: rounded(metric.value, 6)
            for metric in result.metrics
            if metric.value is not None and math.isfinite(metric.value) and not metric.moves_with_peak
        },
        process=result.measurement.process,
        disturbance=disturbance_of(result, disturbance),
    )


def _largest(shares: Iterable[float | None]) -> float | None:
    measured = [share for share in shares if share is not None]
    return round(max(measured), 3) if measured else None


def _times(result: Result, measurement: Measurement) -> dict[str, Any]:
    times = sorted(measurement.times_s)
    if not times or times[0] <= 0:
        raise ValueError(f"{result.case} has a sample of {times[0] if times else 'no'} seconds; a baseline needs times")
    switches = measurement.involuntary_switches or (0,) * len(times)
    is_clean = [result.simulated or not count for count in switches]
    clean_s = sorted(compress(measurement.times_s, is_clean))
    all_s = measurement.yardsticks_s
    clean_yardsticks_s = tuple(compress(all_s, is_clean)) if enough_clean(len(clean_s), len(times)) else all_s
    clean_y, all_y = (sorted(times_s) if all(times_s) else () for times_s in (clean_yardsticks_s, all_s))
    p95 = functools.partial(quantile, share=0.95)
    yardstick, all_yardstick = _logarithm(clean_y, statistics.median), _logarithm(all_y, statistics.median)
    return {
        "quantiles_s": tuple(rounded(quantile(times, share), 4) for share in QUANTILES),
        "location": _logarithm(clean_s, statistics.median),
        "mean": _logarithm(times, statistics.fmean),
        "clean_mean": _logarithm(clean_s, statistics.fmean),
        "clean_p95": _logarithm(clean_s, p95),
        "yardstick": yardstick,
        "all_yardstick": all_yardstick if all_yardstick != yardstick else None,
        "yardstick_mean": _logarithm(clean_y, statistics.fmean),
        "yardstick_p95": _logarithm(clean_y, p95),
        "samples": len(times),
        "clean": len(clean_s),
    }


def disturbance_of(result: Result, after: str) -> str:
    """Return the disturbances in the telemetry of a run, during the samples and ``after`` it.

    The driver reads the devices of its host; a rank of another host reads its device once, at the end of its last
    sample.
    """
    measurement = result.measurement
    assert measurement is not None, "a run out of memory has no looks"
    ranks = measurement.ranks
    found = [held_down(measurement.looks), held_down_elsewhere(ranks), after if after != TELEMETRY_UNKNOWN else ""]
    unseen = any(rank.host != ranks[0].host and rank.throttle is None for rank in ranks)
    unseen = unseen and bool(measurement.looks) and not result.simulated
    return "; ".join(filter(None, found)) or (TELEMETRY_UNKNOWN if unseen else after)


def _logarithm(times_s: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> float | None:
    return round(math.log(statistic(times_s)), 5) if times_s else None
