"""Decide on one quantity of one case from its stored level, this session's runs and A/B pairs.

All values are natural logarithms, larger is worse.  perfsuite docs gate-evidence has every bound and its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.gate.noise import Level
from perfsuite.gate.shift import (
    CONFIRM_ALPHA,
    SESSION_SHARE,
    SURELY_ALPHA,
    TWO_SIDED,
    Bounds,
    Estimate,
    Outcome,
    Spread,
    Today,
)
from perfsuite.record.verdict import GateSettings
from perfsuite.statistics.paired import paired_mean
from perfsuite.statistics.robust import (
    clipped_variance,
    huber_mean,
    median,
    rough_sigma,
    t_quantile,
    variance,
    without_largest,
)

SURE = 0.999  # Confidence with which a pass excludes a slowdown that is too large to be missed.
SURE_ALONE = 0.9999
"""The same if only a few sessions of one case show the host's noise.  Row: silence 1 to 8."""
LIKELY = 0.95
LAST_STAGE = 0.985  # The same for the last stage, whose runs are sometimes disturbed.
NEAR, NEAR_LAST = 0.6, 0.85
"""Shares of the tolerance below which a suspect is cleared after its first and after its last runs."""
NEAR_BASE = 0.85
"""Share of the tolerance that an A/B must show if the re-measurement has shown the rest against the stored runs."""
ENOUGH_PAIRS = 10
"""Fewest pairs whose own scatter estimates the noise of a case; eleven of twelve are left without the largest."""
MIN_SCATTER = 4
"""Fewest runs whose scatter shows whether pairs can decide.  Row: silence 1, hosted VM."""
UNKNOWN_SESSION_SIGMA = 0.01
"""Assumed movement of a case between sessions if the baseline has too few sessions and no A/B can be run."""
NOISIER = 2.5  # Variance of this session's runs over that of stored ones above which the host is noisier.
UNRESTED_SHARE = 0.5  # Share of the variance of stored runs that the spread of samples cannot show, because it is drift
UNKNOWN_SHARE = 2 / 3
"""Largest assumed share of a run's variance between sessions if a noisier host's drift is part of it."""
ENOUGH_SESSIONS = 3
LEAST_DOF = 3
SESSIONS_OVER_RUNS = 2.5
"""Variance of runs of different sessions over that inside one: 2 to 4 on most hosts.  Row: histories, silence."""
SESSIONS_DOF = 4
"""Weight of that ratio in degrees of freedom, at most half of the stored runs'.  Row: histories, silence."""


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Judges one quantity of one case."""

    level: Level  # The stored level.
    today: Today  # The shift of the session.
    bounds: Bounds
    settings: GateSettings  # Limits of runs and pairs.
    between: float = SESSION_SHARE  # Share of the variance of stored runs between sessions.
    restless: float = 1.0
    """Spread of samples inside today's runs relative to the usual one, if it shows a noisier host; else 1."""
    inside: float = 1 - SESSION_SHARE  # Variance of runs inside this session over the variance of stored runs.

    @property
    def dof(self) -> int:
        """Degrees of freedom of the noise.  If the host's drifts are not subtracted, they are most of the noise. All
        cases show them in the same few sessions, so other cases add no degrees of freedom.
        """
        dof = self.level.dof
        return dof if self.today.is_known else max(LEAST_DOF, min(dof, self.level.sessions - 1))

    def spread(self, runs: int) -> Spread:
        """Return the spread of the mean of ``runs`` runs of this session minus the stored level.  The part between
        sessions shrinks with the number of stored sessions, not with the number of runs today.
        """
        level = self.level
        variance = level.sigma**2
        between = self.between * variance
        within = max(0.0, variance - between)
        if level.sessions < ENOUGH_SESSIONS and not self.settings.can_run_base:
            between = max(between, UNKNOWN_SESSION_SIGMA**2)
        shared = between * (1 + 1 / level.sessions) + within / level.runs + self.today.shift_variance
        new = self.inside * variance
        return math.sqrt(shared + new / runs), math.sqrt(shared)

    def excludes(self, effect: float, error: float) -> bool:
        """Return whether a slowdown of the limit is practically impossible.  A negative effect counts as 0: a faster
        look does not make a noisy case more certain.
        """
        return max(0.0, effect) + self._sure * error < self.bounds.limit

    @property
    def _sure(self) -> float:
        """Number of standard errors that is practically certain."""
        return t_quantile(SURE if self.today.is_known else SURE_ALONE, self.dof)

    @property
    def best(self) -> Spread:
        """The uncertainty after all allowed runs and pairs; an A/B shares no error with the screening."""
        runs = self.spread(self._most_runs)
        if not self.settings.can_run_base:
            return runs
        error = self.level.sigma * math.sqrt(2 * self.inside / self._most_pairs)
        return min(error, runs[0]), 0.0

    @property
    def smallest_shown(self) -> float:
        """The smallest change that the last stage shows with 95 % probability; not below the tolerance."""
        (error, shared), dof = self.best, self.dof
        alpha = self._pairs_alpha if self.settings.can_run_base else self.bounds.alpha
        reach = max(t_quantile(1 - alpha, dof) * error, t_quantile(1 - self.bounds.shared_alpha, dof) * shared)
        return max(self.bounds.tolerance, reach + t_quantile(LIKELY, dof) * error)

    def smallest_found(self, screening_runs: int) -> float:
        """Return the smallest change that all stages find with 95 % probability after ``screening_runs`` runs.  A stage
        finds a change that exceeds its threshold by the scatter of its estimate: a change equal to the tolerance is
        found in half of the sessions on any host.
        """
        bounds, dof = self.bounds, self.dof
        sure = t_quantile(TWO_SIDED, dof)
        first, again = self.spread(max(1, screening_runs))[0], self.spread(self.settings.first_runs)[0]
        hopeful = 0.0 if self.can_clear else self.smallest_shown / 2
        suspected = max(self._suspicious(first), hopeful) + sure * first
        kept = NEAR * bounds.tolerance + sure * again
        scatter, (error, fixed) = self.level.sigma * math.sqrt(self.inside), self.best
        if self.settings.can_run_base:
            count, scatter = self._most_pairs, scatter * math.sqrt(2)
            least, alpha = self._least_of_pairs, self._pairs_alpha
        else:
            count, least, alpha = self._most_runs, bounds.tolerance, bounds.alpha
        shared = t_quantile(1 - bounds.shared_alpha, dof) * fixed
        threshold = max(least, shared, t_quantile(1 - alpha, dof) * error) + without_largest(count) * scatter
        last = threshold + t_quantile(LAST_STAGE, dof) * error
        return max(bounds.tolerance, suspected, kept, last)

    @property
    def can_clear(self) -> bool:
        """Whether an unchanged case would pass after all allowed runs and pairs."""
        return self.excludes(0.0, self.best[0])

    def arms_tell(self, values: Sequence[float]) -> bool:
        """Return whether the base and the stored commit, run now, would show a slowdown of the limit.  Used if too few
        cases show the host's movement since the stored sessions: it affects all arms of today alike. ``values`` of this
        session show the scatter of runs; stored runs of several days scatter more.
        """
        if not self.settings.can_run_base or self.today.is_known:
            return False
        scatter = self.level.sigma * math.sqrt(self.inside)
        if len(values) >= MIN_SCATTER:
            scatter = min(scatter, rough_sigma(values))
        return self._pairs_would_show(math.sqrt(2) * scatter)

    def _pairs_would_show(self, scatter: float) -> bool:
        """Return whether all allowed pairs show a slowdown of the limit with this scatter."""
        count = self._most_pairs
        sure = t_quantile(1 - self._pairs_alpha, count - 1) + t_quantile(LIKELY, count - 1)
        return sure * scatter / math.sqrt(count) < self.bounds.limit

    def more_pairs_tell(self, pairs: Sequence[tuple[float, float]]) -> bool:
        """Return whether further pairs like these would show a slowdown of the limit, if stored runs cannot."""
        return not self.today.is_known and self._pairs_would_show(paired_mean([new - old for old, new in pairs]).spread)

    def difference(self, values: Sequence[float]) -> float:
        """Return the median of the values minus the stored level and the host's shift."""
        return median(values) - self.level.centre - self.today.shift

    def _suspicious(self, error: float) -> float:
        return max(self.bounds.tolerance / 2, self.bounds.doubt * error)

    def is_suspicious(self, estimate: Estimate) -> bool:
        """Return whether the effect is worse than half the tolerance and than the usual scatter."""
        return estimate.effect > self._suspicious(estimate.error)

    def screening_runs(self, values: Sequence[float]) -> int:
        """Return the number of runs that the screening needs: 1 on a quiet host.  A case that looks unchanged gets more
        runs until a pass excludes the limit, unless no number of runs does.
        """
        noise = self.level.sigma * math.sqrt(max(1.0, self.inside))
        wanted = min(self.settings.first_runs, max(1, math.ceil((noise / (0.4 * self.bounds.tolerance)) ** 2)))
        effect = self.bounds.tolerance / 4
        if len(values) >= wanted:
            effect = self.difference(values)
            if effect > self._suspicious(self.spread(len(values))[0]):
                return len(values)
        enough = max(wanted, len(values))
        for runs in range(enough, self._most_runs + 1):
            if self.excludes(effect, self.spread(runs)[0]):
                return runs
        return enough

    def screen(self, values: Sequence[float]) -> Estimate:
        """Return the screening: suspect (slower, or much faster than the baseline), pass, or inconclusive.  A case is
        suspected only if more runs could clear it or confirm the effect. A case that is not cleared is also suspected
        if other arms could decide.
        """
        effect, (error, shared) = self.difference(values), self.spread(len(values))
        slower = effect > self._suspicious(error) and (effect > self.smallest_shown / 2 or self.can_clear)
        faster = -effect > max(0.8 * self.bounds.tolerance, error) and -effect > self.smallest_shown / 2
        outcome: Outcome = "inconclusive"
        if slower or faster:
            outcome = "suspect"
        elif self.excludes(effect, error):
            outcome = "pass"
        elif self.arms_tell(values):
            outcome = "suspect"
        reach = self._reach(values, shared)
        return Estimate(effect=effect, error=error, dof=self.dof, outcome=outcome, reach=reach)

    def remeasured(self, values: Sequence[float]) -> Estimate:
        """Return the re-measurement, from fresh runs only: the runs of the screening are biased by the selection.
        Improved excludes the limit like a pass.
        """
        effect, (error, shared) = self._effect(values), self.spread(len(values))
        outcome: Outcome
        if self._shows(values, 1.0):
            outcome = "candidate"
        elif self._shows(values, -1.0) and effect + self._sure * error < self.bounds.limit:
            outcome = "improved"
        else:
            share = NEAR_LAST if len(values) >= self._most_runs else NEAR
            least = effect + t_quantile(LIKELY, self.dof) * error
            near = effect < share * self.bounds.tolerance or least < self.bounds.tolerance
            outcome = "pass" if near and self.excludes(effect, error) else "inconclusive"
        reach = self._reach(values, shared)
        return Estimate(effect=effect, error=error, dof=self.dof, outcome=outcome, reach=reach)

    def is_surely_worse(self, values: Sequence[float], *, expected: bool) -> bool:
        """Return whether these runs of one session are certainly worse than the level.  If the host's drifts are
        unknown, the session counts as one more run with the full noise between sessions, because its drift looks like a
        change. ``expected``: the environment has changed in a way that can slow the case; this is rare, so the bound of
        an A/B applies. Otherwise every case of a large suite adds a chance of a false alarm.
        """
        level, bounds = self.level, self.bounds
        error, dof = self.spread(len(values))[0], self.dof
        if not self.today.is_known:
            sigma, dof = self._of_sessions(values)
            error = max(error, sigma * math.sqrt(1 + 1 / level.sessions))
        alpha = min(bounds.surely_alpha, bounds.shared_alpha)
        if expected:
            alpha = max(bounds.surely_alpha, min(CONFIRM_ALPHA, bounds.shared_alpha))
        return self._effect(values) > max(bounds.tolerance, t_quantile(1 - alpha, dof) * error)

    def _of_sessions(self, values: Sequence[float]) -> tuple[float, int]:
        """Return the scatter between sessions and its degrees of freedom, without help of other cases.  A few stored
        runs may lie close together by chance, which causes false alarms. So the scatter of the runs inside this
        session, times the usual ratio, counts as well. Its weight is smaller if the stored runs scatter much more: such
        a host drifts more than runs inside a session show.
        """
        own, dof = self.level.sigma**2, self.dof
        if len(values) < MIN_SCATTER:
            return self.level.sigma, dof
        usual = SESSIONS_OVER_RUNS * clipped_variance(values, rough_sigma(values))
        weight = min(SESSIONS_DOF, (dof + 1) / 2) * min(1.0, usual / own) ** 2
        return math.sqrt((dof * own + weight * usual) / (dof + weight)), dof + int(weight)

    @property
    def _most_pairs(self) -> int:
        """Largest number of pairs."""
        return self.settings.pairs + self.settings.more_pairs + (0 if self.today.is_known else self.settings.sure_pairs)

    @property
    def _pairs_alpha(self) -> float:
        """False alarms of an A/B.  If too few cases show the host's noise, an A/B is run although the case does not
        look slower.
        """
        return self.bounds.confirm_alpha if self.today.is_known else self.bounds.lone_alpha

    @property
    def _least_of_pairs(self) -> float:
        """Least effect that an A/B must show: the whole tolerance if no other stage has shown a part of it."""
        return (NEAR_BASE if self.today.is_known else 1.0) * self.bounds.tolerance

    def is_sure(self, pairs: Estimate) -> bool:
        """Return whether an A/B shows a slowdown without a previous suspicion, such as one with the stored commit."""
        return pairs.outcome == "regressed" and self._surely(pairs.effect, pairs.error, pairs.dof)

    def _surely(self, effect: float, error: float, dof: int) -> bool:
        """Return whether an effect is certain; if few cases show the host's noise, A/Bs are frequent and need more."""
        alpha = self.bounds.surely_alpha if self.today.is_known else self.bounds.lone_alpha
        return effect > t_quantile(1 - alpha, dof) * error

    def _effect(self, values: Sequence[float]) -> float:
        return huber_mean(values, self.level.sigma) - self.level.centre - self.today.shift

    @property
    def _most_runs(self) -> int:
        return self.settings.first_runs + self.settings.more_runs

    def _shows(self, values: Sequence[float], sign: float) -> bool:
        """Return whether the runs show a change in this direction, also without the most extreme run.  Disturbances are
        one-sided and rare: one of a few runs can dominate a mean, and must not decide a verdict.
        """
        bounds = self.bounds
        for some in (values, sorted(values, key=lambda value: sign * value)[:-1]):
            error, fixed = self.spread(len(some))
            alone = t_quantile(1 - bounds.alpha, self.dof) * error
            shared = t_quantile(1 - bounds.shared_alpha, self.dof) * fixed
            if sign * self._effect(some) <= max(bounds.tolerance, alone, shared):
                return False
        return True

    def paired(self, pairs: Sequence[tuple[float, float]]) -> Estimate:
        """Return the A/B from (base, new) values of neighbouring runs in this session, without the stored level.  The
        expected noise of the case and that of the pairs are pooled by degrees of freedom.
        """
        differences = [new - base for base, new in pairs]
        effect, error, dof = self.mean_of_pairs(differences)
        outcome: Outcome = "inconclusive"
        enough = self.today.is_known or self._surely(abs(effect), error, dof)
        if enough and self._pairs_show(differences):
            outcome = "regressed"
        elif enough and self._pairs_show([-difference for difference in differences]):
            outcome = "improved"
        elif effect < 0.5 * self.bounds.tolerance or effect + 1.7 * error < self.bounds.tolerance:
            outcome = "pass" if self.excludes(effect, error) else "inconclusive"
        reach = own_reach(differences)
        return Estimate(effect=effect, error=error, dof=dof, outcome=outcome, reach=reach)

    def _reach(self, values: Sequence[float], shared: float) -> float:
        """Return half the 95 % interval from the runs of this session; ``shared`` is the part of their spread.  A host
        with more noise inside a session than in the baseline is assumed to vary more between sessions by the same
        factor; if its drift is unknown, as much as inside.
        """
        count, expected = len(values), self.inside * self.level.sigma**2
        sure = t_quantile(TWO_SIDED, self.dof)
        own = variance(values) if count > 1 else 0.0
        unsure = t_quantile(TWO_SIDED, count - 1) if own > expected else sure
        share = min(UNKNOWN_SHARE, self.between) if self.today.is_known else UNKNOWN_SHARE
        then = self.level.sigma**2
        now = max(expected, own, (1 - UNRESTED_SHARE) * self.restless**2 * then)
        further = share / (1 - share) * now - share * then if now > NOISIER * then else 0.0
        inside = max(sure * math.sqrt(expected / count), own_reach(values))
        return math.hypot(sure * shared, max(sure, unsure) * math.sqrt(further), inside)

    def _pairs_show(self, differences: Sequence[float]) -> bool:
        """Return whether the pairs confirm a slowdown, also without the most extreme pair."""
        ordered = sorted(differences)
        return all(self.confirms(*self.mean_of_pairs(some)) for some in (ordered, ordered[:-1]))

    def mean_of_pairs(self, differences: Sequence[float]) -> tuple[float, float, int]:
        """Return the mean, its standard error and its degrees of freedom.  Many pairs use only their own scatter if the
        stored noise contains drifts of the host or a disturbed run.
        """
        count, dof = len(differences), self.level.dof
        expected = 2 * self.inside * self.level.sigma**2
        total = dof + count - 1
        pooled = math.sqrt((dof * expected + (count - 1) * clipped_variance(differences, math.sqrt(expected))) / total)
        if not self.today.is_known and count >= ENOUGH_PAIRS:
            own = paired_mean(differences)
            if own.reach(2 * SURELY_ALPHA) < t_quantile(1 - SURELY_ALPHA, total) * pooled / math.sqrt(count):
                return own.mean, own.error, own.dof
        return huber_mean(differences, pooled), pooled / math.sqrt(count), total

    def confirms(self, effect: float, error: float, dof: int) -> bool:
        """Return whether an A/B with this mean, standard error and degrees of freedom shows a slowdown."""
        reach = t_quantile(1 - self.bounds.confirm_alpha, dof) * error
        return effect > max(self._least_of_pairs, reach)


def own_reach(values: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean of values from their scatter; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    return t_quantile(TWO_SIDED, len(values) - 1) * math.sqrt(variance(values) / len(values))
