"""Verdicts of the gate, and the runs that it requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfsuite.base.errors import ConfigurationError

VerdictName = Literal[
    "pass",
    "regressed",
    "drifted",
    "environment",
    "improved",
    "inconclusive",
    "impossible",
    "no-baseline",
    "learning",
    "not-comparable",
    "unstable-host",
]
"""Names of verdicts in output, files and options."""

FAILING: frozenset[VerdictName] = frozenset({"regressed", "drifted", "environment", "impossible"})
"""Verdicts that fail a case, and a suite, unless ``--perf-fail-on`` names others."""

TIME = "time"  # The quantity that gates every case: the time of one iteration.

MEAN = "mean"  # The mean of the samples; unlike the median it shows a slow iteration in three.
P95 = "p95"  # The 95 % quantile of the samples.
ALL = "all samples"  # The median of all samples, compared if many more samples than usual are not clean.

INSTRUMENTED = "its ranks were instrumented: "
"""Beginning of the reason for a case that tools or debug settings slowed; it is neither compared nor stored."""

RHYTHM = 60  # Every run of so many iterations has one that is slow once in so many.
SEEN_ITERATIONS = 200  # In a shorter run the mean cannot show one slow iteration in RHYTHM.


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """How the gate decides; the defaults are those that perfsuite docs gate-evidence has figures for."""

    tolerance: float = 0.03  # Relative slowdown that is accepted, unless the case says otherwise.
    suite_alpha: float = 0.05  # False alarms that chance may cause per suite run, at most, on an unchanged code.
    screen_alpha: float = 0.05  # Share of unchanged cases expected to be suspected by the screening.
    min_stored: int = 5  # Stored runs below which a case is still learning.
    min_suite: int = 8  # Cases from which on the suite's common shift and today's noise are estimated.
    blind_margin: float = 0.07
    """A pass excludes (at 99.9 %) a slowdown of the tolerance plus this; 10 % at the default tolerance."""
    first_runs: int = 4  # Fresh runs of a suspect.
    more_runs: int = 8  # Further runs when those do not decide and no base can be run.
    pairs: int = 6  # Pairs of runs, base and new, that confirm.
    more_pairs: int = 6  # Further pairs when those do not decide.
    sure_pairs: int = 12
    """Further pairs where an A/B is the first test of a case and not the confirmation of a suspicion."""
    can_run_base: bool = False
    """Whether the session can run the base revision (``--perf-against``), and with it the commit of the stored runs."""
    base_commit: str = ""  # Revision of the base; a case whose stored runs name the same needs no third arm.
    in_place: bool = False
    """Each case is settled when it ends (-x, --maxfail, --pdb): the suite's shift is unknown and 0 is used."""
    remeasure: bool = True  # False when the session only looks: nothing is requested, suspects are inconclusive.
    yardstick: bool = True  # Whether the runs of this session time the yardstick.
    planned_cases: int = 0  # Gated cases of the session where not all are known yet (settled in place); 0: those given.

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


RequestKind = Literal["run", "ab_pair", "anchor_pair"]  # The anchor is the commit that the stored runs name.


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run that the gate requests from the session."""

    case: str  # pytest node id.
    kind: RequestKind
    """One fresh run of the new code, or one right after the other of the new code and of the base or the anchor."""
    first: Literal["base", "new"] = "new"
    """Which of a pair goes first, the older code or the new; they alternate, so that a drift of the host cancels."""
    why: str = ""  # Its purpose: screening, re-measurement, confirmation, or attribution of a shift.


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One comparison of the new code with something older."""

    change: float  # Relative change for the worse (0.05: 5 % slower).
    interval: tuple[float, float]  # 95 % confidence interval of the change.
    count: int  # Runs, or pairs of runs, that it rests on.


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The comparison of one quantity of a case."""

    quantity: str  # ``time`` or the name of a metric.
    name: VerdictName  # Verdict of this quantity alone.
    tolerance: float  # Relative change that is accepted; absolute for a quantity with an absolute rule.
    effect: float | None = None
    """Relative change for the worse (0.05: 5 % slower); negative is better; None when nothing could be compared."""
    interval: tuple[float, float] | None = None  # 95 % confidence interval of the effect.
    before: float | None = None  # The stored value, in ``unit``.
    after: float | None = None  # The new value: ``before`` with the effect.
    unit: str = ""  # Unit of the two: ``s`` for the time.
    level: Effect | None = None  # Against the stored runs.
    change: Effect | None = None  # Against the base, both measured now; None without an A/B.
    since_anchor: Effect | None = None
    """Against the commit of the stored runs, both measured now; None if it was not run."""
    mde: float | None = None
    """Smallest change for the worse that would have been found with 95 % probability, never below the tolerance."""
    exact: bool = False  # Decided by an exact rule and not by statistics.
    confirmed: bool | None = None
    """For regressed: whether an A/B in this session (or an exact rule) confirmed it.  None otherwise."""
    reasons: tuple[str, ...] = ()  # Why, one phrase each.
    flags: tuple[str, ...] = ()
    """Remarks on the verdict: unconfirmed, not gateable at this tolerance, host shifted, ..."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one case."""

    case: str  # pytest node id.
    name: VerdictName  # The worst of the findings, or why there is none.
    findings: tuple[Finding, ...] = ()  # One per quantity, the one that decided first.
    runs: int = 0  # Fresh runs of this session that were looked at, unstable ones included.
    iterations: int | None = None  # Iterations timed in the shortest of these runs; None where none was timed.
    pairs: int = 0  # Pairs of an A/B that were looked at.
    stored_runs: int = 0  # Stored runs that it was compared with.
    stored_sessions: int = 0  # Sessions that these came from.
    reasons: tuple[str, ...] = ()  # Why, one phrase each.
    flags: tuple[str, ...] = ()  # Remarks on the verdict.
    soft_differences: tuple[str, ...] = ()
    """Fields of the environment that differ from the newest stored run: ``torch 2.13.0, stored 2.12.0``."""

    stored_commit: str = ""  # Revision of the runs that it was compared with; empty where they name none.
    no_ab: str = ""  # Why an A/B with that revision is impossible here; empty if it is possible.
    ab_folder: str = ""  # Directory for an A/B, relative to the invocation directory; empty for the root directory.

    @property
    def gated(self) -> bool:
        """Whether the case was compared with stored runs: it counts into ``gated k of n``."""
        return self.name in ("pass", "improved", "inconclusive", "regressed", "drifted", "environment")

    @property
    def decisive(self) -> Finding | None:
        """The finding that decided; None when nothing was compared."""
        return self.findings[0] if self.findings else None

    @property
    def fails(self) -> bool:
        """Whether ``--perf-gate`` fails the test, unless ``--perf-fail-on`` says otherwise."""
        return self.name in FAILING

    @property
    def is_instrumented(self) -> bool:
        """Whether tools or debug settings slowed its ranks."""
        return self.name == "not-comparable" and "".join(self.reasons[:1]).startswith(INSTRUMENTED)

    @property
    def misses_rhythms(self) -> bool:
        """Whether it does not fail, and a run of it timed fewer than SEEN_ITERATIONS iterations."""
        compared = self.gated or self.name == "unstable-host"
        return compared and not self.fails and self.iterations is not None and self.iterations < SEEN_ITERATIONS

    @property
    def hidden(self) -> tuple[float, str] | None:
        """Return the largest slowdown that an undecided case may have, and its quantity.

        None without a bound of at most 100 %.
        """
        highs = [(finding.interval[1], finding.quantity) for finding in self.findings if finding.interval is not None]
        largest = max(highs, default=None) if self.gated else None
        return largest if largest is not None and largest[0] <= 1 else None


@dataclass(frozen=True, kw_only=True)
class SuiteVerdict:
    """The verdict on the session as a whole, if its cases are slower together."""

    name: VerdictName
    """regressed (slower than the base), drifted, environment, unstable-host (yardsticks moved along), inconclusive."""
    effect: float  # Relative change of the median case: 0.05 is 5 % slower.
    line: str  # The change, the number of cases, and the controls, in one line.
    seen: bool = True  # Whether the cases look slower; False: the noise of the host could hide that they are.
