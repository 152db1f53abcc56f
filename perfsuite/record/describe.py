"""Verdicts in words: of a case its change, the evidence and the next command; of a run the counts and doubts."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from perfsuite.base.text import listed
from perfsuite.base.units import format_seconds, percent, plural, significant
from perfsuite.record.result import RankFacts, Result
from perfsuite.record.run import INSTRUMENTED
from perfsuite.record.step import USUAL_UNDER_LOAD, DeviceLook
from perfsuite.record.verdict import (
    ALL,
    MEAN,
    P95,
    RHYTHM,
    SEEN_ITERATIONS,
    TIME,
    Effect,
    Finding,
    GateSettings,
    SuiteVerdict,
    Verdict,
)

SHORT_COMMIT = 10
SUITE_FAILS = "SUITE "  # Beginning of the line on the suite if it fails the session.
_QUIET = ("pass", "no-baseline", "learning")
_MOST_QUIET = 10
_UNDECIDED = ("inconclusive", "unstable-host")
_QUANTITY = {TIME: "the median"}  # Names of quantities in a bound; others have their own names.
_NAMED = 3  # Undecided cases that a line lists.


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


def gate_lines(verdicts: Mapping[str, Verdict], gate: bool) -> Iterator[str]:
    """Yield a line for every case that changed or has a remark; the screen has the counts and the banner."""
    if _nothing_compared(verdicts, gate):
        return
    yield from (f"{verdict.case}: {describe(verdict)}" for verdict in verdicts.values() if verdict.name not in _QUIET)
    flagged = [verdict for verdict in verdicts.values() if verdict.name in _QUIET and verdict.flags]
    for verdict in flagged[:_MOST_QUIET]:
        yield f"{verdict.case}: {describe(verdict)}"
    if len(flagged) > _MOST_QUIET:
        yield f"and {plural(len(flagged) - _MOST_QUIET, 'more case')} with remarks (JUnit: verdict_detail)"


def verdict_counts(verdicts: Mapping[str, Verdict], gate: bool, *, stores: bool = False) -> str:
    """Return ``gated 18 of 20 cases: 17 pass, 1 regressed``, or the command that stores a first run."""
    if _nothing_compared(verdicts, gate):
        stored = Counter(verdict.name for verdict in verdicts.values() if verdict.name != "no-baseline")
        slowed = [verdict.reasons[0] for verdict in verdicts.values() if verdict.is_instrumented]
        way_on = "" if stores else "; --perf-update=append stores one"
        if stored["learning"]:
            way_on += f"; a comparison needs {GateSettings.min_stored} usable stored runs"
        if len(slowed) == len(verdicts):  # append would refuse all of them
            way_on = f"; {slowed[0]}"
        listing = "".join(f", {count} {name}" for name, count in stored.most_common())
        return f"compared 0 of {plural(len(verdicts), 'case')} with a baseline{listing}{way_on}"
    gated = sum(verdict.gated for verdict in verdicts.values())
    counts = Counter(verdict.name for verdict in verdicts.values())
    listing = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    if gate and counts and set(counts) <= {"learning", "no-baseline"}:
        most = max(verdict.stored_runs for verdict in verdicts.values())
        way_on = "" if stores else "; --perf-update=append stores one"
        return f"not gated yet: {most} of {GateSettings.min_stored} runs stored ({listing}){way_on}"
    return f"{'gated' if gate else 'compared'} {gated} of {plural(len(verdicts), 'case')}: {listing}"


def _nothing_compared(verdicts: Mapping[str, Verdict], gate: bool) -> bool:
    return not gate and not any(verdict.gated or verdict.fails for verdict in verdicts.values())


def suite_lines(suite: SuiteVerdict | None, fail_on: Collection[str]) -> Iterator[str]:
    """Yield one line on the session if its cases are slower together.

    >>> list(suite_lines(SuiteVerdict(name="drifted", effect=0.1, line="the suite is 10 % slower"), ["drifted"]))
    ['SUITE DRIFTED: the suite is 10 % slower']
    """
    if suite is not None:
        name = f"{SUITE_FAILS}{suite.name.upper()}" if suite.name in fail_on else f"suite {suite.name}"
        yield f"{name}: {suite.line}"


def undecided_lines(verdicts: Collection[Verdict], gate: bool) -> Iterator[str]:
    """Yield the count of undecided cases, their names, and the largest change that they could hide.

    Then the cases whose runs are too short to see a slow iteration in RHYTHM.
    """
    undecided = [verdict for verdict in verdicts if verdict.name in _UNDECIDED]
    cases = plural(len(verdicts), "case")
    if undecided:
        undecided.sort(key=lambda verdict: math.inf if verdict.hidden is None else verdict.hidden[0], reverse=True)
        most = undecided[0].hidden
        hidden = (
            "any slowdown"
            if most is None
            else f"slowdowns of {_QUANTITY.get(most[1], most[1])} up to {percent(most[0])}"
        )
        named = listed([verdict.case for verdict in undecided], _NAMED)
        line = f"not decided: {len(undecided)} of {cases}; {hidden} could have hidden there: {named}"
        yield f"{line} (--perf-fail-on=default,{','.join(_UNDECIDED)} makes that fail)" if gate else line
    short = sorted(
        (verdict for verdict in verdicts if verdict.misses_rhythms), key=lambda verdict: verdict.iterations or 0
    )
    if short:
        named = listed([verdict.case for verdict in short], _NAMED)
        yield (
            f"not seen: {len(short)} of {cases} timed fewer than {SEEN_ITERATIONS} iterations in a run "
            f"({short[0].iterations} and more): one that is slow once in {RHYTHM} can be missed: {named} "
            f"(--benchmark-min-rounds={SEEN_ITERATIONS} times enough)"
        )


_INSTRUMENTS = 3  # Instruments that a warning names.


def instrumented_line(results: Iterable[Result]) -> str:
    """Return the warning that tools or debug settings slowed the ranks; empty if none did."""
    measured = [result for result in results if result.outcome != "out_of_memory"]
    slowed = Counter(instrument for result in measured for instrument in result.instruments)
    if not slowed:
        return ""
    count = sum(bool(result.instruments) for result in measured)
    named = listed([name for name, _ in slowed.most_common()], _INSTRUMENTS)
    return f"{INSTRUMENTED}{count} of {plural(len(measured), 'case')} ran under {named}"


def foreign_line(imports: Mapping[str, str]) -> str:
    """Return one sentence on foreign modules, by name, and the file of the first.

    >>> foreign_line({"shop": "/old/shop/__init__.py", "shop.till": "/old/shop/till.py"})
    'module shop (and 1 more) was imported from /old/shop/__init__.py and not from this checkout: other code is \
measured; run "python -m pip install -e ." here, or put its folder first on PYTHONPATH'
    """
    name, file = next(iter(imports.items()))
    more = f" (and {len(imports) - 1} more)" if len(imports) > 1 else ""
    return (
        f"module {name}{more} was imported from {file} and not from this checkout: other code is measured; "
        'run "python -m pip install -e ." here, or put its folder first on PYTHONPATH'
    )


def held_down(looks: Iterable[DeviceLook]) -> str:
    """One line naming devices that were throttled while samples were taken; empty when none is known to have been.

    >>> held_down([DeviceLook(device=0, at_s=at, throttle=("thermal",) if at else ("power cap",)) for at in (0.0, 0.5)])
    'device 0 was throttled (thermal) in 1 of 2 looks while it was timed'
    """
    devices: dict[int, list[frozenset[str]]] = {}
    for look in looks:
        devices.setdefault(look.device, []).append(frozenset(look.throttle or ()) - USUAL_UNDER_LOAD)
    return "; ".join(
        f"device {device} was throttled ({', '.join(sorted(frozenset().union(*seen)))}) in {sum(map(bool, seen))} of "
        f"{plural(len(seen), 'look')} while it was timed"
        for device, seen in devices.items()
        if any(seen)
    )


def held_down_elsewhere(ranks: Sequence[RankFacts]) -> str:
    """Return one line on throttled devices of ranks that are not on the host of rank 0."""
    lines = []
    for rank in ranks:
        reasons = sorted(set(rank.throttle or ()) - USUAL_UNDER_LOAD)
        if reasons and rank.host != ranks[0].host:
            lines.append(f"rank {rank.rank} ({rank.device} of {rank.host}) was throttled ({', '.join(reasons)})")
    return "; ".join(lines)
