"""The finding on one quantity: whether it is worse, and whether the code, the host or the environment is the cause.

A suspect has two tests.  *Change*: is it slower than the base, both measured now?  *Level*: is it slower than the
stored runs?  If only the level is worse, the host is blamed only if a control is slower too; the commit of the stored
runs, measured now, decides.

Comparing only clean samples must not hide a regression.  Spinning threads interrupt a rank, and the samples that they
slow would not be compared.  If clearly more samples are disturbed than in the stored runs, all samples are compared
too. A busy host disturbs samples as well; the base or the yardstick of the same samples separates the two causes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from perfsuite.base.units import percent, plural
from perfsuite.gate.evidence import CaseWork
from perfsuite.gate.judge import ENOUGH_SESSIONS
from perfsuite.gate.noise import STEEPEST
from perfsuite.gate.question import MIN_PAIRS, Question, flagged
from perfsuite.gate.shift import WAITS, Estimate, Moved, Says, comparable, explains, waited
from perfsuite.record.verdict import ALL, Finding, VerdictName
from perfsuite.statistics.robust import MAD_TO_SIGMA, median

SHIFT_LIMIT = 0.1
"""Shift of the suite (ln) above which no case fails without an A/B: host noise affects cases differently."""
UNSTABLE_RUNS = 3
"""Runs without enough clean samples after which the host is called unstable.  Row: silence 8, no clean samples."""
SCATTER = 3.0
"""Standard deviations above the stored runs that a run without clean samples must have.  Row: silence 8."""
_SMALL = "the level may be worse by less than would show"


def finding(asked: Question) -> Finding:
    """Return the finding on one quantity, from the last stage that it reached."""
    work, first = asked.work, asked.screened
    if asked.judged.name == ALL:
        return of_all_samples(asked)
    if first is None:
        return unstable(asked, len(work.screening), "")
    if asked.judged.name not in work.suspected and first.outcome != "suspect":
        return _resting_on_shift(
            asked, asked.shown(first, "pass" if first.outcome == "pass" else "inconclusive"), first
        )
    if asked.level is None:
        return _unsettled(asked, first)
    if asked.work.settings.can_run_base and asked.change is not None:
        return _with_base(asked, asked.level, asked.change)
    return _without_base(asked, asked.level)


def _unsettled(asked: Question, first: Estimate) -> Finding:
    if len(asked.work.fresh) >= UNSTABLE_RUNS:
        return unstable(asked, len(asked.work.fresh), "further ")
    remeasures = asked.view.settings.remeasure
    if first.effect < 0 and not remeasures:
        return flagged(asked.shown(first, "pass"), "seems faster; --perf-gate measures again")
    why = "suspected and not measured again" + ("" if remeasures else "; --perf-gate does")
    return replace(asked.shown(first, "inconclusive"), reasons=(why,))


def _with_base(asked: Question, level: Estimate, change: Estimate) -> Finding:
    """Return the finding of the A/B with the base; if it clears the code, the stored level decides.  A case that is
    slower than the base or the stored commit is slower at any level: the host may be faster today.
    """
    if change.outcome == "regressed":
        return replace(asked.shown(change, "regressed", asked.work.pairs), confirmed=True)
    anchor = asked.since_anchor
    if anchor is not None and asked.judge().is_sure(anchor):
        return _drifted(asked, anchor)
    if level.effect < 0:
        return _faster(asked, level)
    if asked.level_moved:
        return _moved(asked)
    if level.outcome == "pass":
        return _resting_on_shift(asked, asked.shown(level, "pass"), level)
    cleared = change.outcome in ("pass", "improved")
    shown = asked.shown(change, "pass" if cleared else "inconclusive", asked.work.pairs)
    return flagged(shown, _SMALL) if cleared else shown


def _drifted(asked: Question, anchor: Estimate) -> Finding:
    shown = asked.shown(anchor, "drifted", asked.work.stored_commit_pairs)
    why = f"not slower than the base by more than the tolerance, slower than {asked.anchor_name}: the code drifted"
    return replace(shown, confirmed=True, reasons=(why, *growth(asked)))


def _faster(asked: Question, level: Estimate) -> Finding:
    """Return the finding on a faster level: improved if the base or the stored commit, measured now, is slower."""
    if level.outcome != "improved":
        return asked.shown(level, "pass" if level.outcome == "pass" else "inconclusive")
    for found, pairs in ((asked.change, asked.work.pairs), (asked.since_anchor, asked.work.stored_commit_pairs)):
        if found is not None and found.outcome == "improved":
            return _improved(replace(asked.shown(found, "improved", pairs), confirmed=True))
    why = "faster than stored; neither the base nor the stored commit, measured now, is slower: the host may be faster"
    return flagged(asked.shown(level, "pass"), why)


def _improved(shown: Finding) -> Finding:
    return flagged(shown, "a second session of the machine that finds the same begins a new epoch")


def _moved(asked: Question) -> Finding:
    """Return the finding on a worse level if neither the base nor the stored commit explains it."""
    today = _all_of_today(asked)
    judge = asked.judge(asked.work.fresh)
    estimate = judge.remeasured(today)
    if judge.is_surely_worse(today, expected=bool(asked.work.gate_case.environment_changes)):
        return _attributed(asked, asked.shown(estimate, "drifted"), estimate)
    cleared = judge.excludes(estimate.effect, estimate.error)
    shown = asked.shown(estimate, "pass" if cleared else "inconclusive")
    return flagged(shown, _SMALL) if cleared else shown


def _all_of_today(asked: Question) -> list[float]:
    """Return the values of the new code after the screening, and of the stored commit if it is as slow."""
    work = asked.work
    runs = [*work.fresh, *(new for _, new in (*work.pairs, *work.anchor_pairs))]
    if asked.since_anchor is not None and asked.since_anchor.outcome == "pass":
        runs += [anchor for anchor, _ in asked.work.stored_commit_pairs]
    return asked.values(runs)


def _attributed(asked: Question, shown: Finding, estimate: Estimate) -> Finding:
    work, changes = asked.work, asked.work.gate_case.changes
    slower = f"slower than stored; {_controls(asked)}"
    control = asked.control([*work.fresh, *(new for _, new in (*work.pairs, *work.anchor_pairs))])
    if control is not None:
        says = control.says(estimate.effect + asked.context[0].shift, math.log1p(shown.tolerance))
        if says != "code":
            name: VerdictName = "unstable-host" if says == "host" else "inconclusive"
            return replace(shown, name=name, reasons=(f"{slower}; {_control_reason(control, says)}",))
    if changes:
        why = f"{slower}; different from the stored runs: {', '.join(changes)}"
        return replace(shown, name="environment", reasons=(why,))
    why = f"(unattributed) {slower}; no control moved along"
    return replace(shown, reasons=(why, *growth(asked)))


def _control_reason(control: Moved, says: Says) -> str:
    if control.amount is None:
        return f"the cause may be the host or the code: {control.why}"
    moved = _host_moved(control.amount, by_waits=control.why == WAITS)
    if says == "host":
        return f"{moved}: the host has drifted"
    return f"{moved} ({control.why}), which may explain it: a case and its yardstick lie as far apart now and then"


def _host_moved(amount: float, *, by_waits: bool) -> str:
    change = percent(math.expm1(amount), signed=True)
    return f"longer waits for a core explain {change}" if by_waits else f"the yardstick moved by {change}"


def _controls(asked: Question) -> str:
    if not asked.work.settings.can_run_base:
        return asked.work.no_base or "no base was run"
    if asked.since_anchor is not None and asked.since_anchor.effect > math.log1p(asked.tolerance):
        return f"as slow as the base; {asked.anchor_name}, which the stored runs name, is not surely faster"
    if asked.since_anchor is not None:
        return f"as slow as the base and as {asked.anchor_name}, which the stored runs name"
    return f"as slow as the base; the stored commit was not run: {asked.work.why_no_anchor}"


def _without_base(asked: Question, level: Estimate) -> Finding:
    if level.outcome == "pass":
        return _resting_on_shift(asked, asked.shown(level, "pass"), level)
    if level.outcome == "improved":
        return _improved(flagged(asked.shown(level, "improved"), "unconfirmed: no A/B was run"))
    if asked.judged.is_secondary and asked.context[0].unexplained:
        why = f"{asked.judged.name} is slower in the whole suite: the host or the code; --perf-against decides"
        return replace(asked.shown(level, "inconclusive"), reasons=(why,))
    why = "the noise forbids a verdict"
    if level.outcome == "candidate" and asked.work.settings.can_run_base:
        made = len(asked.work.pairs)
        stable = f"{len(asked.judged.pair_values(asked.work.pairs))} of {plural(made, 'A/B pair')} stable"
        why = f"slower, and not confirmed: {f'{stable}, {MIN_PAIRS} are needed' if made else 'the A/B was not run'}"
    elif level.outcome == "candidate":
        own = asked.judged.quantity.is_own
        shift = asked.context[0].shift if own else asked.view.today.shift
        if abs(shift) <= SHIFT_LIMIT:
            return _regressed_unconfirmed(asked, level)
        why = "slower, but the suite has shifted so far that only an A/B could confirm (--perf-against)"
    return replace(asked.shown(level, "inconclusive"), reasons=(why,))


def _regressed_unconfirmed(asked: Question, level: Estimate) -> Finding:
    """Return the finding on a slower level without a base; a changed environment or host is reported first."""
    other = _attributed(asked, asked.shown(level, "regressed"), level)
    if other.name != "regressed":
        return other
    flags = [f"unconfirmed: {asked.work.no_base or 'no base to run'}"]
    sessions = asked.judged.level.sessions
    if sessions < ENOUGH_SESSIONS:
        flags.append(f"the baseline is of {plural(sessions, 'session')}: build it from {ENOUGH_SESSIONS} or more")
    return flagged(replace(other, confirmed=False, reasons=growth(asked)), *flags)


def _resting_on_shift(asked: Question, shown: Finding, estimate: Estimate) -> Finding:
    """Withdraw a pass that holds only because the whole suite is slower, unless the host is known to be the cause."""
    unexplained = asked.view.today.unexplained
    if shown.name != "pass" or unexplained <= math.log1p(asked.view.settings.tolerance):
        return shown
    whole = estimate.effect + unexplained
    judge = asked.judge()
    if whole <= math.log1p(shown.tolerance) and judge.excludes(whole, estimate.error):
        return shown
    change = percent(math.expm1(whole), signed=True)
    why = f"{change} against the stored runs, and so is the whole suite, which is slower and judged as one"
    as_stored = asked.shown(replace(estimate, effect=whole), "inconclusive")
    level = shown.level and replace(shown.level, change=math.expm1(whole), interval=as_stored.interval or (0.0, 0.0))
    return replace(as_stored, level=level, reasons=(why,))


def growth(asked: Question) -> tuple[str, ...]:
    """Return a phrase with the stored commits around the largest step of a level that left its reference.  Empty
    without stored runs newer than the reference that have a commit.
    """
    work, judged = asked.work, asked.judged
    anchor, values = work.gate_case.anchor, dict[str, list[float]]()
    for run in work.gate_case.newest:
        if run.commit and run.commit != anchor:
            values.setdefault(run.commit, []).extend(judged.values([run]))
    steps = [(commit, median(own) - judged.level.centre) for commit, own in values.items() if own]
    if not steps:
        return ()
    now = asked.values(work.runs)
    last = median(now) - judged.level.centre if now else steps[-1][1]
    path = [(anchor, 0.0), *steps, ("this run", last)]
    before, after = max(itertools.pairwise(path), key=lambda pair: pair[1][1] - pair[0][1])
    first, then, whole = (
        percent(math.expm1(judged.quantity.sign * away), signed=True) for away in (before[1], after[1], last)
    )
    step = f"from {first} at {before[0][:10]} to {then} at {after[0][:10]}"
    return (
        f"{whole} since the reference ({anchor[:10]}), over {len(steps)} stored commits; the largest step is {step}",
    )


def of_all_samples(asked: Question) -> Finding:
    """Return the finding on all samples, if clearly more are disturbed than in the stored runs and look slower."""
    level, change = asked.level, asked.change
    if change is not None and asked.work.settings.can_run_base:
        if change.outcome == "regressed":
            return replace(asked.shown(change, "regressed", asked.work.pairs), confirmed=True)
        cleared = change.outcome in ("pass", "improved")
        shown = asked.shown(change, "pass" if cleared else "inconclusive", asked.work.pairs)
        return flagged(shown, "more samples are disturbed than stored, with the base too") if cleared else shown
    estimate = level or asked.screened
    assert estimate is not None, "it looked slower, so there is a run"
    if level is not None and level.outcome in ("pass", "improved"):
        return asked.shown(level, "pass")
    yardsticks = [yardstick for _, yardstick in _apparent(asked.work) if yardstick is not None]
    moved = median(yardsticks) if yardsticks else None
    if moved is not None and explains(estimate.effect, moved, math.log1p(asked.tolerance)):
        by_waits = waited(asked.work.gate_case.stored, asked.work.runs) >= moved
        why = f"more samples are disturbed, and {_host_moved(moved, by_waits=by_waits)}"
        return flagged(asked.shown(estimate, "pass"), why)
    return replace(asked.shown(estimate, "inconclusive"), reasons=(_both_figures(asked, estimate.effect),))


def _both_figures(asked: Question, effect: float) -> str:
    clean = Question(work=asked.work, judged=asked.work.time, view=asked.view)
    estimate = clean.level or clean.screened
    clean_text = f"clean ones {percent(math.expm1(estimate.effect), signed=True)}" if estimate else "too few are clean"
    runs = asked.work.runs
    samples, disturbed = sum(run.samples for run in runs), sum(run.samples - run.clean for run in runs)
    return (
        f"all samples {percent(math.expm1(effect), signed=True)}, {clean_text}; {disturbed} of {samples} samples "
        "disturbed, clearly more than stored: the host or the code; --perf-against decides"
    )


def unstable(asked: Question, runs: int, further: str) -> Finding:
    """Return the finding on runs without enough clean samples, from all samples and their yardstick."""
    blank = asked.blank
    cause = next((run.disturbance for run in asked.work.runs if run.is_disturbed), "too few clean samples")
    held = [run.throttled for run in asked.work.runs if asked.judged.quantity.is_held_back(run)]
    if held:
        cause = f"the CPU quota held the ranks back in {median(held):.0%} of its periods, and not in the stored runs"
    why = f"{runs} of {runs} {further}runs unstable: {cause}"
    if runs < UNSTABLE_RUNS:
        return replace(blank, name="inconclusive", reasons=(why,))
    changes = _apparent(asked.work)
    if not changes:
        return replace(blank, name="unstable-host", reasons=(why,))
    effect = median([change for change, _ in changes])
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


def _is_slower(asked: Question, changes: Sequence[tuple[float, float | None]], *, beside_yardstick: bool) -> bool:
    """Return whether every run is slower by more than a pass may hide, after subtraction of its yardstick if asked."""
    stored = [math.log(run.median_s) for run in asked.work.gate_case.stored if run.quantiles_s]
    centre = median(stored)
    scatter = SCATTER * MAD_TO_SIGMA * median([abs(value - centre) for value in stored])
    limit = max(scatter, math.log1p(asked.tolerance + asked.view.settings.blind_margin))
    if not beside_yardstick:
        return all(change > limit for change, _ in changes)
    return all(beside is not None and change - STEEPEST * max(0.0, beside) > limit for change, beside in changes)


def _apparent(work: CaseWork) -> list[tuple[float, float | None]]:
    """Return the changes (ln) of each run's samples from the stored runs, and how much its yardstick or its waits for a
    core explain.  Runs with a disturbance in the telemetry are left out; None for a yardstick that was not timed or did
    other work.
    """
    stored = [run for run in work.gate_case.stored if run.quantiles_s and not run.is_disturbed]
    if not stored:
        return []
    then, found = median([math.log(run.median_s) for run in stored]), []
    for run in work.runs:
        if run.quantiles_s and not run.is_disturbed:
            alike = [
                before for one in stored if comparable(one.control, run.control) and (before := one.yardstick_of_all)
            ]
            now = run.yardstick_of_all
            beside = None if now is None or not alike else max(now - median(alike), waited(stored, [run]))
            found.append((math.log(run.median_s) - then, beside))
    return found
