"""What is judged of a case: its time, mean and tail of its samples, and metrics with a tolerance of their own."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from perfsuite.baselines.runs import DISTURBED_CPU_SHARE, CaseIdentity, RunSummary, mostly, usually_clean
from perfsuite.gate.control import Control, middle, stored_control
from perfsuite.gate.exact import rule_for
from perfsuite.gate.noise import History
from perfsuite.metrics import REGISTRY
from perfsuite.record.verdict import ALL, MEAN, P95, TIME
from perfsuite.statistics.robust import median

SHORT_S = 10e-6
"""Below this time the tolerance is absolute: what it is here, in seconds.  Clock and scheduler blur less than that."""
ALIAS_SPREAD = 2e-3
"""A metric whose logarithm follows that of the time within this in every stored run is the time under another name."""
OF_SAMPLES = frozenset({TIME, MEAN, P95, ALL})
"""Quantities that are read from the samples of a run; every other is a metric."""
SURELY_MORE = 3.0
"""Binomial standard deviations above the largest stored share from which on today's runs are more disturbed."""
P95_TOLERANCE = 0.25
"""Of 30 samples the 95 % quantile is the second largest: it scatters several times as much as the median.  25 % keeps a
quiet suite quiet, and a tail that doubled is four times as far."""
THROTTLED_SHARE = 0.01
"""Of the periods of a CPU quota: in a run with more its times are those of the quota."""
LEAST_SPREAD = 1e-3
"""Smallest spread of samples, a logarithm, that stored quantiles of four digits tell."""
USEFUL: Mapping[str, float] = MappingProxyType({MEAN: 0.3, P95: 1.0})
"""Changes that each must show to be worth watching: every third iteration twice as slow, a tail that doubled."""
PRIMARY_WEIGHT = 0.8
SECONDARY_WEIGHT = 0.1
"""Shares of the suite's false alarms: the time keeps nearly all of its power beside mean and tail."""
OWN_WEIGHT = 0.2
"""The same of all metrics of one's own together, taken from the time."""
OWN_USEFUL = 0.25
"""Change of a metric of one's own above which a reader is told that it is hardly watched."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One thing that is judged by statistics, and how a run's value of it is read."""

    name: str
    """``time``, ``mean``, ``p95`` or the name of a metric."""
    tolerance: float
    """Relative change for the worse that is accepted."""
    history: History
    """Stored values."""
    weight: float = 1.0
    """Share of the suite's false alarms that it may cause."""
    is_secondary: bool = False
    """Mean, tail and metrics of one's own: judged only where they look worse.

    They ask for no run before and are never improved.
    """
    is_own: bool = False
    """A metric of one's own: what moves it need not move the time."""
    useful: float = math.inf
    """Smallest change shown above which a reader is told that this quantity is hardly watched."""
    clean_only: bool = False
    """The clean samples are compared, because the stored runs have enough of them."""
    sign: float = 1.0
    """-1 where higher is better, so that larger is worse."""
    unit: str = "s"
    """Unit of a value before its logarithm is taken."""
    usual_spread: float = 0.0
    """Median spread of the samples inside a stored run, a logarithm; 0 where it says nothing of the quantity."""
    usual_cpu_share: float = 0.0
    """Median CPU share of the stored runs; a computation that had its core alone shows when it has to share it."""
    usually_held_back: bool = False
    """Whether the CPU quota held most of the stored runs back as well: then it is no news."""
    control: Control | None = None
    """The control beside the stored runs; None where too few have one of the same kind, and beside other quantities."""

    def value(self, run: RunSummary) -> float | None:
        """The logarithm, larger is worse; None when the run has no such value."""
        if self.name in OF_SAMPLES and not self.is_own and (self.is_secondary or self.name == TIME):
            return _of_samples(self.name, run, self.clean_only)
        value = run.metrics.get(self.name, 0.0)
        return self.sign * math.log(value) if value > 0 else None

    def worse(self, logarithm: float) -> float:
        """The relative change of the value for the worse: 0.25 for a bandwidth that fell by a quarter."""
        return self.sign * math.expm1(self.sign * logarithm)

    def logarithm(self, worse: float) -> float:
        """The inverse."""
        return self.sign * math.log1p(self.sign * worse)

    def unrest(self, run: RunSummary) -> float:
        """How many times as far the samples of a run lie apart as usual: it tells a noisier host from one run.

        Seen in the faster half alone, which slow iterations of the code hardly widen.
        """
        return spread_of(run) / self.usual_spread if self.usual_spread else 1.0

    def stable_value(self, run: RunSummary) -> float | None:
        """The value of a run that is fit to be compared: enough clean samples where that is usual, no disturbance."""
        if run.outcome != "measured" or run.is_disturbed or (self.clean_only and not run.has_clean):
            return None
        if self.is_held_back(run):
            return None
        if run.cpu_share < DISTURBED_CPU_SHARE and self.usual_cpu_share >= 0.995:
            return None
        return self.value(run)

    def is_held_back(self, run: RunSummary) -> bool:
        """Whether the CPU quota held a run back, and most of the stored ones not."""
        return is_throttled(run) and not self.usually_held_back

    def is_stable(self, run: RunSummary) -> bool:
        """Whether a run is fit to be compared and has a value."""
        return self.stable_value(run) is not None


def is_throttled(run: RunSummary) -> bool:
    """Whether the CPU quota held the ranks of a run back."""
    return run.throttled > THROTTLED_SHARE


def spread_of(run: RunSummary) -> float:
    """Logarithm of the median sample over the 5 % quantile, at least what four digits can tell."""
    return max(LEAST_SPREAD, math.log(run.quantiles_s[2] / run.quantiles_s[0]))


def quantities(
    case: CaseIdentity, stored: Sequence[RunSummary], *, tolerance: float, metric_tolerances: Mapping[str, float]
) -> tuple[tuple[Quantity, ...], tuple[str, ...]]:
    """What is judged by statistics, the time first, and a flag for every tolerance that cannot be used.

    A tolerance for a metric that is the time or the mean under another name (latency, bandwidth, FLOPS) is the
    tolerance of these.  Exact quantities have their own rules and are not listed.
    """
    measured = [run for run in stored if run.outcome == "measured"]
    flags = []
    others = []
    own = _beside_the_time(case, measured, tolerance, metric_tolerances)
    secondary = {name: wanted for name, wanted in metric_tolerances.items() if name in (MEAN, P95)}
    secondary = {name: wanted for name, wanted in secondary.items() if name not in case.metrics}
    for name, wanted in sorted(metric_tolerances.items()):
        if name in secondary or name in own:
            continue
        why_not = _why_not(case, name, measured)
        if why_not:
            flags.append(f"tolerance for {name} unused: {why_not}")
        elif rule_for(name, case.metrics[name], wanted) is not None:
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
    case: CaseIdentity, measured: Sequence[RunSummary], tolerance: float, tolerances: Mapping[str, float]
) -> Mapping[str, Quantity]:
    """Metrics that scatter, have a direction, are not the time under another name, and are above 0 in every stored run.

    Those of one's own, and perfsuite's where no marker names them.
    """
    judged: dict[str, float | None] = {}
    for name, meaning in case.metrics.items():
        spec, own = REGISTRY.get(name), meaning.own
        if own is not None and not own.exact and own.better != "neither":
            judged[name] = own.tolerance
        elif own is None and spec is not None and name not in tolerances and rule_for(name, meaning) is None:
            times = ([math.log(run.median_s) for run in measured], [run.mean for run in measured])
            if not _why_not(case, name, measured) and not any(_is_alias(measured, name, each) for each in times):
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


def _is_alias(measured: Sequence[RunSummary], name: str, times: Sequence[float | None]) -> bool:
    """Whether a metric follows these times, or their inverse, in every stored run."""
    logs = [(math.log(run.metrics[name]), time) for run, time in zip(measured, times, strict=True) if time is not None]
    if not logs or len(logs) < len(measured):
        return False
    rests = ([metric + sign * time for metric, time in logs] for sign in (1.0, -1.0))
    return any(max(rest) - min(rest) < ALIAS_SPREAD for rest in rests)


def _time_quantity(case: CaseIdentity, usable: Sequence[RunSummary], tolerance: float, *, clean_only: bool) -> Quantity:
    values = tuple(run.location or 0.0 if clean_only else math.log(run.median_s) for run in usable)
    control = stored_control(usable, values, middle)
    yardsticks = tuple(time for run in usable if control and (time := control.of(run)) is not None)
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
        usual_spread=median([spread_of(run) for run in usable]),
        usual_cpu_share=median([run.cpu_share for run in usable]),
        usually_held_back=any(map(is_throttled, usable)),
        control=control,
    )


def _secondary_quantities(
    case: CaseIdentity, usable: Sequence[RunSummary], time: Quantity, tolerances: Mapping[str, float]
) -> list[Quantity]:
    """Mean and tail where at least two stored runs have them; a metric of the case that has the name goes first."""
    usual = {MEAN: time.tolerance, P95: max(P95_TOLERANCE, time.tolerance)}
    quantities = []
    for name, tolerance in usual.items():
        known = [(run, value) for run in usable if (value := _of_samples(name, run, time.clean_only)) is not None]
        if len(known) < 2 or name in case.metrics:
            continue
        history = History(
            kind=case.kind,
            sessions=tuple([run.session for run, _ in known]),
            values=tuple([value for _, value in known]),
        )
        read = operator.attrgetter(f"yardstick_{name}")
        quantities.append(
            replace(
                time,
                name=name,
                tolerance=tolerances.get(name, tolerance),
                history=history,
                weight=SECONDARY_WEIGHT,
                is_secondary=True,
                useful=USEFUL[name],
                control=stored_control([run for run, _ in known], history.values, read, middle),
            )
        )
    return quantities


def more_disturbed(stored: Sequence[RunSummary], runs: Sequence[RunSummary]) -> bool:
    """Whether clearly more of today's samples are disturbed than in any stored run, by a binomial bound."""
    today = [run for run in runs if run.has_clean and not run.is_disturbed]
    disturbed, samples = sum(run.samples - run.clean for run in today), sum(run.samples for run in today)
    if not disturbed:
        return False
    share = max((run.disturbed_share for run in stored if run.outcome == "measured"), default=1.0)
    return disturbed > samples * share + SURELY_MORE * math.sqrt(samples * share * (1 - share))


def all_samples(case: CaseIdentity, stored: Sequence[RunSummary], time: Quantity) -> Quantity | None:
    """All samples as a quantity beside the time, which compares the clean ones; None where too little is stored."""
    measured = [run for run in stored if run.outcome == "measured" and not run.is_disturbed]
    if not time.clean_only or len(measured) < 2:
        return None
    history = History(
        kind=case.kind,
        sessions=tuple([run.session for run in measured]),
        values=tuple([math.log(run.median_s) for run in measured]),
    )
    return Quantity(
        name=ALL,
        tolerance=time.tolerance,
        history=history,
        weight=SECONDARY_WEIGHT,
        is_secondary=True,
        clean_only=True,  # a run with too few clean samples is replaced, and says nothing here either
        usually_held_back=time.usually_held_back,
    )


def _metric_quantity(case: CaseIdentity, measured: Sequence[RunSummary], name: str, tolerance: float) -> Quantity:
    sign = -1.0 if case.metrics[name].better == "higher" else 1.0
    usable = [run for run in measured if not run.is_disturbed]
    history = History(
        kind=f"{name} of {case.kind}",
        sessions=tuple(run.session for run in usable),
        values=tuple(sign * math.log(run.metrics[name]) for run in usable),
    )
    return Quantity(
        name=name,
        tolerance=tolerance,
        history=history,
        sign=sign,
        unit=case.metrics[name].unit,
        usually_held_back=mostly([*map(is_throttled, measured)]),
    )


def _of_samples(name: str, run: RunSummary, clean_only: bool) -> float | None:
    """One of OF_SAMPLES, a logarithm: of the clean samples or of all; None where the run has none."""
    if name == MEAN:
        return run.clean_mean if clean_only else run.mean
    if clean_only and name != ALL:
        return run.location if name == TIME else run.clean_p95
    return math.log(run.quantiles_s[-1] if name == P95 else run.median_s) if run.quantiles_s else None
