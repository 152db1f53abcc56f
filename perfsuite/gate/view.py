"""What the decision on every case depends on, beside the case itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perfsuite.baselines.runs import RunSummary
from perfsuite.gate.evidence import CaseWork, Judged, Pair
from perfsuite.gate.judge import CONFIRM_ALPHA, Bounds, Judge, Today
from perfsuite.gate.shift import Replicates, Shares, own_inside
from perfsuite.gate.suite import SuiteShift
from perfsuite.gate.verdict import TIME, GateSettings


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
    tests: int = 1
    """Quantities that are judged in the session."""
    suspects: int = 0
    """Cases that the screening suspected."""
    confirming: int = 0
    """Cases that go through an A/B."""

    def bounds(self, tolerance: float) -> Bounds:
        """Bounds for a relative tolerance: the suite's false alarms are split over the tests that are made."""
        alpha = self.settings.suite_alpha
        expected = self.settings.screen_alpha * self.tests
        return Bounds(
            tolerance=math.log1p(tolerance),
            limit=math.log1p(tolerance + self.settings.blind_margin),
            alpha=alpha / max(1.0, expected, self.suspects),
            shared_alpha=alpha / max(1, self.tests),
            confirm_alpha=min(CONFIRM_ALPHA, alpha / max(1, self.confirming)),
        )

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
        timed = judged.name == TIME
        known = self.shares if timed else Shares()
        share = known.of(kind)
        values = self.values(judged, runs) if len(runs) > 1 else []
        if len(values) > 1:
            share = own_inside(share, Replicates(kind=kind, level=level, values=values), known.scale)
        return Judge(
            level=level,
            today=self.today if timed else Today(),
            bounds=self.bounds(judged.quantity.tolerance),
            settings=self.settings_of(work),
            between=known.between,
            inside=share,
        )
