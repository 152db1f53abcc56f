"""DeepSpeed's timers: wall_clock_breakdown, and the lines with samples per second.

Lines with ``microstep`` are of one micro-batch, other lines of all micro-batches of a step. Samples per second are of
all devices. GB are GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from perfsuite.imports.row import Meaning, Source
from perfsuite.imports.steps import (
    LogFigures,
    StepFigure,
    StepLine,
    StepProgram,
    any_line,
    fields_of,
    figures_of,
    found_in,
)

_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("forward", "fwd"), "forward_ms"),
    **dict.fromkeys(("backward", "bwd"), "backward_ms"),
    **dict.fromkeys(("backward_inner", "bwd_inner"), "backward_inner_ms"),
    **dict.fromkeys(("backward_allreduce", "bwd_allreduce"), "backward_allreduce_ms"),
    "step": "optimizer_ms",
    "optimizer_allgather": "optimizer_allgather_ms",
    "optimizer_gradients": "optimizer_gradients_ms",
    "optimizer_step": "optimizer_step_ms",
}
_BREAKDOWN = re.compile(r"\btime \(ms\)(?= \| [a-z])")
_BREAKDOWN_FIELDS = re.compile(r"\|\s*(?P<name>[A-Za-z][\w -]*):\s*(?P<value>[^|]*?)\s*(?P<end>(?=\|)|$)")
_OTHERS = re.compile(r"\| (?:[a-z_]+[ -][a-z -]+|optimizer): ")
"""Names of Megatron's timers, which print the same begin of a line."""


def _part(metric: str, of: str) -> tuple[StepFigure, ...]:
    meaning: Meaning = (metric, "ms", "lower")
    how = f"deepspeed wall_clock_breakdown: of {of}, every part synchronised"
    return (StepFigure(meaning=meaning, convention=how, form=r"(?P<number>-?\d+\.\d\d)", is_whole=True),)


_TIMES: Mapping[str, Sequence[StepFigure]] = {
    **{name: _part(metric, "all micro-batches of a step") for name, metric in _PARTS.items()},
    **{f"{name}_microstep": _part(f"micro_{metric}", "one micro-batch") for name, metric in _PARTS.items()},
}


def _samples(metric: str, how: str) -> tuple[StepFigure, ...]:
    meaning: Meaning = (metric, "samples/s", "higher")
    of_all = f"deepspeed: of all devices, {how}"
    return (
        StepFigure(meaning=meaning, convention=of_all, form=r"(?P<number>\d+\.\d{9,})", is_whole=True),
        StepFigure(meaning=meaning, convention=of_all),
    )


def _memory(metric: str, how: str) -> tuple[StepFigure, ...]:
    return (StepFigure(meaning=(metric, "GiB", "lower"), convention=f"deepspeed: {how}; printed as GB", form="@GB"),)


_RATES = StepProgram(
    step=re.compile(r"\b(?:global_step=|\d+/)(?P<step>\d+),\s*(?=\w*SamplesPerSec=)"),
    fields=re.compile(r"(?P<name>[A-Za-z]\w*)=(?P<value>[^,=]*?)(?P<end>,|$)"),
    figures={
        "currsamplespersec": _samples("samples_per_s", "last step"),
        "runningavgsamplespersec": _samples("mean_samples_per_s", "mean since the second step"),
        "samplespersec": _samples("mean_samples_per_s", "mean since the second step"),
        "memallocated": _memory("allocated_memory_gib", "allocated"),
        "maxmemallocated": _memory("peak_allocated_memory_gib", "peak allocated since the start"),
    },
    mark=re.compile(r"SamplesPerSec="),
    ignored=frozenset({"global_step"}),
    noun="global step",
)


def has_timers(source: Source) -> bool:
    """Return whether a file has lines of DeepSpeed's timers."""
    return any_line(source.lines, _BREAKDOWN) or any_line(source.lines, _RATES.mark)


def timers_in(source: Source) -> LogFigures:
    """Return the figures of all timer lines."""
    found = figures_of(source, list(_breakdowns(source)), _TIMES)
    if found.rows:
        found.notes.insert(0, "timers are named by report: not every one says its step")
    found.add(found_in(source, _RATES))
    return found


def _breakdowns(source: Source) -> Iterator[StepLine]:
    """Yield the lines of wall_clock_breakdown; a report ends with the line of the whole step."""
    report, micro = 1, 0
    for number, line in enumerate(source.lines, start=1):
        match = _BREAKDOWN.search(line)
        if match is None:
            continue
        fields = tuple(fields_of(line[match.end() :], _BREAKDOWN_FIELDS))
        if _OTHERS.search(line):
            fields = tuple(replace(one, name=f"timer {one.name}") for one in fields)
        names = {one.name for one in fields}
        if any(name.endswith("_microstep") for name in names):
            micro += 1
            yield StepLine(line=number, name=f"report {report} micro-batch {micro}", fields=fields)
            continue
        yield StepLine(line=number, name=f"report {report}", fields=fields)
        if names & {"step", "forward", "fwd"}:
            report, micro = report + 1, 0
