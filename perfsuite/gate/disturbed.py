"""Cases whose samples are disturbed: the clean ones alone must not make a regression vanish that disturbs the others.

Threads that spin make a rank lose its core, and take the samples that they slow out of the comparison.  Where clearly
more samples are disturbed than in the stored runs, all of them are compared as well.  A busy host disturbs samples too:
the base, run in turn with the new code, or the yardstick beside the same samples tells the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfsuite.base.units import percent
from perfsuite.baselines.runs import RunSummary
from perfsuite.gate.control import comparable, explains
from perfsuite.gate.evidence import CaseWork
from perfsuite.gate.question import Question, flagged
from perfsuite.gate.yardstick import STEEPEST
from perfsuite.record.verdict import Finding, VerdictName
from perfsuite.statistics.robust import MAD_TO_SIGMA, median

UNSTABLE_RUNS = 3
"""Runs without enough clean samples after which the host is called unstable."""
SCATTER = 3.0
"""Standard deviations of the stored runs that a run without clean samples has to lie above them."""


@dataclass(frozen=True, kw_only=True)
class Apparent:
    """All samples of one run against those of the stored runs, logarithms."""

    change: float
    """By how much its median lies above theirs."""
    yardstick: float | None
    """By how much the yardstick beside these samples does; None where it was not timed."""


def of_all_samples(asked: Question) -> Finding:
    """What all samples say, where clearly more of them are disturbed than in the stored runs and they look slower."""
    level, change = asked.level, asked.change
    if change is not None and asked.settings.can_run_base:
        if change.outcome == "regressed":
            return replace(asked.shown(change, "regressed", asked.work.pairs), confirmed=True)
        cleared = change.outcome in ("pass", "improved")
        shown = asked.shown(change, "pass" if cleared else "inconclusive", asked.work.pairs)
        return flagged(shown, "more samples are disturbed than stored, with the base too") if cleared else shown
    estimate = level or asked.screened
    assert estimate is not None, "it looked slower, so there is a run"
    if level is not None and level.outcome in ("pass", "improved"):
        return asked.shown(level, "pass")
    changes = apparent(asked.work, asked.work.runs)
    yardsticks = [look.yardstick for look in changes if look.yardstick is not None]
    moved = median(yardsticks) if yardsticks else None
    if moved is not None and explains(estimate.effect, moved, math.log1p(asked.tolerance)):
        told = percent(math.expm1(moved), signed=True)
        return flagged(asked.shown(estimate, "pass"), f"more samples are disturbed, and the yardstick moved by {told}")
    return replace(asked.shown(estimate, "inconclusive"), reasons=(_both_figures(asked, estimate.effect),))


def _both_figures(asked: Question, effect: float) -> str:
    clean = Question(work=asked.work, judged=asked.work.time, view=asked.view)
    estimate = clean.level or clean.screened
    told = f"clean ones {percent(math.expm1(estimate.effect), signed=True)}" if estimate else "too few are clean"
    runs = asked.work.runs
    samples, disturbed = sum(run.samples for run in runs), sum(run.samples - run.clean for run in runs)
    return (
        f"all samples {percent(math.expm1(effect), signed=True)}, {told}; {disturbed} of {samples} samples disturbed, "
        "clearly more than stored: the host or the code; --perf-base would tell"
    )


def unstable(asked: Question, runs: int, further: str) -> Finding:
    """Runs without enough clean samples: what all samples say, against the yardstick beside them."""
    blank = asked.blank
    told = next((run.disturbance for run in asked.work.runs if run.is_disturbed), "too few clean samples")
    held = [run.throttled for run in asked.work.runs if asked.judged.quantity.is_held_back(run)]
    if held:
        told = f"the CPU quota held the ranks back in {median(held):.0%} of its periods, and not in the stored runs"
    why = f"{runs} of {runs} {further}runs unstable: {told}"
    if runs < UNSTABLE_RUNS:
        return replace(blank, name="inconclusive", reasons=(why,))
    changes = apparent(asked.work, asked.work.runs)
    if not changes:
        return replace(blank, name="unstable-host", reasons=(why,))
    effect = median([look.change for look in changes])
    why += f"; all samples {percent(math.expm1(effect), signed=True)}"
    if len(changes) >= UNSTABLE_RUNS and _is_slower(asked, changes, beside_yardstick=not held):
        after = median([run.median_s for run in asked.work.runs if run.quantiles_s and not run.is_disturbed])
        name: VerdictName = "environment" if held else "regressed"
        shown = replace(blank, name=name, effect=math.expm1(effect), confirmed=False, reasons=(why,))
        shown = replace(shown, before=after / math.exp(effect), after=after, unit="s")
        if held:
            return shown
        return flagged(shown, "unconfirmed: no clean samples, slower even against its yardstick")
    return replace(blank, name="unstable-host", reasons=(why,))


def _is_slower(asked: Question, changes: Sequence[Apparent], *, beside_yardstick: bool) -> bool:
    """Whether every run is slower, than its yardstick explains if that is asked, by more than a pass may hide."""
    stored = [math.log(run.median_s) for run in asked.work.given.stored if run.quantiles_s]
    centre = median(stored)
    scatter = SCATTER * MAD_TO_SIGMA * median([abs(value - centre) for value in stored])
    limit = max(scatter, math.log1p(asked.tolerance + asked.view.settings.blind_margin))
    if not beside_yardstick:
        return all(look.change > limit for look in changes)
    return all(
        look.yardstick is not None and look.change - STEEPEST * max(0.0, look.yardstick) > limit for look in changes
    )


def apparent(work: CaseWork, runs: Sequence[RunSummary]) -> list[Apparent]:
    """All samples of each of these runs that telemetry did not see disturbed, against those of the stored runs."""
    stored = [run for run in work.given.stored if run.quantiles_s and not run.is_disturbed]
    then = median([math.log(run.median_s) for run in stored]) if stored else 0.0
    return [
        Apparent(change=math.log(run.median_s) - then, yardstick=_beside(stored, run))
        for run in runs
        if stored and run.quantiles_s and not run.is_disturbed
    ]


def _beside(stored: Sequence[RunSummary], run: RunSummary) -> float | None:
    alike = [then for one in stored if comparable(one.control, run.control) and (then := one.yardstick_of_all)]
    now = run.yardstick_of_all
    return None if now is None or not alike else now - median(alike)
