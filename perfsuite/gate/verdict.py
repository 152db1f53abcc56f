"""What the gate says about a case, and what it asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from perfsuite.errors import ConfigurationError
from perfsuite.records import VerdictName
from perfsuite.units import plural

TIME = "time"
"""The quantity that gates every case: the time of one iteration."""


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """How the gate decides; the defaults are those that docs/gate.md has figures for."""

    tolerance: float = 0.03
    """Relative slowdown that is accepted, unless the case says otherwise."""
    suite_alpha: float = 0.05
    """False alarms that chance may cause per suite run, at most, on an unchanged code."""
    screen_alpha: float = 0.05
    """Share of unchanged cases expected to be suspected by the screening."""
    min_stored: int = 5
    """Stored runs below which a case is still learning."""
    min_suite: int = 20
    """Cases from which on the suite's common shift and today's noise are estimated."""
    blind_margin: float = 0.07
    """A pass excludes (at 99.9 %) a slowdown of the tolerance plus this; 10 % at the default tolerance."""
    first_runs: int = 4
    """Fresh runs of a suspect."""
    more_runs: int = 8
    """Further runs when those do not decide and no base can be run."""
    pairs: int = 6
    """Pairs of runs, base and new, that confirm."""
    more_pairs: int = 6
    """Further pairs when those do not decide."""
    can_run_base: bool = False
    """Whether the session can run the base revision (``--perf-base``)."""
    in_place: bool = False
    """Each case is settled when it ends (-x, --maxfail, --pdb): the suite's shift is unknown and 0 is used."""
    remeasure: bool = True
    """False when the session only looks: nothing is requested, suspects are inconclusive."""
    yardstick: bool = True
    """Whether the runs of this session time the yardstick."""
    planned_cases: int = 0
    """Gated cases of the session where not all are known yet (settled in place); 0: those given."""

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ConfigurationError(
                f"tolerance {self.tolerance} is not between 0 and 1; write 0.03 for three per cent"
            )
        for name in ("suite_alpha", "screen_alpha"):
            if not 0 < getattr(self, name) < 0.5:
                raise ConfigurationError(f"{name}={getattr(self, name)} is not between 0 and 0.5")
        for name in ("min_stored", "first_runs", "pairs"):
            if getattr(self, name) < 3:
                raise ConfigurationError(f"{name}={getattr(self, name)} is too few to know any noise; take 3 or more")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Something that the session shall run, in the order of the list that it stands in."""

    case: str
    """pytest node id."""
    kind: Literal["run", "ab_pair"]
    """One fresh run of the new code, or one of the base and one of the new code, one right after the other."""
    first: Literal["base", "new"] = "new"
    """Which of a pair goes first; they alternate, so that a drift of the host cancels."""
    why: str = ""
    """What it is for: screening, re-measurement, confirmation, or whose shift it was."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one quantity of a case says."""

    quantity: str
    """``time`` or the name of a metric."""
    name: VerdictName
    """Verdict of this quantity alone."""
    tolerance: float
    """Relative change that is accepted; absolute for a quantity with an absolute rule."""
    effect: float | None = None
    """Relative change for the worse (0.05: 5 % slower); negative is better; None when nothing could be compared."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the effect."""
    mde: float | None = None
    """Smallest change for the worse that would have been found with 95 % probability, never below the tolerance."""
    exact: bool = False
    """Decided by an exact rule and not by statistics."""
    confirmed: bool | None = None
    """For regressed: whether an A/B in this session (or an exact rule) confirmed it.  None otherwise."""
    reasons: tuple[str, ...] = ()
    """Why, one phrase each."""
    flags: tuple[str, ...] = ()
    """What a reader must know beside the verdict: unconfirmed, not gateable at this tolerance, host shifted, ..."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the gate says about one case."""

    case: str
    """pytest node id."""
    name: VerdictName
    """The worst of the findings, or why there is none."""
    findings: tuple[Finding, ...] = ()
    """One per quantity, the one that decided first."""
    runs: int = 0
    """Fresh runs of this session that were looked at, unstable ones included."""
    pairs: int = 0
    """Pairs of an A/B that were looked at."""
    stored_runs: int = 0
    """Stored runs that it was compared with."""
    stored_sessions: int = 0
    """Sessions that these came from."""
    reasons: tuple[str, ...] = ()
    """Why, one phrase each."""
    flags: tuple[str, ...] = ()
    """What a reader must know beside the verdict."""
    soft_differences: tuple[str, ...] = ()
    """Fields of the environment that differ from the newest stored run: ``torch 2.13.0, stored 2.12.0``."""

    @property
    def gated(self) -> bool:
        """Whether the case was compared with stored runs: it counts into ``gated k of n``."""
        return self.name in ("pass", "regressed", "improved", "inconclusive")

    @property
    def decisive(self) -> Finding | None:
        """The finding that decided; None when nothing was compared."""
        return self.findings[0] if self.findings else None

    @property
    def fails(self) -> bool:
        """Whether ``--perf-gate`` fails the test."""
        return self.name in ("regressed", "impossible")

    def describe(self) -> str:
        """One line for a person: verdict, effect, interval, MDE, runs, reasons and flags."""
        parts = [self.name.upper() if self.fails else self.name]
        finding = self.decisive
        if finding is not None and finding.effect is not None:
            parts.append(_effect_text(finding))
        if self.stored_runs:
            parts.append(self._evidence())
        parts.extend(self.reasons)
        parts.extend(f"[{flag}]" for flag in self.flags)
        parts.extend(self.soft_differences)
        return "; ".join(parts)

    def _evidence(self) -> str:
        runs = plural(self.runs, "run")
        pairs = f" and {self.pairs} A/B pairs" if self.pairs else ""
        return f"{runs}{pairs} against {self.stored_runs} stored of {plural(self.stored_sessions, 'session')}"


def percent(share: float, *, signed: bool = False) -> str:
    """A share as per cent, three significant digits at most.

    >>> percent(0.0312), percent(-0.2, signed=True), percent(0.05, signed=True)
    ('3.12 %', '-20 %', '+5 %')
    """
    return f"{100 * share:{'+' if signed else ''}.3g} %"


def _effect_text(finding: Finding) -> str:
    assert finding.effect is not None
    word = "slower" if finding.effect >= 0 else "faster"
    if finding.quantity != TIME:
        word = f"worse in {finding.quantity}" if finding.effect >= 0 else f"better in {finding.quantity}"
    text = f"{percent(abs(finding.effect))} {word}"
    if finding.interval is not None:
        low, high = finding.interval
        text += f" (95 % interval {percent(low, signed=True)} to {percent(high, signed=True)})"
    text += f", tolerance {percent(finding.tolerance)}"
    if finding.mde is not None and math.isfinite(finding.mde):
        text += f", smallest change that would show {percent(finding.mde)}"
    return text
