"""From what came in for a case to its findings and its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from perfsuite.baselines.runs import TELEMETRY_UNKNOWN
from perfsuite.gate.evidence import CaseWork, Judged
from perfsuite.gate.exact import exact_findings
from perfsuite.gate.judge import ENOUGH_SESSIONS, Estimate
from perfsuite.gate.stages import MIN_PAIRS, paired, remeasured
from perfsuite.gate.verdict import Finding, Verdict, percent
from perfsuite.gate.view import View
from perfsuite.records import VerdictName
from perfsuite.units import plural

_ORDER: tuple[VerdictName, ...] = ("regressed", "unstable-host", "inconclusive", "improved", "pass")
"""The worst first: a case is what its worst quantity is."""
SHIFT_LIMIT = 0.1
"""Shift of the suite, a logarithm, beyond which no case fails without an A/B: cases feel a host differently."""
NOISY = 2.0
"""Variance inside the session, over that of stored runs, from which on a reader is told."""
_UNSTABLE_RUNS = 3


def verdict(work: CaseWork, view: View) -> Verdict:
    """What can be said about a case now."""
    given = work.given
    blank = Verdict(
        case=work.node,
        name="inconclusive",
        runs=len(work.runs),
        pairs=len(work.pairs),
        stored_runs=len(given.stored),
        stored_sessions=len({run.session for run in given.stored}),
        reasons=given.reasons,
        flags=(*given.flags, *work.flags, *_run_flags(work)),
        soft_differences=given.soft_differences,
    )
    early = _uncompared(work, blank) or _memory(work, blank)
    if early is not None:
        return early
    exact = exact_findings(given.stored, work.runs, given.case.metrics, given.metric_tolerances)
    if work.learnt is not None:
        return _learning(blank, exact, work.learnt, view)
    statistical = [_finding(work, judged, view) for judged in work.judged]
    return _worst(blank, [*statistical, *exact], work.withdrawn)


def _worst(blank: Verdict, findings: Sequence[Finding], withdrawn: str) -> Verdict:
    ordered = tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.name)))
    worst = ordered[0]
    reasons = (*blank.reasons, *worst.reasons)
    if withdrawn and worst.name in ("inconclusive", "unstable-host"):
        reasons = (*reasons, withdrawn)
    flags = (*blank.flags, *(flag for finding in ordered for flag in finding.flags))
    return replace(blank, name=worst.name, findings=ordered, reasons=reasons, flags=tuple(dict.fromkeys(flags)))


def _run_flags(work: CaseWork) -> list[str]:
    flags = []
    if any(run.process == "reused" for run in work.runs):
        flags.append("processes were reused; stored runs had fresh ones")
    if any(run.disturbance == TELEMETRY_UNKNOWN for run in work.runs):
        flags.append("telemetry unknown: throttling would not be seen")
    if work.judged and not work.time.quantity.clean_only:
        flags.append("no clean samples: all samples are compared")
    return flags


def _uncompared(work: CaseWork, blank: Verdict) -> Verdict | None:
    """The verdict of a case that nothing is or can be compared of; None for the others."""
    given = work.given
    if work.impossible:
        return replace(blank, name="impossible", reasons=tuple(dict.fromkeys(work.impossible)))
    if given.refusal:
        return replace(blank, name=given.refusal)
    if not given.stored:
        return replace(blank, name="no-baseline", reasons=(*blank.reasons, "nothing is stored for it"))
    if not work.runs:
        return replace(blank, reasons=(*blank.reasons, work.withdrawn or "it has not been measured"))
    return None


def _memory(work: CaseWork, blank: Verdict) -> Verdict | None:
    """The verdict of a case that does or did not fit into memory; None when all its runs fitted."""
    fitted = [run for run in work.given.stored if run.outcome == "measured"]
    name: VerdictName = "pass"
    why = "out of memory, as stored"
    if work.ran_out and fitted:
        name, why = "regressed", f"out of memory, where {plural(len(fitted), 'stored run')} fitted"
    elif not work.ran_out and not fitted:
        name, why = "improved", "it fits into memory now; the stored runs did not"
    elif not work.ran_out:
        return None
    finding = Finding(
        quantity="memory",
        name=name,
        tolerance=0.0,
        exact=True,
        confirmed=True if name == "regressed" else None,
        reasons=(why,),
    )
    return replace(blank, name=name, findings=(finding,), reasons=(*blank.reasons, why))


def _learning(blank: Verdict, exact: Sequence[Finding], learnt: int, view: View) -> Verdict:
    worse = [finding for finding in exact if finding.name == "regressed"]
    if worse:
        return replace(blank, name="regressed", findings=tuple(worse), reasons=worse[0].reasons)
    why = f"{learnt} of the {view.settings.min_stored} usable stored runs that a comparison needs"
    return replace(blank, name="learning", findings=tuple(exact), reasons=(*blank.reasons, why))


def _finding(work: CaseWork, judged: Judged, view: View) -> Finding:
    """What one quantity says, from the last stage that it reached."""
    tolerance = judged.quantity.tolerance
    judge, values = view.judge(work, judged, work.screening), view.values(judged, work.screening)
    if not values:
        blank = Finding(quantity=judged.name, name="inconclusive", tolerance=tolerance)
        return _unstable(blank, len(work.screening), "")
    first = judge.screen(values)
    shown = view.judge(work, judged, work.runs).smallest_shown if work.fresh else judge.smallest_shown
    blank = Finding(quantity=judged.name, name="inconclusive", tolerance=tolerance, mde=math.expm1(shown))
    second = remeasured(work, judged, view)
    if judged.name not in work.suspected and first.outcome != "suspect":
        name: VerdictName = "pass" if first.outcome == "pass" else "inconclusive"
        return _resting_on_shift(_shown(blank, first, name, view), first, view)
    if second is None:
        return _unsettled(work, blank, first, view)
    confirmation = paired(work, judged, view)
    if confirmation is not None and first.effect > 0 and second.outcome not in ("pass", "improved"):
        return _confirmed(blank, confirmation, view)
    return _unconfirmed(work, judged, blank, second, view)


def _unstable(blank: Finding, runs: int, further: str) -> Finding:
    why = f"{runs} of {runs} {further}runs unstable: too few clean samples, or a disturbed device"
    return replace(blank, name="unstable-host" if runs >= _UNSTABLE_RUNS else "inconclusive", reasons=(why,))


def _unsettled(work: CaseWork, blank: Finding, first: Estimate, view: View) -> Finding:
    """Suspected and not measured again."""
    if len(work.fresh) >= _UNSTABLE_RUNS:
        return _unstable(blank, len(work.fresh), "further ")
    if first.effect < 0 and not view.settings.remeasure:
        return _flagged(_shown(blank, first, "pass", view), "seems faster; --perf-gate measures again")
    why = "suspected and not measured again" + ("" if view.settings.remeasure else "; --perf-gate does")
    return replace(_shown(blank, first, "inconclusive", view), reasons=(why,))


def _confirmed(blank: Finding, estimate: Estimate, view: View) -> Finding:
    """What the A/B says; the host's shift plays no part in it."""
    if estimate.outcome == "regressed":
        return replace(_shown(blank, estimate, "regressed", view), confirmed=True)
    if estimate.outcome == "pass":
        shown = _shown(blank, estimate, "pass", view)
        return _flagged(shown, "slower than stored, not slower than the base: the host has drifted")
    return _shown(blank, estimate, "inconclusive", view)


def _unconfirmed(work: CaseWork, judged: Judged, blank: Finding, estimate: Estimate, view: View) -> Finding:
    """What the re-measurement says where no A/B was run."""
    if estimate.outcome == "pass":
        return _resting_on_shift(_shown(blank, estimate, "pass", view), estimate, view)
    if estimate.outcome == "improved":
        return _flagged(_shown(blank, estimate, "improved", view), "the baseline is stale: --perf-update=improved")
    why = "the noise forbids a verdict"
    if estimate.outcome == "candidate":
        if not view.settings_of(work).can_run_base and abs(view.today.shift) <= SHIFT_LIMIT:
            return _regressed_unconfirmed(work, judged, _shown(blank, estimate, "regressed", view))
        why = f"slower, and not confirmed: {_pairs_told(work, judged)}"
        if not view.settings_of(work).can_run_base:
            why = "slower, but the host has shifted so far that only an A/B could confirm (--perf-base)"
    return replace(_shown(blank, estimate, "inconclusive", view), reasons=(why,))


def _pairs_told(work: CaseWork, judged: Judged) -> str:
    if not work.pairs:
        return "the A/B was not run"
    stable = len(judged.pair_values(work.pairs))
    return f"{stable} of {plural(len(work.pairs), 'A/B pair')} stable, {MIN_PAIRS} are needed"


def _regressed_unconfirmed(work: CaseWork, judged: Judged, finding: Finding) -> Finding:
    flags = [f"unconfirmed: {work.no_base or 'no base to run'}"]
    sessions = judged.level.sessions
    if sessions < ENOUGH_SESSIONS:
        flags.append(f"the baseline is of {plural(sessions, 'session')}: build it from {ENOUGH_SESSIONS} or more")
    return _flagged(replace(finding, confirmed=False), *flags)


def _shown(blank: Finding, estimate: Estimate, name: VerdictName, view: View) -> Finding:
    """A finding with its effect, its interval and the flags that every finding may have."""
    low, high = estimate.interval()
    flags = []
    if blank.mde is not None and blank.mde > blank.tolerance * 1.0001:
        flags.append(f"not gateable at {percent(blank.tolerance)}: only a change of {percent(blank.mde)} would show")
    if view.settings.in_place:
        flags.append("settled in place: the suite's shift is not known and 0 is used")
    return Finding(
        quantity=blank.quantity,
        name=name,
        tolerance=blank.tolerance,
        mde=blank.mde,
        effect=math.expm1(estimate.effect),
        interval=(math.expm1(low), math.expm1(high)),
        reasons=("the noise forbids a verdict",) if name == "inconclusive" else (),
        flags=tuple(flags),
    )


def _flagged(finding: Finding, *flags: str) -> Finding:
    return replace(finding, flags=(*finding.flags, *flags))


def _resting_on_shift(finding: Finding, estimate: Estimate, view: View) -> Finding:
    """Take back a pass that is one only because the whole suite is slower, when nothing tells why it is."""
    accepted = math.log1p(view.settings.tolerance)
    whole = estimate.effect + view.today.unexplained
    if finding.name != "pass" or view.today.unexplained <= accepted or whole <= math.log1p(finding.tolerance):
        return finding
    why = (
        f"it is {percent(math.expm1(whole))} slower and so is the whole suite: the host or the code; "
        "--perf-base or a yardstick would tell"
    )
    return replace(finding, name="inconclusive", reasons=(why,))


def banner(view: View) -> tuple[str, ...]:
    """What a reader must know about the session as a whole."""
    said = []
    shift = view.today.shift
    if abs(shift) > math.log1p(view.settings.tolerance):
        word = "slower" if shift > 0 else "faster"
        line = f"host shifted: the whole suite is {percent(abs(math.expm1(shift)))} {word} than its baseline"
        if view.today.unexplained > 0:
            line += "; the host or the code, nothing measured tells which"
        line += "; this is taken off every case"
        said.append(f"{line}, and a failure needs an A/B" if abs(shift) > SHIFT_LIMIT else line)
    if view.shares.usual > NOISY:
        said.append(f"the host is {math.sqrt(view.shares.usual):.2g} times as noisy as when the baseline was taken")
    return tuple(said)
