"""What is judged of a case: its time, and the metrics that have a tolerance of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfsuite.baselines.runs import DISTURBED_CPU_SHARE, TELEMETRY_UNKNOWN, CaseIdentity, RunSummary, mostly
from perfsuite.gate.exact import rule_for
from perfsuite.gate.noise import History
from perfsuite.gate.verdict import TIME
from perfsuite.metrics import REGISTRY
from perfsuite.statistics.robust import median

SHORT_S = 10e-6
"""Below this time the tolerance is absolute: what it is here, in seconds.  Clock and scheduler blur less than that."""
ALIAS_SPREAD = 2e-3
"""A metric whose logarithm follows that of the time within this in every stored run is the time under another name."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One thing that is judged by statistics, and how a run's value of it is read."""

    name: str
    """``time`` or the name of a metric."""
    tolerance: float
    """Relative change for the worse that is accepted."""
    history: History
    """Stored values."""
    clean_only: bool = False
    """Time: the clean samples are compared, because the stored runs have enough of them."""
    sign: float = 1.0
    """-1 where higher is better, so that larger is worse."""
    unit: str = "s"
    """Unit of a value before its logarithm is taken."""
    usual_cpu_share: float = 0.0
    """Median CPU share of the stored runs; a computation that had its core alone shows when it has to share it."""

    def value(self, run: RunSummary) -> float | None:
        """The logarithm, larger is worse; None when the run has no such value."""
        if self.name == TIME:
            return _time(run, clean_only=self.clean_only)
        return _metric(run, self.name, self.sign)

    def is_stable(self, run: RunSummary) -> bool:
        """Whether a run is fit to be compared: clean samples where there usually are, nothing seen by telemetry."""
        if run.outcome != "measured" or is_disturbed(run) or self.value(run) is None:
            return False
        if self.clean_only and not run.has_clean:
            return False
        return self.usual_cpu_share < 0.995 or run.cpu_share >= DISTURBED_CPU_SHARE


def is_disturbed(run: RunSummary) -> bool:
    """Whether telemetry saw the device held down or shared; unknown is not disturbed, and is not clean either."""
    return run.disturbance not in ("", TELEMETRY_UNKNOWN)


def quantities(
    case: CaseIdentity, stored: Sequence[RunSummary], *, tolerance: float, metric_tolerances: Mapping[str, float]
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """What is judged by statistics, the time first, and a flag for every tolerance that cannot be used.

    A tolerance for a metric that is the time under another name (latency, bandwidth, FLOPS) is the tolerance of the
    time.  Exact quantities have their own rules and are not listed.
    """
    measured = [run for run in stored if run.outcome == "measured"]
    flags = []
    others = []
    for name, wanted in sorted(metric_tolerances.items()):
        why_not = _why_not(case, name, measured)
        if why_not:
            flags.append(f"tolerance for {name} unused: {why_not}")
        elif rule_for(name, case.metrics[name], wanted) is not None:
            continue
        elif _is_time(measured, name):
            tolerance = wanted
        else:
            others.append(_metric_quantity(case, measured, name, wanted))
    time = _time_quantity(case, measured, tolerance)
    return (*((time,) if time else ()), *others), tuple(flags)


def _why_not(case: CaseIdentity, name: str, measured: Sequence[RunSummary]) -> str:
    if name not in case.metrics:
        return f"the case has {', '.join(sorted(case.metrics)) or 'no metric'}"
    spec = REGISTRY.get(name)
    if spec is not None and spec.observed:
        return "it is observed only"
    if case.metrics[name].better == "neither":
        return "it has no better direction"
    if not all(run.metrics.get(name, 0.0) > 0 for run in measured):
        return "it is missing, zero or negative in some stored run"
    return ""


def _is_time(measured: Sequence[RunSummary], name: str) -> bool:
    logs = [(math.log(run.metrics[name]), math.log(run.median_s)) for run in measured]
    for sign in (1.0, -1.0):
        rest = [metric + sign * time for metric, time in logs]
        if rest and max(rest) - min(rest) < ALIAS_SPREAD:
            return True
    return False


def _time_quantity(case: CaseIdentity, measured: Sequence[RunSummary], tolerance: float) -> Quantity | None:
    clean = [run.has_clean for run in measured]
    clean_only = mostly(clean)
    usable = [
        run for run, enough in zip(measured, clean, strict=True) if (enough or not clean_only) and not is_disturbed(run)
    ]
    if not usable:
        return None
    values = tuple(run.location or 0.0 if clean_only else math.log(run.median_s) for run in usable)
    yardsticks = tuple(run.yardstick for run in usable if run.yardstick is not None)
    history = History(
        kind=case.kind,
        sessions=tuple(run.session for run in usable),
        values=values,
        yardsticks=yardsticks if len(yardsticks) == len(usable) else (),
    )
    middle_s = math.exp(median(values))
    return Quantity(
        name=TIME,
        tolerance=tolerance * max(1.0, SHORT_S / middle_s),
        history=history,
        clean_only=clean_only,
        usual_cpu_share=median([run.cpu_share for run in usable]),
    )


def _metric_quantity(case: CaseIdentity, measured: Sequence[RunSummary], name: str, tolerance: float) -> Quantity:
    sign = -1.0 if case.metrics[name].better == "higher" else 1.0
    usable = [run for run in measured if not is_disturbed(run)]
    history = History(
        kind=f"{name} of {case.kind}",
        sessions=tuple(run.session for run in usable),
        values=tuple(sign * math.log(run.metrics[name]) for run in usable),
    )
    return Quantity(name=name, tolerance=tolerance, history=history, sign=sign, unit=case.metrics[name].unit)


def _time(run: RunSummary, *, clean_only: bool) -> float | None:
    if clean_only:
        return run.location
    return math.log(run.median_s) if run.quantiles_s else None


def _metric(run: RunSummary, name: str, sign: float) -> float | None:
    value = run.metrics.get(name, 0.0)
    return sign * math.log(value) if value > 0 else None
