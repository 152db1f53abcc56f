"""A Markdown summary of a run, for a file and for the page that a CI service shows beside the build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from perfsuite.gate.describe import describe, word
from perfsuite.gate.verdict import Verdict
from perfsuite.metrics import find
from perfsuite.metrics.spec import significant
from perfsuite.records import Metric, Result
from perfsuite.reports.tables.markdown import escape
from perfsuite.units import format_seconds

_ATTENTION = (
    "impossible",
    "regressed",
    "drifted",
    "environment",
    "inconclusive",
    "unstable-host",
    "not-comparable",
    "improved",
)


def markdown_summary(
    results: Mapping[str, Result],
    verdicts: Mapping[str, Verdict],
    *,
    hardware: str,
    banner: Sequence[str] = (),
    gate: bool = False,
) -> str:
    """The whole summary: what was measured on what, verdicts that need a reader, a table of all cases."""
    return "\n".join(_lines(results, verdicts, hardware, banner, gate)) + "\n"


def _lines(
    results: Mapping[str, Result], verdicts: Mapping[str, Verdict], hardware: str, banner: Sequence[str], gate: bool
) -> Iterator[str]:
    yield "## perfsuite"
    yield ""
    gated = sum(verdict.gated for verdict in verdicts.values())
    yield f"{len(results)} cases on `{hardware}`; {'gated' if gate else 'compared'} {gated} of {len(verdicts)}."
    counts = Counter(verdict.name for verdict in verdicts.values())
    if counts:
        yield ""
        yield ", ".join(f"{count} {name}" for name, count in counts.most_common()) + "."
    for line in banner:
        yield ""
        yield f"> {line}"
    needing = [verdict for name in _ATTENTION for verdict in verdicts.values() if verdict.name == name]
    if needing:
        yield ""
        yield "| verdict | case | what was found |"
        yield "| --- | --- | --- |"
        for verdict in needing:
            yield f"| {verdict.name} | {_code(verdict.case)} | {escape(describe(verdict))} |"
    if results:
        yield ""
        yield "<details><summary>all cases</summary>"
        yield ""
        yield from _table(results, verdicts)
        yield ""
        yield "</details>"


def _table(results: Mapping[str, Result], verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    yield "| case | ranks | median | metrics | verdict |"
    yield "| --- | ---: | ---: | --- | --- |"
    for case, result in results.items():
        median = result.detail or "no samples"
        if result.measurement is not None:
            median = format_seconds(result.measurement.median_s)
        metrics = ", ".join(_metrics(result.metrics))
        verdict = word(verdicts[case]) if case in verdicts else ""
        yield f"| {_code(case)} | {result.world_size} | {median} | {escape(metrics)} | {verdict} |"


def _metrics(metrics: Sequence[Metric]) -> Iterator[str]:
    values = {metric.name: metric.value for metric in metrics}
    ends = {end for name in values for end in find(name).interval or ()}
    for metric in metrics:
        if metric.name in ends:
            continue
        interval = [values.get(end) for end in find(metric.name).interval or ()]
        known = [significant(value, 2) for value in interval if value is not None]
        between = f" ({' to '.join(known)})" if len(set(known)) == 2 else ""
        yield _metric(metric.name, metric.value, f"{between} {metric.unit}")


def _metric(name: str, value: float | None, unit: str) -> str:
    return f"{name} unknown" if value is None else f"{name} {find(name).format(value)}{unit}".strip()


def _code(text: str) -> str:
    return f"`{escape(text)}`"
