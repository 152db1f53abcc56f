"""The change of a case between two sets of runs, with an interval if there are enough runs.

The unit of evidence is a run, not a sample: one run against one has no interval.  One new run against several stored
ones has a prediction interval, from the spread of the stored runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfsuite.base.units import change, format_seconds, interval, plural
from perfsuite.baselines.summarise import changed_settings
from perfsuite.record.describe import amount
from perfsuite.record.result import Result
from perfsuite.record.run import GateRecord
from perfsuite.record.verdict import FAILING, TIME, GateSettings, Verdict
from perfsuite.reports.document import Tone
from perfsuite.reports.ids import name_of
from perfsuite.reports.stored import Recording, StoredResult
from perfsuite.statistics.robust import t_quantile


@dataclass(frozen=True, kw_only=True)
class CaseChange:
    """One case before and after."""

    node: str
    effect: float | None  # Relative change of the time: 0.05 is 5 % slower; None if nothing could be compared.
    low: float | None = None  # Lower end of the 95 % interval; None without one: then the effect is unsure.
    high: float | None = None
    before: str = ""
    after: str = ""
    word: str = ""  # The decision: regressed, slower, pass, undecided.
    tone: Tone = "plain"
    runs: str = ""  # The evidence: ``6 pairs``, ``1 run against 12``.

    @property
    def between(self) -> str:
        """The interval after a blank; empty without one."""
        return "" if self.low is None or self.high is None else f" {interval(self.low, self.high)}"


Timed = tuple[Result, tuple[float, ...]]
"""A case with the median seconds of each run that is known of it, the newest last."""


def timed_result(result: Result) -> Timed:
    """Return a case with its time; a stored case with the time of each stored run."""
    if isinstance(result, StoredResult):
        return result, result.times_s
    return result, (result.median_s,) if result.outcome == "measured" and result.median_s else ()


def timed(recording: Recording) -> list[Timed]:
    """Return the cases of a recording with the times of all their runs."""
    return [
        (result, recording.times_s.get(result.case, times_s))
        for result, times_s in map(timed_result, recording.run.results.values())
    ]


def joined(older: Timed | None, newer: Timed) -> Timed:
    """Return the newer run of a case with the times of both; the older one if only that was measured.

    Times of a run with other settings are dropped.
    """
    if older is None or changed_settings(older[0], newer[0], glance=True):
        return newer
    if older[0].outcome == "measured" != newer[0].outcome:
        return older
    return newer[0], (*older[1], *newer[1])


LEAST_RUNS = 3  # Runs that are needed to estimate their spread.
TOLERANCE = 0.03  # Largest change that does not matter; the gate's default.

NOT_COMPARABLE = "not comparable"  # Beginning of the word of a case that ran with other settings.
UNCHANGED = ("pass", "no difference")  # Words of comparisons that exclude a change above TOLERANCE.


def ratio(before_s: Sequence[float], after_s: Sequence[float]) -> tuple[float, float | None, float | None] | None:
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
    several = [times for times in (before, after) if len(times) >= LEAST_RUNS]
    if not several:
        return math.expm1(effect), None, None
    freedom = sum(len(times) - 1 for times in several)
    variance = sum(statistics.variance(times) * (len(times) - 1) for times in several) / freedom
    reach = t_quantile(0.975, freedom) * math.sqrt(variance * (1 / len(before) + 1 / len(after)))
    return math.expm1(effect), math.expm1(effect - reach), math.expm1(effect + reach)


def tone_of(effect: float, low: float | None, high: float | None) -> Tone:
    """Return bad or good if the interval excludes 0 and the change is above the tolerance, else plain."""
    if low is not None and low > 0 and effect > TOLERANCE:
        return "bad"
    return "good" if high is not None and high < 0 and effect < -TOLERANCE else "plain"


def changes_between(before: Iterable[Timed], after: Iterable[Timed]) -> Iterator[CaseChange]:
    """Yield the cases that both have, in the order of ``after``."""
    older = {result.case: (result, times_s) for result, times_s in before if result.outcome == "measured"}
    for result, times_s in after:
        base, base_s = older.get(result.case, (None, ()))
        if base is None or result.outcome != "measured":
            continue
        changed = changed_settings(base, result, glance=True)
        if changed:
            yield CaseChange(node=result.case, effect=None, word=f"{NOT_COMPARABLE}: {changed}")
            continue
        found = ratio(base_s, times_s)
        if found is None:
            continue
        effect, low, high = found
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


def changes_of_verdicts(verdicts: Iterable[Verdict]) -> Iterator[CaseChange]:
    """Yield the decisive finding of each case that the gate compared or found impossible."""
    for verdict in verdicts:
        if not verdict.gated and verdict.name not in ("impossible", "unstable-host"):
            continue
        tone: Tone = "bad" if verdict.name in FAILING else "good" if verdict.name == "improved" else "plain"
        sure = verdict.decisive
        if sure is None or sure.effect is None or not math.isfinite(sure.effect):
            yield CaseChange(node=verdict.case, effect=None, word=verdict.name, tone=tone)
            continue
        low, high = sure.interval if sure.interval is not None else (None, None)
        before, after = ("" if value is None else amount(value, sure.unit) for value in (sure.before, sure.after))
        yield CaseChange(
            node=verdict.case,
            effect=sure.effect,
            low=low,
            high=high,
            before=before,
            after=after,
            word=verdict.name if sure.quantity == TIME else f"{verdict.name} in {sure.quantity}",
            tone=tone,
            runs=f"{plural(verdict.runs, 'run')} against {verdict.stored_runs}"
            + (f", {plural(verdict.pairs, 'pair')}" if verdict.pairs else ""),
        )


def why_nothing(verdicts: Iterable[Verdict]) -> str:
    """Return why the gate compared no case: ``3 of 5 runs are stored``, or there is no baseline."""
    stored, least = max((verdict.stored_runs for verdict in verdicts), default=0), GateSettings.min_stored
    return f"{stored} of {least} runs are stored" if 0 < stored < least else "there is no baseline here"


def failing_suite(gates: Iterable[GateRecord | None]) -> str:
    """Return why a gate failed the suite as a whole, without the figures in brackets; empty if none did."""
    failing = (gate for gate in gates if gate is not None and gate.suite is not None and gate.fails(gate.suite))
    return next((gate.suite_line.partition(" (")[0] or str(gate.suite) for gate in failing), "")


def without_memory(results: Iterable[Result], judged: Mapping[str, Verdict]) -> int:
    """Return how many cases ran out of memory, without those that did so in the stored runs."""
    oom = [one.case for one in results if one.outcome == "out_of_memory"]
    return sum(not (case in judged and judged[case].name == "pass") for case in oom)


def changes_sentence(
    changes: Iterable[CaseChange],
    *,
    failed: int = 0,
    interrupted: int = 0,
    cut: str = "",
    out_of_memory: int = 0,
    suite: str = "",
    apart: str = "",
    name: Callable[[str], str] = name_of,
) -> str:
    """Return the outcome: ``12 cases slower, worst test_a[cpu] +8.1 % [+6.2, +10.0]; 204 unchanged``.

    ``cut``: how the run ended too early; ``suite``: why the suite as a whole fails; ``apart``: a phrase on cases
    without a comparison; ``name`` formats a node id.  Empty without any case.  One run against one is "unsure".
    """
    compared = [one for one in changes if not one.word.startswith(NOT_COMPARABLE)]
    impossible = [one for one in compared if one.word.startswith("impossible")]
    bad = [one for one in compared if one.tone == "bad" and not one.word.startswith("impossible")]
    good = [one for one in compared if one.tone == "good"]
    unchanged = [one for one in compared if one.word in UNCHANGED]
    rest = [one for one in compared if one.tone == "plain" and one.word not in UNCHANGED]
    unsure = [one for one in rest if one.word.startswith("unsure")]

    def extreme(members: Sequence[CaseChange], text: str, superlative: str) -> str:
        figures = [(abs(one.effect), one) for one in members if one.effect is not None]
        if not figures:
            return text if members else ""
        _, one = max(figures, key=lambda pair: pair[0])
        return f"{text}, {superlative} {name(one.node)} {change(one.effect or 0)}{one.between}"

    if compared and len(unsure) == len(compared):
        decided = f"unsure: one run each of {plural(len(compared), 'case')} decides nothing"
        decided = extreme(unsure, decided, "at most")
    elif compared and len(rest) == len(compared):
        decided = f"none of {plural(len(compared), 'case')} is decided: runs differ too much among themselves"
    else:
        counts = (
            extreme(bad, f"{plural(len(bad), 'case')} slower", "worst")
            or ("no case is shown to be slower" if rest else ""),
            extreme(good, f"{plural(len(good), 'case')} faster", "best"),
            f"{len(rest) - len(unsure)} undecided" if len(rest) > len(unsure) else "",
            f"{len(unsure)} unsure, with one run each" if unsure else "",
            f"{len(unchanged)} unchanged" if unchanged else "",
        )
        decided = "; ".join(filter(None, counts))
    parts = (
        f"the suite as a whole fails: {suite}" if suite else "",
        cut,
        f"{plural(failed, 'case')} failed" if failed else "",
        f"{plural(interrupted, 'case')} interrupted" if interrupted else "",
        f"{plural(len(impossible), 'case')} impossible to be true" if impossible else "",
        f"{plural(out_of_memory, 'case')} out of memory" if out_of_memory else "",
        decided,
        apart,
    )
    return "; ".join(filter(None, parts))
