"""Derive findings and verdicts of cases from their runs, and the verdict on the session from all cases."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from perfsuite.base.units import percent, plural, significant
from perfsuite.baselines.runs import TELEMETRY_UNKNOWN, MetricMeaning
from perfsuite.gate.attribution import finding
from perfsuite.gate.evidence import CaseWork
from perfsuite.gate.quantity import exact_findings, is_throttled, rule_for
from perfsuite.gate.question import Question, View
from perfsuite.gate.suite import SUITE_ALPHA, Compared, SuiteShift, compared
from perfsuite.record.verdict import FAILING, Finding, GateSettings, SuiteVerdict, Verdict, VerdictName

_ORDER: tuple[VerdictName, ...] = (
    *("regressed", "drifted", "environment", "unstable-host", "inconclusive", "improved", "pass"),
)
"""The worst first: a case has the verdict of its worst quantity."""
LOUD = 3.0  # Standard deviations of a run; every change that can be shown is larger.


def verdict(work: CaseWork, view: View) -> Verdict:
    """Return the verdict on a case from its present runs."""
    gate_case = work.gate_case
    blank = Verdict(
        case=work.node,
        name="inconclusive",
        runs=len(work.runs),
        iterations=min((run.samples * run.iterations for run in work.runs if run.samples), default=None),
        pairs=len(work.pairs),
        stored_runs=len(gate_case.stored),
        stored_sessions=len({run.session for run in gate_case.stored}),
        reasons=gate_case.reasons,
        flags=(*gate_case.flags, *work.flags, *_run_flags(work)),
        soft_differences=gate_case.soft_differences,
        stored_commit=gate_case.anchor,
    )
    if early := _uncompared(work, blank) or _memory(work, blank):
        return early
    metrics, tolerances = gate_case.case.metrics, gate_case.metric_tolerances
    exact = exact_findings(gate_case.stored, work.runs, metrics, gate_case.specs, tolerances)
    exact = (*exact, *uncompared(work))
    if work.learnt is not None:
        return _learning(blank, exact, work, view)
    asked = [Question(work=work, judged=judged, view=view) for judged in work.judged]
    asked = [
        one for one in asked if one.judged.name in work.suspected or not one.judged.is_secondary or one.looks_worse
    ]
    found = [_in_its_words(_within_its_interval(finding(one), one), one) for one in asked]
    found = [_cut_short(one, work.cut_short) for one in found]
    unwatched = [*_unwatched(work, view), *unjudged(work, view.settings.min_stored)]
    return _worst(blank, [*found, *exact], work.withdrawn, unwatched)


def _in_its_words(found: Finding, asked: Question) -> Finding:
    """Return the finding with the words worse and better for an own metric, instead of slower and faster."""
    if not asked.judged.quantity.is_own:
        return found
    reasons = found.reasons
    for old, new in (("as slow as", "as bad as"), ("slower", "worse"), ("faster", "better")):
        reasons = tuple(reason.replace(old, new) for reason in reasons)
    return replace(found, reasons=reasons)


def _within_its_interval(found: Finding, asked: Question) -> Finding:
    """Withdraw a slowdown that no interval shows; report the level if only its interval shows it.  An A/B must show
    less if the re-measurement has shown the rest against the stored runs.
    """
    if found.name not in FAILING or found.interval is None or found.interval[0] > 0:
        return found
    if found.level is None or found.level.interval[0] <= 0:
        why = f"its interval contains no change: {found.name} is not shown"
        return replace(found, name="inconclusive", confirmed=None, reasons=(why, *found.reasons))
    centre, effect = asked.judged.level.centre, found.level.change
    moved = asked.judged.quantity.logarithm(effect)
    before, after = (asked.judged.plain(value) for value in (centre, centre + moved))
    return replace(found, effect=effect, interval=found.level.interval, before=before, after=after)


def _cut_short(found: Finding, why: str) -> Finding:
    """Withdraw a pass of a case that needed more runs; keep a slowdown that is already shown."""
    if not why:
        return found
    if found.name in FAILING:
        return replace(found, flags=(*found.flags, f"{why} before all runs and pairs were made"))
    name = "inconclusive" if found.name in ("pass", "improved") else found.name
    return replace(found, name=name, reasons=(f"{why} before it was decided", *found.reasons))


def _unwatched(work: CaseWork, view: View) -> list[str]:
    """Return flags for mean and tail if they are too noisy to show even a useful change."""
    flags = []
    for judged in work.judged:
        useful = math.log1p(judged.quantity.useful)
        if judged.is_secondary and LOUD * judged.level.sigma > useful:
            shown = Question(work=work, judged=judged, view=view).judge(work.screening).smallest_shown
            if shown > useful:
                flags.append(f"{judged.name} hardly watched: only a change of {percent(math.expm1(shown))} would show")
    return flags


def _worst(blank: Verdict, findings: Sequence[Finding], withdrawn: str, unwatched: Sequence[str]) -> Verdict:
    ordered = tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.name)))
    worst = ordered[0]
    more = [withdrawn] if withdrawn and worst.name in ("inconclusive", "unstable-host") else []
    reasons = (*blank.reasons, *worst.reasons, *more)
    fails = worst.name in FAILING
    shown = [finding for finding in ordered if finding.name in FAILING] if fails else ordered
    uncompared = [why for finding in ordered[1:] if finding.effect is None for why in finding.reasons]
    flags = (*blank.flags, *(() if fails else unwatched), *(flag for finding in shown for flag in finding.flags))
    flags = (*flags, *(why for why in uncompared if why not in reasons))
    return replace(blank, name=worst.name, findings=ordered, reasons=reasons, flags=tuple(dict.fromkeys(flags)))


def _run_flags(work: CaseWork) -> list[str]:
    reused = work.gate_case.stored and any(run.process == "reused" for run in work.runs)
    unseen = any(run.disturbance == TELEMETRY_UNKNOWN for run in work.runs)
    flags = {
        "processes were reused; stored runs had fresh ones": reused,
        "telemetry unknown: throttling would not be seen": unseen,
        "no clean samples: all samples are compared": work.judged and not work.time.quantity.clean_only,
    }
    return [flag for flag, applies in flags.items() if applies]


def _uncompared(work: CaseWork, blank: Verdict) -> Verdict | None:
    gate_case = work.gate_case
    if work.impossible:
        return replace(blank, name="impossible", reasons=tuple(dict.fromkeys(work.impossible)))
    if gate_case.refusal:
        return replace(blank, name=gate_case.refusal)
    if not gate_case.stored:
        return replace(blank, name="no-baseline", reasons=(*blank.reasons, "nothing is stored for it"))
    if not work.runs:
        return replace(blank, reasons=(*blank.reasons, work.withdrawn or "it has not been measured"))
    return None


def _memory(work: CaseWork, blank: Verdict) -> Verdict | None:
    """The verdict of a case that does or did not fit into memory; None when all its runs fitted."""
    fitted = [run for run in work.gate_case.stored if run.outcome == "measured"]
    name: VerdictName = "pass"
    why = "out of memory, as stored"
    if work.ran_out and fitted:
        name, why = "regressed", f"out of memory, where {plural(len(fitted), 'stored run')} fitted"
    elif not work.ran_out and not fitted:
        name, why = "improved", "it fits into memory now; the stored runs did not"
    elif not work.ran_out:
        return None
    shown = True if name == "regressed" else None
    finding = Finding(quantity="memory", name=name, tolerance=0.0, exact=True, confirmed=shown, reasons=(why,))
    return replace(blank, name=name, findings=(finding,), reasons=(*blank.reasons, why))


def _learning(blank: Verdict, exact: Sequence[Finding], work: CaseWork, view: View) -> Verdict:
    worse = [finding for finding in exact if finding.name == "regressed"]
    if worse:
        return replace(blank, name="regressed", findings=tuple(worse), reasons=worse[0].reasons)
    why = f"{work.learnt} of the {view.settings.min_stored} usable stored runs that a comparison needs"
    disturbed = [run.disturbance for run in (*work.gate_case.stored, *work.gate_case.newest) if run.is_disturbed]
    if disturbed:  # the reason why a device that is always throttled is never gated
        why += f"; {plural(len(disturbed), 'stored run')} disturbed: {disturbed[-1]}"
    unclean = len([run for run in work.gate_case.stored if not run.is_disturbed]) - (work.learnt or 0)
    held = [run for run in work.gate_case.stored if not run.is_disturbed and is_throttled(run)]
    if held and unclean >= len(held):
        unclean -= len(held)
        why += f"; {plural(len(held), 'stored run')} held back by the CPU quota"
    if unclean > 0:
        why += f"; {plural(unclean, 'stored run')} with too few clean samples"
    return replace(blank, name="learning", findings=tuple(exact), reasons=(*blank.reasons, why))


def uncompared(work: CaseWork) -> Iterator[Finding]:
    """Yield findings for metrics that changed unit or direction, are missing today, or are not above 0."""
    gate_case = work.gate_case
    for name, why in gate_case.changed_metrics.items():
        yield _undecided(name, f"{why}: not compared; if that is meant: --perf-accept=all --perf-reason=TEXT")
    newest = (gate_case.newest or gate_case.stored)[-1]
    for name, meaning in gate_case.stored_metrics.items():
        if name in gate_case.changed_metrics or not (meaning.own or rule_for(name, meaning, gate_case.specs)):
            continue
        if name in newest.metrics and not any(name in run.metrics for run in work.runs):
            stored = f"{significant(newest.metrics[name])} {meaning.unit}".rstrip()
            text = f"{name} was {stored} in the newest stored run and was not recorded now: not compared"
            yield _undecided(name, f"{text}; if that is meant, store runs without it: --perf-update=append")
    for name, meaning in gate_case.case.metrics.items():
        if meaning.own and not meaning.own.exact and meaning.better != "neither":
            yield from _not_above_zero(work, name, meaning)


def _not_above_zero(work: CaseWork, name: str, meaning: MetricMeaning) -> Iterator[Finding]:
    """Yield a finding for values of 0 and below, which statistics of logarithms cannot compare."""
    then = [run.metrics[name] for run in work.gate_case.stored if name in run.metrics]
    now = [run.metrics[name] for run in work.runs if name in run.metrics]
    if not then or not now or min(*then, *now) > 0:
        return
    before, after = statistics.median(then), statistics.median(now)
    values = f"{name} is {significant(after)}, stored {significant(before)} {meaning.unit}".rstrip()
    higher = meaning.better == "higher"
    if min(then) > 0 and higher and max(now) <= 0:
        yield Finding(
            quantity=name,
            name="regressed",
            tolerance=0.0,
            before=before,
            after=after,
            unit=meaning.unit,
            effect=(before - after) / before,
            confirmed=False,
            reasons=(f"{values}: it fell to 0 or below",),
        )
        return
    apart = min(then) - max(now) if higher else min(now) - max(then)
    if min(then) > 0 or apart > max(then) - min(then):
        text = "values of 0 and below have no relative change; exact=True and floor= judge it"
        yield _undecided(name, f"{values}: {text}")


def _undecided(name: str, why: str) -> Finding:
    return Finding(quantity=name, name="inconclusive", tolerance=0.0, reasons=(why,))


def unjudged(work: CaseWork, needed: int) -> Iterator[str]:
    """Yield a flag for each own metric that is not judged; a comparison needs ``needed`` stored runs."""
    own_metrics = {name: meaning.own for name, meaning in work.gate_case.case.metrics.items() if meaning.own}
    for name, own in own_metrics.items():
        then = [run.metrics[name] for run in work.gate_case.stored if name in run.metrics]
        if own.better == "neither" and not own.exact:
            yield f"{name} is not judged: it has no better direction; give better='lower' or 'higher'"
        elif len(then) < (least := 1 if own.exact else needed):
            total = plural(least, "stored run")
            yield f"{name} is not judged yet: {len(then)} of the {total} that a comparison needs have it"
        elif not own.exact and min(then) <= 0:
            yield f"{name} is judged by its range alone: a stored value is 0 or below; exact=True and floor= judge it"


LONE_SESSIONS = 8
"""Stored sessions with which an unchanged case mostly passes in a suite of few cases (docs gate-evidence)."""
NOISY = 2.0  # Variance inside the session over that of stored runs above which a line reports a noisy host.


def against_base(works: Sequence[CaseWork], view: View) -> Compared | None:
    """Return the joint result of these cases' A/Bs with the base."""
    return compared(Question(work=work, judged=work.time, view=view).change for work in works)


def on_suite(works: Sequence[CaseWork], view: View) -> SuiteVerdict | None:
    """Return the verdict on the suite; None if it is not slower than the tolerance and cannot hide a slowdown."""
    shift, settings = view.suite, view.settings
    if settings.in_place or not (shift.exceeds(settings) or shift.may_hide(settings)):
        return None
    base = against_base(works, view)
    anchor = compared(Question(work=work, judged=work.time, view=view).since_anchor for work in works)
    commits = Counter(work.gate_case.anchor for work in works if work.gate_case.anchor)
    anchor_commit = commits.most_common(1)[0][0][:10] if commits else ""
    reasons = Counter(why for work in works if (why := work.why_no_anchor))
    no_anchor = reasons.most_common(1)[0][0] if reasons else ""
    if settings.can_run_base and base is None:
        no_anchor = "the base was not measured"
    if not shift.exceeds(settings):
        return _hidden(shift, settings, base, anchor, no_anchor)
    controls = _control_lines(shift, base, anchor, anchor_commit, no_anchor)
    changes = Counter(key for work in works for key in work.gate_case.changes)
    keys = [key for key, count in changes.items() if 2 * count > shift.cases]
    name: VerdictName = "drifted"
    if base is not None and base.shows(shift):
        name = "regressed"
    elif anchor is not None and anchor.shows(shift):
        controls.append(f"the code drifted since {anchor_commit}")
    elif shift.explained(settings):
        name = "unstable-host"
    elif not shift.is_shown:
        name = "inconclusive"
        usual = percent(math.expm1(shift.reach(1 - SUITE_ALPHA)))
        controls.append(f"this host moves by up to {usual} between sessions")
    elif keys:
        name = "environment"
        controls.append(f"different from the stored runs: {', '.join(keys)}")
    elif shift.says(settings) == "unsure":
        name = "inconclusive"
        controls.append("the cause may be the host or the code; --perf-against checks the code")
    else:
        controls.append("unattributed: no control moved along")
    effect, (low, high) = math.expm1(shift.effect), shift.interval
    line = (
        f"the suite is {percent(effect)} slower than stored "
        f"(95 % interval {percent(low, signed=True)} to {percent(high, signed=True)}; "
        f"{shift.slower} of {plural(shift.cases, 'case')} by more than {percent(settings.tolerance)}); "
        + "; ".join(controls)
    )
    return SuiteVerdict(name=name, effect=effect, line=line)


def _hidden(
    shift: SuiteShift, settings: GateSettings, base: Compared | None, anchor: Compared | None, no_anchor: str
) -> SuiteVerdict | None:
    """Return the verdict on a suite whose host may hide a slowdown; None if other arms clear the code.  Without pairs
    of the stored commit, the base is that commit.
    """
    tolerance = math.log1p(settings.tolerance)
    effect = math.expm1(shift.effect)
    for arm, name, older in ((base, "regressed", "the base"), (anchor, "drifted", "the stored commit")):
        if arm is not None and arm.exceeds(tolerance):
            by = _compared_text(arm)
            line = f"the suite is slower than {older}, by {by}; {percent(effect, signed=True)} than stored"
            return SuiteVerdict(name=name, effect=math.expm1(arm.effect), line=line)  # type: ignore[arg-type]
    if base is not None and not no_anchor:
        return None
    line = (
        f"the suite is {percent(effect, signed=True)} against the stored runs, on a host that moves so much between "
        f"sessions that all cases may be up to {percent(shift.most_hidden)} slower; "
        f"{no_anchor if base is not None or settings.can_run_base else '--perf-against decides'}"
    )
    return SuiteVerdict(name="inconclusive", effect=effect, line=line, seen=False)


def _control_lines(
    shift: SuiteShift, base: Compared | None, anchor: Compared | None, anchor_commit: str, no_anchor: str
) -> list[str]:
    lines, control = ["no yardstick was timed on the host"], shift.control
    if control is not None:
        moved = "no yardstick resembles most of these cases"
        if control.amount is not None:
            moved = f"yardsticks moved by {percent(math.expm1(control.amount), signed=True)}"
        lines = [f"{moved} ({control.why})"]
    if base is not None:
        lines.append(f"against the base {_compared_text(base)}")
    if anchor is not None:
        lines.append(f"against {anchor_commit}, which the stored runs name, {_compared_text(anchor)}")
    elif no_anchor:
        lines.append(no_anchor)
    return lines


def _compared_text(compared_with: Compared) -> str:
    return f"{percent(math.expm1(compared_with.effect), signed=True)} in {plural(compared_with.cases, 'case')}"


def banner(view: View) -> tuple[str, ...]:
    """Return remarks about the session, apart from the verdict on the suite."""
    lines, shift = [], view.today.shift
    if abs(shift) > math.log1p(view.settings.tolerance):
        change = f"{percent(abs(math.expm1(shift)))} {'slower' if shift > 0 else 'faster'}"
        subtracted = "this is subtracted from every case before it is judged"
        lines.append(f"the whole suite is {change} than its baseline; {subtracted}")
    if view.shares.usual > NOISY:
        lines.append(f"the host is {math.sqrt(view.shares.usual):.2g} times as noisy as when the baseline was taken")
    return tuple(lines)


def few_sessions(undecided: Sequence[CaseWork], settings: GateSettings) -> str:
    """Return a remedy for cases undecided because of few cases and few stored sessions; empty if it does not apply."""
    few = [work.time.level.sessions for work in undecided if work.time.level.sessions < LONE_SESSIONS]
    if not few:
        return ""
    return (
        f"{plural(len(few), 'case')} undecided: fewer than {settings.min_suite} cases cannot show the host's noise, "
        f"and the stored runs are of {plural(min(few), 'session')} of the machine (runs of one commit without an hour "
        f"between them are one session); store runs in {LONE_SESSIONS} sessions, or give --perf-against=REV a revision "
        "to compare with"
    )
