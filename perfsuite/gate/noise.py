"""Estimate the level and the noise of a case from stored runs, without the host's common effect on all cases.

A value is the natural logarithm of a time (or of a metric, with the sign that makes larger worse), so a difference of
0.03 is 3 %.  Stored runs are fitted as case + session.  The effect of a session is the median over its cases; it is
subtracted if enough cases share it, because a slower host affects all of them.  The residual is noise.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfsuite.statistics.robust import MAD_TO_SIGMA, huber_mean, median, rough_sigma, variance, without_spike

GAIN = 0.25
"""A yardstick is used if it cuts the noise of a kind by this share.  Row: the same with a yardstick, error rates."""
ENOUGH_DOF = 14  # Degrees of freedom that this share needs.
FEW_GAIN = 0.7  # The share with fewer of them: eight unrelated runs show it by chance in one of 200 sets.
LEAST_DOF = 6  # Fewest degrees of freedom for a slope on the yardstick.
STEEPEST = 1.5  # Largest slope on a yardstick; a larger one means an unsuitable yardstick.


def slopes(series: Iterable[tuple[str, Sequence[float], Sequence[float]]]) -> dict[str, float]:
    """Return the slope of value on yardstick by kind, pooled over its cases, without kinds where it does not help.
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
    """Return the slope of the line through the origin with the least absolute residuals; 0 if its gain is smaller.

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
"""Most degrees of freedom of other cases in the noise of one.  Row: ordinary box, no base, error rates."""
KIND_CASES = 6
"""Fewest cases of a kind for its own noise; else that of the whole suite is used.  Row: ordinary box, error rates."""

Member = tuple[float, int]  # Variance of one case and its degrees of freedom.


def priors(members: Sequence[tuple[str, Member]]) -> dict[str, Member]:
    """Return the usual variance of each kind with its weight in degrees of freedom; the whole suite's for few cases.
    ``members`` are cases with their kind. The similarity of cases of one kind is estimated over all kinds together.
    """
    groups: dict[str, list[Member]] = {}
    for kind, member in members:
        groups.setdefault(kind, []).append(member)
    whole = [member for _, member in members]
    weight = prior_weight([group for group in groups.values() if len(group) >= KIND_CASES])
    suite = _prior(whole, prior_weight([whole]))
    return {kind: _prior(group, weight) if len(group) >= KIND_CASES else suite for kind, group in groups.items()}


def prior_weight(groups: Sequence[Sequence[Member]]) -> int:
    """Return the weight, in degrees of freedom, of a group's variance for its members, by empirical Bayes.

    The logarithm of a sample variance scatters by trigamma(dof / 2) if all members are equally noisy; more scatter
    means that they differ, and lowers the weight.

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


def _prior(members: Sequence[Member], weight: int) -> Member:
    middle = median(_centred_logs(members))
    return math.exp(middle + (_log_bias(weight / 2) if weight else 0.0)), weight


def _centred_logs(members: Sequence[Member]) -> list[float]:
    return [math.log(variance) - _log_bias(dof / 2) for variance, dof in members]


def _log_bias(half: float) -> float:
    """Return digamma(x) - ln(x): the bias of the mean logarithm of a sample variance."""
    return -1 / (2 * half) - 1 / (12 * half**2)


def _trigamma(half: float) -> float:
    return 1 / half + 1 / (2 * half**2) + 1 / (6 * half**3)


FLOOR = 5e-4  # Smallest noise: stored quantiles have four significant digits.
UNLIKE = 2.0  # Noise relative to the usual one above which a case has little in common with the others.
UNLIKE_PRIOR_DOF = 2
_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The stored runs of one quantity of one case: three parallel series of at least two runs."""

    kind: str  # Histories of one kind share their estimate of noise.
    sessions: tuple[str, ...]  # The session of each run.
    values: tuple[float, ...]  # Logarithms of the quantity, larger is worse.
    yardsticks: tuple[float, ...] = ()  # Logarithms of the yardstick times; empty unless every run has one.


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """The level of a case and its scatter from run to run."""

    centre: float  # Huber mean of the stored values.
    sigma: float  # Standard deviation of one run.
    dof: int  # Degrees of freedom of ``sigma``.
    runs: int  # Number of stored runs.
    sessions: int  # Number of their sessions.
    slope: float = 0.0  # Share of the yardstick's logarithm that is subtracted from a value.
    yardstick: float | None = None  # Median logarithm of the stored yardsticks.

    def adjusted(self, value: float, yardstick: float | None, yardstick_shift: float) -> float | None:
        """Return a new value on the scale of ``centre``; None without its yardstick.  ``yardstick_shift`` is the common
        shift of all yardsticks in the session.
        """
        if not self.slope:
            return value
        return None if yardstick is None else value - self.slope * (yardstick - yardstick_shift)


def levels(histories: Sequence[History], *, min_suite: float, use_yardstick: bool = True) -> tuple[Level, ...]:
    """Return the level of each history, estimated together.  The common effect of a session with at least ``min_suite``
    histories is subtracted; ``use_yardstick`` is False if this session's runs do not time it.
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
    """Return the common effect of each session with enough histories, by a median polish.  ``values`` are the values of
    each history. A case counts once per session. The effects have median 0.
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
    """Return the values of each history without the common effects of the sessions."""
    effects = session_effects(histories, values, min_suite)
    if not effects:
        return values
    return [
        [value - effects.get(name, 0.0) for name, value in zip(history.sessions, row, strict=True)]
        for history, row in zip(histories, values, strict=True)
    ]


def _undisturbed(histories: Sequence[History], values: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """Return the values without a disturbed run: one far from all others, which agree.  In kinds of few cases all runs
    stay: without them a host with heavy tails would look quiet.
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


def _level(history: History, values: Sequence[float], noise: Member, prior: Member, slope: float) -> Level:
    (own, dof), (usual, weight) = noise, prior
    weight = weight if own < UNLIKE**2 * usual else min(weight, UNLIKE_PRIOR_DOF)
    sigma = math.sqrt((weight * usual + dof * own) / (weight + dof))
    return Level(
        centre=huber_mean(values, sigma),
        sigma=sigma,
        dof=weight + dof,
        runs=len(values),
        sessions=len(set(history.sessions)),
        slope=slope,
        yardstick=median(history.yardsticks) if history.yardsticks else None,
    )
