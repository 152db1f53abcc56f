"""How much a case changed between two sets of runs, with an interval where runs allow one.

The run of the processes is the unit of evidence, not the sample: one run against one has no interval.  One new run
against several stored ones has the interval of a prediction, as wide as stored runs differ among themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perfsuite.base.units import format_seconds, plural
from perfsuite.baselines.summarise import changed_settings
from perfsuite.record.describe import word
from perfsuite.record.result import Result
from perfsuite.record.verdict import TIME, Verdict
from perfsuite.reports.document import Tone
from perfsuite.reports.recording import Recording
from perfsuite.reports.stored import StoredResult
from perfsuite.statistics.student import t_quantile


@dataclass(frozen=True, kw_only=True)
class CaseChange:
    """One case before and after."""

    node: str
    effect: float | None
    """Relative change of the time: 0.05 is 5 % slower; None where nothing could be compared."""
    low: float | None = None
    """Lower end of the 95 % interval; None without one: then the effect is unsure."""
    high: float | None = None
    before: str = ""
    after: str = ""
    word: str = ""
    """What was decided: regressed, slower, pass, undecided."""
    tone: Tone = "plain"
    runs: str = ""
    """What it rests on: ``6 pairs``, ``1 run against 12``."""


Timed = tuple[Result, tuple[float, ...]]
"""A case with the median seconds of each run that is known of it, the newest last."""


def timed_result(result: Result) -> Timed:
    """A case with the times that it has itself: those of a baseline's runs, or its own."""
    if isinstance(result, StoredResult):
        return result, result.times_s
    return result, (result.median_s,) if result.outcome == "measured" and result.median_s else ()


def timed(recording: Recording) -> list[Timed]:
    """The cases of a recording, with the times of all runs that it knows."""
    return [
        (result, recording.times_s.get(result.case, times_s))
        for result, times_s in map(timed_result, recording.run.results.values())
    ]


def joined(older: Timed | None, newer: Timed) -> Timed:
    """The newer run of a case with the times of both; one that measured nothing does not hide one that did.

    Times of a run with other settings are another case's.
    """
    if older is None or changed_settings(older[0], newer[0], glance=True):
        return newer
    if older[0].outcome == "measured" != newer[0].outcome:
        return older
    return newer[0], (*older[1], *newer[1])


LEAST_RUNS = 3
"""Of fewer runs nobody knows how they spread."""
TOLERANCE = 0.03
"""A change that does not matter, as the gate's default has it."""

Known = tuple[float, float | None, float | None]


def ratio(before_s: Sequence[float], after_s: Sequence[float]) -> Known | None:
    """Relative change of the geometric means and its 95 % interval; no interval where runs are too few.

    >>> effect, low, high = ratio([1.0, 1.01, 0.99, 1.0], [1.1])
    >>> round(effect, 3), low < 0.1 < high
    (0.1, True)
    >>> ratio([1.0], [2.0])
    (1.0, None, None)
    """
    if not before_s or not after_s or min(*before_s, *after_s) <= 0:
        return None
    before, after = ([math.log(time_s) for time_s in times_s] for times_s in (before_s, after_s))
    effect = statistics.fmean(after) - statistics.fmean(before)
    known = [times for times in (before, after) if len(times) >= LEAST_RUNS]
    if not known:
        return math.expm1(effect), None, None
    freedom = sum(len(times) - 1 for times in known)
    variance = sum(statistics.variance(times) * (len(times) - 1) for times in known) / freedom
    reach = t_quantile(0.975, freedom) * math.sqrt(variance * (1 / len(before) + 1 / len(after)))
    return math.expm1(effect), math.expm1(effect - reach), math.expm1(effect + reach)


def tone_of(effect: float, low: float | None, high: float | None) -> Tone:
    """bad or good only where the interval excludes no change and the change is more than the tolerance."""
    if low is not None and low > 0 and effect > TOLERANCE:
        return "bad"
    return "good" if high is not None and high < 0 and effect < -TOLERANCE else "plain"


def changes_between(before: Iterable[Timed], after: Iterable[Timed]) -> Iterator[CaseChange]:
    """The cases that both have, in the order of ``after``."""
    older = {result.case: (result, times_s) for result, times_s in before if result.outcome == "measured"}
    for result, times_s in after:
        base, base_s = older.get(result.case, (None, ()))
        if base is None or result.outcome != "measured":
            continue
        changed = changed_settings(base, result, glance=True)
        if changed:
            yield CaseChange(node=result.case, effect=None, word=f"not comparable: {changed}")
            continue
        known = ratio(base_s, times_s)
        if known is None:
            continue
        effect, low, high = known
        tone = tone_of(effect, low, high)
        unsure = "unsure: one run each" if low is None else "not shown"
        if low is not None and high is not None and low >= -TOLERANCE and high <= TOLERANCE:
            unsure = "no difference"
        yield CaseChange(
            node=result.case,
            effect=effect,
            low=low,
            high=high,
            before=format_seconds(statistics.geometric_mean(base_s), 3),
            after=format_seconds(statistics.geometric_mean(times_s), 3),
            word={"bad": "slower", "good": "faster"}.get(tone, unsure),
            tone=tone,
            runs=f"{plural(len(times_s), 'run')} against {len(base_s)}",
        )


_BAD = ("regressed", "drifted", "environment", "impossible")


def changes_of_verdicts(verdicts: Iterable[Verdict]) -> Iterator[CaseChange]:
    """What the gate compared: of each case the finding that decided."""
    for verdict in verdicts:
        sure = verdict.decisive
        if sure is None or sure.effect is None or not math.isfinite(sure.effect):
            continue
        low, high = sure.interval if sure.interval is not None else (None, None)
        seconds = sure.unit == "s"
        ends = [
            "" if value is None else format_seconds(value, 3) if seconds else f"{value:.4g} {sure.unit}".strip()
            for value in (sure.before, sure.after)
        ]
        tone: Tone = "bad" if verdict.name in _BAD else "good" if verdict.name == "improved" else "plain"
        of = "" if sure.quantity == TIME else f" in {sure.quantity}"
        yield CaseChange(
            node=verdict.case,
            effect=sure.effect,
            low=low,
            high=high,
            before=ends[0],
            after=ends[1],
            word=f"{word(verdict).partition(' ')[0]}{of}",
            tone=tone,
            runs=f"{plural(verdict.runs, 'run')} against {verdict.stored_runs}"
            + (f", {plural(verdict.pairs, 'pair')}" if verdict.pairs else ""),
        )
