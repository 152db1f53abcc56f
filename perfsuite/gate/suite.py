"""The suite as a whole: by how much all cases together are off their stored levels, and what that comes from.

A host that moves every case alike is told from code, or a library, that does so by controls alone: yardsticks that
moved along, the base, and the commit that the stored runs name.  What no control explains fails the session.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfsuite.base.units import plural
from perfsuite.gate.control import EXPLAINED, Moved, Says
from perfsuite.gate.judge import UNKNOWN_SESSION_SIGMA
from perfsuite.gate.noise import History, Level
from perfsuite.gate.shift import SURELY_ALPHA, Estimate, Seen
from perfsuite.record.verdict import GateSettings
from perfsuite.statistics.robust import median, median_of_most
from perfsuite.statistics.student import t_quantile

SUITE_ALPHA = 0.005
"""False alarms of the suite as a whole, per session of an unchanged code on a host that moves as it did before."""
SHOWN_KINDS = 3
"""Kinds of controls that the line of the suite names."""
USUAL_DOF = 2
"""Weight, in degrees of freedom, of the movement that is expected before any stored session tells."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How much the suite as a whole moves from one session to the next."""

    sigma: float = UNKNOWN_SESSION_SIGMA
    """Standard deviation, a logarithm."""
    dof: int = USUAL_DOF
    sessions: int = 1
    """Stored sessions that it is known from."""

    @property
    def error(self) -> float:
        """Standard error of this session against the stored ones."""
        return self.sigma * math.sqrt(1 + 1 / self.sessions)


def usual_drift(cases: Iterable[tuple[History, Level]]) -> Drift:
    """The movement between stored sessions: of the median over the cases of what each lies off its own median."""
    away: dict[str, list[float]] = defaultdict(list)
    count = 0
    for history, level in cases:
        count += 1
        values = _adjusted(history, level)
        centre = median(values)
        own: dict[str, list[float]] = defaultdict(list)
        for session, value in zip(history.sessions, values, strict=True):
            own[session].append(value - centre)
        for session, differences in own.items():
            away[session].append(statistics.fmean(differences))
    known = [median(differences) for differences in away.values() if 2 * len(differences) >= count]
    if len(known) < 2:
        return Drift()
    total = USUAL_DOF * UNKNOWN_SESSION_SIGMA**2 + (len(known) - 1) * statistics.variance(known)
    dof = USUAL_DOF + len(known) - 1
    return Drift(sigma=math.sqrt(total / dof), dof=dof, sessions=len(known))


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
    """How far this session's cases are from their stored levels, all together."""

    cases: int = 0
    slower: int = 0
    """Cases that are slower than stored by more than the tolerance."""
    effect: float = 0.0
    """Median over the cases, a logarithm; larger is slower."""
    drift: Drift = Drift()
    """What the suite usually does."""
    control: Moved | None = None
    """How far the controls of the slower cases moved, of all cases where few are slower; None where none was timed, and
    where they are none because what they run through changed."""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the relative change."""
        reach = t_quantile(0.975, self.drift.dof) * self.drift.error
        return math.expm1(self.effect - reach), math.expm1(self.effect + reach)

    def exceeds(self, settings: GateSettings) -> bool:
        """Whether it is worth a word: more than the tolerance, of more than one case and of most of them."""
        most = self.cases > 1 and 2 * self.slower > self.cases
        return most and self.effect > math.log1p(settings.tolerance)

    @property
    def is_shown(self) -> bool:
        """Whether the host's usual movement would hardly give it."""
        return self.effect > t_quantile(1 - SUITE_ALPHA, self.drift.dof) * self.drift.error

    def may_hide(self, settings: GateSettings) -> bool:
        """Whether a host that is faster today may hide a slowdown of all cases that no pass may hide.

        What the sessions have in common is taken off the cases: where it may be that large, only a yardstick that did
        not move, or another arm, tells.
        """
        if self.cases < settings.min_suite:
            return False
        amount = self.control.amount if self.control is not None else None
        if amount is not None and self.effect - amount <= math.log1p(settings.tolerance):
            return False
        return self.effect + self._sure_reach >= math.log1p(settings.tolerance + settings.blind_margin)

    @property
    def most_hidden(self) -> float:
        """The relative slowdown up to which it may."""
        return math.expm1(self.effect + self._sure_reach)

    @property
    def _sure_reach(self) -> float:
        return t_quantile(1 - SURELY_ALPHA, self.drift.dof) * self.drift.error

    def explained(self, settings: GateSettings) -> bool:
        """Whether yardsticks, which do not run the code under test, moved along with the cases."""
        return self.says(settings) == "host"

    def says(self, settings: GateSettings) -> Says:
        """Whose doing the shift is, by the controls; without any, nothing speaks for the host."""
        return self.control.says(self.effect, math.log1p(settings.tolerance)) if self.control is not None else "code"


def suite_shift(
    screened: Sequence[Seen], drift: Drift, settings: GateSettings, *, yardstick_counts: bool
) -> SuiteShift:
    """The shift of a session; ``yardstick_counts`` is False where what the yardstick runs through changed as well."""
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
    """What the controls of some cases say together; only those count that resemble their case, and most have to."""
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
    """What some cases say about the suite: this session's runs against those of an older revision."""

    effect: float
    """Median over the cases, a logarithm."""
    error: float
    """Median of the standard errors."""
    cases: int

    def shows(self, shift: SuiteShift) -> bool:
        """Whether it finds the shift of the suite in the code: at least half of it."""
        return self.effect > 2 * self.error and self.effect >= EXPLAINED * shift.effect

    def exceeds(self, tolerance: float) -> bool:
        """Whether it finds a slowdown by more than the tolerance, a logarithm."""
        return self.effect > max(2 * self.error, tolerance)


def compared(estimates: Iterable[Estimate | None]) -> Compared | None:
    """What the A/Bs of some cases say together; None without any."""
    known = [estimate for estimate in estimates if estimate is not None]
    if not known:
        return None
    effect, error = (statistics.median(each) for each in zip(*((one.effect, one.error) for one in known), strict=True))
    return Compared(effect=effect, error=error, cases=len(known))
