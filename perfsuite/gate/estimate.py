"""What a judgement is given and what it gives: the session, the bounds of a quantity, an effect with its uncertainty.

All values are natural logarithms, larger is worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfsuite.statistics.student import t_quantile

TWO_SIDED = 0.975
"""For 95 % of a two-sided interval; and for each of two stages that together shall fail in 5 %."""


CONFIRM_ALPHA = 0.005
"""False alarms allowed per case of an A/B."""


SURELY_ALPHA = 0.0005
"""False alarms per case of a level that is worse where the base is not: one question more is asked of the same runs."""

LONE_LOOKS = 8
"""Looks among which SURELY_ALPHA is split where too few cases tell of the host: there base and stored commit are run in
nearly every session, and each is looked at after 6, 12 and 24 pairs."""


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
