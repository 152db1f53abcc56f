"""A verdict in words: first what happened to which figure, then since when, on what evidence, and what to do.

The same words tell the baseline about the runs that it is offered.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace

from perfsuite.base.units import format_seconds, percent, plural, significant
from perfsuite.baselines.draft import NewRuns
from perfsuite.gate.quantity import ALL, MEAN, P95
from perfsuite.gate.suite import SuiteVerdict
from perfsuite.record.verdict import FAILING, TIME, Effect, Finding, Verdict

SHORT_COMMIT = 10


def word(verdict: Verdict) -> str:
    """The verdict for a table, with the effect that it was made of.

    >>> word(Verdict(case="t.py::test", name="no-baseline"))
    'no-baseline'
    """
    finding = verdict.decisive
    if finding is None or finding.effect is None:
        return verdict.name
    of = f" {finding.quantity}" if _is_metric(finding) else ""
    return f"{verdict.name} {_own_change(finding, finding.effect):+.1%}{of}"


def describe(verdict: Verdict) -> str:
    """One line for a person; its first 80 characters have verdict, effect, before and after."""
    return "; ".join(phrases(verdict))


def phrases(verdict: Verdict) -> list[str]:
    """What a person has to know, the most important first: the lines of a failure."""
    parts = [headline(verdict)]
    finding = verdict.decisive
    if verdict.stored_runs:
        parts.append(_stored(verdict))
    if finding is not None:
        parts.extend(_evidence(verdict, finding))
    parts.extend(verdict.reasons)
    parts.extend(f"[{flag}]" for flag in verdict.flags)
    if verdict.name != "environment":
        parts.extend(verdict.soft_differences)
    parts.extend(_advice(verdict))
    return parts


def headline(verdict: Verdict) -> str:
    """Verdict, effect, before and after."""
    name = verdict.name.upper() if verdict.fails else verdict.name
    finding = verdict.decisive
    if finding is None or finding.effect is None:
        return name
    effect = percent(finding.effect, signed=True)
    if not math.isfinite(finding.effect):
        effect = "more than nothing"
    if _is_metric(finding) and finding.before is not None and finding.after is not None:
        change = percent(_own_change(finding, finding.effect), signed=True)
        amounts = f"{_amount(finding.before, finding.unit, bare=True)} -> {_amount(finding.after, finding.unit)}"
        return f"{name} {finding.quantity} {amounts}, {change if math.isfinite(finding.effect) else effect}"
    if finding.quantity != TIME:
        effect += f" {'worse' if finding.effect >= 0 else 'better'} in {finding.quantity}"
    if finding.before is None or finding.after is None:
        return f"{name} {effect}"
    return f"{name} {effect} ({_amount(finding.before, finding.unit)} -> {_amount(finding.after, finding.unit)})"


def _is_metric(finding: Finding) -> bool:
    """Whether a finding is of a metric, and not of the times of the samples."""
    return finding.quantity not in (TIME, MEAN, P95, ALL) and finding.before is not None


def _own_change(finding: Finding, worse: float) -> float:
    """A change for the worse as the change of the value itself: -0.25 for a bandwidth that fell by a quarter."""
    if finding.before is None or finding.after is None or finding.effect is None:
        return worse
    return -worse if finding.effect * (finding.after - finding.before) < 0 else worse


def _amount(value: float, unit: str, *, bare: bool = False) -> str:
    return format_seconds(value) if unit == "s" else f"{significant(value)} {'' if bare else unit}".rstrip()


def _stored(verdict: Verdict) -> str:
    at = f" at {verdict.stored_commit[:SHORT_COMMIT]}" if verdict.stored_commit else ""
    return f"stored{at}: {plural(verdict.stored_runs, 'run')} of {plural(verdict.stored_sessions, 'session')}"


def _evidence(verdict: Verdict, finding: Finding) -> Iterator[str]:
    """Both answers, level and change, whichever of them made the verdict."""
    if finding.level is not None:
        yield f"level {_effect(finding, finding.level, 'run')}"
    if finding.change is not None:
        yield f"change against the base {_effect(finding, finding.change, 'pair')}"
    elif finding.level is not None:
        yield "change not measured" + ("" if verdict.fails or verdict.name == "inconclusive" else ": nothing suspected")
    if finding.since_anchor is not None:
        yield f"against {verdict.stored_commit[:SHORT_COMMIT]} {_effect(finding, finding.since_anchor, 'pair')}"
    yield f"tolerance {percent(finding.tolerance)}"
    if finding.mde is not None and math.isfinite(finding.mde) and not verdict.fails:
        yield f"smallest change that would show {percent(finding.mde)}"


def _effect(finding: Finding, effect: Effect, noun: str) -> str:
    change = percent(_own_change(finding, effect.change), signed=True)
    low, high = (percent(end, signed=True) for end in sorted(_own_change(finding, end) for end in effect.interval))
    return f"{change} (95 % interval {low} to {high}, {plural(effect.count, noun)})"


def _advice(verdict: Verdict) -> Iterator[str]:
    """The next command."""
    if verdict.name == "environment":
        yield "if that is meant: --perf-accept=environment --perf-reason=TEXT"
    elif verdict.name in ("regressed", "drifted"):
        since = verdict.stored_commit[:SHORT_COMMIT]
        there = f"cd {shlex.quote(verdict.ab_folder)} && " if verdict.ab_folder else ""
        if verdict.no_ab:
            yield f"no A/B with {since or 'an older revision'}: {verdict.no_ab}"
        else:
            yield f"next: {there}perfsuite ab --a {since or 'REV'} -- {shlex.quote(verdict.case)}"
        if not since and not verdict.no_ab:
            yield "REV: a revision that was fast; the stored runs name none"
        yield "if it is meant: --perf-update=accept --perf-reason=TEXT"


def offered(new: NewRuns, verdict: Verdict, suite: SuiteVerdict | None) -> NewRuns:
    """The runs of a case with what the gate said of the case and of the session as a whole."""
    name, seen = verdict.name, seen_in(verdict)
    together = suite is not None and suite.seen and suite.name in FAILING and verdict.gated and name not in FAILING
    if suite is not None and together and (name == "inconclusive" or suite.name == "environment"):
        name, seen = suite.name, f"{suite.name} with the whole suite: {suite.line}"
    return replace(new, verdict=name, seen=seen, suspected=suspects_slowdown(verdict), gains=gains_in(verdict))


def seen_in(verdict: Verdict) -> str:
    """A verdict with its effect, or with its first reason where it has none."""
    finding = verdict.decisive
    if finding is None or finding.effect is None:
        return ": ".join([verdict.name, *verdict.reasons[:1]])
    return headline(verdict)


def suspects_slowdown(verdict: Verdict) -> bool:
    """Whether a slowdown was seen that is neither shown nor excluded, by the rule that the gate suspects by.

    Above half the tolerance and above the standard error, which is about a quarter of the 95 % interval's width.
    """
    return any(_is_suspect(finding) for finding in verdict.findings if finding.name == "inconclusive")


def _is_suspect(finding: Finding) -> bool:
    seen = [(level.change, level.interval) for level in (finding.level,) if level is not None]
    if finding.effect is not None:
        seen.append((finding.effect, finding.interval or (finding.effect, finding.effect)))
    return any(effect > max(finding.tolerance / 2, (high - low) / 4) for effect, (low, high) in seen)


def gains_in(verdict: Verdict) -> dict[str, float]:
    """The quantities that improved, and the relative gain from which on other runs show the same.

    The tolerance; half of what is seen now where nothing scatters, because such a tolerance may be absolute or none.
    """
    return {
        finding.quantity: abs(finding.effect or 0.0) / 2 if finding.exact else finding.tolerance
        for finding in verdict.findings
        if finding.name == "improved"
    }
