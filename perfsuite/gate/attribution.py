"""The finding on one quantity: is it worse, and whose doing is it.

Two questions are asked of a suspect.  *Change*: is it slower than the base, both measured now?  *Level*: is it slower
than the stored runs?  A level that is worse where the base is not is never put down to the host without a control that
moved along; the commit that the stored runs name, measured now as well, is the decisive one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from perfsuite.base.units import percent, plural
from perfsuite.gate.control import Moved, Says
from perfsuite.gate.disturbed import UNSTABLE_RUNS, of_all_samples, unstable
from perfsuite.gate.estimate import Estimate
from perfsuite.gate.growth import growth
from perfsuite.gate.judge import ENOUGH_SESSIONS
from perfsuite.gate.quantity import ALL
from perfsuite.gate.question import Question, flagged
from perfsuite.gate.stages import MIN_PAIRS, control_moved, level_moved, why_no_anchor
from perfsuite.record.verdict import Finding, VerdictName

SHIFT_LIMIT = 0.1
"""Shift of the suite, a logarithm, beyond which no case fails without an A/B: cases feel a host differently."""
_SMALL = "the level may be worse by less than would show"


def finding(asked: Question) -> Finding:
    """What one quantity says, from the last stage that it reached."""
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
    if asked.settings.can_run_base and asked.change is not None:
        return _with_base(asked, asked.level, asked.change)
    return _without_base(asked, asked.level)


def _unsettled(asked: Question, first: Estimate) -> Finding:
    """Suspected and not measured again."""
    if len(asked.work.fresh) >= UNSTABLE_RUNS:
        return unstable(asked, len(asked.work.fresh), "further ")
    remeasures = asked.view.settings.remeasure
    if first.effect < 0 and not remeasures:
        return flagged(asked.shown(first, "pass"), "seems faster; --perf-gate measures again")
    why = "suspected and not measured again" + ("" if remeasures else "; --perf-gate does")
    return replace(asked.shown(first, "inconclusive"), reasons=(why,))


def _with_base(asked: Question, level: Estimate, change: Estimate) -> Finding:
    """What the A/B with the base says, and where it clears the code, what the stored level says beside it.

    Slower than the base, or than the stored commit, is slower whatever the level says: the host may be faster today.
    """
    if change.outcome == "regressed":
        return replace(asked.shown(change, "regressed", asked.work.pairs), confirmed=True)
    anchor = asked.since_anchor
    if anchor is not None and asked.view.judge(asked.work, asked.judged).is_sure(anchor):
        return _drifted(asked, anchor)
    if level.effect < 0:
        return _faster(asked, level)
    if level_moved(asked.work, asked.judged, asked.view):
        return _moved(asked)
    if level.outcome == "pass":
        return _resting_on_shift(asked, asked.shown(level, "pass"), level)
    cleared = change.outcome in ("pass", "improved")
    shown = asked.shown(change, "pass" if cleared else "inconclusive", asked.work.pairs)
    return flagged(shown, _SMALL) if cleared else shown


def _drifted(asked: Question, anchor: Estimate) -> Finding:
    """The stored commit, measured now, is faster: the code drifted."""
    shown = asked.shown(anchor, "drifted", asked.anchor_pairs)
    why = f"not slower than the base by more than the tolerance, slower than {asked.anchor_name}: the code drifted"
    return replace(shown, confirmed=True, reasons=(why, *growth(asked.work, asked.judged, asked.view)))


def _faster(asked: Question, level: Estimate) -> Finding:
    """Faster than stored: an improvement where the base or the stored commit, measured now, is slower."""
    if level.outcome != "improved":
        return asked.shown(level, "pass" if level.outcome == "pass" else "inconclusive")
    for found, pairs in ((asked.change, asked.work.pairs), (asked.since_anchor, asked.anchor_pairs)):
        if found is not None and found.outcome == "improved":
            return _improved(replace(asked.shown(found, "improved", pairs), confirmed=True))
    why = "faster than stored; neither the base nor the stored commit, measured now, is slower: the host may be faster"
    return flagged(asked.shown(level, "pass"), why)


def _improved(shown: Finding) -> Finding:
    return flagged(shown, "a second session of the machine that finds the same begins a new epoch")


def _moved(asked: Question) -> Finding:
    """The level is worse, and neither the base nor the stored commit shows why."""
    today = _all_of_today(asked)
    judge = asked.view.judge(asked.work, asked.judged, asked.work.fresh)
    estimate = judge.remeasured(today)
    if judge.is_surely_worse(today, expected=bool(asked.work.given.environment_changes)):
        return _attributed(asked, asked.shown(estimate, "drifted"), estimate)
    cleared = judge.excludes(estimate.effect, estimate.error)
    shown = asked.shown(estimate, "pass" if cleared else "inconclusive")
    return flagged(shown, _SMALL) if cleared else shown


def _all_of_today(asked: Question) -> list[float]:
    """Values of the new code in every stage after the screening; of the stored commit too, where it is as slow."""
    work = asked.work
    runs = [*work.fresh, *(new for _, new in (*work.pairs, *work.anchor_pairs))]
    if asked.since_anchor is not None and asked.since_anchor.outcome == "pass":
        runs += [anchor for anchor, _ in asked.anchor_pairs]
    return asked.view.values(asked.judged, runs)


def _attributed(asked: Question, shown: Finding, estimate: Estimate) -> Finding:
    """Worse than stored, and what runs the same code is worse as well, or cannot be run: whose doing it is."""
    work, changes = asked.work, asked.work.given.environment_changes
    told = f"slower than stored; {_controls(asked)}"
    control = _control_of(asked)
    if control is not None:
        says = control.says(estimate.effect + asked.view.known(asked.judged)[0].shift, math.log1p(shown.tolerance))
        if says != "code":
            name: VerdictName = "unstable-host" if says == "host" else "inconclusive"
            return replace(shown, name=name, reasons=(f"{told}; {_control_told(control, says)}",))
    if changes:
        why = f"{told}; different from the stored runs: {', '.join(changes)}"
        return replace(shown, name="environment", reasons=(why,))
    why = f"(unattributed) {told}; no control moved along"
    return replace(shown, reasons=(why, *growth(work, asked.judged, asked.view)))


def _control_of(asked: Question) -> Moved | None:
    """How far the control moved that was timed beside the runs which decide."""
    work = asked.work
    runs = [*work.fresh, *(new for _, new in (*work.pairs, *work.anchor_pairs))]
    return control_moved(work, asked.judged, runs, asked.view.today.yardstick_shift)


def _control_told(control: Moved, says: Says) -> str:
    if control.amount is None:
        return f"nothing tells the host from the code: {control.why}"
    told = f"the yardstick moved by {percent(math.expm1(control.amount), signed=True)}"
    if says == "host":
        return f"{told}: the host has drifted"
    return f"{told} ({control.why}), which may explain it: a case and its yardstick lie as far apart now and then"


def _controls(asked: Question) -> str:
    """What the base and the stored commit say."""
    if not asked.settings.can_run_base:
        return asked.work.no_base or "no base was run"
    if asked.since_anchor is not None and asked.since_anchor.effect > math.log1p(asked.tolerance):
        return f"as slow as the base; {asked.anchor_name}, which the stored runs name, is not surely faster"
    if asked.since_anchor is not None:
        return f"as slow as the base and as {asked.anchor_name}, which the stored runs name"
    return f"as slow as the base; the stored commit was not run: {why_no_anchor(asked.work, asked.view)}"


def _without_base(asked: Question, level: Estimate) -> Finding:
    """What the re-measurement says where no A/B was run."""
    if level.outcome == "pass":
        return _resting_on_shift(asked, asked.shown(level, "pass"), level)
    if level.outcome == "improved":
        return _improved(flagged(asked.shown(level, "improved"), "unconfirmed: no A/B was run"))
    if asked.judged.is_secondary and asked.view.known(asked.judged)[0].unexplained:
        why = f"{asked.judged.name} is slower in the whole suite: the host or the code; --perf-base would tell"
        return replace(asked.shown(level, "inconclusive"), reasons=(why,))
    why = "the noise forbids a verdict"
    if level.outcome == "candidate" and asked.settings.can_run_base:
        why = f"slower, and not confirmed: {_pairs_told(asked)}"
    elif level.outcome == "candidate":
        own = asked.judged.quantity.is_own
        shift = asked.view.known(asked.judged)[0].shift if own else asked.view.today.shift
        if abs(shift) <= SHIFT_LIMIT:
            return _regressed_unconfirmed(asked, level)
        why = "slower, but the suite has shifted so far that only an A/B could confirm (--perf-base)"
    return replace(asked.shown(level, "inconclusive"), reasons=(why,))


def _pairs_told(asked: Question) -> str:
    if not asked.work.pairs:
        return "the A/B was not run"
    stable = len(asked.judged.pair_values(asked.work.pairs))
    return f"{stable} of {plural(len(asked.work.pairs), 'A/B pair')} stable, {MIN_PAIRS} are needed"


def _regressed_unconfirmed(asked: Question, level: Estimate) -> Finding:
    """Slower than stored, and no base to ask: an environment or a host that changed as well is named first."""
    name: VerdictName = "regressed"
    other = _attributed(asked, asked.shown(level, name), level)
    if other.name != name:
        return other
    flags = [f"unconfirmed: {asked.work.no_base or 'no base to run'}"]
    sessions = asked.judged.level.sessions
    if sessions < ENOUGH_SESSIONS:
        flags.append(f"the baseline is of {plural(sessions, 'session')}: build it from {ENOUGH_SESSIONS} or more")
    reasons = growth(asked.work, asked.judged, asked.view)
    return flagged(replace(other, confirmed=False, reasons=reasons), *flags)


def _resting_on_shift(asked: Question, shown: Finding, estimate: Estimate) -> Finding:
    """Take back a pass that is one only because the whole suite is slower, when nothing tells that it is the host."""
    unexplained = asked.view.today.unexplained
    if shown.name != "pass" or unexplained <= math.log1p(asked.view.settings.tolerance):
        return shown
    whole = estimate.effect + unexplained
    judge = asked.view.judge(asked.work, asked.judged)
    if whole <= math.log1p(shown.tolerance) and judge.excludes(whole, estimate.error):
        return shown
    told = percent(math.expm1(whole), signed=True)
    why = f"{told} against the stored runs, and so is the whole suite, which is slower and judged as one"
    as_stored = asked.shown(replace(estimate, effect=whole), "inconclusive")
    level = shown.level and replace(shown.level, change=math.expm1(whole), interval=as_stored.interval or (0.0, 0.0))
    return replace(as_stored, level=level, reasons=(why,))
