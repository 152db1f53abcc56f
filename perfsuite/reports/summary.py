"""A Markdown summary of a run, for a file and for the page of a CI service.

Its first line is the verdict; then findings and changed cases; the other cases are counted and folded.  Paths and
names of hosts are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfsuite.base.text import LONGEST_LINE, code_text, markdown_text, printable, without_hosts, without_paths
from perfsuite.base.units import format_seconds, percent, plural, readable_rate
from perfsuite.metrics import is_headline
from perfsuite.record.describe import change_in_words, word
from perfsuite.record.result import Result
from perfsuite.record.run import RunRecord
from perfsuite.record.verdict import Verdict
from perfsuite.reports.changes import changes_of_verdicts, changes_sentence, failing_suite, why_nothing, without_memory
from perfsuite.reports.families import marked, share_of_peak
from perfsuite.reports.ids import hosts_of
from perfsuite.reports.notable import Notable
from perfsuite.reports.questions import slow_lines
from perfsuite.reports.screen import accepted, outcome_counts, skip_reasons

LIMIT_BYTES = 64_000  # Size of a summary; GitHub allows 1 MiB for all steps together.
_SLOWER = ("regressed", "drifted", "environment")
_FOOT_BYTES = 300
_NOTABLE = 40


def first_sentence(run: RunRecord) -> str:
    """Return the outcome of the run: ``12 cases slower, worst `...` +8.1 % [+6.2, +10.0]; 204 unchanged``.

    PASS or FAIL of an acceptance run comes first.
    """
    verdicts = run.gate.verdicts if run.gate is not None else ()
    judged = run.gate.by_case if run.gate is not None else {}
    apart = sum(verdict.name in ("no-baseline", "learning", "not-comparable") for verdict in verdicts)
    without = f"{apart} without a baseline" if apart else ""
    if apart and apart == len(verdicts):
        measured = sum(one.outcome == "measured" for one in run.results.values())
        without = f"{plural(measured, 'case')} measured, none compared: {why_nothing(verdicts)}"
    sentence = changes_sentence(
        changes_of_verdicts(verdicts),
        failed=len(run.failures),
        interrupted=len(run.interrupted),
        cut=run.cut,
        out_of_memory=without_memory(run.results.values(), judged),
        suite=_text(failing_suite([run.gate])),
        apart=without,
        name=code_text,
    )
    verdict = ". ".join(map(_text, accepted([run])))
    if verdict:
        return f"{verdict}. {sentence or outcome_counts(run)}"
    return sentence or f"{outcome_counts(run)}, not judged"


def markdown_summary(run: RunRecord, findings: Sequence[Notable], *, show_hosts: bool = False) -> str:
    """Return the summary, at most LIMIT_BYTES; ``show_hosts``: keep names of hosts."""
    lines = _Lines(LIMIT_BYTES - _FOOT_BYTES)
    hosts = () if show_hosts else hosts_of(run.results.values())

    def public(text: str) -> str:
        return _text(without_hosts(text, hosts))

    lines.add(f"**perfsuite**: {first_sentence(run)}", "", public(_about(run)))
    measured = [one for one in run.results.values() if one.outcome == "measured"]
    if remarks := (run.end.remarks if run.end is not None else ()) or slow_lines(measured):
        lines.add("")
        lines.rows(f"- {public(remark)}" for remark in remarks[:_NOTABLE])
    if findings:
        lines.add("")
        kept = lines.rows(
            f"- {public(one.sentence)}{f', {code_text(one.case)}' if one.case else ''}" for one in findings[:_NOTABLE]
        )
        if kept < len(findings):
            lines.add(f"- and {len(findings) - kept} more in the journal")
    verdicts = run.gate.verdicts if run.gate is not None else ()
    quiet = ("pass", "no-baseline", "learning")
    changed = sorted((verdict for verdict in verdicts if verdict.name not in quiet), key=_gravity)
    if changed:
        lines.table(("verdict", "case", "change"), [_changed_row(verdict) for verdict in changed])
    if run.skips:
        reasons = "; ".join(f"{count} x {public(reason)}" for reason, count in skip_reasons(run.skips.values())[:5])
        lines.add("", f"{len(run.skips)} skipped: {reasons}")
    names = {verdict.case for verdict in changed}
    rest = [result for case, result in run.results.items() if case not in names]
    if rest and (changed or findings or run.skips or not verdicts):
        heading = f"<details><summary>{plural(len(rest), 'other case')}</summary>"
        judged = run.gate.by_case if run.gate is not None else {}
        rows = (_row(result, judged.get(result.case)) for result in rest)
        lines.table(("case", "ranks", "median", "best figure", "verdict"), rows, heading, "</details>")
    return "\n".join(lines.lines) + "\n"


def _gravity(verdict: Verdict) -> tuple[int, float]:
    order = ("impossible", *_SLOWER, "improved")
    effect = verdict.decisive.effect if verdict.decisive is not None else None
    return order.index(verdict.name) if verdict.name in order else len(order), -abs(effect or 0.0)


class _Lines:
    """Lines of at most ``room`` bytes; a table is cut at a row."""

    def __init__(self, room: int) -> None:
        self.lines: list[str] = []
        self._room = room

    def add(self, *lines: str) -> None:
        """Add the lines that fit."""
        for line in lines:
            self.rows([line])

    def rows(self, rows: Iterable[str]) -> int:
        """Add rows while they fit; return how many."""
        kept = 0
        for row in rows:
            taken = len(row.encode("utf-8", "replace")) + 1
            if taken > self._room:
                break
            self._room -= taken
            self.lines.append(row)
            kept += 1
        return kept

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], heading: str = "", end: str = "") -> None:
        """Add a table between ``heading`` and ``end``; rows that do not fit are counted."""
        all_rows = list(rows)
        foot = [f"and {len(all_rows)} more in the journal", "", end]
        reserved = sum(map(len, foot)) + 8
        if self._room < reserved + 200:
            self.lines.append(f"\n{foot[0]}")
            self._room = 0
            return
        self._room -= reserved
        above = ["", heading, ""] if heading else [""]
        self.add(*above, f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}")
        kept = self.rows(f"| {' | '.join(row)} |" for row in all_rows)
        self._room += reserved
        if kept < len(all_rows):
            self.add("", f"and {len(all_rows) - kept} more in the journal")
        if end:
            self.add("", end)


def _about(run: RunRecord) -> str:
    revision = run.revision
    commit = revision.commit[:10] + (" with uncommitted changes" if revision.dirty else "")
    branch = f" on {revision.branch}" if revision.branch else ""
    subject = f" ({printable(revision.subject, 80)})" if revision.subject else ""
    torch = run.versions.get("torch")
    simulated = "SIMULATED " if any(one.simulated for one in run.results.values()) else ""
    parts = [
        f"{simulated}{run.fingerprint or run.platform}",
        *([f"torch {torch}"] if torch else []),
        *([f"commit {commit}{branch}{subject}"] if commit else []),
        outcome_counts(run),
    ]
    warnings = run.end.warnings if run.end is not None else ()
    return ", ".join(parts) + "".join(f"; {warning.partition(', e.g. ')[0]}" for warning in warnings[:2])


def _changed_row(verdict: Verdict) -> tuple[str, str, str]:
    finding = verdict.decisive
    if finding is None or finding.effect is None:
        change = "; ".join(verdict.reasons)
    else:
        change = change_in_words(finding.effect, finding.interval, finding.quantity)
        change += f", tolerance {percent(finding.tolerance)}"
    return verdict.name, _cell(verdict.case), _text(printable(change))


def _row(result: Result, verdict: Verdict | None) -> tuple[str, ...]:
    median = _text(result.detail) or "no samples"
    if result.outcome == "measured":
        median = marked(result, format_seconds(result.median_s, 3))
    decided = word(verdict) if verdict else ""
    return _cell(result.case), str(result.world_size), median, _text(best_figure(result)), decided


def best_figure(result: Result) -> str:
    """Return the last headline metric that is not a time, with its share of the peak."""
    for metric in reversed(result.metrics):
        if metric.value is not None and is_headline(metric.name) and metric.unit not in ("s", "us", "ms"):
            name, times = readable_rate([metric.value], metric.unit)
            return f"{metric.value * times:.3g} {name} {share_of_peak(metric, result)}".strip()
    return ""


def _text(text: str) -> str:
    return markdown_text(printable(without_paths(text), LONGEST_LINE)).replace("|", "\\|")


def _cell(text: str) -> str:
    return code_text(text).replace("|", "\\|")
