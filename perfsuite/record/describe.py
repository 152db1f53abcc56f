"""A verdict in words: the change of a figure, since when, the evidence, and the next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from perfsuite.base.units import format_seconds, percent, plural, significant
from perfsuite.record.verdict import ALL, MEAN, P95, TIME, Effect, Finding, Verdict

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
    """Return the lines of a failure, the most important first."""
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
        amounts = f"{amount(finding.before, finding.unit, bare=True)} -> {amount(finding.after, finding.unit)}"
        return f"{name} {finding.quantity} {amounts}, {change if math.isfinite(finding.effect) else effect}"
    if finding.quantity != TIME:
        effect += f" {'worse' if finding.effect >= 0 else 'better'} in {finding.quantity}"
    if finding.before is None or finding.after is None:
        return f"{name} {effect}"
    return f"{name} {effect} ({amount(finding.before, finding.unit)} -> {amount(finding.after, finding.unit)})"


def change_in_words(effect: float, interval: tuple[float, float] | None, quantity: str = TIME) -> str:
    """An effect with its interval.

    >>> change_in_words(0.081, (0.062, 0.1)), change_in_words(-0.2, None, "busbw_gb_per_s")
    ('8.1 % slower [6.2, 10]', '20 % better in busbw_gb_per_s')
    """
    if quantity == TIME:
        direction = "slower" if effect >= 0 else "faster"
    else:
        direction = f"{'worse' if effect >= 0 else 'better'} in {quantity}"
    size = percent(abs(effect)) if math.isfinite(effect) else "more than nothing"
    if interval is None:
        return f"{size} {direction}"
    ends = sorted(abs(end) if (end >= 0) == (effect >= 0) else -abs(end) for end in interval)
    return f"{size} {direction} [{', '.join(percent(end).removesuffix(' %') for end in ends)}]"


def _is_metric(finding: Finding) -> bool:
    return finding.quantity not in (TIME, MEAN, P95, ALL) and finding.before is not None


def _own_change(finding: Finding, worse: float) -> float:
    """A change for the worse as the change of the value itself: -0.25 for a bandwidth that fell by a quarter."""
    if finding.before is None or finding.after is None or finding.effect is None:
        return worse
    return -worse if finding.effect * (finding.after - finding.before) < 0 else worse


def amount(value: float, unit: str, *, bare: bool = False) -> str:
    """A value with its unit, seconds as times read best; ``bare``: without the unit."""
    return format_seconds(value) if unit == "s" else f"{significant(value)} {'' if bare else unit}".rstrip()


def _stored(verdict: Verdict) -> str:
    at = f" at {verdict.stored_commit[:SHORT_COMMIT]}" if verdict.stored_commit else ""
    return f"stored{at}: {plural(verdict.stored_runs, 'run')} of {plural(verdict.stored_sessions, 'session')}"


def _evidence(verdict: Verdict, finding: Finding) -> Iterator[str]:
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
        yield "if it is meant: --perf-accept=all --perf-reason=TEXT"
