"""A run on one screen: counts, the gate, trust, a row per question, a line per family, notable cases, the next command.

It has at most MOST_LINES lines, none wider than the terminal but an id or a path alone on its line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from perfsuite.base.text import folded, padded, printable
from perfsuite.base.units import clock_time, plural
from perfsuite.record.describe import instrumented_line, undecided_lines, verdict_counts
from perfsuite.record.result import Result
from perfsuite.record.run import INSTRUMENTED, NOT_QUIET, THROTTLED, XFAILED, RunRecord
from perfsuite.reports.families import OTHERS, FamilyLine, family_lines
from perfsuite.reports.notable import Notable, equal_work, spread_of_equal_work
from perfsuite.reports.questions import answer_lines, answers, expected_of

if TYPE_CHECKING:
    from perfsuite.expectations.judge import Expected

MOST_LINES = 40
_LABEL = 12
_FAMILY_LINES = 2
_REASONS_TO_DOUBT = 6
_FINE = ("pass", "improved", "no-baseline", "learning")  # Verdicts that trust does not change.
_LONGEST = 600  # Characters of a line before it is folded: it may name three cases.
_REASONS = 3
_REASON = 60  # Characters of a reason for skipping.
_LOUD = {THROTTLED: "THROTTLED", NOT_QUIET: "NOT QUIET"}
"""Beginnings of the warnings that are printed first, and their words."""
Mark = Literal["", "bad", "doubt", "good"]
_MARKS: dict[str, tuple[str, Mark]] = {
    **dict.fromkeys(("impossible", "failed", "regressed", "drifted", "environment", "undecided"), ("!", "bad")),
    "out-of-memory": ("!", "doubt"),
    "improved": ("+", "good"),
}
"""By kind of finding; others are ``?`` and doubtful."""


ScreenLine = tuple[str, Mark]  # A line, and how a terminal may colour it.


def title(run: RunRecord) -> str:
    """``perfsuite: cpu (1 x AMD EPYC), torch 2.13.0``."""
    torch = run.versions.get("torch")
    return printable(f"perfsuite: {run.platform}" + (f", torch {torch}" if torch else ""), 160)


def screen(
    run: RunRecord,
    findings: Sequence[Notable],
    *,
    width: int,
    quiet: bool = False,
    full: bool = False,
    stores: bool = False,
    links: Sequence[tuple[str, str]] = (),
    expected: Sequence[Expected] | None = None,
) -> list[ScreenLine]:
    """Return the lines below the title.

    ``quiet``: only counts, the gate's counts, LOW and SLOW rows, times that no metric has, and notable cases; the links
    of an interrupted run too.
    ``full``: everything that concerns trust.  ``stores``: this run updates the baseline itself.
    ``links``: label and command or path; the last is the next step.
    ``expected``: results judged by ``--perf-expect``, whose table is printed above the screen if any is judged; None:
    by the shipped expectations.
    """
    head = _labelled("", outcome_counts(run), width)
    entries = expected_of(run.results.values()) if expected is None else expected
    judged = [entry for entry in entries if entry.verdict != "not judged"]
    rows = [] if expected is not None and judged else answers(run.results.values(), judged)
    head += _verdict(run, judged, width, quiet)
    if quiet:
        if run.gate is not None and run.gate.gate:  # a green gate lists the undecided cases
            head += _gate(run, width, stores)
        rows = [row for row in rows if row.mark == "bad"]
    else:
        head += [*_gate(run, width, stores), *_trust(run, width, full)]
    head += [(line, mark) for line, mark in answer_lines(rows, width)]
    for line in family_lines(run.results.values()):
        if not quiet or line[0] == OTHERS:
            head += [(text, "") for text in _packed(line, width)]
    tail = [line for label, place in links for line in _labelled(label, place, width)]
    tail = [*_skips(run, width), *(tail if run.was_interrupted or not quiet else [])]
    return [*head, *notable_lines(findings, width=width, most=MOST_LINES - 1 - len(head) - len(tail)), *tail]


def accepted(runs: Iterable[RunRecord]) -> list[str]:
    """Return the verdicts of the acceptance runs (``--perf-expect``) among these runs, FAIL first."""
    return sorted(run.end.verdict for run in runs if run.end is not None and run.end.verdict)


def _verdict(run: RunRecord, judged: Sequence[Expected], width: int, quiet: bool) -> Iterator[ScreenLine]:
    """Yield the verdict of --perf-expect, else whether results are as expected; ``quiet``: only if not."""
    if run.end is not None and run.end.verdict:
        verdict, remarks = run.end.verdict, run.end.remarks
        yield from _labelled("verdict", verdict, width, "good" if verdict.startswith("PASS") else "bad")
        for remark in remarks[:_REASONS_TO_DOUBT]:
            yield from _labelled(" ", remark, width, "bad" if remark.startswith("SLOW") else "doubt")
        if len(remarks) > _REASONS_TO_DOUBT:
            yield from _labelled(" ", f"+ {plural(len(remarks) - _REASONS_TO_DOUBT, 'more remark')}", width)
        return
    below = sum(entry.verdict == "below" for entry in judged)
    looks = sum(entry.verdict == "look" for entry in judged)
    results = plural(len(judged), "judged result")
    if below:
        text = f"LOW: {below} of {results} below expectation; --perf-expect makes it fail"
        yield from _labelled("verdict", text, width, "bad")
    elif judged and not quiet:
        yield from _labelled("verdict", f"as expected: {results}{f', {looks} to look at' if looks else ''}", width)


def outcome_counts(run: RunRecord) -> str:
    """``216 measured, 28 skipped, 1 failed; 5 min 50 s``."""
    counts = case_counts(run.results.values(), run.failures, run.interrupted, run.skips)
    took = clock_time(run.end.took_s) if run.end is not None and run.end.took_s else ""
    return "; ".join(filter(None, (counts, took, run.cut)))


def case_counts(
    results: Iterable[Result], failures: Collection[str], interrupted: Collection[str], skips: Mapping[str, str]
) -> str:
    """``216 measured, 28 skipped, 1 failed (1 of them measured)``; the reasons of ``skips`` mark expected failures."""
    results = list(results)
    after = sum(one.case in failures and one.outcome == "measured" for one in results)
    skipped = len(_skipped(skips))
    without = {
        f"failed ({after} of them measured)" if after else "failed": len(failures),
        "interrupted": len(interrupted),
        "skipped": skipped,
        "xfailed": len(skips) - skipped,
    }
    return outcomes(results, without=without) or "no cases"


def outcomes(
    results: Iterable[Result], reused: Collection[str] = (), without: Mapping[str, int] = MappingProxyType({})
) -> str:
    """Return the counts of cases by outcome; ``reused`` are from the journal that the run resumed.

    ``without``: counts of cases without a result, by reason.
    """
    counts = Counter("reused" if result.case in reused else result.outcome for result in results)
    by_outcome = {
        "measured": counts["measured"],
        "from the journal": counts["reused"],
        "built, checked and run once, not measured": counts["smoke"],
        "out of memory": counts["out_of_memory"],
        **without,
    }
    return ", ".join(f"{count} {outcome}" for outcome, count in by_outcome.items() if count)


def _gate(run: RunRecord, width: int, stores: bool) -> Iterator[ScreenLine]:
    if run.gate is None:
        return
    failing = any(run.gate.fails(verdict.name) for verdict in run.gate.verdicts)
    counts = verdict_counts(run.gate.by_case, run.gate.gate, stores=stores)
    yield from _labelled("gate", counts, width, "bad" if failing else "")
    for line in (*undecided_lines(run.gate.verdicts, run.gate.gate), *run.gate.banner):
        yield from _labelled(" ", line, width, "doubt")


def _trust(run: RunRecord, width: int, full: bool) -> Iterator[ScreenLine]:
    """Yield one line; all lines if a gate left a case failed or undecided, which they may explain, and if ``full``."""
    measured = [result for result in run.results.values() if result.outcome == "measured"]
    if not measured:
        return
    warnings = run.end.warnings if run.end is not None else ()
    parts = ["SIMULATED: no time is a measurement"] if any(result.simulated for result in measured) else []
    instrumented = instrumented_line(measured)
    if instrumented:
        parts.append(f"INSTRUMENTED: {instrumented.removeprefix(INSTRUMENTED)}")
    loud = [
        (name, line.removeprefix(head)) for head, name in _LOUD.items() for line in warnings if line.startswith(head)
    ]
    for name, line in loud:
        signs = line.partition(", e.g. ")[0].split("; ")
        parts.append(f"{name}: {signs[-1]}{' (~)' if signs[-1].endswith('disturbed') else ''}")
        parts += signs[:-1]
    if not loud:
        unknown = run.end is None or (run.was_interrupted and not warnings)  # SIGTERM leaves no time to look
        parts.append("unknown whether the machine was quiet" if unknown else "no sign of other programs")
    spread = spread_of_equal_work(equal_work(run.results.values()))
    if spread is not None:
        parts.append(f"equal work differs by up to {100 * spread:.2g} %")
    parts += [line for line in warnings if not line.startswith((*_LOUD, INSTRUMENTED))]
    mark: Mark = "doubt" if loud or instrumented else ""
    judged = run.gate.verdicts if run.gate is not None and run.gate.gate else ()
    if full or any(verdict.name not in _FINE for verdict in judged):
        for number, part in enumerate(parts if full else parts[:_REASONS_TO_DOUBT]):
            yield from _labelled("trust" if not number else " ", part, width, mark)
        return
    text, left = printable(parts[0]), len(parts) - 1
    for number, part in enumerate(parts[1:]):
        more = f"; + {left - 1} more" if number < len(parts) - 2 else ""
        if len(text) + len(f"; {part}{more}") > width - _LABEL:
            break
        text, left = f"{text}; {printable(part)}", left - 1
    more = f"; + {left} more" if left else ""
    yield ("trust".ljust(_LABEL) + _beginning(text, width - _LABEL - len(more)) + more, mark)


def _packed(line: FamilyLine, width: int) -> list[str]:
    family, parts, further = line
    lines: list[str] = [family.ljust(_LABEL)]
    count = left = len(parts) + further
    for part in map(padded, parts):
        more = f"   + {left - 1} more" if left > 1 else ""
        last = len(lines) == _FAMILY_LINES
        room = width - len(lines[-1]) - (len(more) if last else 0)
        gap = "   " if len(lines[-1]) > _LABEL else ""
        if len(gap) + len(part) > room and len(lines[-1]) > _LABEL:
            if last:
                break
            lines.append(" " * _LABEL)
            gap, room = "", width - _LABEL - len(more)
        if len(part) > room and left < count and len(lines) > 1:
            lines = lines[:-1] if lines[-1].isspace() else lines
            break
        lines[-1] += gap + part
        left -= 1
    if left:
        more = f"   + {left} more"
        lines += [] if len(lines[-1]) + len(more) <= width else [" " * _LABEL]
        lines[-1] += more if lines[-1].strip() else more.strip()
    return [short for line in lines for short in folded(line.replace("\0", ""), width, " " * _LABEL)]


def notable_lines(findings: Sequence[Notable], *, width: int, most: int) -> list[ScreenLine]:
    """Return the findings, the gravest first, in at most ``most`` lines; the last line counts the others."""
    if not findings:
        return []
    lines: list[ScreenLine] = [("notable", "")]
    for number, one in enumerate(findings):
        left = len(findings) - number
        own = _finding(one, width)
        room = most - len(lines) - (1 if left > 1 else 0)
        if len(own) > room and number:
            kinds = Counter(rest.kind for rest in findings[number:])
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append((f" . and {left} more: {counts}", ""))
            break
        lines += own
    return lines


def _finding(one: Notable, width: int) -> list[ScreenLine]:
    sign, mark = _MARKS.get(one.kind, ("?", "doubt"))
    case, sentence = printable(one.case), printable(one.sentence, _LONGEST)
    together = f" {sign} {sentence}   {case}".rstrip()
    if len(padded(together)) <= width:
        return [(together, mark)]
    texts = [*folded(f" {sign} {sentence}", width, "   "), *([f"   {case}"] if case else [])]
    return [(text, mark) for text in texts]


def skip_reasons(skips: Iterable[str]) -> list[tuple[str, int]]:
    """Return reasons, cut to _REASON characters, with their counts, the commonest first."""
    return Counter(_beginning(printable(text), _REASON) for text in skips).most_common()


def _beginning(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."


def _skipped(skips: Mapping[str, str]) -> list[str]:
    """Return the reasons of skipped cases; those that failed as expected are left out."""
    return [reason for reason in skips.values() if not reason.startswith(XFAILED)]


def _skips(run: RunRecord, width: int) -> list[ScreenLine]:
    skipped = _skipped(run.skips)
    reasons = skip_reasons(skipped)
    if not reasons:
        return []
    named = "; ".join(f"{count} x {reason}" for reason, count in reasons[:_REASONS])
    more = f"; {plural(len(reasons) - _REASONS, 'other reason')}" if len(reasons) > _REASONS else ""
    return [(text, "") for text in folded(f" . skipped {len(skipped)}: {named}{more}", width, "   ")]


def _labelled(label: str, text: str, width: int, mark: Mark = "") -> list[ScreenLine]:
    plain = printable(text, max(4 * width, _LONGEST))
    start = label.ljust(_LABEL) if label else ""
    return [(line, mark) for line in folded(start + plain, width, " " * _LABEL)]
