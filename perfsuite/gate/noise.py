"""What stored runs say about a case: its level and its noise, freed from what the host did to all cases alike.

A value is the natural logarithm of a time (or of a metric, with the sign that makes larger worse), so a difference of
0.03 is 3 %.  Stored runs are fitted as case + session: the effect of a session, the median over its cases, is taken out
where enough cases share it, because a host that is slower on one day is slower for all of them.  What remains is noise.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


def slopes(series: Iterable[tuple[str, Sequence[float], Sequence[float]]]) -> dict[str, float]:
    """Slope of value on yardstick by kind, pooled over its cases; kinds where it does not help are left out.

    ``series`` has the kind, values and yardsticks of each case, logarithms.
    """
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
    values: list[Sequence[float]] = [history.values for history in histories]
    freed = _freed(histories, values, min_suite)
    slope_of: dict[str, float] = {}
    timed = [(index, history) for index, history in enumerate(histories) if history.yardsticks]
    if use_yardstick and timed:
        yards = _freed([history for _, history in timed], [history.yardsticks for _, history in timed], min_suite)
        slope_of = slopes(
            (history.kind, freed[index], yard) for (index, history), yard in zip(timed, yards, strict=True)
        )
        for (index, history), yard in zip(timed, yards, strict=True):
            slope = slope_of.get(history.kind, 0.0)
            if slope:
                values[index] = [value - slope * each for value, each in zip(values[index], yard, strict=True)]
        freed = _freed(histories, values, min_suite) if slope_of else freed
    freed = _undisturbed(histories, freed)
    noise = [(max(FLOOR**2, variance(own)), len(own) - 1) for own in freed]
    usual = priors([(history.kind, member) for history, member in zip(histories, noise, strict=True)])
    return tuple(
        _level(
            history, own, member, usual[history.kind], slope_of.get(history.kind, 0.0) if history.yardsticks else 0.0
        )
        for history, own, member in zip(histories, freed, noise, strict=True)
    )


def session_effects(
    histories: Sequence[History], values: Sequence[Sequence[float]], min_suite: float
) -> dict[str, float]:
    """How much each session moved all its cases, by a median polish; only sessions shared by enough histories.

    ``values`` are those to look at, of each history.  A case counts once per session.  The effects have median 0.
    """
    effects: dict[str, float] = {}
    if len(histories) < min_suite:
        return effects
    for _ in range(_ROUNDS):
        residuals: dict[str, list[float]] = defaultdict(list)
        for history, row in zip(histories, values, strict=True):
            centre = median([value - effects.get(name, 0.0) for name, value in zip(history.sessions, row, strict=True)])
            own: dict[str, list[float]] = defaultdict(list)
            for name, value in zip(history.sessions, row, strict=True):
                own[name].append(value - centre)
            for name, above in own.items():
                residuals[name].append(sum(above) / len(above))
        shared = {name: median(above) for name, above in residuals.items() if len(above) >= min_suite}
        usual = median(list(shared.values())) if shared else 0.0
        effects = {name: effect - usual for name, effect in shared.items()}
    return effects


def _freed(
    histories: Sequence[History], values: Sequence[Sequence[float]], min_suite: float
) -> Sequence[Sequence[float]]:
    """The values of each history without what each session did to all its cases."""
    effects = session_effects(histories, values, min_suite)
    if not effects:
        return values
    return [
        [value - effects.get(name, 0.0) for name, value in zip(history.sessions, row, strict=True)]
        for history, row in zip(histories, values, strict=True)
    ]


def _undisturbed(histories: Sequence[History], values: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """The values without a run that something else disturbed: one that lies far off when all others agree.

    Where fewer cases of a kind tell what is usual, all runs stay: a host with heavy tails would look quiet without.
    """
    rough = [rough_sigma(row) for row in values]
    by_kind: dict[str, list[float]] = defaultdict(list)
    for history, sigma in zip(histories, rough, strict=True):
        by_kind[history.kind].append(sigma)
    usual = {kind: median(sigmas) for kind, sigmas in by_kind.items() if len(sigmas) >= KIND_CASES}
    return [
        without_spike(row, max(sigma, usual[history.kind], FLOOR)) if history.kind in usual else row
        for history, row, sigma in zip(histories, values, rough, strict=True)
    ]


def _level(history: History, values: Sequence[float], noise: Member, prior: Prior, slope: float) -> Level:
    own, dof = noise
    weight = prior.dof if own < UNLIKE**2 * prior.variance else min(prior.dof, UNLIKE_PRIOR_DOF)
    sigma = math.sqrt((weight * prior.variance + dof * own) / (weight + dof))
    return Level(
        centre=huber_mean(values, sigma),
        sigma=sigma,
        dof=weight + dof,
        runs=len(values),
        sessions=len(set(history.sessions)),
        slope=slope,
        yardstick=median(history.yardsticks) if history.yardsticks else None,
    )
