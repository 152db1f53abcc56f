"""What other cases say about the noise of one, by empirical Bayes.

Source: Smyth, Linear models and empirical Bayes methods for assessing differential expression (2004).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.statistics.robust import MAD_TO_SIGMA, median

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
