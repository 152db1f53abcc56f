"""How far a case has come, what follows from it, and what it still needs."""

from __future__ import annotations

from dataclasses import dataclass

from perfsuite.gate.evidence import CaseWork
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


def screened(work: CaseWork) -> Screened | None:
    """The time of a case as the screening saw it; None without a stable run."""
    values = work.values(0, work.screening)
    if not values:
        return None
    return Screened(level=work.levels[0], values=tuple(values), yardstick_moved=yardstick_moved(work))


def yardstick_moved(work: CaseWork) -> float | None:
    """By how much the yardstick of a case moved from the stored one; None where either is missing."""
    then = work.levels[0].yardstick
    if then is None:
        return None
    now = [run.yardstick for run in work.screening if run.yardstick is not None and work.judged[0].is_stable(run)]
    return median(now) - then if now else None


def screening_runs(work: CaseWork, view: View) -> int:
    """Stable runs that the screening of a case takes."""
    return max(
        view.judge(work, index, work.screening).screening_runs(work.values(index, work.screening))
        for index in range(len(work.levels))
    )


def suspects(work: CaseWork, view: View) -> frozenset[int]:
    """Which quantities of a screened case have to be measured again, by their place."""
    estimates = {index: screen(work, index, view) for index in range(len(work.levels))}
    return frozenset(index for index, estimate in estimates.items() if estimate and estimate.outcome == "suspect")


def screen(work: CaseWork, index: int, view: View) -> Estimate | None:
    """The first look at one quantity; None without a stable run."""
    values = work.values(index, work.screening)
    return view.judge(work, index, work.screening).screen(values) if values else None


def remeasured(work: CaseWork, index: int, view: View) -> Estimate | None:
    """The second look; None without enough stable fresh runs."""
    values = work.values(index, work.fresh)
    return view.judge(work, index, work.fresh).remeasured(values) if len(values) >= MIN_FRESH else None


def paired(work: CaseWork, index: int, view: View) -> Estimate | None:
    """The A/B; None without enough stable pairs."""
    pairs = work.pair_values(index)
    return view.judge(work, index).paired(pairs) if len(pairs) >= MIN_PAIRS else None


def need(work: CaseWork, view: View) -> Need:
    """What a suspect needs in all, over its suspected quantities."""
    needs = [_need_of(work, index, view) for index in work.suspects]
    return Need(runs=max(each.runs for each in needs), pairs=max(each.pairs for each in needs))


def _need_of(work: CaseWork, index: int, view: View) -> Need:
    settings = view.settings_of(work)
    first, second = screen(work, index, view), remeasured(work, index, view)
    least = Need(runs=settings.first_runs)
    if first is None or second is None or first.effect < 0 or second.outcome in ("pass", "improved"):
        return least
    if settings.can_run_base:
        return Need(runs=settings.first_runs, pairs=_pairs_needed(work, index, view))
    if second.outcome == "candidate" or not _more_would_help(work, index, view, second):
        return least
    return Need(runs=settings.first_runs + settings.more_runs)


def _pairs_needed(work: CaseWork, index: int, view: View) -> int:
    settings, estimate = view.settings, paired(work, index, view)
    if estimate is not None and estimate.outcome == "inconclusive" and _more_would_help(work, index, view, estimate):
        return settings.pairs + settings.more_pairs
    return settings.pairs


def _more_would_help(work: CaseWork, index: int, view: View, estimate: Estimate) -> bool:
    """Whether the last runs could decide: let an unchanged case pass, or show what is seen now."""
    found = view.judge(work, index, work.fresh)
    return found.can_clear or estimate.effect > found.smallest_shown / 2
