"""What stored runs say about a case: its level and its noise, freed from what the host did to all cases alike.

A value is the natural logarithm of a time (or of a metric, with the sign that makes larger worse), so a difference of
0.03 is 3 %.  Stored runs are fitted as case + session: the effect of a session, the median over its cases, is taken out
where enough cases share it, because a host that is slower on one day is slower for all of them.  What remains is noise.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from perfsuite.statistics.robust import MAD_TO_SIGMA, huber_mean, median, rough_sigma, variance, without_spike

GAIN = 0.25
"""A yardstick is used where it cuts the noise of a kind of cases by at least this share."""
ENOUGH_DOF = 14
"""Degrees of freedom from which on that is believed."""
FEW_GAIN = 0.7
"""The share with fewer of them: of eight runs of a case without any connection one set in 200 shows it by chance."""
LEAST_DOF = 6
"""Degrees of freedom below which no slope on the yardstick is believed."""
STEEPEST = 1.5
"""A yardstick that must be multiplied by more is the wrong one."""


Series = tuple[str, Sequence[float], Sequence[float]]
"""Kind, values and yardsticks of the runs of one case, logarithms."""


def slopes(series: Iterable[Series]) -> dict[str, float]:
    """Slope of value on yardstick by kind, pooled over its cases; kinds where it does not help are left out."""
    points: dict[str, list[tuple[float, float]]] = {}
    dof: dict[str, int] = {}
    for kind, values, yards in series:
        value_centre, yard_centre = median(values), median(yards)
        centred = [(x - yard_centre, y - value_centre) for x, y in zip(yards, values, strict=True)]
        points.setdefault(kind, []).extend(centred)
        dof[kind] = dof.get(kind, 0) + len(values) - 1
    fitted = {
        kind: helpful_slope(pairs, GAIN if dof[kind] >= ENOUGH_DOF else FEW_GAIN)
        for kind, pairs in points.items()
        if dof[kind] >= LEAST_DOF
    }
    return {kind: slope for kind, slope in fitted.items() if slope}


def helpful_slope(points: Sequence[tuple[float, float]], gain: float = GAIN) -> float:
    """Slope of the line through the origin with the least absolute residuals; 0 where it lowers them by less.

    ``points`` are (yardstick, value), both from their medians.  The line is the weighted median of y / x with weights
    abs(x): disturbed runs do not bend it.

    >>> round(helpful_slope([(-0.02, -0.018), (0.01, 0.012), (0.03, 0.027), (-0.01, -0.009), (0.02, 0.5)]), 2)
    0.9
    >>> helpful_slope([(-0.02, 0.018), (0.01, 0.012), (0.03, -0.02), (-0.01, 0.009)])
    0.0
    """
    steep = sorted((y / x, abs(x)) for x, y in points if x)
    half, passed, slope = sum(weight for _, weight in steep) / 2, 0.0, 0.0
    for candidate, weight in steep:
        passed += weight
        if passed >= half:
            slope = candidate
            break
    slope = min(STEEPEST, slope)
    left = median([abs(y - slope * x) for x, y in points])
    before = median([abs(y) for _, y in points])
    return slope if slope > 0 and left <= (1 - gain) * before else 0.0


MOST_PRIOR_DOF = 10
"""Most weight, in degrees of freedom, that other cases have in the noise of one of them."""
KIND_CASES = 6
"""Cases from which on a kind tells by itself how noisy it is; smaller kinds are judged with the whole suite."""

Member = tuple[float, int]
"""Variance of one case and its degrees of freedom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """What other cases say about the noise of one."""

    variance: float
    """The usual variance."""
    dof: int
    """What that is worth."""


def priors(members: Sequence[tuple[str, Member]]) -> dict[str, Prior]:
    """By kind: how noisy its cases are; kinds of few cases are judged with the whole suite.

    ``members`` are cases with their kind.  How alike cases of one kind are is judged over all kinds together.
    """
    groups: dict[str, list[Member]] = {}
    for kind, member in members:
        groups.setdefault(kind, []).append(member)
    whole = [member for _, member in members]
    weight = prior_weight([group for group in groups.values() if len(group) >= KIND_CASES])
    suite = _prior(whole, prior_weight([whole]))
    return {kind: _prior(group, weight) if len(group) >= KIND_CASES else suite for kind, group in groups.items()}


def prior_weight(groups: Sequence[Sequence[Member]]) -> int:
    """How much, in degrees of freedom, a group says about the variance of its members, by empirical Bayes.

    The logarithm of a sample variance scatters by trigamma(dof / 2) when all of a group are equally noisy; scatter
    beyond that is their unlikeness and lowers the weight.

    >>> prior_weight([[(1.0, 7), (1.4, 7), (0.7, 7), (0.9, 7), (1.2, 7), (0.8, 7)] * 2])
    10
    >>> prior_weight([[(0.1, 7), (1.4, 7), (0.01, 7), (9.0, 7), (1.2, 7), (0.8, 7)] * 2])
    1
    """
    away: list[float] = []
    expected: list[float] = []
    for members in groups:
        logs = _centred_logs(members)
        middle = median(logs)
        away.extend(abs(value - middle) for value in logs)
        expected.extend(_trigamma(dof / 2) for _, dof in members)
    if len(away) <= 2 * len(groups):
        return 0
    excess = (MAD_TO_SIGMA * median(away)) ** 2 - statistics.fmean(expected)
    weight = int(2 / (math.sqrt(1 + 2 * excess) - 1)) if excess > 0 else MOST_PRIOR_DOF
    return min(weight, MOST_PRIOR_DOF, len(away) - len(groups))


def _prior(members: Sequence[Member], weight: int) -> Prior:
    middle = median(_centred_logs(members))
    return Prior(variance=math.exp(middle + (_log_bias(weight / 2) if weight else 0.0)), dof=weight)


def _centred_logs(members: Sequence[Member]) -> list[float]:
    return [math.log(variance) - _log_bias(dof / 2) for variance, dof in members]


def _log_bias(half: float) -> float:
    """digamma(x) - ln(x): how far the mean logarithm of a sample variance lies below that of the variance."""
    return -1 / (2 * half) - 1 / (12 * half**2)


def _trigamma(half: float) -> float:
    return 1 / half + 1 / (2 * half**2) + 1 / (6 * half**3)


FLOOR = 5e-4
"""Smallest noise that is believed: stored quantiles have four significant digits."""
UNLIKE = 2.0
"""A case this many times as noisy as usual has little in common with the others."""
UNLIKE_PRIOR_DOF = 2
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The stored runs of one quantity of one case; the three series run parallel, at least two runs."""

    kind: str
    """Histories of one kind share what is known about noise."""
    sessions: tuple[str, ...]
    """The session that each run was measured in."""
    values: tuple[float, ...]
    """Logarithms of the quantity, larger is worse."""
    yardsticks: tuple[float, ...] = ()
    """Logarithms of the yardstick times; empty when they were not timed with every run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """Where a case is and how much it moves from run to run."""

    centre: float
    """Huber mean of the stored values."""
    sigma: float
    """Standard deviation of one run."""
    dof: int
    """Degrees of freedom of ``sigma``."""
    runs: int
    """Stored runs."""
    sessions: int
    """Sessions that they came from."""
    slope: float = 0.0
    """How much of the yardstick's logarithm is subtracted from a value."""
    yardstick: float | None = None
    """Median logarithm of the stored yardsticks."""

    def adjusted(self, value: float, yardstick: float | None, yardstick_shift: float) -> float | None:
        """A new value on the scale of ``centre``; None where its yardstick is missing.

        ``yardstick_shift`` is what all yardsticks of the session have in common.
        """
        if not self.slope:
            return value
        return None if yardstick is None else value - self.slope * (yardstick - yardstick_shift)


def levels(histories: Sequence[History], *, min_suite: float, use_yardstick: bool = True) -> tuple[Level, ...]:
    """The level of each history, estimated together.

    Sessions shared by at least ``min_suite`` histories are freed from their common effect; ``use_yardstick`` is False
    when this session's runs do not time it.
    """
    if not histories:
        return ()
    series = _freed([_Series(history=history, values=history.values) for history in histories], min_suite)
    if use_yardstick:
        series = _without_yardstick(series, min_suite)
    series = _undisturbed(series)
    usual = priors([(row.history.kind, row.noise) for row in series])
    return tuple(_level(row, usual[row.history.kind]) for row in series)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    """The stored values of one history on their way to its level."""

    history: History
    values: Sequence[float]
    """What is explained so far: the stored values, less the yardstick's part."""
    freed: Sequence[float] = ()
    """``values`` without what the host did to all cases alike, and without a disturbed run."""
    yard: Sequence[float] = ()
    """Yardsticks without what their sessions have in common; empty when they are not used."""
    slope: float = 0.0
    """How much of the yardstick was taken off."""

    @property
    def noise(self) -> Member:
        """Variance of the freed values and its degrees of freedom."""
        return max(FLOOR**2, variance(self.freed)), len(self.freed) - 1

    def with_freed(self, freed: Sequence[float]) -> _Series:
        """The same with other freed values; written out, because dataclasses.replace is slow for 10,000 cases."""
        return _Series(history=self.history, values=self.values, freed=freed, yard=self.yard, slope=self.slope)


def _without_yardstick(series: list[_Series], min_suite: float) -> list[_Series]:
    """The series less what their yardsticks explain, where these help a kind of cases."""
    complete = [_Series(history=row.history, values=row.history.yardsticks) for row in series if row.history.yardsticks]
    yards = iter(_freed(complete, min_suite))
    with_yards = [replace(row, yard=next(yards).freed) if row.history.yardsticks else row for row in series]
    helpful = slopes((row.history.kind, row.freed, row.yard) for row in with_yards if row.yard)
    if not helpful:
        return series
    return _freed([_less_yardstick(row, helpful.get(row.history.kind, 0.0)) for row in with_yards], min_suite)


def _less_yardstick(row: _Series, slope: float) -> _Series:
    if not slope or not row.yard:
        return row
    values = [value - slope * yard for value, yard in zip(row.values, row.yard, strict=True)]
    return replace(row, values=values, slope=slope)


def _undisturbed(series: Sequence[_Series]) -> list[_Series]:
    """The series without a run that something else disturbed: one that lies far off when all others agree.

    Where fewer cases of a kind tell what is usual, all runs stay: a host with heavy tails would look quiet without.
    """
    rough = [(row, rough_sigma(row.freed)) for row in series]
    by_kind: dict[str, list[float]] = {}
    for row, sigma in rough:
        by_kind.setdefault(row.history.kind, []).append(sigma)
    usual = {kind: median(sigmas) for kind, sigmas in by_kind.items() if len(sigmas) >= KIND_CASES}
    return [
        row.with_freed(without_spike(row.freed, max(sigma, usual[row.history.kind], FLOOR)))
        if row.history.kind in usual
        else row
        for row, sigma in rough
    ]


def _level(row: _Series, prior: Prior) -> Level:
    history, values, (own, dof) = row.history, row.freed, row.noise
    weight = prior.dof if own < UNLIKE**2 * prior.variance else min(prior.dof, UNLIKE_PRIOR_DOF)
    sigma = math.sqrt((weight * prior.variance + dof * own) / (weight + dof))
    return Level(
        centre=huber_mean(values, sigma),
        sigma=sigma,
        dof=weight + dof,
        runs=len(values),
        sessions=len(set(history.sessions)),
        slope=row.slope,
        yardstick=median(history.yardsticks) if history.yardsticks else None,
    )


def session_effects(rows: Sequence[tuple[History, Sequence[float]]], min_suite: float) -> dict[str, float]:
    """How much each session moved all its cases, by a median polish; only sessions shared by enough histories.

    ``rows`` are histories with the values to look at.  The effects have median 0.
    """
    effects: dict[str, float] = {}
    if len(rows) < min_suite:
        return effects
    rows_of: dict[tuple[str, ...], list[Sequence[float]]] = defaultdict(list)
    for history, values in rows:
        rows_of[history.sessions].append(values)
    for _ in range(_ROUNDS):
        residuals: dict[str, list[float]] = defaultdict(list)
        for names, alike in rows_of.items():
            _add_residuals(residuals, names, alike, effects)
        shared = {name: median(above) for name, above in residuals.items() if len(above) >= min_suite}
        usual = median(list(shared.values())) if shared else 0.0
        effects = {name: effect - usual for name, effect in shared.items()}
    return effects


def _add_residuals(
    residuals: dict[str, list[float]],
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    effects: Mapping[str, float],
) -> None:
    """Add what each session of these cases lies above their centres; a case counts once per session."""
    shift = [effects.get(name, 0.0) for name in names]
    centres = [median(list(map(operator.sub, row, shift))) for row in rows]
    columns: dict[str, list[list[float]]] = defaultdict(list)
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        columns[name].append(list(map(operator.sub, column, centres)))
    for name, rows_above in columns.items():
        residuals[name].extend(
            rows_above[0]
            if len(rows_above) == 1
            else [sum(above) / len(above) for above in zip(*rows_above, strict=True)]
        )


def _freed(series: Sequence[_Series], min_suite: float) -> list[_Series]:
    """The series with their values freed from what each session did to all its cases."""
    effects = session_effects([(row.history, row.values) for row in series], min_suite)
    if not effects:
        return [row.with_freed(row.values) for row in series]
    shifts = {names: [effects.get(name, 0.0) for name in names] for names in {row.history.sessions for row in series}}
    return [row.with_freed(list(map(operator.sub, row.values, shifts[row.history.sessions]))) for row in series]
