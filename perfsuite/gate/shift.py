"""Inputs and results of a judge: the shift of the session, the bounds of a quantity, an effect with its uncertainty.

All values are natural logarithms, larger is worse.  The whole suite shows the host's shift in this session, and the
shares of noise inside and between sessions, in units of the variance of a stored run.  Most cases are assumed to be
unchanged.

A control decides whether the host or the code made a case slower.  A control (yardstick) is fixed work that was timed
between the samples.  It is evidence only for cases with similar work, and only if all compared runs timed the same kind
of control.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from perfsuite.baselines.runs import RunSummary
from perfsuite.gate.noise import Level
from perfsuite.record.step import UNLIKE
from perfsuite.record.verdict import GateSettings
from perfsuite.statistics.robust import (
    MAD_TO_SIGMA,
    clipped_variance,
    median,
    median_of_most,
    rough_sigma,
    t_quantile,
    variance,
)

ENOUGH_CONTROLS = 3  # Fewest stored runs with a control of one kind for a stored control.
SCATTERS = 2.0  # Multiple of the usual distance between case and control above which the code is blamed.
UNLIKE_RESPONSE = 0.3
"""Standard deviation of the share of a host's shift in a case: memory-bound and compute-bound cases differ."""
SURELY_UNLIKE = 3 * UNLIKE_RESPONSE
"""Share of a control's movement by which some case of a suite moves further.  Row: busier, controls."""
EXPLAINED = 0.5
"""Least share of a change that the control must show before the host is blamed.  Row: busier, controls."""
_BEFORE_KINDS = ("", "compute", "memory")
"""Kinds of controls that are comparable with a run without a kind: older versions chose them by the workload."""

Read = Callable[[RunSummary], float | None]
Says = Literal["host", "unsure", "code"]
"""Cause of a slowdown by the control; ``code`` if the control moved less than its usual scatter allows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredControl:
    """The control of the stored runs of a case; times are logarithms."""

    kind: str  # Kind of the control; empty in older runs.
    centre: float  # Median of its times.
    apart: float  # Standard deviation of the difference between case and control.
    read: Read  # Function that reads the time of the control from a run.

    def of(self, run: RunSummary) -> float | None:
        """Return the time of a run's control; None without one, or for another kind."""
        return self.read(run) if comparable(self.kind, run.control) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Movement of today's control from the stored one (ln)."""

    amount: float | None = None  # None if no control resembles the case.
    doubt: float = 0.0  # Additional movement of the case that the host may have caused.
    why: str = ""  # The kind of the control, or why none resembles the case.

    def says(self, effect: float, tolerance: float) -> Says:
        """Return the cause of a slowdown of a case or a suite by ``effect``."""
        if self.amount is None:
            return "unsure"
        if explains(effect, self.amount, tolerance):
            return "host"
        return "unsure" if effect - self.amount <= tolerance + self.doubt else "code"


def comparable(stored: str, now: str) -> bool:
    """Return whether controls of these kinds do the same work, and resemble the case.

    >>> comparable("sleep 4 ms", "sleep 4 ms"), comparable("", "memory"), comparable("", "message 1 KiB")
    (True, True, False)
    """
    if "" in (stored, now):
        return stored in _BEFORE_KINDS and now in _BEFORE_KINDS
    return stored == now != UNLIKE


def stored_control(runs: Sequence[RunSummary], values: Sequence[float], *reads: Read) -> StoredControl | None:
    """Return the control of most stored runs; ``values`` are the judged values of the runs, in the same order.
    ``reads`` are functions that read a control's time; the first one with enough values is used, because old runs have
    no means.
    """
    kinds = Counter(run.control for run in runs if run.yardstick is not None)
    kind = max(kinds, key=lambda one: (kinds[one], one), default="")
    alike = [(run, value) for run, value in zip(runs, values, strict=True) if comparable(kind, run.control)]
    for read in reads:
        timed = [(time, value) for run, value in alike if (time := read(run)) is not None]
        if len(timed) >= ENOUGH_CONTROLS:
            apart = rough_sigma([value - time for time, value in timed])
            return StoredControl(kind=kind, centre=median([time for time, _ in timed]), apart=apart, read=read)
    return None


def moved(
    stored: StoredControl | None, runs: Sequence[RunSummary], *, slope: float = 0.0, common: float = 0.0
) -> Moved | None:
    """Return the movement of these runs' control; None without any control.  ``slope`` times its movement beyond
    ``common``, the common movement of all controls, is already subtracted from the values.
    """
    timed = [run for run in runs if run.control or run.yardstick is not None]
    if not timed:
        return None
    kinds = ", ".join(dict.fromkeys(run.control or "of unknown kind" for run in timed))
    now = [time for run in timed if stored is not None and (time := stored.of(run)) is not None]
    if stored is None or not now:
        if all(run.control == UNLIKE for run in timed):
            return Moved(why="no control resembles the step")
        then = "none of one kind" if stored is None else stored.kind or "of unknown kind"
        return Moved(why=f"its control is {kinds}, stored is {then}: store new runs")
    far = median(now) - stored.centre
    shared, apart = (common, 0.0) if slope else (0.0, stored.apart)  # with a slope the distance is part of the noise
    doubt = SCATTERS * apart + SURELY_UNLIKE * max(0.0, far - shared)
    return Moved(amount=far - slope * (far - common), doubt=doubt, why=stored.kind or kinds)


WAITS = "waits for a core"  # The control of Moved if no yardstick moved as far as these waits explain.
_MOST_WAITED = 0.99
_OWN_WAITS = 0.2  # Stored share above which the threads of a case share the cores among themselves.


def waited(stored: Iterable[RunSummary], runs: Iterable[RunSummary]) -> float:
    """Return by how much (ln) longer waits for a core make these runs slower than the stored ones; 0 if unknown, or if
    the threads of the stored runs waited for each other: then more work of the code makes the waits longer too.

    >>> before, now = (RunSummary(session="", time="", waited=share) for share in (0.0, 0.5))
    >>> round(waited([before], [now]), 3), waited([now], [before])
    (0.693, 0.0)
    """
    then, now = ([run.waited for run in each if run.waited is not None] for each in (stored, runs))
    if not then or not now or median(then) > _OWN_WAITS:
        return 0.0
    then_s, now_s = (1 / (1 - min(_MOST_WAITED, median(shares))) for shares in (then, now))
    return max(0.0, math.log(now_s / then_s))


def explains(effect: float, amount: float, tolerance: float) -> bool:
    """Return whether a control that moved by ``amount`` explains an effect up to the tolerance; all are logarithms.

    >>> explains(0.1, 0.08, 0.03), explains(0.1, 0.05, 0.03), explains(0.04, 0.015, 0.03)
    (True, False, False)
    """
    return effect - amount <= tolerance and amount >= EXPLAINED * effect


TWO_SIDED = 0.975  # Probability for a two-sided 95 % interval, and for each of two stages that may fail in 5 % together
CONFIRM_ALPHA = 0.005  # False alarms allowed per case of an A/B.
SURELY_ALPHA = 0.0005
"""False alarms per case of a level that is worse although the base is not: one more test of the same runs."""
LONE_LOOKS = 8
"""Looks that share SURELY_ALPHA if too few cases show the host's noise: then base and stored commit run in nearly every
session, and each is tested after 6, 12 and 24 pairs.  Row: histories of 50 merges, silence."""

Outcome = Literal["pass", "regressed", "improved", "inconclusive", "suspect", "candidate"]


@dataclass(frozen=True, kw_only=True)
class Today:
    """The shift of this session from all cases together."""

    shift: float = 0.0  # Common shift of all cases, which is subtracted; larger is slower.
    shift_variance: float = 0.0  # Variance of the shift in a single case.
    is_known: bool = False  # Whether the shifts of this and of the stored sessions are known and subtracted.
    unexplained: float = 0.0
    """Part of ``shift`` that may be caused by the code or the host; 0 if the host is certainly the cause."""
    yardstick_shift: float = 0.0  # Common shift of the yardsticks of all cases.


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds of one quantity."""

    tolerance: float  # ln(1 + tolerance).
    limit: float  # ln(1 + tolerance + blind margin): a pass excludes it.
    alpha: float  # False alarms allowed for this case in the re-measurement.
    shared_alpha: float
    """False alarms for errors that screening and re-measurement share, which the screening cannot reduce."""
    confirm_alpha: float = CONFIRM_ALPHA  # False alarms of an A/B.
    surely_alpha: float = SURELY_ALPHA  # False alarms of tests for a case whose base is not slower.
    doubt: float = 1.0  # Standard errors below which nothing is suspicious.

    @property
    def lone_alpha(self) -> float:
        """The share of ``surely_alpha`` for one look at an A/B if too few cases show the host's noise."""
        return self.surely_alpha / LONE_LOOKS


Spread = tuple[float, float]
"""Standard error of this session's mean minus the stored level, and its part that more runs in this session cannot
reduce: level, session and shift."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An effect with its uncertainty."""

    effect: float  # Logarithm, larger is worse.
    error: float  # Standard error.
    dof: int  # Degrees of freedom of ``error``.
    outcome: Outcome  # The outcome of this estimate.
    reach: float = 0.0
    """Half the 95 % interval from the scatter of this session's runs, if it is wider than by ``error``."""

    def interval(self) -> tuple[float, float]:
        """Return the two-sided 95 % confidence interval (ln)."""
        reach = max(self.reach, t_quantile(TWO_SIDED, self.dof) * self.error)
        return self.effect - reach, self.effect + reach


SESSION_SHARE = 0.1  # Least share of the variance of stored runs that is assumed between sessions.
PRIOR_INSIDE = 1 - SESSION_SHARE
SUITE_PRIOR_DOF = 30
KIND_PRIOR_DOF = 8
"""Weight of the expectation that nearly all noise lies inside sessions.  Row: hosted VM, error rates."""
SHIFTLESS_INSIDE = 0.5
SHIFTLESS_PRIOR_DOF = 6  # The same if a host's drift cannot be separated from a case's noise.
SCALE_CASES = 5  # Fewest replicated cases for an estimate of today's noise.
MOST_BETWEEN = 2.0  # Largest variance between sessions.
EXCESS = 1.3
"""Variance of the cases around the suite's shift, relative to the expected one, above which it counts as larger."""
HALVES_APART = 1.0
"""Expected standard deviations between two halves of the cases above which they do not share one scatter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One quantity of one case in some runs of this session."""

    kind: str  # Cases of one kind share their estimate of noise.
    level: Level  # The stored level.
    values: Sequence[float]
    """This session's values, adjusted by the yardstick like the level; two or more are replicates."""
    control: Moved | None = None  # Movement of its control from the stored one; None if today's runs have none.

    @property
    def difference(self) -> float:
        """Median of this session's values minus the stored level."""
        return median(self.values) - self.level.centre

    @property
    def dof(self) -> int:
        """Degrees of freedom of the variance of the values."""
        return len(self.values) - 1

    def ratio(self, scale: float) -> float:
        """Return the variance of the values relative to that of stored runs.  Noise is assumed to be ``scale`` times
        the stored one; an outlier is clipped to ``CLIP`` standard deviations of that from the median.
        """
        return clipped_variance(self.values, scale * self.level.sigma) / self.level.sigma**2


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of noise, in units of the variance of a stored run."""

    between: float = SESSION_SHARE  # Variance between sessions, one figure for the suite.
    usual: float = PRIOR_INSIDE  # Variance inside today's session, over all kinds.
    inside: Mapping[str, float] = field(default_factory=dict)
    """Variance inside today's session by kind, if runs of the kind were replicated."""
    scale: float = 1.0  # Standard deviation of an undisturbed run today over that of a stored one, at least 1.

    def of(self, kind: str) -> float:
        """Return the variance inside today's session for cases of this kind."""
        return self.inside.get(kind, self.usual)


def shares(replicates: Iterable[Seen], *, with_shift: bool) -> Shares:
    """Return the shares of noise from replicated runs and an expectation, which outweighs a few of them.
    ``with_shift``: the sessions' common shifts are known and subtracted. Otherwise they are part of the variance
    between sessions, which is then at least half of the whole: scatter inside this session does not show its drift.
    """
    replicated = list(replicates)
    # Noise of an ordinary case relative to the baseline; a median ignores spikes.
    scale = 1.0
    if len(replicated) >= SCALE_CASES:
        # The median of a variance with d degrees of freedom is about (1 - 2/9d)^3 of its mean (Wilson and Hilferty).
        ratios = [variance(one.values) / one.level.sigma**2 / (1 - 2 / (9 * one.dof)) ** 3 for one in replicated]
        scale = math.sqrt(max(1.0, median(ratios)))
    sums: dict[str, tuple[float, int]] = {}
    for replicate in replicated:
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
    """Return a ratio of variances from (sum of ratio x dof, dof) and ``expected`` with ``weight`` dof."""
    total, dof = ratio
    return (weight * expected + total) / (weight + dof)


def own_inside(share: float, replicates: Seen, scale: float) -> float:
    """Return the share of a case with replicated runs: that of its kind, or larger if its runs scatter more."""
    dof = replicates.dof
    return max(share, (KIND_PRIOR_DOF * share + dof * replicates.ratio(scale)) / (KIND_PRIOR_DOF + dof))


def knows_shift(cases: int, settings: GateSettings) -> bool:
    """Return whether this number of cases shows the common shift of a session."""
    return not settings.in_place and cases >= settings.min_suite


def look(screened: Sequence[Seen], noise: Shares, settings: GateSettings, *, explained: bool) -> tuple[Today, Shares]:
    """Return the shift of the session, and the shares corrected by the scatter of the cases around it.

    ``explained``: the yardsticks show that the host caused the shift.

    Fewer than ``settings.min_suite`` cases, or cases settled in place, show no shift.  If the cases scatter more than
    their replicates and levels explain, they vary between sessions; without replicates, today is noisier.
    """
    if not knows_shift(len(screened), settings):
        return Today(), noise
    differences = [case.difference for case in screened]
    shift = median_of_most(differences, math.log1p(settings.tolerance))  # slower halves do not shift the others
    feels = (UNLIKE_RESPONSE * shift) ** 2
    expected = [_variance(case, noise) * case.level.sigma**2 + feels for case in screened]
    away = [abs(one - shift) / math.sqrt(usual) for one, usual in zip(differences, expected, strict=True)]
    scatter = (MAD_TO_SIGMA * median_of_most(away, HALVES_APART)) ** 2  # 1 on a host like that of the baseline
    error = math.pi / 2 * median(expected) * max(1.0, scatter) / len(screened)
    today = Today(
        is_known=True, shift=shift, shift_variance=error + feels, unexplained=0.0 if explained else max(0.0, shift)
    )
    return today, _corrected(screened, noise, scatter)


def _variance(screened: Seen, noise: Shares) -> float:
    """Return the variance of the difference of an unchanged case, in units of that of a stored run."""
    level = screened.level
    inside = noise.usual / len(screened.values)
    return noise.between * (1 + 1 / level.sessions) + max(0.0, 1 - noise.between) / level.runs + inside


def _corrected(screened: Sequence[Seen], noise: Shares, scatter: float) -> Shares:
    if scatter < EXCESS:
        return noise
    missing = (scatter - 1) * median([_variance(case, noise) for case in screened])
    replicated = sum(len(case.values) > 1 for case in screened)
    if 2 * replicated > len(screened):
        sessions = median([case.level.sessions for case in screened])
        return replace(noise, between=min(MOST_BETWEEN, noise.between + missing / (1 + 1 / sessions)))
    usual = noise.usual + missing
    return replace(noise, usual=usual, inside={kind: max(usual, share) for kind, share in noise.inside.items()})
