"""Logs of training programs: a line per step with named figures, possibly repeated by every rank.

A program is a table: the beginning of a step, the syntax of its fields, and the meaning of each field. A number without
a meaning is listed as not imported. A number that may be cut is refused: nothing follows it, and other lines have more
fields.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

from perfsuite.base.units import plural
from perfsuite.imports.lines import Runs, seconds, split_lines
from perfsuite.imports.row import Imported, ImportedRow, LogFigures, Meaning, Source

_NUMBER = r"(?:[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf))"
_ONE: Mapping[str, float] = MappingProxyType({"": 1.0})
_OTHER_PHASE = re.compile(r"\b(?:validate|validation|evaluate|evaluation|val loss)\b")
"""Words of other phases, also if another line was printed between them and the step."""
_LONGEST = 20_000  # Most characters of a line of steps.
_RANKS_APART = 1.2  # Largest ratio of a time or rate of one step between ranks of one program.
NO_GROUPS = "(?!.*,)@"  # Form of a figure that a program prints with three decimals, so that 53,753 is not thousands.
_TRAINING = ("", "train", "training")  # Words before ``step`` that do not name another phase.


@dataclass(frozen=True, kw_only=True)
class StepFigure:
    """A number of a field."""

    meaning: Meaning
    convention: str
    form: str = "@"
    """Pattern of the whole field: @ is the number, # another number; a group ``unit`` selects the factor."""
    scales: Mapping[str, float] = field(default_factory=lambda: _ONE)
    is_whole: bool = False  # A cut number cannot match the form, even if nothing follows it.
    beside: str = ""  # Name of the other number if it is not imported.

    @property
    def shows_cut(self) -> bool:
        """Return whether a cut field cannot match the form."""
        return self.is_whole or not self.form.endswith(("@", "#", "?)"))


@dataclass(frozen=True, kw_only=True)
class StepField:
    """A field of a line, as printed."""

    name: str
    value: str
    is_closed: bool  # Other text follows the field.
    line: int = 0  # Its line in the file if the step has a line per field; else 0.


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """A line of a step, or the part of a line that is of one step."""

    line: int
    name: str  # Subject of the figures.
    fields: tuple[StepField, ...]
    step: int | None = None  # None for a line without a step.
    epoch: int = 0  # Epoch in which ``step`` counts; 0 also if ``step`` is of the run.
    rank: str = ""
    time: float | None = None
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The syntax of a program's steps."""

    step: re.Pattern[str]
    """Beginning of a step; groups ``step`` and, if the word before may name another phase, ``phase``.

    A group ``whole`` is the step of the run if ``step`` may be of an epoch, a group ``epoch`` that epoch. A group
    ``micro`` matches if the line counts micro-steps.
    """
    fields: re.Pattern[str]  # A field: groups ``name`` and ``value``, and ``end`` for the text after every field.
    figures: Mapping[str, Sequence[StepFigure]]
    mark: re.Pattern[str]  # Text of every line of a step; a line with it but without a beginning was cut.
    settings: Mapping[str, str] = field(default_factory=dict)  # Name of a setting by name of field.
    ignored: frozenset[str] = frozenset({"step", "iteration"})
    noun: str = "step"  # Word for a step in the names of figures.

    def begins(self, source: Source) -> bool:
        """Return whether a file has a step of the program."""
        return any_line(source.lines, self.step)


def read_steps(source: Source, program: StepProgram) -> Imported:
    """Return all figures of a log of a program. Raises ImportFailed without figures."""
    return imported(source, found_in(source, program))


def imported(source: Source, found: LogFigures) -> Imported:
    """Return the figures of the requested run. Raises ImportFailed without figures."""
    run = source.options.run
    if run is not None and found.rows:
        found.rows = [row for row in found.rows if row.settings.get("run", "1") == str(run)]
        if not found.rows:
            raise source.fault(1, f"the log has no run {run}", "see the runs without --run")
    if not found.rows and found.refused:
        first = found.refused[0]
        raise source.fault(first.line, first.why, "no line has a figure; give a whole log")
    if not found.rows:
        raise source.fault(1, "no line of a step has a figure", "give the log of a run that reached its first report")
    return source.imported(found.rows, refused=found.refused, notes=found.notes)


def found_in(source: Source, program: StepProgram) -> LogFigures:
    """Return the figures of a program's steps."""
    found = LogFigures()
    lines = list(_step_lines(source, program, found))
    if "phase" in program.step.groupindex and any(line.time is not None for line in lines):
        for line in lines:
            if line.time is None:
                why = (
                    "it has no time stamp, other lines of steps have one: its begin was cut, and may name another phase"
                )
                found.refuse(line.line, line.text, why)
        lines = [line for line in lines if line.time is not None]
    found.add(figures_of(source, lines, program.figures, program.settings, program.ignored))
    return found


def _step_lines(source: Source, program: StepProgram, found: LogFigures) -> Iterator[StepLine]:
    """Yield the lines of steps; refuse cut lines, and count lines of other phases."""
    raw = split_lines(source.text)
    phases: Counter[str] = Counter()
    below_step = 0  # Number of the line below the last step.
    for line in source.labelled:
        if len(line.text) > _LONGEST:
            if program.mark.search(line.text):
                why = f"the line has more than {_LONGEST} characters, so it is not the line of a step"
                found.refuse(line.number, line.text, why)
            continue
        matches = list(program.step.finditer(line.text))
        before = line.text[: matches[0].start()] if matches else line.text
        if program.mark.search(before) or (line.number == below_step and not matches and _has_figure(program, before)):
            why = "it does not say its step: the line was cut or wrapped, or another line was printed into it"
            found.refuse(line.number, before, why)
        for match, after in zip(matches, [*matches[1:], None], strict=False):
            phase = (match.groupdict().get("phase") or "").lower()
            if "phase" in match.groupdict() and (other := _OTHER_PHASE.search(before)):
                phase = other[0]
            if phase not in _TRAINING:
                phases[phase] += 1
                continue
            below_step = line.number + 1
            groups = match.groupdict()
            step = int(groups.get("whole") or match["step"])
            epoch = 0 if groups.get("whole") else int(groups.get("epoch") or 0)
            noun = "micro-step" if groups.get("micro") else program.noun
            text = line.text[match.start() : after.start() if after else None].rstrip()
            yield StepLine(
                line=line.number,
                name=f"epoch {epoch} {noun} {step}" if epoch else f"{noun} {step}",
                fields=tuple(fields_of(text, program.fields)),
                step=step,
                epoch=epoch,
                rank=line.label,
                time=seconds(raw[line.number - 1], line.text[match.start() :]),
                text=text,
            )
    found.notes += [f"{plural(count, 'line')} of another phase ({name}) left out" for name, count in phases.items()]


def _has_figure(program: StepProgram, text: str) -> bool:
    """Return whether the rest of a wrapped line has a field that the program's lines of steps have."""
    if _OTHER_PHASE.search(text):
        return False
    return any(one.name in program.figures and one.value[:1].isdigit() for one in fields_of(text, program.fields))


def fields_of(text: str, pattern: re.Pattern[str]) -> Iterator[StepField]:
    """Yield the fields of a text."""
    for match in pattern.finditer(text):
        is_closed = bool(match["end"].strip()) or match.end() < len(text)
        yield StepField(name=match["name"].strip().lower(), value=match["value"].strip(), is_closed=is_closed)


def figures_of(
    source: Source,
    lines: Sequence[StepLine],
    figures: Mapping[str, Sequence[StepFigure]],
    settings: Mapping[str, str] = MappingProxyType({}),
    ignored: frozenset[str] = frozenset(),
) -> LogFigures:
    """Return the figures of lines; if several ranks print the same step, the first figure counts."""
    reading = _Reader(source, figures, settings, ignored, _open_ends(lines))
    for line in lines:
        reading.take(line)
    return reading.result()


def _open_ends(lines: Sequence[StepLine]) -> tuple[str, str]:
    """Return name and form of the last field if it ends the line in several lines; else empty texts."""
    ends = [line.fields[-1] for line in lines if line.fields]
    if len(ends) < 2 or any(end.is_closed or end.name != ends[0].name for end in ends):
        return "", ""
    return ends[0].name, Counter(_form(end.value) for end in ends).most_common(1)[0][0]


def _form(value: str) -> str:
    """Return a value with 9 for every group of digits, and for each decimal: ``3.14`` becomes ``9.99``."""
    head, point, tail = value.partition(".")
    return re.sub(r"\d+", "9", head) + point + re.sub(r"\d", "9", tail)


@cache
def _pattern(form: str) -> re.Pattern[str]:
    return re.compile(form.replace("@", f"(?P<number>{_NUMBER})").replace("#", _NUMBER), re.IGNORECASE)


def _value(figure: StepFigure, match: re.Match[str]) -> float:
    return float(match["number"].replace(",", "")) * figure.scales[match.groupdict().get("unit") or ""]


class _Reader:
    """Turns lines of steps into figures, one after the other."""

    def __init__(
        self,
        source: Source,
        figures: Mapping[str, Sequence[StepFigure]],
        settings: Mapping[str, str],
        ignored: frozenset[str],
        open_end: tuple[str, str],
    ) -> None:
        self._source = source
        self._figures = figures
        self._settings = settings
        self._ignored = ignored
        self._open_end = open_end
        self._runs = Runs()
        self._found = LogFigures()
        self._steps: set[tuple[int, str]] = set()
        self._repeated = 0
        self._apart: dict[str, float] = {}
        self._unread: dict[str, None] = {}
        self._empty: dict[tuple[str, str], list[int]] = {}

    def take(self, line: StepLine) -> None:
        """Take the figures of a line that no earlier line had."""
        taken: dict[str, float] = {}
        is_first, name = True, line.name
        if line.step is not None:
            at = (line.epoch, line.step)
            taken, is_first = self._runs.enter(line.line, at, line.rank, line.time, line.text)
            self._steps.add((self._runs.count, name))
        settings = {} if line.step is None else {"step": str(line.step), "run": str(self._runs.count)}
        settings |= {"epoch": str(line.epoch)} if line.epoch else {}
        settings |= {
            self._settings[one.name]: one.value
            for one in line.fields
            if one.name in self._settings and one.is_closed and re.fullmatch(r"\d+", one.value)
        }
        metrics: dict[str, float] = {}
        rows = len(self._found.rows)
        values: dict[str, set[str]] = {}
        for one in line.fields:
            values.setdefault(one.name, set()).add(one.value)
        for one in line.fields:
            if one.name in self._figures and len(values[one.name]) > 1:
                why = f"the line has two values of {one.name}: another line was printed into it"
                self._found.refuse(line.line, f"{name}: {one.name}: {one.value}", why)
                continue
            metrics |= self._take_field(line, one, name, settings, taken)
        taken |= metrics
        self._repeated += not is_first and len(self._found.rows) == rows

    def _take_field(
        self, line: StepLine, one: StepField, name: str, settings: Mapping[str, str], taken: Mapping[str, float]
    ) -> dict[str, float]:
        figures, at = self._figures.get(one.name), one.line or line.line
        if figures is None:
            if any(f"{other}:" in one.value.lower() for other in self._figures):
                self._found.refuse(at, f"{one.name}: {one.value}", "another line was printed into it")
            elif one.name not in self._ignored and one.name not in self._settings and re.search(r"\d", one.value):
                self._unread[one.name] = None
            return {}
        fits: dict[str, tuple[StepFigure, re.Match[str]]] = {}
        for figure in figures:
            match = _pattern(figure.form).fullmatch(one.value)
            has_unit = match is not None and (match.groupdict().get("unit") or "") in figure.scales
            if match and has_unit and not (figure.meaning[0] == "loss" and "," in match["number"]):
                fits.setdefault(figure.meaning[0], (figure, match))
        metrics = {metric: _value(*fit) for metric, fit in fits.items()} or {figures[0].meaning[0]: math.nan}
        if metrics.keys() <= taken.keys():
            for metric, value in metrics.items() if one.is_closed else ():
                if ("step_time" in metric or "_per_s" in metric) and min(value, taken[metric]) > 0:
                    apart = max(value, taken[metric]) / min(value, taken[metric])
                    self._apart[metric] = max(apart, self._apart.get(metric, 1.0))
            return {}
        if not fits or not (one.is_closed or any(figure.shows_cut for figure, _ in fits.values()) or self._ends(one)):
            why = "the line was cut, or another line was printed into it"
            self._found.refuse(at, f"{name}: {one.name}: {one.value}", f"{one.name} is {one.value!r:.60}: {why}")
            return {}
        for metric, (figure, match) in fits.items():
            if figure.beside:
                self._unread[figure.beside] = None
            if metric in taken or not self._take_number(at, figure, match, name, settings):
                del metrics[metric]
        return metrics

    def _ends(self, one: StepField) -> bool:
        return (one.name, _form(one.value)) == self._open_end

    def _take_number(
        self, line: int, figure: StepFigure, match: re.Match[str], name: str, settings: Mapping[str, str]
    ) -> bool:
        """Return whether a number was imported or refused; False for a placeholder."""
        printed, value = match["number"], _value(figure, match)
        metric, unit, _ = figure.meaning
        if not math.isfinite(value) or (unit and value < 0):
            rule = "no finite number" if not math.isfinite(value) else f"below 0 {unit}"
            self._found.refuse(line, f"{name}: {match[0]}", f"{metric} is {printed}, {rule}")
            return True
        if "loss" in metric and value < 0 and value == int(value):
            self._empty.setdefault(
                (metric, f"{printed}: a rank without the last pipeline stage prints no loss"), []
            ).append(line)
            return False
        if value == 0 and unit:
            self._empty.setdefault((metric, f"{printed}: not computed, or less than the digits show"), []).append(line)
            return False
        printed += match.groupdict().get("unit") or ""
        row = self._source.row(
            line, name, figure.meaning, value, printed=printed, convention=figure.convention, settings=settings
        )
        self._found.rows.append(row)
        return True

    def result(self) -> LogFigures:
        """Return the figures, refusals and notes of all lines."""
        notes = [plural(len(self._steps), "step"), "the first steps of a run are warm-up"] if self._steps else []
        notes += self._runs.notes
        if self._repeated:
            notes.append(f"{plural(self._repeated, 'line')} of other ranks for the same steps left out")
        notes += [
            f"{metric} of one step differs by up to {apart - 1:.0%}: two programs may print into this log"
            for metric, apart in self._apart.items()
            if apart > _RANKS_APART
        ]
        notes += [
            f"{metric} {what}; left out {plural(len(lines), 'time')}, first in line {lines[0]}"
            for (metric, what), lines in self._empty.items()
        ]
        if self._unread:
            notes.append(f"not imported: {', '.join(self._unread)}")
        self._found.notes = notes
        self._found.rows = [self._of_run(row) for row in self._found.rows]
        return self._found

    def _of_run(self, row: ImportedRow) -> ImportedRow:
        """Add the run to the name of a figure if there are several runs."""
        run = row.settings.get("run")
        if run is None:
            return row
        if self._runs.count > 1:
            return replace(row, name=f"{row.name} run {run}")
        return replace(row, settings={name: text for name, text in row.settings.items() if name != "run"})


def any_line(lines: Iterable[str], pattern: re.Pattern[str]) -> bool:
    """Return whether a line of normal length matches the pattern."""
    return any(pattern.search(line) for line in lines if len(line) <= _LONGEST)
