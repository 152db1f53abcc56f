"""How far a case has come, what follows from it, and what it still needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfsuite.baselines.runs import RunSummary
from perfsuite.gate.control import Moved, moved
from perfsuite.gate.evidence import CaseWork, Judged, Pair
from perfsuite.gate.quantity import ALL
from perfsuite.gate.shift import Estimate, Screened
from perfsuite.gate.view import View
from perfsuite.record.verdict import TIME

MIN_PAIRS = 3
"""Stable pairs without which an A/B says nothing."""
MIN_FRESH = 2
"""Stable fresh runs without which a re-measurement says nothing."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """How many stable runs and pairs a suspect needs in all."""

    runs: int = 0
    """Fresh runs."""
    pairs: int = 0
    """A/B pairs with the base."""
    anchor_pairs: int = 0
    """A/B pairs with the commit that the stored runs name."""


def screened(work: CaseWork, yardstick_shift: float, judged: Judged | None = None) -> Screened | None:
    """One quantity of a case, the time unless said otherwise, as the screening saw it; None without a stable run."""
    judged = judged or work.time
    values = judged.values(work.screening, yardstick_shift)
    if not values:
        return None
    return Screened(
        level=judged.level,
        values=tuple(values),
        control=control_moved(work, judged, work.screening, yardstick_shift),
    )


def yardstick_moved(work: CaseWork) -> float | None:
    """By how much the yardstick of a case moved from the stored one; None where no control resembles it."""
    beside = moved(work.time.quantity.control, _stable(work.time, work.screening))
    return beside.amount if beside else None


def control_moved(work: CaseWork, judged: Judged, runs: Sequence[RunSummary], yardstick_shift: float) -> Moved | None:
    """How far the control beside these runs moved, as far as it is not taken off their values; None without any.

    A control that runs through torch is none where torch, or another part of the environment, changed.
    """
    if work.given.environment_changes or (judged.name != TIME and not judged.is_secondary):
        return None
    return moved(judged.quantity.control, _stable(judged, runs), slope=judged.level.slope, common=yardstick_shift)


def _stable(judged: Judged, runs: Sequence[RunSummary]) -> list[RunSummary]:
    return [run for run in runs if judged.quantity.is_stable(run)]


def screening_lacks(work: CaseWork, view: View) -> int:
    """Runs that the screening of a case lacks; each quantity wants as many stable ones as tell something of it."""
    lacks = []
    for judged in work.deciding:
        wanted = view.judge(work, judged, work.screening).screening_runs(view.values(judged, work.screening))
        lacks.append(judged.lacking(work.screening, wanted))
    return max(lacks)


def suspected(work: CaseWork, view: View) -> frozenset[str]:
    """Names of the quantities of a screened case that have to be measured again."""
    looked_at = [judged for judged in work.judged if not judged.is_secondary or worse(work, judged, view)]
    estimates = {judged.name: screen(work, judged, view) for judged in looked_at}
    return frozenset(name for name, estimate in estimates.items() if estimate and estimate.outcome == "suspect")


def worse(work: CaseWork, judged: Judged, view: View) -> bool:
    """Whether mean or tail are suspicious at the first look; every other quantity is judged in any case."""
    if not view.looks_worse(judged, work.screening):
        return False
    first = screen(work, judged, view)
    return first is not None and view.judge(work, judged, work.screening).is_suspicious(first)


def screen(work: CaseWork, judged: Judged, view: View) -> Estimate | None:
    """The first look at one quantity; None without a stable run."""
    values = view.values(judged, work.screening)
    return view.judge(work, judged, work.screening).screen(values) if values else None


def remeasured(work: CaseWork, judged: Judged, view: View) -> Estimate | None:
    """The second look; None without enough stable fresh runs."""
    values = view.values(judged, work.fresh)
    return view.judge(work, judged, work.fresh).remeasured(values) if len(values) >= MIN_FRESH else None


def paired(judged: Judged, work: CaseWork, pairs: Sequence[Pair], view: View) -> Estimate | None:
    """An A/B of one quantity; None without enough stable pairs."""
    values = view.pair_values(judged, pairs)
    return view.judge(work, judged).paired(values) if len(values) >= MIN_PAIRS else None


def change(work: CaseWork, judged: Judged, view: View) -> Estimate | None:
    """The new code against the base, both measured now."""
    return paired(judged, work, work.pairs, view)


def since_anchor(work: CaseWork, judged: Judged, view: View) -> Estimate | None:
    """The new code against the commit that the stored runs name, both measured now."""
    return paired(judged, work, anchor_pairs(work, view), view)


def anchor_pairs(work: CaseWork, view: View) -> Sequence[Pair]:
    """Pairs with the commit that the stored runs name; those with the base where that is the same commit."""
    return work.pairs if _anchor_is_base(work, view) else work.anchor_pairs


def _anchor_is_base(work: CaseWork, view: View) -> bool:
    return bool(work.given.anchor) and work.given.anchor == view.settings.base_commit


def why_no_anchor(work: CaseWork, view: View) -> str:
    """Why the commit that the stored runs name was not run; empty where it can be."""
    if not view.settings.can_run_base:
        return "no base was given (--perf-base): the commit of the stored runs was not run"
    return work.no_anchor or work.cut_short


def level_moved(work: CaseWork, judged: Judged, view: View) -> bool:
    """Whether the stored level seems to be left, or may have been by more than a pass can hide."""
    second = remeasured(work, judged, view)
    if second is None or second.outcome == "pass":
        return False
    if second.outcome in ("candidate", "improved") or second.effect > math.log1p(judged.quantity.tolerance):
        return True
    return not view.judge(work, judged, work.fresh).excludes(second.effect, second.error)


def need(work: CaseWork, view: View) -> Need:
    """What a suspect needs in all, over its suspected quantities."""
    needs = [_need_of(work, judged, view) for judged in work.judged if judged.name in work.suspected]
    return Need(
        runs=max(need.runs for need in needs),
        pairs=max(need.pairs for need in needs),
        anchor_pairs=max(need.anchor_pairs for need in needs),
    )


def _need_of(work: CaseWork, judged: Judged, view: View) -> Need:
    settings = view.settings_of(work)
    first, second = screen(work, judged, view), remeasured(work, judged, view)
    least = Need(runs=settings.first_runs)
    if first is None or second is None or second.outcome == "pass":
        return least
    if first.effect < 0 and second.outcome != "improved" and not _arms_tell(work, judged, view):
        return least
    if settings.can_run_base:
        pairs = _pairs_needed(work, judged, view, work.pairs)
        return Need(runs=settings.first_runs, pairs=pairs, anchor_pairs=_anchor_pairs_needed(work, judged, view))
    if second.outcome in ("candidate", "improved") or not _more_would_help(work, judged, view, second):
        return least
    return Need(runs=settings.first_runs + settings.more_runs)


def _pairs_needed(work: CaseWork, judged: Judged, view: View, pairs: Sequence[Pair], *, surely: bool = False) -> int:
    """Pairs until the A/B decides; ``surely``: as one decides that confirms nothing which was seen before."""
    settings, estimate = view.settings, paired(judged, work, pairs, view)
    judge = view.judge(work, judged)
    if estimate is None or estimate.outcome in ("pass", "improved") or judge.is_sure(estimate):
        return settings.pairs
    surely = surely or not judge.today.known
    if estimate.outcome == "regressed" and not surely:
        return settings.pairs
    values, most = view.pair_values(judged, pairs), settings.pairs + settings.more_pairs
    if surely and estimate.effect > judge.bounds.tolerance:
        return most if len(values) < most else most + settings.sure_pairs
    more = judge.more_pairs_tell(values) or _more_would_help(work, judged, view, estimate)
    return most if more else settings.pairs


def _anchor_pairs_needed(work: CaseWork, judged: Judged, view: View) -> int:
    """Pairs with the commit of the stored runs: where the level moved and the base does not show why."""
    found, level = change(work, judged, view), remeasured(work, judged, view)
    if found is None or level is None or not level_moved(work, judged, view):
        return 0
    if found.outcome == ("regressed" if level.effect > 0 else "improved"):
        return 0
    if judged.name == ALL or why_no_anchor(work, view) or _anchor_is_base(work, view):
        return 0
    return _pairs_needed(work, judged, view, work.anchor_pairs, surely=True)


def _arms_tell(work: CaseWork, judged: Judged, view: View) -> bool:
    """Whether the base and the stored commit could show what the level does not exclude; all runs tell of scatter."""
    return view.judge(work, judged, work.fresh).arms_tell(view.values(judged, work.runs))


def _more_would_help(work: CaseWork, judged: Judged, view: View, estimate: Estimate) -> bool:
    """Whether the last runs could decide: let an unchanged case pass, or show what is seen now."""
    judge = view.judge(work, judged, work.fresh)
    return judge.can_clear or abs(estimate.effect) > judge.smallest_shown / 2


def pairs_may_decide(work: CaseWork, view: View, pairs: Sequence[Pair], further: int) -> bool:
    """Whether so many further pairs would show or exclude a slowdown, if they are like what is known."""
    return any(_may_decide(work, each, view, pairs, further) for each in work.judged if each.name in work.suspected)


def _may_decide(work: CaseWork, judged: Judged, view: View, pairs: Sequence[Pair], further: int) -> bool:
    judge, values = view.judge(work, judged), view.pair_values(judged, pairs)
    level = remeasured(work, judged, view)
    effects = [level.effect, 0.0] if level else [0.0]  # as slow as the level, or not the code's doing
    noise, total = judge.level.sigma * math.sqrt(2 * judge.inside), len(values) + further
    if len(values) > 1:
        effect, error, _ = judge.mean_of_pairs([new - old for old, new in values])
        effects, noise = [effect], error * math.sqrt(len(values))
    error, dof = noise / math.sqrt(total), judge.level.dof + total - 1
    if total < MIN_PAIRS:
        return False
    clears = total >= view.settings.pairs and any(judge.excludes(effect, error) for effect in effects)
    return clears or any(judge.confirms(abs(effect), error, dof) for effect in effects)


def clearness(work: CaseWork, view: View) -> float:
    """How many standard errors a suspect is off its level at the first look: the clearest are decided first."""
    seen = [screen(work, judged, view) for judged in work.judged if judged.name in work.suspected]
    return max((abs(each.effect) / max(each.error, 1e-9) for each in seen if each is not None), default=0.0)
