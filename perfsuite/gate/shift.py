"""What a judgement is given and what it gives: the session, the bounds of a quantity, an effect with its uncertainty.

All values are natural logarithms, larger is worse.  The whole suite says by how much the host moved this session, and
how noise divides inside and between sessions, in units of the variance of a stored run.  Unchanged cases are taken to
be the majority.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from perfsuite.gate.control import UNLIKE_RESPONSE, Moved
from perfsuite.gate.noise import Level
from perfsuite.record.verdict import GateSettings
from perfsuite.statistics.robust import MAD_TO_SIGMA, clipped_variance, median, median_of_most, variance
from perfsuite.statistics.student import t_quantile

TWO_SIDED = 0.975
"""For 95 % of a two-sided interval; and for each of two stages that together shall fail in 5 %."""


CONFIRM_ALPHA = 0.005
"""False alarms allowed per case of an A/B."""


SURELY_ALPHA = 0.0005
"""False alarms per case of a level that is worse where the base is not: one question more is asked of the same runs."""

LONE_LOOKS = 8
"""Looks among which SURELY_ALPHA is split where too few cases tell of the host: there base and stored commit are run in
nearly every session, and each is looked at after 6, 12 and 24 pairs.  Row: histories of 50 merges, silence."""


Outcome = Literal["pass", "regressed", "improved", "inconclusive", "suspect", "candidate"]


@dataclass(frozen=True, kw_only=True)
class Today:
    """What all cases together say about this session."""

    shift: float = 0.0
    """How much the host moved every case, taken off; larger is slower."""
    shift_variance: float = 0.0
    """Variance of what a case feels of it."""
    known: bool = False
    """Whether the shifts of this and of the stored sessions are known and taken off."""
    unexplained: float = 0.0
    """Part of ``shift`` that may be the code's doing as well as the host's; 0 when it is known to be the host's."""
    yardstick_shift: float = 0.0
    """What the yardsticks of all cases have in common."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one quantity is judged by."""

    tolerance: float
    """ln(1 + tolerance)."""
    limit: float
    """ln(1 + tolerance + blind margin): a pass excludes it."""
    alpha: float
    """False alarms allowed for this case in the re-measurement."""
    shared_alpha: float
    """The same for errors that screening and re-measurement have in common: the screening won nothing against them."""
    confirm_alpha: float = CONFIRM_ALPHA
    """The same for an A/B."""
    surely_alpha: float = SURELY_ALPHA
    """The same for what is asked of a case whose base is not slower."""
    doubt: float = 1.0
    """Standard errors below which nothing is suspicious."""

    @property
    def lone_alpha(self) -> float:
        """The share of ``surely_alpha`` for one look at an A/B where too few cases tell of the host."""
        return self.surely_alpha / LONE_LOOKS


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Uncertainty of this session's mean against the stored level."""

    error: float
    """Standard error of the difference."""
    shared: float
    """The part that re-measuring in this session cannot shrink: level, session and shift."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An effect with its uncertainty."""

    effect: float
    """Logarithm, larger is worse."""
    error: float
    """Standard error."""
    dof: int
    """Degrees of freedom of ``error``."""
    outcome: Outcome
    """What follows from it alone."""
    reach: float = 0.0
    """Half the 95 % interval where this session's runs scatter so that it is wider than by ``error``."""

    def interval(self) -> tuple[float, float]:
        """Two-sided 95 % confidence interval, logarithms."""
        reach = max(self.reach, t_quantile(TWO_SIDED, self.dof) * self.error)
        return self.effect - reach, self.effect + reach


SESSION_SHARE = 0.1
"""Share of the variance of stored runs that is taken to lie between sessions, at least."""
PRIOR_INSIDE = 1 - SESSION_SHARE
SUITE_PRIOR_DOF = 30
KIND_PRIOR_DOF = 8
"""Weight of the expectation that nearly all noise lies inside sessions.  Row: hosted VM, error rates."""
SHIFTLESS_INSIDE = 0.5
SHIFTLESS_PRIOR_DOF = 6
"""The same where a host's drift cannot be told from a case's own noise."""
SCALE_CASES = 5
"""Replicated cases from which on they tell how noisy today is."""
MOST_BETWEEN = 2.0
"""Most variance between sessions that is believed."""
EXCESS = 1.3
"""Variance of the cases around the suite's shift, over the expected, from which on it is believed to be larger."""
HALVES_APART = 1.0
"""Expected standard deviations between the halves of the cases from which on they have no scatter in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One quantity of one case as some runs of this session saw it."""

    kind: str
    """Cases of one kind share what is known about noise."""
    level: Level
    """The stored level."""
    values: Sequence[float]
    """This session's values, adjusted by the yardstick where the level is; two of them or more are replicates."""
    control: Moved | None = None
    """How far its control moved from the stored one; None where today's runs have none."""

    @property
    def difference(self) -> float:
        """Median of this session's values minus the stored level."""
        return median(self.values) - self.level.centre

    @property
    def dof(self) -> int:
        """Degrees of freedom of the variance of the values."""
        return len(self.values) - 1

    def ratio(self, scale: float) -> float:
        """Variance of the values, divided by that of stored runs.

        Noise is taken to be ``scale`` times the stored one; an outlier counts as if it lay ``CLIP`` standard deviations
        of that from the median.
        """
        return clipped_variance(self.values, scale * self.level.sigma) / self.level.sigma**2


@dataclass(frozen=True, kw_only=True)
class Shares:
    """How noise divides, in units of the variance of a stored run."""

    between: float = SESSION_SHARE
    """Variance between sessions, one figure for the suite."""
    usual: float = PRIOR_INSIDE
    """Variance inside today's session, over all kinds."""
    inside: Mapping[str, float] = field(default_factory=dict)
    """The same by kind, where runs of the kind were replicated."""
    scale: float = 1.0
    """Standard deviation of an undisturbed run today over that of a stored one, at least 1."""

    def of(self, kind: str) -> float:
        """Variance inside today's session for cases of this kind."""
        return self.inside.get(kind, self.usual)


def shares(replicates: Iterable[Seen], *, with_shift: bool) -> Shares:
    """What replicated runs say; the expectation weighs more than a few of them.

    ``with_shift``: the sessions' common shifts are known and taken off.  Where they are not, they are part of what lies
    between sessions, which then is taken to be half of everything at least: runs that scatter much inside this session
    say nothing about how far it drifted.
    """
    known = list(replicates)
    # How much noisier an ordinary case is than when the baseline was taken; spikes do not count in a median.
    scale = 1.0
    if len(known) >= SCALE_CASES:
        # The median of a variance with d degrees of freedom is about (1 - 2/9d)^3 of its mean (Wilson and Hilferty).
        ratios = [variance(one.values) / one.level.sigma**2 / (1 - 2 / (9 * one.dof)) ** 3 for one in known]
        scale = math.sqrt(max(1.0, median(ratios)))
    sums: dict[str, tuple[float, int]] = {}
    for replicate in known:
        total, dof = sums.get(replicate.kind, (0.0, 0))
        sums[replicate.kind] = (total + replicate.ratio(scale) * replicate.dof, dof + replicate.dof)
    whole = sum(total for total, _ in sums.values()), sum(dof for _, dof in sums.values())
    usual = _pooled(whole, PRIOR_INSIDE, SUITE_PRIOR_DOF)
    inside = usual if with_shift else _pooled(whole, SHIFTLESS_INSIDE, SHIFTLESS_PRIOR_DOF)
    between = max(SESSION_SHARE if with_shift else 1 - SHIFTLESS_INSIDE, 1 - inside)
    usual = max(usual, 1 - between)
    return Shares(
        between=between,
        usual=usual,
        inside={kind: max(1 - between, _pooled(pooled, usual, KIND_PRIOR_DOF)) for kind, pooled in sums.items()},
        scale=scale,
    )


def _pooled(ratio: tuple[float, int], expected: float, weight: int) -> float:
    """A ratio of variances, given as (sum of ratio x dof, dof), with ``expected`` counted for ``weight`` dof."""
    total, dof = ratio
    return (weight * expected + total) / (weight + dof)


def own_inside(share: float, replicates: Seen, scale: float) -> float:
    """The share of a case whose own runs are known: never below that of its kind, larger when its runs scatter more."""
    dof = replicates.dof
    return max(share, (KIND_PRIOR_DOF * share + dof * replicates.ratio(scale)) / (KIND_PRIOR_DOF + dof))


def knows_shift(cases: int, settings: GateSettings) -> bool:
    """Whether so many cases tell what a session did to all of them."""
    return not settings.in_place and cases >= settings.min_suite


def look(screened: Sequence[Seen], known: Shares, settings: GateSettings, *, explained: bool) -> tuple[Today, Shares]:
    """Shift of the session, and the shares as the scatter of the cases around it corrects them.

    ``explained``: the yardsticks show that the shift is the host's.

    Fewer than ``settings.min_suite`` cases, or cases settled in place, say nothing.  Where the cases scatter more than
    their replicates and levels explain, they differ between sessions; where there are no replicates, today is noisier.
    """
    if not knows_shift(len(screened), settings):
        return Today(), known
    differences = [case.difference for case in screened]
    shift = median_of_most(differences, math.log1p(settings.tolerance))  # half of the cases slower are no shift of all
    feels = (UNLIKE_RESPONSE * shift) ** 2
    expected = [_variance(case, known) * case.level.sigma**2 + feels for case in screened]
    away = [abs(one - shift) / math.sqrt(usual) for one, usual in zip(differences, expected, strict=True)]
    scatter = (MAD_TO_SIGMA * median_of_most(away, HALVES_APART)) ** 2  # 1 on a host like that of the baseline
    error = math.pi / 2 * median(expected) * max(1.0, scatter) / len(screened)
    today = Today(
        known=True,
        shift=shift,
        shift_variance=error + feels,
        unexplained=0.0 if explained else max(0.0, shift),
    )
    return today, _corrected(screened, known, scatter)


def _variance(screened: Seen, known: Shares) -> float:
    """Variance of the difference of an unchanged case, in units of that of a stored run."""
    level = screened.level
    inside = known.usual / len(screened.values)
    return known.between * (1 + 1 / level.sessions) + max(0.0, 1 - known.between) / level.runs + inside


def _corrected(screened: Sequence[Seen], known: Shares, scatter: float) -> Shares:
    if scatter < EXCESS:
        return known
    missing = (scatter - 1) * median([_variance(case, known) for case in screened])
    replicated = sum(len(case.values) > 1 for case in screened)
    if 2 * replicated > len(screened):
        sessions = median([case.level.sessions for case in screened])
        return replace(known, between=min(MOST_BETWEEN, known.between + missing / (1 + 1 / sessions)))
    usual = known.usual + missing
    return replace(known, usual=usual, inside={kind: max(usual, share) for kind, share in known.inside.items()})
