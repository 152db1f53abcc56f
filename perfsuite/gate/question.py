"""One quantity of one case, from its runs to a finding: its stage, the missing runs, and the printed finding.

Every decision creates a new question.  It uses the runs of the screening, then fresh runs, then pairs with the base and
with the commit of the stored runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from perfsuite.base.units import percent
from perfsuite.baselines.runs import RunSummary
from perfsuite.gate.evidence import CaseWork, Judged, Pair
from perfsuite.gate.judge import Judge
from perfsuite.gate.quantity import Quantity
from perfsuite.gate.shift import CONFIRM_ALPHA, SURELY_ALPHA, Bounds, Estimate, Moved, Shares, Today, own_inside
from perfsuite.gate.suite import SuiteShift
from perfsuite.record.verdict import ALL, FAILING, TIME, Effect, Finding, GateSettings, VerdictName
from perfsuite.statistics.robust import median

MIN_PAIRS = 3  # Fewest stable pairs of an A/B.
MIN_FRESH = 2  # Fewest stable fresh runs of a re-measurement.
RESTLESS = 2.5
"""Spread of samples relative to stored runs that shows a noisier host; on one host 2 in 1,000 runs exceed it.
Row: hosted VM with a base, error rates."""
SECONDARY_DOUBT = 2.0
"""Standard errors above which mean and tail are suspicious; 1 for the time, so that no slow case is missed.
Row: silence 7."""
OWN_DOUBT = 1.25
"""Standard errors above which own metrics are suspicious; no other quantity shows their changes.  Row: memory +12 % at
2 %, metrics in addition to the time."""


@dataclass(frozen=True, kw_only=True)
class View:
    """Everything that a decision depends on apart from the case; every decision creates a new one."""

    settings: GateSettings
    today: Today  # Shift of the session from all cases.
    suite: SuiteShift = field(default_factory=SuiteShift)  # Shift of all cases together from their stored levels.
    shares: Shares = field(default_factory=Shares)  # Shares of noise between and inside sessions.
    beside: Mapping[str, tuple[Today, Shares]] = field(default_factory=dict)
    """Shift and shares of mean and tail, by name: a host moves them differently from the time."""
    tests: int = 1  # Number of judged quantities in the session, without mean and tail.
    suspects: int = 0  # Number of cases that the screening suspected.
    confirming: int = 0  # Number of cases with an A/B.


class Need(NamedTuple):
    """The numbers of stable runs and pairs that a suspect needs."""

    runs: int = 0  # Fresh runs.
    pairs: int = 0  # A/B pairs with the base.
    anchor_pairs: int = 0  # A/B pairs with the commit of the stored runs.


@dataclass(frozen=True, kw_only=True)
class Question:
    """Whether a quantity is worse than stored, and worse than the base."""

    work: CaseWork
    judged: Judged
    view: View

    @property
    def tolerance(self) -> float:
        """Accepted relative change."""
        return self.judged.quantity.tolerance

    @property
    def anchor_name(self) -> str:
        """Short id of the commit of the stored runs."""
        return self.work.gate_case.anchor[:10]

    @property
    def context(self) -> tuple[Today, Shares]:
        """Shift of the session and shares of noise for this quantity."""
        view, judged = self.view, self.judged
        if judged.name == TIME:
            return view.today, view.shares
        if judged.name == ALL:
            return view.today, Shares()
        return view.beside.get(judged.name, (Today(), Shares())) if judged.is_secondary else (Today(), Shares())

    @property
    def bounds(self) -> Bounds:
        """The bounds; the suite's false alarms are split over all tests."""
        view, quantity = self.view, self.judged.quantity
        alpha, margin = quantity.weight * view.settings.suite_alpha, view.settings.blind_margin
        if quantity.is_secondary:
            margin = max(margin, quantity.tolerance)
        return Bounds(
            tolerance=math.log1p(quantity.tolerance),
            limit=math.log1p(quantity.tolerance + margin),
            alpha=alpha / max(1.0, view.settings.screen_alpha * view.tests, view.suspects),
            shared_alpha=alpha / max(1, view.tests),
            confirm_alpha=min(quantity.weight * CONFIRM_ALPHA, alpha / max(1, view.confirming)),
            surely_alpha=quantity.weight * SURELY_ALPHA,
            doubt=OWN_DOUBT if quantity.is_own else SECONDARY_DOUBT if quantity.is_secondary else 1.0,
        )

    def values(self, runs: Sequence[RunSummary]) -> list[float]:
        """Return the values of the stable runs."""
        return self.judged.values(runs, self.view.today.yardstick_shift)

    def pair_values(self, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
        """Return the (older, new) values of the stable pairs."""
        return self.judged.pair_values(pairs, self.view.today.yardstick_shift)

    def judge(self, runs: Sequence[RunSummary] = ()) -> Judge:
        """Return the judge of the quantity; ``runs`` show its scatter in this session."""
        today, noise = self.context
        share = noise.of(self.judged.quantity.history.kind)
        seen = self.judged.seen(runs, self.view.today.yardstick_shift) if len(runs) > 1 else None
        count = len(seen.values) if seen is not None else 0
        if seen is not None and count > 1:
            share = own_inside(share, seen, noise.scale)
        unrest = self.judged.unrest(runs) if runs else 1.0
        unrest = unrest if unrest > RESTLESS else 1.0
        if unrest > 1 and runs is self.work.screening and count < self.view.settings.first_runs:
            share = max(share, unrest**2 * (1 - noise.between))  # with more runs their own scatter is used
        return Judge(
            level=self.judged.level,
            today=today,
            bounds=self.bounds,
            settings=self.work.settings,
            restless=unrest,
            between=noise.between,
            inside=share,
        )

    @functools.cached_property
    def screened(self) -> Estimate | None:
        """The screening; None without a stable run."""
        values = self.values(self.work.screening)
        return self.judge(self.work.screening).screen(values) if values else None

    @property
    def looks_worse(self) -> bool:
        """Whether mean or tail are suspicious in the screening; every other quantity is judged in any case."""
        values = self.values(self.work.screening)
        above = median(values) - self.judged.level.centre - self.context[0].shift if values else 0.0
        if above <= math.log1p(self.tolerance) / 2:
            return False
        return self.screened is not None and self.judge(self.work.screening).is_suspicious(self.screened)

    @functools.cached_property
    def level(self) -> Estimate | None:
        """The fresh runs compared with the stored ones; None without enough stable runs."""
        values = self.values(self.work.fresh)
        return self.judge(self.work.fresh).remeasured(values) if len(values) >= MIN_FRESH else None

    @property
    def level_moved(self) -> bool:
        """Whether the level seems to have moved, or may have moved by more than a pass can hide."""
        second = self.level
        if second is None or second.outcome == "pass":
            return False
        if second.outcome in ("candidate", "improved") or second.effect > math.log1p(self.tolerance):
            return True
        return not self.judge(self.work.fresh).excludes(second.effect, second.error)

    def paired(self, pairs: Sequence[Pair]) -> Estimate | None:
        """Return the A/B of these pairs; None without enough stable ones."""
        values = self.pair_values(pairs)
        return self.judge().paired(values) if len(values) >= MIN_PAIRS else None

    @functools.cached_property
    def change(self) -> Estimate | None:
        """The new code compared with the base, both measured now; None without enough stable pairs."""
        return self.paired(self.work.pairs)

    @functools.cached_property
    def since_anchor(self) -> Estimate | None:
        """The new code compared with the commit of the stored runs, both measured now."""
        return self.paired(self.work.stored_commit_pairs)

    def control(self, runs: Sequence[RunSummary]) -> Moved | None:
        """Return the movement of these runs' control that is not subtracted from their values."""
        return self.work.control(self.judged, runs, self.view.today.yardstick_shift)

    @property
    def need(self) -> Need:
        """The runs and pairs that a suspect needs."""
        settings, first, second = self.work.settings, self.screened, self.level
        least = Need(runs=settings.first_runs)
        if first is None or second is None or second.outcome == "pass":
            return least
        arms_tell = self.judge(self.work.fresh).arms_tell(self.values(self.work.runs))  # all runs show the scatter
        if first.effect < 0 and second.outcome != "improved" and not arms_tell:
            return least
        if settings.can_run_base:
            return Need(settings.first_runs, self._pairs_needed(self.work.pairs), self._anchor_pairs_needed())
        if second.outcome in ("candidate", "improved") or not self._more_would_help(second):
            return least
        return Need(runs=settings.first_runs + settings.more_runs)

    def _pairs_needed(self, pairs: Sequence[Pair], *, surely: bool = False) -> int:
        """Return the pairs until the A/B decides; ``surely``: with the bound of an A/B without a suspicion."""
        settings, estimate, judge = self.work.settings, self.paired(pairs), self.judge()
        if estimate is None or estimate.outcome in ("pass", "improved") or judge.is_sure(estimate):
            return settings.pairs
        surely = surely or not judge.today.is_known
        if estimate.outcome == "regressed" and not surely:
            return settings.pairs
        values, most = self.pair_values(pairs), settings.pairs + settings.more_pairs
        if surely and estimate.effect > judge.bounds.tolerance:
            return most if len(values) < most else most + settings.sure_pairs
        return most if judge.more_pairs_tell(values) or self._more_would_help(estimate) else settings.pairs

    def _anchor_pairs_needed(self) -> int:
        """Return the pairs with the commit of the stored runs, if the level moved and the base does not show why."""
        found, level, work = self.change, self.level, self.work
        if found is None or level is None or not self.level_moved:
            return 0
        if found.outcome == ("regressed" if level.effect > 0 else "improved"):
            return 0
        if self.judged.name == ALL or not work.needs_anchor:
            return 0
        return self._pairs_needed(work.anchor_pairs, surely=True)

    def _more_would_help(self, estimate: Estimate) -> bool:
        """Return whether the last runs could decide: let an unchanged case pass, or show the present effect."""
        judge = self.judge(self.work.fresh)
        return judge.can_clear or abs(estimate.effect) > judge.smallest_shown / 2

    def may_decide(self, pairs: Sequence[Pair], further: int) -> bool:
        """Return whether ``further`` pairs like the present ones would show or exclude a slowdown."""
        judge, values, level = self.judge(), self.pair_values(pairs), self.level
        effects = [level.effect, 0.0] if level else [0.0]  # as slow as the level, or not caused by the code
        noise, total = judge.level.sigma * math.sqrt(2 * judge.inside), len(values) + further
        if len(values) > 1:
            effect, error, _ = judge.mean_of_pairs([new - old for old, new in values])
            effects, noise = [effect], error * math.sqrt(len(values))
        if total < MIN_PAIRS:
            return False
        error, dof = noise / math.sqrt(total), judge.level.dof + total - 1
        clears = total >= self.work.settings.pairs and any(judge.excludes(effect, error) for effect in effects)
        return clears or any(judge.confirms(abs(effect), error, dof) for effect in effects)

    @functools.cached_property
    def blank(self) -> Finding:
        """The finding before the verdict."""
        blank = Finding(quantity=self.judged.name, name="inconclusive", tolerance=self.tolerance)
        if self.screened is None:
            return blank
        work, quantity = self.work, self.judged.quantity
        judge = self.judge(work.runs if work.fresh else work.screening)
        mde = quantity.worse(judge.smallest_found(len(self.values(work.screening))))
        flags: tuple[str, ...] = ()
        if judge.smallest_shown > judge.bounds.tolerance * 1.0001:
            name = f"{self.judged.name} " if self.judged.is_secondary else ""
            change = f"only a change of {percent(mde)} would show"
            flags = (f"{name}not gateable at {percent(self.tolerance)}: {change}",)
        stage, count = (self.level, len(work.fresh)) if self.level else (self.screened, len(work.screening))
        return replace(
            blank,
            mde=mde,
            flags=flags,
            unit=self.judged.quantity.unit,
            level=_effect(quantity, stage, count),
            change=_effect(quantity, self.change, len(work.pairs)),
            since_anchor=_effect(quantity, self.since_anchor, len(self.work.stored_commit_pairs)),
        )

    def shown(self, estimate: Estimate, name: VerdictName, pairs: Sequence[Pair] = ()) -> Finding:
        """Return a finding with its effect, its interval and the common flags.  The effect is relative to the older
        runs of ``pairs``, or to the stored level without pairs.
        """
        blank, older = self.blank, [value for value, _ in self.pair_values(pairs)]
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
    """Return the finding with more flags."""
    return replace(finding, flags=(*finding.flags, *flags))


def _effect(quantity: Quantity, estimate: Estimate | None, count: int) -> Effect | None:
    if estimate is None:
        return None
    low, high = map(quantity.worse, estimate.interval())
    return Effect(change=quantity.worse(estimate.effect), interval=(low, high), count=count)


def suspected(work: CaseWork, view: View) -> frozenset[str]:
    """Return the names of a screened case's quantities that have to be measured again."""
    asked = [Question(work=work, judged=judged, view=view) for judged in work.judged]
    looked_at = [one for one in asked if not one.judged.is_secondary or one.looks_worse]
    return frozenset(one.judged.name for one in looked_at if one.screened and one.screened.outcome == "suspect")


def suspects(work: CaseWork, view: View) -> Iterator[Question]:
    """Return the questions of a case's suspected quantities."""
    return (Question(work=work, judged=judged, view=view) for judged in work.judged if judged.name in work.suspected)
