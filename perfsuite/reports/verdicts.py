"""The gate's findings for a terminal: counts, failed cases with reasons, undecided cases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from perfsuite.base.text import listed
from perfsuite.base.units import percent, plural
from perfsuite.record.describe import describe
from perfsuite.record.verdict import RHYTHM, SEEN_ITERATIONS, TIME, GateSettings, SuiteVerdict, Verdict

SUITE_FAILS = "SUITE "
"""Beginning of the line on the suite if it fails the session."""
_QUIET = ("pass", "no-baseline", "learning")
_MOST_QUIET = 10
_UNDECIDED = ("inconclusive", "unstable-host")
_QUANTITY = {TIME: "the median"}
"""Names of quantities in a bound; others have their own names."""
_NAMED = 3
"""Undecided cases that a line lists."""


def gate_lines(
    verdicts: Mapping[str, Verdict], banner: Sequence[str], gate: bool, *, stores: bool = False
) -> Iterator[str]:
    """Yield ``gated k of n``, the count of each verdict, and a line for every case that changed.

    ``stores``: this run updates the baseline itself.
    """
    if not verdicts:
        return
    yield verdict_counts(verdicts, gate, stores=stores)
    if _nothing_compared(verdicts, gate):
        return
    yield from undecided_lines(verdicts.values(), gate)
    yield from banner
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

    >>> list(suite_lines(SuiteVerdict(name="drifted", effect=0.1, line="the suite is +10 % slower"), ["drifted"]))
    ['SUITE DRIFTED: the suite is +10 % slower']
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
        line = f"not decided: {len(undecided)} of {cases}; {hidden} could have hidden there: {_named(undecided)}"
        yield f"{line} (--perf-fail-on=default,{','.join(_UNDECIDED)} makes that fail)" if gate else line
    short = sorted(
        (verdict for verdict in verdicts if verdict.misses_rhythms), key=lambda verdict: verdict.iterations or 0
    )
    if short:
        yield (
            f"not seen: {len(short)} of {cases} timed fewer than {SEEN_ITERATIONS} iterations in a run "
            f"({short[0].iterations} and more): one that is slow once in {RHYTHM} can be missed: {_named(short)} "
            f"(--benchmark-min-rounds={SEEN_ITERATIONS} times enough)"
        )


def _named(verdicts: Sequence[Verdict]) -> str:
    return listed([verdict.case for verdict in verdicts], _NAMED)
