"""Print the result of a judgement: a line per question, the cases without a verdict, and the overall verdict."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from perfsuite.base.text import bare_name, listed
from perfsuite.base.units import plural, significant
from perfsuite.expectations.judge import Expected
from perfsuite.expectations.rows import Expectation
from perfsuite.record.result import Result

Mark = Literal["", "bad", "doubt"]
_WORDS = {"below": "LOW", "look": "look", "pass": "pass"}
_WORST = ("below", "look", "pass", "not judged")
_NAMED = 3
"""Most questions and rows that one line lists."""


@dataclass(frozen=True, kw_only=True)
class AnswerLine:
    """One line of text and its colour in a terminal."""

    text: str
    mark: Mark = ""


def verdict_of(judged: Sequence[Expected], withheld: Sequence[str] = ()) -> str:
    """Return PASS or FAIL with its reason; without a verdict, or with anything in ``withheld``, there is no PASS.

    >>> verdict_of([])
    'FAIL: no result was judged by an expectation'
    """
    counts = Counter(entry.verdict for entry in judged)
    below, count = counts["below"], len(judged) - counts["not judged"]
    reasons = list(withheld)
    if below:
        reasons.insert(0, f"{below} of {plural(count, 'judged result')} below expectation")
    if not count:
        reasons.append("no result was judged by an expectation")
    if reasons:
        return f"FAIL: {'; '.join(reasons)}"
    looks = f", {counts['look']} to look at" if counts["look"] else ""
    return f"PASS: {plural(count, 'judged result')}{looks}, {counts['not judged']} not judged"


def answer_lines(judged: Sequence[Expected], width: int = 10**6) -> Iterator[AnswerLine]:
    """Yield a table with a line per judged question: best value, share of peak, expected range, share of it, verdict.

    A question is judged by its worst case; ``best`` is of all its cases.  The last line lists the other questions.
    """
    questions: dict[str, list[Expected]] = defaultdict(list)
    for entry in judged:
        questions[f"{entry.question} {entry.metric.name}"].append(entry)
    rows: list[tuple[tuple[str, ...], Mark, str]] = []
    unjudged: list[Expected] = []
    for cases in questions.values():
        worst = min(cases, key=lambda entry: (_WORST.index(entry.verdict), entry.speed or 9.9))
        if worst.verdict == "not judged":
            unjudged.append(worst)
            continue
        pick = max if worst.metric.better == "higher" else min
        best = pick(cases, key=lambda entry: entry.metric.value or 0.0)
        share, unit = best.metric.share_of_peak, worst.metric.unit
        low, high, speed = worst.low, worst.high, worst.speed
        span = "" if low is None or high is None else significant(low)
        span += f" to {significant(high)}" if low != high and high is not None else ""
        cells: tuple[str, ...] = (
            worst.question,
            f"{significant(best.metric.value or 0.0)} {best.metric.unit}{_of(best)}",
            f"{100 * share:.0f} %" if share is not None else "",
            f"{span} {unit}{_of(worst)}" if span else "",
            f"{speed:.2f}" if speed is not None else "",
            _WORDS[worst.verdict],
        )
        mark: Mark = "bad" if worst.verdict == "below" else "doubt" if worst.verdict == "look" else ""
        rows.append((cells, mark, worst.reason if worst.verdict in ("below", "look") else ""))
    headings: tuple[str, ...] = ("question", "best", "of peak", "expected", "of low", "verdict")
    columns = [column for column in range(6) if any(cells[column] for cells, _, _ in rows)]
    table: list[tuple[tuple[str, ...], Mark, str]] = [(headings, "", ""), *rows] if rows else []
    widths = [max((len(cells[column]) for cells, _, _ in table), default=0) for column in range(6)]
    is_wide = sum(widths[column] + 2 for column in columns) - 2 > width
    for cells, mark, reason in table:
        if is_wide:
            yield AnswerLine(text=cells[0], mark=mark)
        shown = [cells[column].ljust(widths[column]) for column in (columns[1:] if is_wide else columns)]
        yield AnswerLine(text=("  " * is_wide + "  ".join(shown)).rstrip(), mark=mark)
        if reason:
            yield AnswerLine(text=f"    {reason}", mark=mark)
    if unjudged:
        named = listed([f"{entry.question} ({entry.reason})" for entry in unjudged], _NAMED, joint="; ")
        yield AnswerLine(text=f"not judged: {plural(len(unjudged), 'question')}: {named}", mark="doubt")


KEPT_FROM = 90.0
"""Percentage of the first minute's rate below which a soak is marked; assumed, without a published source."""


def soak_lines(results: Iterable[Result]) -> Iterator[AnswerLine]:
    """Yield a line for every sustained product, with the rates at its end and at its beginning."""
    for result in results:
        value = result.values.get("last_minute_percent")
        if value is not None:
            note = result.metric("last_minute_percent").note
            text = f"soak: the last minute has {value:.3g} % of the first one's rate{f' ({note})' if note else ''}"
            yield AnswerLine(text=f"{text}: {bare_name(result.case)}", mark="doubt" if value < KEPT_FROM else "")


def unused_line(rows: Sequence[Expectation], judged: Sequence[Expected], platform: str) -> str:
    """Return a line on own rows of this platform without a matching result; empty without any."""
    used = {row.place for entry in judged for row in entry.rows}
    unused = [row for row in rows if row.platform == platform and row.kind == "own" and row.place not in used]
    if not unused:
        return ""
    named = listed([f"{row.workload} {row.metric} ({row.place})" for row in unused], _NAMED)
    return f"{plural(len(unused), 'own row')} matched no result: {named}"


def _of(entry: Expected) -> str:
    return f" ({entry.size})" if entry.size else ""
