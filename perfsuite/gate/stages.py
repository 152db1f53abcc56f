"""How far a case has come, what follows from it, and what it still needs."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.gate.evidence import CaseWork, Judged
from perfsuite.gate.judge import Estimate
from perfsuite.gate.shift import Screened
from perfsuite.gate.view import View
from perfsuite.statistics.robust import median

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
    """A/B pairs."""


def screened(work: CaseWork, yardstick_shift: float) -> Screened | None:
    """The time of a case as the screening saw it; None without a stable run."""
    values = work.time.values(work.screening, yardstick_shift)
    if not values:
        return None
    return Screened(level=work.time.level, values=tuple(values), yardstick_moved=yardstick_moved(work))


def yardstick_moved(work: CaseWork) -> float | None:
    """By how much the yardstick of a case moved from the stored one; None where either is missing."""
    then = work.time.level.yardstick
    if then is None:
        return None
    stable = [run for run in work.screening if work.time.quantity.is_stable(run)]
    now = [run.yardstick for run in stable if run.yardstick is not None]
    return median(now) - then if now else None


def screening_lacks(work: CaseWork, view: View) -> int:
    """Runs that the screening of a case lacks; each quantity wants as many stable ones as tell something of it."""
    lacks = []
    for judged in work.judged:
        wanted = view.judge(work, judged, work.screening).screening_runs(view.values(judged, work.screening))
        lacks.append(judged.lacking(work.screening, wanted))
    return max(lacks)


def suspected(work: CaseWork, view: View) -> frozenset[str]:
    """Names of the quantities of a screened case that have to be measured again."""
    estimates = {judged.name: screen(work, judged, view) for judged in work.judged}
    return frozenset(name for name, estimate in estimates.items() if estimate and estimate.outcome == "suspect")


def screen(work: CaseWork, judged: Judged, view: View) -> Estimate | None:
    """The first look at one quantity; None without a stable run."""
    values = view.values(judged, work.screening)
    return view.judge(work, judged, work.screening).screen(values) if values else None


def remeasured(work: CaseWork, judged: Judged, view: View) -> Estimate | None:
    """The second look; None without enough stable fresh runs."""
    values = view.values(judged, work.fresh)
    return view.judge(work, judged, work.fresh).remeasured(values) if len(values) >= MIN_FRESH else None


def paired(work: CaseWork, judged: Judged, view: View) -> Estimate | None:
    """The A/B; None without enough stable pairs."""
    pairs = view.pair_values(work, judged)
    return view.judge(work, judged).paired(pairs) if len(pairs) >= MIN_PAIRS else None


def need(work: CaseWork, view: View) -> Need:
    """What a suspect needs in all, over its suspected quantities."""
    needs = [_need_of(work, judged, view) for judged in work.judged if judged.name in work.suspected]
    return Need(runs=max(need.runs for need in needs), pairs=max(need.pairs for need in needs))


def _need_of(work: CaseWork, judged: Judged, view: View) -> Need:
    settings = view.settings_of(work)
    first, second = screen(work, judged, view), remeasured(work, judged, view)
    least = Need(runs=settings.first_runs)
    if first is None or second is None or first.effect < 0 or second.outcome in ("pass", "improved"):
        return least
    if settings.can_run_base:
        return Need(runs=settings.first_runs, pairs=_pairs_needed(work, judged, view))
    if second.outcome == "candidate" or not _more_would_help(work, judged, view, second):
        return least
    return Need(runs=settings.first_runs + settings.more_runs)


def _pairs_needed(work: CaseWork, judged: Judged, view: View) -> int:
    settings, estimate = view.settings, paired(work, judged, view)
    if estimate is not None and estimate.outcome == "inconclusive" and _more_would_help(work, judged, view, estimate):
        return settings.pairs + settings.more_pairs
    return settings.pairs


def _more_would_help(work: CaseWork, judged: Judged, view: View, estimate: Estimate) -> bool:
    """Whether the last runs could decide: let an unchanged case pass, or show what is seen now."""
    judge = view.judge(work, judged, work.fresh)
    return judge.can_clear or estimate.effect > judge.smallest_shown / 2
