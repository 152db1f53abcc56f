"""What the decision on every case depends on, beside the case itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfsuite.baselines.runs import RunSummary
from perfsuite.gate.evidence import CaseWork, Judged, Pair
from perfsuite.gate.judge import Judge
from perfsuite.gate.quantity import ALL, Quantity
from perfsuite.gate.shift import CONFIRM_ALPHA, SURELY_ALPHA, Bounds, Replicates, Shares, Today, own_inside
from perfsuite.gate.suite import SuiteShift
from perfsuite.record.verdict import TIME, GateSettings
from perfsuite.statistics.robust import median

RESTLESS = 2.5
"""Samples that lie so many times as far apart as in stored runs tell a noisier host; on one host 2 in 1,000 runs do."""
SECONDARY_DOUBT = 2.0
"""Standard errors above which mean and tail are suspicious; the time is at one, because no slow case may slip by it."""
OWN_DOUBT = 1.25
"""The same of metrics of one's own: no other quantity of the case shows what they show."""


@dataclass(frozen=True, kw_only=True)
class View:
    """All that a decision depends on beside the case itself; every decision looks anew, and keeps none."""

    settings: GateSettings
    """How the gate decides."""
    today: Today
    """What all cases say about the session."""
    suite: SuiteShift = field(default_factory=SuiteShift)
    """By how much all cases together are off their stored levels."""
    shares: Shares = field(default_factory=Shares)
    """How noise divides between and inside sessions."""
    beside: Mapping[str, tuple[Today, Shares]] = field(default_factory=dict)
    """The same for mean and tail, by name: a host moves them otherwise than the time."""
    tests: int = 1
    """Quantities that are judged in the session, mean and tail apart."""
    suspects: int = 0
    """Cases that the screening suspected."""
    confirming: int = 0
    """Cases that go through an A/B."""

    def bounds(self, quantity: Quantity) -> Bounds:
        """Bounds of one quantity: the suite's false alarms are split over the tests that are made."""
        alpha, tolerance = quantity.weight * self.settings.suite_alpha, quantity.tolerance
        margin = self.settings.blind_margin
        if quantity.is_secondary:
            margin = max(margin, tolerance)
        expected = self.settings.screen_alpha * self.tests
        return Bounds(
            tolerance=math.log1p(tolerance),
            limit=math.log1p(tolerance + margin),
            alpha=alpha / max(1.0, expected, self.suspects),
            shared_alpha=alpha / max(1, self.tests),
            confirm_alpha=min(quantity.weight * CONFIRM_ALPHA, alpha / max(1, self.confirming)),
            surely_alpha=quantity.weight * SURELY_ALPHA,
            doubt=OWN_DOUBT if quantity.is_own else SECONDARY_DOUBT if quantity.is_secondary else 1.0,
        )

    def known(self, judged: Judged) -> tuple[Today, Shares]:
        """What all cases say about one quantity."""
        if judged.name == TIME:
            return self.today, self.shares
        if judged.name == ALL:
            return self.today, Shares()
        return self.beside.get(judged.name, (Today(), Shares())) if judged.is_secondary else (Today(), Shares())

    def looks_worse(self, judged: Judged, runs: Sequence[RunSummary]) -> bool:
        """Whether mean or tail lie above half their tolerance; most do not, and need no judge."""
        values = self.values(judged, runs)
        above = median(values) - judged.level.centre - self.known(judged)[0].shift if values else 0.0
        return above > math.log1p(judged.quantity.tolerance) / 2

    def settings_of(self, work: CaseWork) -> GateSettings:
        """The settings, without an A/B where the base cannot run this case."""
        return replace(self.settings, can_run_base=False) if work.no_base else self.settings

    def values(self, judged: Judged, runs: Sequence[RunSummary]) -> list[float]:
        """Values of one quantity in the stable ones of these runs."""
        return judged.values(runs, self.today.yardstick_shift)

    def pair_values(self, judged: Judged, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
        """(older, new) values of one quantity in the stable ones of these pairs."""
        return judged.pair_values(pairs, self.today.yardstick_shift)

    def judge(self, work: CaseWork, judged: Judged, runs: Sequence[RunSummary] = ()) -> Judge:
        """The judge of one quantity of a case; ``runs`` show how much it scatters in this session."""
        level, kind = judged.level, judged.quantity.history.kind
        today, known = self.known(judged)
        share = known.of(kind)
        values = self.values(judged, runs) if len(runs) > 1 else []
        if len(values) > 1:
            share = own_inside(share, Replicates(kind=kind, level=level, values=values), known.scale)
        unrest = judged.unrest(runs) if runs else 1.0
        unrest = unrest if unrest > RESTLESS else 1.0
        if unrest > 1 and runs is work.screening and len(values) < self.settings.first_runs:
            share = max(share, unrest**2 * (1 - known.between))  # later the runs themselves tell how far they lie apart
        return Judge(
            level=level,
            today=today,
            bounds=self.bounds(judged.quantity),
            settings=self.settings_of(work),
            restless=unrest,
            between=known.between,
            inside=share,
        )
