"""The suite as a whole: the common shift of all cases from their stored levels, and its cause.

Only controls separate a host that slows every case from code or a library that does so: yardsticks, the base, and the
commit of the stored runs.  A shift that no control explains fails the session.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfsuite.base.units import plural
from perfsuite.gate.judge import UNKNOWN_SESSION_SIGMA
from perfsuite.gate.noise import History, Level
from perfsuite.gate.shift import EXPLAINED, SURELY_ALPHA, Estimate, Moved, Says, Seen
from perfsuite.record.verdict import GateSettings
from perfsuite.statistics.robust import median, median_of_most, t_quantile

SUITE_ALPHA = 0.005
"""False alarms of the whole suite, per session of unchanged code on a host that moves as usual.  Row: the suite
unchanged, error rates."""
SHOWN_KINDS = 3  # Most kinds of controls in the line of the suite.
USUAL_DOF = 2  # Weight, in degrees of freedom, of the expected movement without stored sessions.


Drift = tuple[float, int]
"""Usual movement of the whole suite between sessions: standard error of this session minus the stored ones, and its
degrees of freedom."""
_UNKNOWN_DRIFT: Drift = (UNKNOWN_SESSION_SIGMA * math.sqrt(2), USUAL_DOF)


def usual_drift(cases: Iterable[tuple[History, Level]]) -> Drift:
    """Return the movement between stored sessions, from the median distance of the cases from their own medians."""
    away: dict[str, list[float]] = defaultdict(list)
    fitted = list(cases)
    for history, level in fitted:
        values = _adjusted(history, level)
        centre = median(values)
        own: dict[str, list[float]] = defaultdict(list)
        for session, value in zip(history.sessions, values, strict=True):
            own[session].append(value - centre)
        for session, differences in own.items():
            away[session].append(statistics.fmean(differences))
    medians = [median(differences) for differences in away.values() if 2 * len(differences) >= len(fitted)]
    if len(medians) < 2:
        return _UNKNOWN_DRIFT
    total = USUAL_DOF * UNKNOWN_SESSION_SIGMA**2 + (len(medians) - 1) * statistics.variance(medians)
    dof = USUAL_DOF + len(medians) - 1
    return math.sqrt(total / dof) * math.sqrt(1 + 1 / len(medians)), dof


def _adjusted(history: History, level: Level) -> Sequence[float]:
    if not level.slope:
        return history.values
    assert level.yardstick is not None, "a slope on the yardstick comes from stored yardsticks"
    return [
        value - level.slope * (yardstick - level.yardstick)
        for value, yardstick in zip(history.values, history.yardsticks, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class SuiteShift:
    """The shift of all cases of this session from their stored levels."""

    cases: int = 0
    slower: int = 0  # Number of cases slower than stored by more than the tolerance.
    effect: float = 0.0  # Median over the cases (ln); larger is slower.
    drift: Drift = _UNKNOWN_DRIFT  # Usual movement of the suite.
    control: Moved | None = None
    """Movement of the controls of the slower cases, or of all cases if few are slower.

    None if no control was timed, or if the software of the controls changed.
    """

    def reach(self, probability: float) -> float:
        """Return the largest usual movement (ln) with this one-sided probability."""
        error, dof = self.drift
        return t_quantile(probability, dof) * error

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the relative change."""
        reach = self.reach(0.975)
        return math.expm1(self.effect - reach), math.expm1(self.effect + reach)

    def exceeds(self, settings: GateSettings) -> bool:
        """Return whether more than one case and most cases are slower by more than the tolerance."""
        return self.cases > 1 and 2 * self.slower > self.cases and self.effect > math.log1p(settings.tolerance)

    @property
    def is_shown(self) -> bool:
        """Whether the shift is larger than the host's usual movement."""
        return self.effect > self.reach(1 - SUITE_ALPHA)

    def may_hide(self, settings: GateSettings) -> bool:
        """Return whether a host that is faster today may hide a slowdown of all cases.  The common shift is subtracted
        from the cases. If it may be that large, only a yardstick that did not move, or another arm, excludes the
        slowdown.
        """
        if self.cases < settings.min_suite:
            return False
        amount = self.control.amount if self.control is not None else None
        if amount is not None and self.effect - amount <= math.log1p(settings.tolerance):
            return False
        return self.effect + self.reach(1 - SURELY_ALPHA) >= math.log1p(settings.tolerance + settings.blind_margin)

    @property
    def most_hidden(self) -> float:
        """The largest relative slowdown that may be hidden."""
        return math.expm1(self.effect + self.reach(1 - SURELY_ALPHA))

    def explained(self, settings: GateSettings) -> bool:
        """Return whether yardsticks, which do not run the code under test, moved with the cases."""
        return self.says(settings) == "host"

    def says(self, settings: GateSettings) -> Says:
        """Return the cause of the shift by the controls; without any it is the code."""
        return self.control.says(self.effect, math.log1p(settings.tolerance)) if self.control is not None else "code"


def suite_shift(
    screened: Sequence[Seen], drift: Drift, settings: GateSettings, *, yardstick_counts: bool
) -> SuiteShift:
    """Return the shift of a session; ``yardstick_counts`` is False if the yardstick's software changed too."""
    if not screened:
        return SuiteShift()
    differences = [case.difference for case in screened]
    accepted = math.log1p(settings.tolerance)
    slower = [case for case in screened if case.difference > accepted]
    concerned = slower if 2 * len(slower) > len(screened) else screened
    return SuiteShift(
        cases=len(screened),
        slower=len(slower),
        effect=median_of_most(differences, accepted),
        drift=drift,
        control=_joint_control([case.control for case in concerned]) if yardstick_counts else None,
    )


def _joint_control(beside: Sequence[Moved | None]) -> Moved | None:
    """Return the joint movement of some cases' controls, if most of them resemble their case."""
    timed = [control for control in beside if control is not None]
    if 2 * len(timed) <= len(beside):
        return None
    alike = [(control.amount, control.doubt) for control in timed if control.amount is not None]
    whys = Counter(control.why for control in timed if (control.amount is None) == (2 * len(alike) <= len(beside)))
    why = "; ".join(f"{plural(count, 'case')}: {why}" for why, count in whys.most_common(SHOWN_KINDS))
    if 2 * len(alike) <= len(beside):
        return Moved(why=why)
    amounts, doubts = zip(*alike, strict=True)
    return Moved(amount=median(amounts), doubt=median(doubts), why=why)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The joint result of some cases' A/Bs: this session's runs compared with those of an older revision."""

    effect: float  # Median over the cases (ln).
    error: float  # Median of the standard errors.
    cases: int

    def shows(self, shift: SuiteShift) -> bool:
        """Return whether at least half of the suite's shift is in the code."""
        return self.effect > 2 * self.error and self.effect >= EXPLAINED * shift.effect

    def exceeds(self, tolerance: float) -> bool:
        """Return whether the slowdown is larger than the tolerance (ln)."""
        return self.effect > max(2 * self.error, tolerance)


def compared(estimates: Iterable[Estimate | None]) -> Compared | None:
    """Return the joint result of some cases' A/Bs; None without any."""
    found = [estimate for estimate in estimates if estimate is not None]
    if not found:
        return None
    effect, error = (statistics.median(each) for each in zip(*((one.effect, one.error) for one in found), strict=True))
    return Compared(effect=effect, error=error, cases=len(found))
