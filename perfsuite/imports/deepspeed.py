"""DeepSpeed: the summaries of its FLOPs profiler, its communication logger and its timers.

The profiler's FLOPs of the backward are an assumed multiple of the forward's; its formulas print the factor.

The timers print the lines of wall_clock_breakdown, and lines with samples per second. Lines with ``microstep`` are of
one micro-batch, other lines of all micro-batches of a step. Samples per second are of all devices. GB are GiB.
Before 0.8, ``0/40, SamplesPerSec=`` counts micro-steps.

The pipeline engine prints ``iter time (s)``. Before 0.5.7 it is the last step over the number of steps since the last
report; in 0.6.2 and 0.6.3 it is in milliseconds. Samples per second are computed from it. The version or the time
stamps of the log show which is right.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from perfsuite.imports import deepspeed_comms
from perfsuite.imports.lines import seconds, split_lines
from perfsuite.imports.row import Format, ImportedRow, LogFigures, Meaning, Source
from perfsuite.imports.steps import (
    StepFigure,
    StepLine,
    StepProgram,
    any_line,
    fields_of,
    figures_of,
    found_in,
    imported,
)

_TIMERS: Mapping[str, str] = {
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
    **{name: _part(metric, "all micro-batches of a step") for name, metric in _TIMERS.items()},
    **{f"{name}_microstep": _part(f"micro_{metric}", "one micro-batch") for name, metric in _TIMERS.items()},
}


def _rate(metric: str, how: str) -> tuple[StepFigure, ...]:
    meaning: Meaning = (metric, "samples/s", "higher")
    of_all = f"deepspeed: of all devices, {how}"
    return (
        StepFigure(meaning=meaning, convention=of_all, form=r"(?P<number>\d+\.\d{9,})", is_whole=True),
        StepFigure(meaning=meaning, convention=of_all),
    )


def _memory(metric: str, how: str) -> tuple[StepFigure, ...]:
    return (StepFigure(meaning=(metric, "GiB", "lower"), convention=f"deepspeed: {how}; printed as GB", form="@GB"),)


_RATES = StepProgram(
    step=re.compile(r"\b(?:global_step=|(?P<micro>\d+/))(?P<step>\d{1,18}),\s*(?=\w*SamplesPerSec=)"),
    fields=re.compile(r"(?P<name>[A-Za-z]\w*)=(?P<value>[^=]*?)(?P<end>,(?!\d)|$)"),
    figures={
        "currsamplespersec": _rate("samples_per_s", "last step (before 0.8 micro-step)"),
        "runningavgsamplespersec": _rate("mean_samples_per_s", "mean since the second step"),
        "samplespersec": _rate("mean_samples_per_s", "mean since the second step"),
        "memallocated": _memory("allocated_memory_gib", "allocated"),
        "maxmemallocated": _memory("peak_allocated_memory_gib", "peak allocated since the start"),
    },
    mark=re.compile(r"SamplesPerSec="),
    ignored=frozenset({"global_step"}),
    noun="global step",
)


def _since_report(meaning: Meaning, how: str, factor: float = 1.0) -> tuple[StepFigure, ...]:
    """Return a figure of the pipeline engine, which has three decimals."""
    return (
        StepFigure(
            meaning=meaning,
            convention=f"deepspeed pipeline: mean since the last report, {how}",
            form=r"(?P<number>\d+\.\d{3})",
            is_whole=True,
            scales={"": factor},
        ),
    )


_PIPELINE = StepProgram(
    step=re.compile(r"\bsteps?:\s+(?P<step>\d{1,18})(?:\s*/\s*\d+)?\s+(?=loss:\s.*\biter time \(s\):)"),
    fields=re.compile(r"(?P<name>[a-z][a-z/ _]*(?:\(s\))?):\s+(?P<value>.*?)(?P<end>,?\s+(?=[a-z][^:]*:\s)|\s*$)"),
    figures={
        "loss": (StepFigure(meaning=("loss", "", "lower"), convention="deepspeed pipeline: mean over the step"),),
        "iter time (s)": _since_report(("step_time_ms", "ms", "lower"), "printed in s", 1e3),
        "samples/sec": _since_report(("samples_per_s", "samples/s", "higher"), "of all devices"),
    },
    mark=re.compile(r"\biter time \(s\): +\d"),
    ignored=frozenset({"steps", "step", "eta"}),
)
_TIMED = frozenset({"step_time_ms", "samples_per_s"})
_STAMPED = re.compile(r"\bstep=(?P<step>\d{1,18}), skipped=")  # The line above a report.
_VERSION = re.compile(r"\bDeepSpeed info: version=(\d+)\.(\d+)\.(\d+)")


def timers_in(source: Source) -> LogFigures:
    """Return the figures of all timer lines."""
    found = figures_of(source, list(_breakdowns(source)), _TIMES)
    if found.rows:
        found.notes.insert(0, "timers are named by report: not every one says its step")
    found.add(found_in(source, _RATES))
    found.add(_pipeline(source))
    return found


def _pipeline(source: Source) -> LogFigures:
    """Return the figures of the pipeline engine; refuse times that the log contradicts, and the rates of them."""
    found = found_in(source, _PIPELINE)
    lines: dict[int, dict[str, ImportedRow]] = {}
    for row in found.rows:
        lines.setdefault(row.line, {})[row.metric] = row
    wrong = dict.fromkeys(lines, _why_no_time(source, list(lines.values()), found.notes))
    for line, printed in lines.items():
        if not wrong[line] and printed.keys() >= _TIMED:
            time, rate = float(printed["step_time_ms"].printed), float(printed["samples_per_s"].printed)
            low, high = ((time + sign * 5e-4) * (rate + sign * 5e-4) for sign in (-1, 1))
            if math.floor(high) < max(low, 1):
                wrong[line] = f"time x rate is {time * rate:.3g}, not a whole batch: a number was cut or changed"
    rows, found.rows = found.rows, []
    for row in rows:
        if row.metric in _TIMED and wrong[row.line]:
            found.refuse(row.line, f"{row.name}: {row.metric}: {row.printed}", wrong[row.line])
        else:
            found.rows.append(row)
    return found


def _why_no_time(source: Source, reports: Sequence[Mapping[str, ImportedRow]], notes: list[str]) -> str:
    """Return why the times of the reports are none, by version or time stamps; empty if they are, or without either."""
    version = next((match for line in source.lines if (match := _VERSION.search(line))), None)
    release = tuple(int(part) for part in version.groups()) if version else (0,)
    if (0, 6, 2) <= release <= (0, 6, 3):
        return "DeepSpeed 0.6.2 and 0.6.3 print milliseconds as seconds, and a rate of them"
    timed = [rows["step_time_ms"] for rows in reports if "step_time_ms" in rows]
    stamps: dict[int, float | None] = {}  # By line of a report: the time of the line above that names the same step.
    latest: dict[str, float | None] = {}
    steps_at = {row.line: row.settings["step"] for row in timed}
    for number, line in enumerate(split_lines(source.text), start=1):
        if match := _STAMPED.search(line):
            latest[match["step"]] = seconds(line, line[match.start() :])
        if number in steps_at:
            stamps[number] = latest.get(steps_at[number])
    ratios, steps = [], []
    for one, row in itertools.pairwise(timed):
        begin, end, count = stamps[one.line], stamps[row.line], int(row.settings["step"]) - int(one.settings["step"])
        steps += [count] if count > 0 else []
        if begin is not None and end is not None and end > begin and count > 0:
            ratios.append(row.value / 1e3 * count / (end - begin))
    ratio, often = (statistics.median(ratios) if ratios else 0.0), (statistics.median(steps) if steps else 1)
    one_in = f"DeepSpeed before 0.5.7 prints the time of one step over the {often:g} steps since the last report"
    if often > 1 and ((0,) < release < (0, 5, 7) or 1 / _STAMPS_OFF < ratio * often < _STAMPS_OFF):
        return f"{one_in}; the time stamps give {1 / ratio:.3g} times the time" if ratio else one_in
    if ratio > _STAMPS_OFF:
        cause = "lines of another log may be mixed in" if ratio < 100 else "0.6.2 and 0.6.3 print milliseconds"
        return f"the times are {ratio:.3g} times those of the time stamps: {cause}"
    if timed and not ratios and not version:
        notes.append("neither version nor time stamps confirm iter time (s), which some versions print wrongly")
    return ""


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


_PROFILER = "DeepSpeed Flops Profiler"
_MS: Mapping[str, float] = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
_TERA: Mapping[str, float] = {
    **{"uFLOPS": 1e-18, "mFLOPS": 1e-15, "FLOPS": 1e-12, "KFLOPS": 1e-9, "MFLOPS": 1e-6, "GFLOPS": 1e-3},
    **{"TFLOPS": 1.0, "PFLOPS": 1e3},
}
_PARTS = "deepspeed: synchronised parts"
_COUNTED = "deepspeed: counted FLOPs of the forward"
_FIGURES: tuple[tuple[str, Meaning, Mapping[str, float], str], ...] = (
    ("fwd latency", ("forward_ms", "ms", "lower"), _MS, _PARTS),
    ("bwd latency", ("backward_ms", "ms", "lower"), _MS, _PARTS),
    ("step latency", ("optimizer_ms", "ms", "lower"), _MS, _PARTS),
    ("iter latency", ("step_time_ms", "ms", "lower"), _MS, _PARTS),
    (r"fwd FLOPS per GPU = fwd flops per GPU / fwd latency", ("forward_tflops_per_device", "TFLOPS", "higher"), _TERA,
     _COUNTED),
    (r"bwd FLOPS per GPU = (?P<factor>[\d.]+) \* fwd flops per GPU / bwd latency",
     ("backward_tflops_per_device", "TFLOPS", "higher"), _TERA, "deepspeed: backward is an assumed {} x forward"),
    (r"fwd\+bwd FLOPS per GPU = (?P<factor>[\d.]+) \* fwd flops per GPU / \(fwd\+bwd latency\)",
     ("tflops_per_device", "TFLOPS", "higher"), _TERA, "deepspeed: forward and backward are an assumed {} x forward"),
    (r"FLOPS per GPU = (?P<factor>[\d.]+) \* fwd flops per GPU / iter latency",
     ("iteration_tflops_per_device", "TFLOPS", "higher"), _TERA,
     "deepspeed: an assumed {} x forward over the time of the whole iteration"),
    ("samples/second", ("samples_per_s", "samples/s", "higher"), {"": 1.0}, "deepspeed: of all devices"),
)  # fmt: skip
"""Pattern of a line up to its colon; meaning; factors by printed unit; convention, with {} for the formula's factor."""
_PROFILED = re.compile(
    r"^(?P<title>[A-Za-z][^:]*):\s*(?P<value>[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|-?inf)?(?P<unit>.*)$"
)
_COUNTS = ("world size", "data parallel size", "batch size per GPU")
_ENDS = re.compile(r"(?:Aggregated|Detailed) Profile per (?:GPU|device)")


_STAMPS_OFF = 1.2  # Largest ratio of a time to that of the time stamps.
_SAMPLES_OFF = 0.01  # Relative tolerance: the latency is printed with three to five digits.


def all_figures(source: Source) -> LogFigures:
    """Return the figures of DeepSpeed's lines in a file, which may be the log of another program."""
    found = LogFigures()
    for profile, lines in enumerate(_profiles(source)):
        found.add(_Profile(source, "profiled step" if profile == 0 else f"profiled step ({profile + 1})").read(lines))
    found.add(deepspeed_comms.tables_in(source))
    found.add(timers_in(source))
    return found


def has_any(source: Source) -> bool:
    """Return whether DeepSpeed printed something in a file."""
    return _PROFILER in source.text or any(
        any_line(source.lines, mark) for mark in (deepspeed_comms.LOGGER, _BREAKDOWN, _RATES.mark, _PIPELINE.step)
    )


def _profiles(source: Source) -> Iterator[list[tuple[int, str]]]:
    """Yield the numbered lines of each summary of the profiler."""
    lines: list[tuple[int, str]] | None = None
    for number, line in enumerate(source.lines, start=1):
        if _PROFILER in line or _ENDS.search(line):
            if lines:
                yield lines
            lines = [] if _PROFILER in line else None
        elif lines is not None:
            lines.append((number, line))
    if lines:
        yield lines


class _Profile:
    """Reads one summary of the profiler."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._name = name
        self._found = LogFigures()
        self._counts: dict[str, int] = {}
        self._unread: list[tuple[int, str]] = []

    def read(self, lines: list[tuple[int, str]]) -> LogFigures:
        """Return the figures of all lines of the summary."""
        plain = [(number, line.replace("per device", "per GPU")) for number, line in lines]
        parts = [(number, match) for number, line in plain if (match := _PROFILED.match(line))]
        for number, match in parts:
            if match["title"] in _COUNTS:
                self._take_count(number, match)
        for number, match in parts:
            self._take(number, match)
        if any(row.metric == "step_time_ms" for row in self._found.rows):
            self._found.notes.append("latencies are of all micro-batches of a step, FLOPs and samples of one")
        last = max((row.line for row in self._found.rows), default=0)
        unread = dict.fromkeys(title for number, title in self._unread if number < last)
        self._check_samples()
        batch = self._counts.get("batch size per GPU")
        settings = {} if batch is None else {"local_batch_size": str(batch)}
        ranks = self._counts.get("world size")
        self._found.rows = [replace(row, ranks=ranks, settings=settings) for row in self._found.rows]
        if unread:
            self._found.notes.append(f"not imported: {', '.join(unread)}")
        return self._found

    def _take_count(self, number: int, match: re.Match[str]) -> None:
        text = f"{match['value'] or ''}{match['unit']}".strip()
        if re.fullmatch(r"0*[1-9]\d{0,8}", text):
            self._counts[match["title"]] = int(text)
        else:
            why = f"{match['title']} is {text!r:.40}, not a whole number from 1 on"
            self._found.refuse(number, match[0], why)

    def _take(self, number: int, match: re.Match[str]) -> None:
        title, value, unit = match["title"], match["value"], match["unit"].strip().replace("FLOPs", "FLOPS")
        for pattern, meaning, scales, convention in _FIGURES:
            fits = re.fullmatch(pattern, title, re.IGNORECASE)
            if fits is None:
                continue
            if value is None or unit not in scales:
                why = (
                    f"the unit is {unit!r:.40}, not {', '.join(scales)}" if value and "" not in scales else "no number"
                )
                self._found.refuse(number, match[0], f"{why}: the line was cut, or another was printed into it")
                return
            figure = float(value) * scales[unit]
            if not math.isfinite(figure) or figure <= 0:
                rule = (
                    f"below 0 {meaning[1]}" if figure < 0 else "0, not computed" if not figure else "no finite number"
                )
                self._found.refuse(number, match[0], f"{meaning[0]} is {value} {unit}".rstrip() + f", {rule}")
                return
            how = convention.format(fits.groupdict().get("factor", ""))
            printed = f"{value} {unit}".strip()
            self._found.rows.append(
                self._source.row(number, self._name, meaning, figure, printed=printed, convention=how)
            )
            return
        if value is not None and title not in _COUNTS:
            self._unread.append((number, title.partition(" = ")[0]))

    def _check_samples(self) -> None:
        """Refuse samples per second that count every rank of a model parallel group, or contradict the other lines."""
        rows = {row.metric: row for row in self._found.rows}
        samples, step = rows.get("samples_per_s"), rows.get("step_time_ms")
        ranks, replicas, batch = (self._counts.get(name) for name in _COUNTS)
        if samples is None or ranks is None:
            return
        why = ""
        if (replicas or ranks) != ranks:
            why = f"it counts the samples of {ranks} ranks, of which {ranks // (replicas or 1)} share each sample"
        elif step is not None and step.value and batch:
            expected = ranks * batch / step.value * 1e3
            if abs(samples.value - expected) > _SAMPLES_OFF * expected + 0.01:
                why = f"world size x batch / iter latency is {expected:.4g} samples/s: one of these lines was cut"
                self._counts.clear()
        if why:
            self._found.refuse(samples.line, f"samples/second: {samples.printed}", why)
            self._found.rows.remove(samples)


FORMAT = Format(
    name="deepspeed",
    about="DeepSpeed's timers, pipeline engine, FLOPs profiler and communication logger",
    recognises=has_any,
    read=lambda source: imported(source, all_figures(source)),
    options=("run",),
)
