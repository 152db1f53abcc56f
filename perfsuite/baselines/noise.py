"""What stored runs say about a case: its level and its noise, freed from what the host did to all cases alike.

A value is the natural logarithm of a time (or of a metric, with the sign that makes larger worse), so a difference of
0.03 is 3 %.  Stored runs are fitted as case + session: the effect of a session, the median over its cases, is taken out
where enough cases share it, because a host that is slower on one day is slower for all of them.  What remains is noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOOR = 5e-4
"""Smallest noise that is believed: stored quantiles have four significant digits."""
CLIP = 2.5
"""Values further than this many standard deviations from their median count as that far."""
SPIKE = 4.0
"""A stored run further than this many standard deviations from the others was disturbed; one per case may be."""
MIN_SPIKED = 5
"""Runs from which on one may be left out."""
MOST_PRIOR_DOF = 10
"""Most weight, in degrees of freedom, that other cases have in the noise of one of them."""
KIND_CASES = 6
"""Cases from which on a kind tells by itself how alike they are; smaller kinds are judged with the whole suite."""
UNLIKE = 2.0
"""A case this many times as noisy as usual has little in common with the others."""
UNLIKE_PRIOR_DOF = 2
YARDSTICK_GAIN = 0.25
"""A yardstick is used where it cuts the noise of a kind of cases by at least this share."""
YARDSTICK_DOF = 14
"""Degrees of freedom below which a slope on the yardstick is not believed."""
_ROUNDS = 2
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One stored run of one quantity."""

    session: str
    """The session that it was measured in."""
    value: float
    """Logarithm of the quantity, larger is worse."""
    yardstick: float | None = None
    """Logarithm of the yardstick time; None when it was not timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The stored runs of one quantity of one case."""

    kind: str
    """Histories of one kind share what is known about noise."""
    points: tuple[Point, ...]
    """At least two."""


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


def rough_sigma(values: Sequence[float]) -> float:
    """Standard deviation without the value furthest from the median, times 1.2 for what that takes away.

    One run that something else disturbed does not count; a case that really has two speeds keeps its spread.

    >>> round(rough_sigma([1.0, 1.0, 1.1, 0.9, 1.0, 5.0]), 4), round(rough_sigma([1.0, 1.0, 1.0, 1.1, 1.1, 1.1]), 4)
    (0.0849, 0.0657)
    """
    middle = statistics.median(values)
    kept = sorted(values, key=lambda value: abs(value - middle))[: max(2, len(values) - 1)]
    mean = sum(kept) / len(kept)
    return 1.2 * math.sqrt(sum((value - mean) ** 2 for value in kept) / (len(kept) - 1))


def huber_mean(values: Sequence[float], sigma: float) -> float:
    """Mean of the values, each drawn in to at most two ``sigma`` from their median.

    >>> round(huber_mean([0.0, 0.01, -0.01, 0.5], 0.01), 5)
    0.00625
    """
    middle = statistics.median(values)
    low, high = middle - 2 * sigma, middle + 2 * sigma
    return sum(min(max(value, low), high) for value in values) / len(values)


def clipped_variance(values: Sequence[float], sigma: float) -> float:
    """Variance of at least two values, each drawn in to at most CLIP ``sigma`` from their median.

    >>> round(clipped_variance([0.0, 0.01, -0.01, 0.5], 0.01), 7)
    0.0002917
    """
    middle = statistics.median(values)
    reach = CLIP * sigma
    drawn = [min(max(value, middle - reach), middle + reach) for value in values]
    mean = sum(drawn) / len(drawn)
    return sum((value - mean) ** 2 for value in drawn) / (len(drawn) - 1)


def levels(histories: Sequence[History], *, min_suite: float, use_yardstick: bool = True) -> tuple[Level, ...]:
    """The level of each history, estimated together.

    Sessions shared by at least ``min_suite`` histories are freed from their common effect; ``use_yardstick`` is False
    when this session's runs do not time it.
    """
    yards = _yards(histories, min_suite) if use_yardstick else [[] for _ in histories]
    slopes = _slopes(histories, yards, min_suite)
    own = [slopes.get(history.kind, 0.0) if yard else 0.0 for history, yard in zip(histories, yards, strict=True)]
    values = [
        [point.value - slope * yard[index] if slope else point.value for index, point in enumerate(history.points)]
        for history, yard, slope in zip(histories, yards, own, strict=True)
    ]
    freed = _freed(histories, values, session_effects(histories, values, min_suite))
    kept = _undisturbed(histories, freed)
    variances = [(max(FLOOR**2, statistics.variance(row)), len(row) - 1) for row in kept]
    priors = _priors(histories, variances)
    return tuple(
        _level(history, kept[index], variance=variances[index][0], prior=priors[history.kind], slope=own[index])
        for index, history in enumerate(histories)
    )


def _yards(histories: Sequence[History], min_suite: float) -> list[list[float]]:
    """Yardsticks without what their sessions have in common, as the values lose it too; empty where some are missing."""
    complete = [history for history in histories if _has_yardstick(history)]
    rows = [[point.yardstick or 0.0 for point in history.points] for history in complete]
    freed = iter(_freed(complete, rows, session_effects(complete, rows, min_suite)))
    return [next(freed) if _has_yardstick(history) else [] for history in histories]


def _undisturbed(histories: Sequence[History], freed: Sequence[Sequence[float]]) -> list[list[float]]:
    """The values without a run that something else disturbed: one that lies far off when all others agree."""
    rough = [rough_sigma(each) for each in freed]
    by_kind: dict[str, list[float]] = {}
    for history, sigma in zip(histories, rough, strict=True):
        by_kind.setdefault(history.kind, []).append(sigma)
    usual = {kind: statistics.median(found) for kind, found in by_kind.items()}
    return [
        without_spike(row, max(sigma, usual[history.kind], FLOOR))
        for history, row, sigma in zip(histories, freed, rough, strict=True)
    ]


def without_spike(values: Sequence[float], sigma: float) -> list[float]:
    """The values without the one furthest from their median, when it is further than SPIKE ``sigma`` away.

    >>> without_spike([0.0, 0.01, -0.01, 0.0, 0.5], 0.01)
    [0.0, 0.01, -0.01, 0.0]
    """
    middle = statistics.median(values)
    place = max(range(len(values)), key=lambda index: abs(values[index] - middle))
    if len(values) < MIN_SPIKED or abs(values[place] - middle) <= SPIKE * sigma:
        return list(values)
    return [value for index, value in enumerate(values) if index != place]


def _level(history: History, values: Sequence[float], *, variance: float, prior: Prior, slope: float) -> Level:
    dof = len(values) - 1
    weight = prior.dof if variance < UNLIKE**2 * prior.variance else min(prior.dof, UNLIKE_PRIOR_DOF)
    sigma = math.sqrt((weight * prior.variance + dof * variance) / (weight + dof))
    yardsticks = [point.yardstick for point in history.points if point.yardstick is not None]
    return Level(
        centre=huber_mean(values, sigma),
        sigma=sigma,
        dof=weight + dof,
        runs=len(values),
        sessions=len({point.session for point in history.points}),
        slope=slope,
        yardstick=statistics.median(yardsticks) if len(yardsticks) == len(history.points) else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """What other cases say about the noise of one."""

    variance: float
    """The usual variance."""
    dof: int
    """What that is worth."""


def _priors(histories: Sequence[History], variances: Sequence[tuple[float, int]]) -> dict[str, Prior]:
    """By kind: how noisy its cases are; kinds of few cases are judged with the whole suite.

    How alike cases of one kind are is judged over all kinds together.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for history, member in zip(histories, variances, strict=True):
        found.setdefault(history.kind, []).append(member)
    large = [members for members in found.values() if len(members) >= KIND_CASES]
    weight = prior_weight(large)
    whole = [[member for members in found.values() for member in members]]
    suite = _prior(whole[0], prior_weight(whole))
    return {kind: _prior(members, weight) if len(members) >= KIND_CASES else suite for kind, members in found.items()}


def prior_weight(groups: Sequence[Sequence[tuple[float, int]]]) -> int:
    """How much, in degrees of freedom, a group says about the variance of its members, by empirical Bayes.

    Members are (variance, degrees of freedom).  The logarithm of a sample variance scatters by trigamma(dof / 2) when
    all of a group are equally noisy; scatter beyond that is their unlikeness and lowers the weight.  Source: Smyth,
    Linear models and empirical Bayes methods for assessing differential expression (2004).

    >>> prior_weight([[(1.0, 7), (1.4, 7), (0.7, 7), (0.9, 7), (1.2, 7), (0.8, 7)] * 2])
    10
    >>> prior_weight([[(0.1, 7), (1.4, 7), (0.01, 7), (9.0, 7), (1.2, 7), (0.8, 7)] * 2])
    1
    """
    away: list[float] = []
    expected: list[float] = []
    lost = 0
    for members in groups:
        logs = _centred_logs(members)
        middle = statistics.median(logs)
        away.extend(abs(value - middle) for value in logs)
        expected.extend(_trigamma(dof / 2) for _, dof in members)
        lost += 1
    if len(away) <= 2 * lost:
        return 0
    excess = (_MAD_TO_SIGMA * statistics.median(away)) ** 2 - statistics.fmean(expected)
    weight = int(2 / (math.sqrt(1 + 2 * excess) - 1)) if excess > 0 else MOST_PRIOR_DOF
    return min(weight, MOST_PRIOR_DOF, len(away) - lost)


def _prior(members: Sequence[tuple[float, int]], weight: int) -> Prior:
    middle = statistics.median(_centred_logs(members))
    return Prior(variance=math.exp(middle + (_log_bias(weight / 2) if weight else 0.0)), dof=weight)


def _centred_logs(members: Sequence[tuple[float, int]]) -> list[float]:
    return [math.log(variance) - _log_bias(dof / 2) for variance, dof in members]


def _log_bias(half: float) -> float:
    """digamma(x) - ln(x): how far the mean logarithm of a sample variance lies below that of the variance."""
    return -1 / (2 * half) - 1 / (12 * half**2)


def _trigamma(half: float) -> float:
    return 1 / half + 1 / (2 * half**2) + 1 / (6 * half**3)


def _has_yardstick(history: History) -> bool:
    return all(point.yardstick is not None for point in history.points)


def session_effects(
    histories: Sequence[History], values: Sequence[Sequence[float]], min_suite: float
) -> dict[str, float]:
    """How much each session moved all its cases, by a median polish; only sessions shared by enough histories.

    ``values`` runs parallel to the points of the histories.  The effects have median 0.
    """
    effects: dict[str, float] = {}
    if len(histories) < min_suite:
        return effects
    for _ in range(_ROUNDS):
        residuals: dict[str, list[float]] = {}
        for history, row in zip(histories, values, strict=True):
            shifted = [
                value - effects.get(point.session, 0.0) for point, value in zip(history.points, row, strict=True)
            ]
            centre = statistics.median(shifted)
            own: dict[str, list[float]] = {}
            for point, value in zip(history.points, row, strict=True):
                own.setdefault(point.session, []).append(value - centre)
            for session, found in own.items():
                residuals.setdefault(session, []).append(found[0] if len(found) == 1 else sum(found) / len(found))
        shared = {session: statistics.median(found) for session, found in residuals.items() if len(found) >= min_suite}
        usual = statistics.median(shared.values()) if shared else 0.0
        effects = {session: effect - usual for session, effect in shared.items()}
    return effects


def _freed(
    histories: Sequence[History], values: Sequence[Sequence[float]], effects: Mapping[str, float]
) -> list[list[float]]:
    return [
        [value - effects.get(point.session, 0.0) for point, value in zip(history.points, row, strict=True)]
        for history, row in zip(histories, values, strict=True)
    ]


def _slopes(histories: Sequence[History], yards: Sequence[Sequence[float]], min_suite: float) -> dict[str, float]:
    """Slope of value on yardstick by kind, pooled over its cases; kinds where it does not help are left out.

    ``yards`` are the yardsticks without what their sessions have in common, empty where there are none.
    """
    usable = [(history, yard) for history, yard in zip(histories, yards, strict=True) if yard]
    rows = [[point.value for point in history.points] for history, _ in usable]
    members = [history for history, _ in usable]
    rows = _freed(members, rows, session_effects(members, rows, min_suite))
    points: dict[str, list[tuple[float, float]]] = {}
    dof: dict[str, int] = {}
    for (history, yard), row in zip(usable, rows, strict=True):
        value_centre, yard_centre = statistics.median(row), statistics.median(yard)
        centred = [(x - yard_centre, y - value_centre) for x, y in zip(yard, row, strict=True)]
        points.setdefault(history.kind, []).extend(centred)
        dof[history.kind] = dof.get(history.kind, 0) + len(row) - 1
    found = {kind: helpful_slope(pairs) for kind, pairs in points.items() if dof[kind] >= YARDSTICK_DOF}
    return {kind: slope for kind, slope in found.items() if slope}


def helpful_slope(points: Sequence[tuple[float, float]]) -> float:
    """Slope of the line through the origin with the least absolute residuals; 0 where it hardly lowers them.

    That line is the weighted median of y / x with weights abs(x): disturbed runs do not bend it.  It is at most 1.5: a
    yardstick that must be multiplied by more is the wrong one.

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
    slope = min(1.5, slope)
    left = statistics.median([abs(y - slope * x) for x, y in points])
    before = statistics.median([abs(y) for _, y in points])
    return slope if slope > 0 and left <= (1 - YARDSTICK_GAIN) * before else 0.0
