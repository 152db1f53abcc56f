"""One quantity of one case: what each stage found of it, and how that is shown."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfsuite.gate import stages
from perfsuite.gate.evidence import CaseWork, Judged, Pair
from perfsuite.gate.judge import Judge
from perfsuite.gate.quantity import Quantity
from perfsuite.gate.shift import Estimate
from perfsuite.gate.view import View
from perfsuite.record.verdict import FAILING, Effect, Finding, GateSettings, VerdictName, percent
from perfsuite.statistics.robust import median


@dataclass(frozen=True, kw_only=True)
class Question:
    """Whether this quantity is worse than stored, and worse than the base."""

    work: CaseWork
    judged: Judged
    view: View

    @property
    def settings(self) -> GateSettings:
        """The settings, without an A/B where the base cannot run this case."""
        return self.view.settings_of(self.work)

    @property
    def tolerance(self) -> float:
        """Relative change that is accepted."""
        return self.judged.quantity.tolerance

    @functools.cached_property
    def screened(self) -> Estimate | None:
        """The first look; None without a stable run."""
        return stages.screen(self.work, self.judged, self.view)

    @functools.cached_property
    def level(self) -> Estimate | None:
        """The fresh runs against the stored ones; None without enough stable ones."""
        return stages.remeasured(self.work, self.judged, self.view)

    @functools.cached_property
    def change(self) -> Estimate | None:
        """The new code against the base, both measured now; None without enough stable pairs."""
        return stages.change(self.work, self.judged, self.view)

    @functools.cached_property
    def since_anchor(self) -> Estimate | None:
        """The new code against the commit that the stored runs name, both measured now."""
        return stages.since_anchor(self.work, self.judged, self.view)

    @property
    def anchor_pairs(self) -> Sequence[Pair]:
        """The pairs of the latter."""
        return stages.anchor_pairs(self.work, self.view)

    @property
    def anchor_name(self) -> str:
        """Short form of the commit that the stored runs name."""
        return self.work.given.anchor[:10]

    @functools.cached_property
    def blank(self) -> Finding:
        """What is known before the verdict."""
        if self.screened is None:
            return Finding(quantity=self.judged.name, name="inconclusive", tolerance=self.tolerance)
        runs = self.work.runs if self.work.fresh else self.work.screening
        judge = self.view.judge(self.work, self.judged, runs)
        quantity = self.judged.quantity
        mde = quantity.worse(judge.smallest_found(len(self.view.values(self.judged, self.work.screening))))
        stage, count = (self.level, len(self.work.fresh)) if self.level else (self.screened, len(self.work.screening))
        return Finding(
            quantity=self.judged.name,
            name="inconclusive",
            tolerance=self.tolerance,
            mde=mde,
            flags=self._not_gateable(judge, mde),
            unit=self.judged.unit,
            level=_effect(quantity, stage, count),
            change=_effect(quantity, self.change, len(self.work.pairs)),
            since_anchor=_effect(quantity, self.since_anchor, len(self.anchor_pairs)),
        )

    def _not_gateable(self, judge: Judge, mde: float) -> tuple[str, ...]:
        """Said where the noise forbids to show a change as large as the tolerance; no host shows one that equals it."""
        if judge.smallest_shown <= judge.bounds.tolerance * 1.0001:
            return ()
        which = f"{self.judged.name} " if self.judged.is_secondary else ""
        return (f"{which}not gateable at {percent(self.tolerance)}: only a change of {percent(mde)} would show",)

    def shown(self, estimate: Estimate, name: VerdictName, pairs: Sequence[Pair] = ()) -> Finding:
        """A finding with its effect, its interval and the flags that every finding may have.

        The effect is relative to the older runs of ``pairs`` where there are any, else to the stored level.
        """
        blank, older = self.blank, [value for value, _ in self.view.pair_values(self.judged, pairs)]
        flags = [] if name in FAILING else list(blank.flags)
        if self.view.settings.in_place:
            flags.append("settled in place: the suite's shift is not known and 0 is used")
        before = median(older) if older else self.judged.level.centre
        effect = _effect(self.judged.quantity, estimate, 0)
        assert effect is not None
        return replace(
            blank,
            name=name,
            effect=effect.change,
            interval=effect.interval,
            before=self.judged.plain(before),
            after=self.judged.plain(before + estimate.effect),
            reasons=("the noise forbids a verdict",) if name == "inconclusive" else (),
            flags=tuple(flags),
        )


def flagged(finding: Finding, *flags: str) -> Finding:
    """The finding with more flags."""
    return replace(finding, flags=(*finding.flags, *flags))


def _effect(quantity: Quantity, estimate: Estimate | None, count: int) -> Effect | None:
    if estimate is None:
        return None
    low, high = map(quantity.worse, estimate.interval())
    return Effect(change=quantity.worse(estimate.effect), interval=(low, high), count=count)
