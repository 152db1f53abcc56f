"""The judged quantities of a case: its time, mean and tail of its samples, metrics with a tolerance or exact rule."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from perfsuite.base.units import percent, significant
from perfsuite.baselines.runs import DISTURBED_CPU_SHARE, CaseIdentity, MetricMeaning, RunSummary, mostly, usually_clean
from perfsuite.gate.noise import History
from perfsuite.gate.shift import Read, StoredControl, stored_control
from perfsuite.record.verdict import ALL, MEAN, P95, TIME, Finding, VerdictName
from perfsuite.statistics.robust import median

if TYPE_CHECKING:
    from perfsuite.metrics.spec import MetricSpec

SHORT_S = 10e-6
"""Seconds below which the tolerance is absolute, as large as at this time: clock and scheduler blur less."""
ALIAS_SPREAD = 2e-3  # Largest difference of logarithms in every stored run at which a metric is an alias of the time.
OF_SAMPLES = frozenset({TIME, MEAN, P95, ALL})  # Quantities of the samples of a run; all others are metrics.
SURELY_MORE = 3.0
"""Binomial standard deviations above the largest stored share at which today's runs are more disturbed."""
P95_TOLERANCE = 0.25
"""Tolerance of the tail.  Of 30 samples the 95 % quantile is the second largest, with several times the scatter of the
median.  25 % avoids false alarms, and a doubled tail is four times as far."""
THROTTLED_SHARE = 0.01  # Share of throttled periods of a CPU quota above which the quota determines the times of a run.
LEAST_SPREAD = 1e-3  # Smallest spread of samples (ln) in stored quantiles of four digits.
USEFUL: Mapping[str, float] = MappingProxyType({MEAN: 0.3, P95: 1.0})
"""Changes that mean and tail must be able to show: every third iteration twice as slow, a doubled tail."""
PRIMARY_WEIGHT = 0.8
SECONDARY_WEIGHT = 0.1  # Shares of the suite's false alarms for the time, and for mean and tail each.
OWN_WEIGHT = 0.2  # Share of all own metrics together, taken from the time.
OWN_USEFUL = 0.25  # Smallest shown change of an own metric above which it is flagged as hardly watched.


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity that is judged by statistics, and the way to read its value from a run."""

    name: str  # ``time``, ``mean``, ``p95`` or the name of a metric.
    tolerance: float  # Accepted relative change for the worse.
    history: History  # Stored values.
    weight: float = 1.0  # Share of the suite's false alarms that it may cause.
    is_secondary: bool = False
    """Whether it is judged only if it looks worse (mean, tail, own metrics): no runs before that, never improved."""
    is_own: bool = False  # Whether it is an own metric, which may move without the time.
    useful: float = math.inf  # Smallest shown change above which it is flagged as hardly watched.
    clean_only: bool = False  # Whether only clean samples are compared, because the stored runs have enough of them.
    sign: float = 1.0  # -1 if higher is better, so that larger is worse.
    unit: str = "s"  # Unit of a value before its logarithm is taken.
    usual_spread: float = 0.0  # Median spread (ln) of the samples inside a stored run; 0 if it does not apply.
    usual_cpu_share: float = 0.0  # Median CPU share of the stored runs; a lower share shows that a core was shared.
    usually_held_back: bool = False  # Whether the CPU quota throttled most of the stored runs too: no reason then.
    control: StoredControl | None = None  # Of the stored runs; None if too few have one of a kind, and for others.

    def value(self, run: RunSummary) -> float | None:
        """Return the logarithm, larger is worse; None without a value."""
        if self.name in OF_SAMPLES and not self.is_own and (self.is_secondary or self.name == TIME):
            return _of_samples(self.name, run, self.clean_only)
        value = run.metrics.get(self.name, 0.0)
        return self.sign * math.log(value) if value > 0 else None

    def worse(self, logarithm: float) -> float:
        """Return the relative change of the value for the worse: 0.25 for a bandwidth that fell by a quarter."""
        return self.sign * math.expm1(self.sign * logarithm)

    def logarithm(self, worse: float) -> float:
        """Return the logarithm of a relative change for the worse: the inverse of :meth:`worse`."""
        return self.sign * math.log1p(self.sign * worse)

    def unrest(self, run: RunSummary) -> float:
        """Return the spread of the faster half of a run's samples over the usual one: it shows a noisier host."""
        return spread_of(run) / self.usual_spread if self.usual_spread else 1.0

    def stable_value(self, run: RunSummary) -> float | None:
        """Return the value of a comparable run: undisturbed, and with enough clean samples if that is usual."""
        if run.outcome != "measured" or run.is_disturbed or (self.clean_only and not run.has_clean):
            return None
        shared = run.cpu_share < DISTURBED_CPU_SHARE and self.usual_cpu_share >= 0.995
        return None if shared or self.is_held_back(run) else self.value(run)

    def is_held_back(self, run: RunSummary) -> bool:
        """Return whether the CPU quota throttled a run, but not most of the stored ones."""
        return is_throttled(run) and not self.usually_held_back

    def is_stable(self, run: RunSummary) -> bool:
        """Return whether a run can be compared and has a value."""
        return self.stable_value(run) is not None


def is_throttled(run: RunSummary) -> bool:
    """Return whether the CPU quota throttled the ranks of a run."""
    return run.throttled > THROTTLED_SHARE


def spread_of(run: RunSummary) -> float:
    """Return the logarithm of the median sample over the 5 % quantile, at least LEAST_SPREAD."""
    return max(LEAST_SPREAD, math.log(run.quantiles_s[2] / run.quantiles_s[0]))


Specs = Mapping[str, "MetricSpec"]  # The registry of perfsuite's metrics: the gate uses its rules and no formula.


def quantities(
    case: CaseIdentity, stored: Sequence[RunSummary], specs: Specs, tolerance: float, tolerances: Mapping[str, float]
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """Return the quantities for statistics, the time first, and a flag for every tolerance that cannot be used.  A
    tolerance for an alias of the time or the mean (latency, bandwidth, FLOPS) becomes the tolerance of these. Exact
    quantities have other rules and are not listed.
    """
    measured = [run for run in stored if run.outcome == "measured"]
    flags = []
    others = []
    own = _beside_the_time(case, measured, specs, tolerance, tolerances)
    secondary = {name: wanted for name, wanted in tolerances.items() if name in {MEAN, P95} - case.metrics.keys()}
    for name, wanted in sorted(tolerances.items()):
        if name in secondary or name in own:
            continue
        if why_not := _why_not(case, name, measured, specs):
            flags.append(f"tolerance for {name} unused: {why_not}")
        elif rule_for(name, case.metrics[name], specs, wanted) is not None:
            continue
        elif _is_alias(measured, name, [math.log(run.median_s) for run in measured]):
            tolerance = wanted
        elif _is_alias(measured, name, [run.mean for run in measured]):
            secondary.setdefault(MEAN, wanted)
        else:
            others.append(_metric_quantity(case, measured, name, wanted))
    clean_only = usually_clean(measured)
    usable = [run for run in measured if (not clean_only or run.has_clean) and not run.is_disturbed]
    usable = usable if mostly([*map(is_throttled, measured)]) else [run for run in usable if not is_throttled(run)]
    if not usable:
        return (*others, *own.values()), tuple(flags)
    has_beside = any(run.mean is not None or run.clean_mean is not None for run in usable)
    time = _time_quantity(case, usable, tolerance, clean_only=clean_only)
    beside = _secondary_quantities(case, usable, time, secondary) if has_beside else []
    if beside or own:
        time = replace(time, weight=(PRIMARY_WEIGHT if beside else 1.0) - (OWN_WEIGHT if own else 0.0))
    flags += [
        f"tolerance for {name} unused: the stored runs have none"
        for name in secondary
        if name not in [quantity.name for quantity in beside]
    ]
    return (time, *others, *beside, *own.values()), tuple(flags)


def _beside_the_time(
    case: CaseIdentity, measured: Sequence[RunSummary], specs: Specs, tolerance: float, tolerances: Mapping[str, float]
) -> Mapping[str, Quantity]:
    """Return metrics that scatter, have a direction, are above 0 in every stored run and are not an alias of the time.
    These are own metrics, and perfsuite's metrics without a marker.
    """
    judged: dict[str, float | None] = {}
    for name, meaning in case.metrics.items():
        spec, own = specs.get(name), meaning.own
        if own is not None and not own.exact and own.better != "neither":
            judged[name] = own.tolerance
        elif own is None and spec is not None and name not in tolerances and rule_for(name, meaning, specs) is None:
            times = ([math.log(run.median_s) for run in measured], [run.mean for run in measured])
            if not _why_not(case, name, measured, specs) and not any(_is_alias(measured, name, each) for each in times):
                judged[name] = spec.tolerance
    quantities = {}
    for name, accepted in judged.items():
        having = [run for run in measured if name in run.metrics]
        if having and all(run.metrics[name] > 0 for run in having):
            wanted = tolerances.get(name, tolerance if accepted is None else accepted)
            quantities[name] = replace(
                _metric_quantity(case, having, name, wanted),
                weight=OWN_WEIGHT / len(judged),
                is_secondary=True,
                is_own=case.metrics[name].own is not None,
                useful=OWN_USEFUL,
            )
    return quantities


def _why_not(case: CaseIdentity, name: str, measured: Sequence[RunSummary], specs: Specs) -> str:
    if name not in case.metrics:
        return f"the case has {', '.join(sorted(case.metrics)) or 'no metric'}"
    spec = specs.get(name)
    if spec is not None and spec.observed:
        return "it is observed only"
    if case.metrics[name].better == "neither":
        return "it has no better direction"
    if not all(run.metrics.get(name, 0.0) > 0 for run in measured):
        return "it is missing, zero or negative in some stored run"
    return ""


def _is_alias(measured: Sequence[RunSummary], name: str, times: Sequence[float | None]) -> bool:
    logs = [(math.log(run.metrics[name]), time) for run, time in zip(measured, times, strict=True) if time is not None]
    if not logs or len(logs) < len(measured):
        return False
    rests = ([metric + sign * time for metric, time in logs] for sign in (1.0, -1.0))
    return any(max(rest) - min(rest) < ALIAS_SPREAD for rest in rests)


def _time_quantity(case: CaseIdentity, usable: Sequence[RunSummary], tolerance: float, *, clean_only: bool) -> Quantity:
    values = tuple(run.location or 0.0 if clean_only else math.log(run.median_s) for run in usable)
    control = stored_control(usable, values, _yardstick(clean_only))
    yardsticks = tuple(time for run in usable if control and (time := control.of(run)) is not None)
    middle_s, is_timed = math.exp(median(values)), len(yardsticks) == len(usable)
    return Quantity(
        name=TIME,
        tolerance=tolerance * max(1.0, SHORT_S / middle_s),
        history=_history(case.kind, usable, values, yardsticks if is_timed else ()),
        clean_only=clean_only,
        usual_spread=median([spread_of(run) for run in usable]),
        usual_cpu_share=median([run.cpu_share for run in usable]),
        usually_held_back=any(map(is_throttled, usable)),
        control=control,
    )


def _secondary_quantities(
    case: CaseIdentity, usable: Sequence[RunSummary], time: Quantity, tolerances: Mapping[str, float]
) -> list[Quantity]:
    """Return mean and tail if at least two stored runs have them, unless a metric of the case has the name."""
    usual = {MEAN: time.tolerance, P95: max(P95_TOLERANCE, time.tolerance)}
    quantities = []
    for name, tolerance in usual.items():
        having = [(run, value) for run in usable if (value := _of_samples(name, run, time.clean_only)) is not None]
        if len(having) < 2 or name in case.metrics:
            continue
        runs, values = zip(*having, strict=True)
        history = _history(case.kind, runs, values)
        reads = (operator.attrgetter(f"yardstick_{name}"), _yardstick(time.clean_only))
        quantities.append(
            replace(
                time,
                name=name,
                tolerance=tolerances.get(name, tolerance),
                history=history,
                weight=SECONDARY_WEIGHT,
                is_secondary=True,
                useful=USEFUL[name],
                control=stored_control(runs, values, *reads),
            )
        )
    return quantities


def more_disturbed(stored: Sequence[RunSummary], runs: Sequence[RunSummary]) -> bool:
    """Return whether clearly more of today's samples are disturbed than in any stored run, by a binomial bound."""
    today = [run for run in runs if run.has_clean and not run.is_disturbed]
    disturbed, samples = sum(run.samples - run.clean for run in today), sum(run.samples for run in today)
    if not disturbed:
        return False
    share = max((run.disturbed_share for run in stored if run.outcome == "measured"), default=1.0)
    return disturbed > samples * share + SURELY_MORE * math.sqrt(samples * share * (1 - share))


def all_samples(case: CaseIdentity, stored: Sequence[RunSummary], time: Quantity) -> Quantity | None:
    """Return all samples as a quantity, if the time compares only clean ones; None with too few stored runs."""
    measured = [run for run in stored if run.outcome == "measured" and not run.is_disturbed]
    if not time.clean_only or len(measured) < 2:
        return None
    return Quantity(
        name=ALL,
        tolerance=time.tolerance,
        history=_history(case.kind, measured, (math.log(run.median_s) for run in measured)),
        weight=SECONDARY_WEIGHT,
        is_secondary=True,
        clean_only=True,  # a run with too few clean samples is replaced, and is not used here either
        usually_held_back=time.usually_held_back,
    )


def _metric_quantity(case: CaseIdentity, measured: Sequence[RunSummary], name: str, tolerance: float) -> Quantity:
    sign = -1.0 if case.metrics[name].better == "higher" else 1.0
    usable = [run for run in measured if not run.is_disturbed]
    values = (sign * math.log(run.metrics[name]) for run in usable)
    return Quantity(
        name=name,
        tolerance=tolerance,
        history=_history(f"{name} of {case.kind}", usable, values),
        sign=sign,
        unit=case.metrics[name].unit,
        usually_held_back=mostly([*map(is_throttled, measured)]),
    )


def _history(
    kind: str, runs: Sequence[RunSummary], values: Iterable[float], yardsticks: tuple[float, ...] = ()
) -> History:
    sessions = tuple([run.session for run in runs])
    return History(kind=kind, sessions=sessions, values=tuple(values), yardsticks=yardsticks)


def _yardstick(clean_only: bool) -> Read:
    """Return the function that reads a run's yardstick of the compared samples."""
    return operator.attrgetter("yardstick" if clean_only else "yardstick_of_all")


def _of_samples(name: str, run: RunSummary, clean_only: bool) -> float | None:
    if name == MEAN:
        return run.clean_mean if clean_only else run.mean
    if clean_only and name != ALL:
        return run.location if name == TIME else run.clean_p95
    return math.log(run.quantiles_s[-1] if name == P95 else run.median_s) if run.quantiles_s else None


STORED_DIGITS = 1e-5  # Relative difference between equal values that were stored with six digits.
BUBBLE_CHANGE = 0.01  # Accepted absolute change of a bubble ratio.
MEMORY_CHANGE = 0.01  # Accepted relative change of a memory size that has no other rule in the registry.
_STILL = 0.1  # Share of the allowed change up to which stored values do not scatter.

ExactRule = tuple[float, float]
"""Allowed change for the worse: as a share of the stored value, and in the unit of the quantity; the larger counts."""


def rule_for(name: str, meaning: MetricMeaning, specs: Specs, tolerance: float | None = None) -> ExactRule | None:
    """Return the exact rule of a metric; None if it scatters and is judged by statistics or not judged.  The registry
    lists the deterministic metrics. Of other metrics bubbles, sizes in GiB or bytes, and counts of operations are
    deterministic. ``tolerance`` is the relative tolerance of the case; a bubble ratio keeps its absolute rule.
    """
    spec, own = specs.get(name), meaning.own
    if own is not None and own.exact:
        return (own.tolerance or 0.0) if tolerance is None else tolerance, own.floor
    scatters = not name.startswith("bubble") and spec is not None and not (spec.deterministic or spec.unit == "GiB")
    if own is not None or scatters or (spec is not None and spec.observed):
        return None
    if name.startswith("bubble"):
        return 0.0, (spec.absolute_floor if spec else 0.0) or BUBBLE_CHANGE
    if spec is not None:
        usual = MEMORY_CHANGE if spec.unit == "GiB" else 0.0
        relative = next(choice for choice in (tolerance, spec.tolerance, usual) if choice is not None)
        return relative, spec.absolute_floor
    if meaning.unit == "GiB":
        return MEMORY_CHANGE if tolerance is None else tolerance, 0.0
    return (tolerance or 0.0, 0.0) if meaning.unit in ("B", "bytes", "FLOP", "FLOPs") else None


def exact_findings(
    stored: Sequence[RunSummary],
    runs: Sequence[RunSummary],
    meanings: Mapping[str, MetricMeaning],
    specs: Specs,
    tolerances: Mapping[str, float],
) -> tuple[Finding, ...]:
    """Return a finding for each exact quantity of both sides."""
    findings = []
    for name in sorted(meanings):
        rule = rule_for(name, meanings[name], specs, tolerances.get(name))
        then = [run.metrics[name] for run in stored if name in run.metrics]
        now = [run.metrics[name] for run in runs if name in run.metrics]
        if rule is not None and then and now:
            findings.append(_judge(name, rule, meanings[name], then, now))
    return tuple(findings)


def _judge(name: str, rule: ExactRule, meaning: MetricMeaning, then: Sequence[float], now: Sequence[float]) -> Finding:
    (relative, absolute), before, after = rule, statistics.median(then), statistics.median(now)
    allowed = max(relative * abs(before), absolute, STORED_DIGITS * abs(before))
    change = after - before  # for the worse; without a better direction any change is worse
    change = {"higher": -change, "lower": change}.get(meaning.better, abs(change))
    verdict: VerdictName = "regressed" if change > allowed else "improved" if change < -allowed else "pass"
    figures = f"{name} {significant(after, 6)}, stored {significant(before, 6)} {meaning.unit}".rstrip()
    limits = [*([percent(relative)] if relative else []), *([significant(absolute)] if absolute else [])]
    reasons = (f"{figures}: it may change by {' or '.join(limits) or 'nothing'}",) if verdict != "pass" else ()
    flags: tuple[str, ...] = ()
    spread = max(then) - min(then)
    one_way = {"higher": min(then) - max(now), "lower": min(now) - max(then)}
    beyond = one_way.get(meaning.better, min(abs(new - old) for new in now for old in then))
    if verdict == "regressed" and spread > _STILL * allowed and beyond <= spread:
        verdict = "inconclusive"
        flags = (f"{name} scatters in the stored runs: not gateable by an exact rule",)
    return Finding(
        quantity=name,
        name=verdict,
        tolerance=absolute if absolute > relative * abs(before) else relative,
        before=before,
        after=after,
        unit=meaning.unit,
        effect=change / abs(before) if before else (math.copysign(math.inf, change) if change else 0.0),
        exact=True,
        confirmed=True if verdict == "regressed" else None,
        reasons=reasons,
        flags=flags,
    )
