"""Everything that is known of one case, in lines for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

from perfsuite.base.text import folded, printable
from perfsuite.base.units import format_seconds, readable_unit, significant
from perfsuite.gate.describe import phrases
from perfsuite.record.result import Measurement, Result
from perfsuite.record.verdict import Verdict
from perfsuite.reports.layout import lay_out
from perfsuite.reports.summary import case_metrics


def case_lines(result: Result, verdict: Verdict | None, width: int) -> Iterator[str]:
    """Parameters, samples, metrics, spans, ranks and the verdict."""
    yield printable(result.case, 10_000)
    parameters = ", ".join(f"{name}={json.dumps(value)}" for name, value in result.parameters.items())
    about = [f"{result.platform}, ranks {result.world_size}, {result.outcome} {result.detail}".strip(), parameters]
    for line in about:
        yield from folded(f"  {printable(line, 2000)}", width, "    ")
    measurement = result.measurement
    if measurement is not None and measurement.times_s:
        yield from folded(f"  {_samples(measurement)}", width, "    ")
    elif result.outcome == "measured":
        yield f"  median {format_seconds(result.median_s)}"
    if result.metrics:
        names = list(case_metrics(result))
        widest = max(len(name) for name, _ in names)
        for name, told in names:
            yield from folded(f"  {name.ljust(widest)}  {printable(told)}", width, "    ")
    if measurement is not None:
        yield from _spans(measurement, width)
        yield from _ranks(measurement, width)
    if verdict is not None:
        for phrase in phrases(verdict):
            yield from folded(f"  {printable(phrase)}", width, "    ")


def _samples(measurement: Measurement) -> str:
    times = sorted(measurement.times_s)
    steady = "" if measurement.warmup_steady else "; the warm-up ended before the time per iteration was steady"
    median, least, most = (format_seconds(time_s) for time_s in (measurement.median_s, times[0], times[-1]))
    return (
        f"{len(times)} samples of {measurement.iterations} iterations: median {median}, {least} to {most}; "
        f"{measurement.disturbed_share:.0%} disturbed{steady}"
    )


def _spans(measurement: Measurement, width: int) -> list[str]:
    rows = [
        [f"  {span.name}", format_seconds(span.time_s), f"{span.count:g}", f"r{span.slowest_rank}"]
        for span in measurement.spans
    ]
    return lay_out(["  span", "time", "count", "slowest"], rows, width) if rows else []


def _ranks(measurement: Measurement, width: int) -> list[str]:
    name, unit = readable_unit([rank.max_rss_bytes for rank in measurement.ranks])
    rows = [
        [
            f"  {rank.rank}",
            rank.device,
            str(rank.threads),
            format_seconds(rank.median_s),
            format_seconds(rank.min_s),
            format_seconds(rank.max_s),
            f"{rank.cpu_share:.0%}",
            significant(rank.max_rss_bytes / unit, 3),
        ]
        for rank in measurement.ranks
    ]
    return lay_out(["  rank", "device", "threads", "median", "least", "most", "CPU share", f"RSS\n{name}"], rows, width)
