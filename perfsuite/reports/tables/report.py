"""A report in Markdown: the tables of a style out of what runs measured, published figures beside.

Pure functions: the same runs give the same text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfsuite.errors import ConfigurationError
from perfsuite.gate.physics import speed_up_violation
from perfsuite.metrics.spec import significant
from perfsuite.platforms import DeviceModel
from perfsuite.records import Result
from perfsuite.reports.tables.case import TableCase, from_result, scaled, unmeasured, why_empty
from perfsuite.reports.tables.environment import environment_grids, peaks_grid, topology_lines
from perfsuite.reports.tables.markdown import Grid, escape, markdown
from perfsuite.reports.tables.published import PublishedLine, notes_of, paired, published_of
from perfsuite.reports.tables.spec import Column, Style, TableSpec
from perfsuite.reports.tables.styles import STYLES
from perfsuite.units import GIB, readable_unit

_NAMED = 4
"""Cases without a row that are named for each reason."""
LABELS = "[M] measured, [M?] mislabelled or anomalous, [R] ratios usable, [X] contradictory: docs/published.md"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one journal or baseline file holds."""

    name: str
    """File, as given."""
    platform: str
    fingerprint: str
    cases: tuple[TableCase, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a case has no result, by node id: skipped or failed."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    device: DeviceModel | None = None
    """What is published of the platform; None for one that nobody knows here."""
    simulated: bool = False

    @property
    def hardware(self) -> str:
        """``cpu (cpu-amd-epyc-2c)``."""
        return f"{self.platform} ({self.fingerprint})" if self.fingerprint else self.platform


def run_of_results(results: Iterable[Result], **meaning: Any) -> Run:
    """A run out of its results; ``meaning`` are the other fields of :class:`Run`."""
    results = tuple(results)
    return Run(
        cases=tuple(from_result(result) for result in results),
        environment=results[-1].environment if results else {},
        simulated=any(result.simulated for result in results),
        **meaning,
    )


@dataclass(frozen=True, kw_only=True)
class _Material:
    """All cases of a report, with speed-ups, and what has no row."""

    cases: tuple[TableCase, ...]
    rest: Mapping[str, str]
    base: str = ""
    """Platform of the base; empty without one."""


def fitting_styles(runs: Iterable[Run]) -> tuple[Style, ...]:
    """Styles that measured cases are of, and that have a table for them."""
    cases = [case for run in runs for case in scaled(run.cases) if case.values]
    return tuple(style for style in STYLES.values() if any(_has_row(style, case) for case in cases))


def _has_row(style: Style, case: TableCase) -> bool:
    return style.applies(case) and any(spec.select(case) for spec in style.tables)


def find_style(name: str) -> Style:
    """The style of this name; ConfigurationError names those there are."""
    if name not in STYLES:
        raise ConfigurationError(f"style {name!r} is unknown; choose from {', '.join(STYLES)}")
    return STYLES[name]


def report(runs: Sequence[Run], styles: Sequence[Style], base: Run | None = None) -> str:
    """The whole report.

    ``base`` is another machine's run: its rows stand in the tables too, and rows of the same model, batch and ranks say
    how much faster they are.  Raises ConfigurationError where there is nothing to show for a style, or the base cannot
    be compared.
    """
    material = _material(runs, base)
    for style in styles:
        _require_rows(style, runs, material)
    lines = ["# perfsuite report", "", *_head(runs, base), ""]
    printed: list[list[str]] = []
    for style in styles:
        lines += [f"## {style.title} (report {style.report})", ""]
        for block in (*_preamble(style, runs, base), *map(markdown, _grids(style, material))):
            if block not in printed:  # machine, software and kernels belong to several styles: once is enough
                lines += block
                printed.append(block)
    if material.rest:
        lines += ["## Not measured", ""]
        lines += [*_unmeasured_lines(material.rest), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _unmeasured_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    """A line per reason with its cases, the first few of them by name."""
    cases: dict[str, list[str]] = {}
    for case, reason in sorted(reasons.items()):
        cases.setdefault(reason, []).append(f"`{case}`")
    for reason, names in sorted(cases.items()):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"- {escape(reason)}: {', '.join(names[:_NAMED])}{more}"


def _preamble(style: Style, runs: Sequence[Run], base: Run | None) -> Iterator[list[str]]:
    """Machine, software, topology and peaks, where the style begins with them."""
    every = (*runs, *([base] if base else []))
    if style.environment:
        machines = list({run.hardware: run.environment for run in every}.items())
        yield from map(markdown, environment_grids(machines))
        yield topology_lines(machines)
    if style.peaks:
        yield markdown(peaks_grid({run.platform: run.device.tflops if run.device else {} for run in every}))


def _head(runs: Sequence[Run], base: Run | None) -> Iterator[str]:
    for run in runs:
        yield f"- measured: {escape(run.name)}, {_described(run)}"
    if base is not None:
        yield f"- base: {escape(base.name)}, {_described(base)}"
    yield f"- published figures are references, no gates; {LABELS}"


def _described(run: Run) -> str:
    measured = sum(bool(case.values) for case in run.cases)
    torch = f", torch {run.versions['torch']}" if "torch" in run.versions else ""
    simulated = "; the devices are simulated: no time here is a measurement" if run.simulated else ""
    return f"{measured} measured cases on {run.hardware}{torch}{simulated}"


# -- what there is -----------------------------------------------------------------------------------------------


def _material(runs: Sequence[Run], base: Run | None) -> _Material:
    cases: list[TableCase] = []
    rest: dict[str, str] = {}
    for run in runs:
        known = scaled(run.cases)
        rows, without = unmeasured(known, run.missing)
        cases += [_with_device(case, run) for case in (*known, *rows)]
        rest.update(without)
    if base is not None:
        _require_comparable(runs, base)
        other = [_with_device(case, base) for case in scaled(base.cases)]
        cases = [*(_over(case, other, base) for case in cases), *other]
    return _Material(cases=tuple(_newest(cases)), rest=rest, base=base.platform if base else "")


def _with_device(case: TableCase, run: Run) -> TableCase:
    """The case with the memory that its device has, GiB, where that is published."""
    memory = run.device.memory if run.device else None
    return (
        dataclasses.replace(case, settings={**case.settings, "memory_there": f"{memory.value:g}"}) if memory else case
    )


def _newest(cases: Sequence[TableCase]) -> list[TableCase]:
    """A case that several files have on the same hardware counts once, as in the last of them that measured it."""
    found: dict[tuple[str, str], TableCase] = {}
    for case in cases:
        key = (case.fingerprint, case.case)
        if case.values or not (key in found and found[key].values):
            found[key] = case
    return list(found.values())


def _require_comparable(runs: Sequence[Run], base: Run) -> None:
    for run in runs:
        if run.simulated != base.simulated:
            first, second = ("simulated", "real") if run.simulated else ("real", "simulated")
            raise ConfigurationError(
                f"{run.name} is of {first} devices and the base {base.name} of {second} ones; the two never meet"
            )
        if run.fingerprint == base.fingerprint and run.fingerprint:
            raise ConfigurationError(
                f"the base {base.name} is of the same hardware as {run.name}, {run.hardware}; give the results of "
                "another machine as the base, or compare two runs of one machine with perfsuite ab"
            )
    common = {case.model for run in runs for case in run.cases} & {case.model for case in base.cases}
    if not common - {""}:
        there = ", ".join(sorted({case.model for case in base.cases} - {""})) or "none"
        raise ConfigurationError(
            f"the base {base.name} of {base.hardware} has no model in common with the results; its models: {there}"
        )


_SAME_RUN = ("model", "ranks", "local_batch_size", "global_batch_size", "strategy", "dtype")


def _over(case: TableCase, others: Sequence[TableCase], base: Run) -> TableCase:
    """The case with its throughput over that of the base's case of the same run; loaders may differ, not otherwise."""
    mine = case.values.get("samples_per_s")
    alike = [
        other
        for other in others
        if other.values.get("samples_per_s")
        and all(case.settings.get(name) == other.settings.get(name) for name in _SAME_RUN)
    ]
    if mine is None or not alike:
        reason = f"{base.platform} has no run of this model, batch and number of ranks" if mine is not None else ""
        return dataclasses.replace(case, reasons={**case.reasons, "over_base": reason}) if reason else case
    workers = case.settings.get("num_workers")
    other = min(alike, key=lambda each: (each.settings.get("num_workers") != workers, each.case))
    ratio = mine / other.values["samples_per_s"]
    return dataclasses.replace(case, values={**case.values, "over_base": ratio})


def _require_rows(style: Style, runs: Sequence[Run], material: _Material) -> None:
    if any(case.values and spec.select(case) for spec in style.tables for case in material.cases):
        return
    names = ", ".join(run.name for run in runs)
    if not any(case.values for case in material.cases):
        raise ConfigurationError(f"{names}: nothing was measured, so there is nothing for a table; run {style.needs}")
    there = ", ".join(sorted({case.model or case.workload for case in material.cases if case.values}))
    fitting = ", ".join(f"--style={each.name}" for each in fitting_styles(runs)) or "another file"
    raise ConfigurationError(
        f"style {style.name} has no table for what {names} measured ({there}); choose {fitting}, or run {style.needs}"
    )


# -- tables ------------------------------------------------------------------------------------------------------


def _grids(style: Style, material: _Material) -> Iterator[Grid]:
    for spec in style.tables:
        selected = [case for case in material.cases if spec.select(case)]
        if not any(case.values for case in selected):
            continue
        parts: dict[str, list[TableCase]] = {}
        for case in selected:
            part = case.settings.get(spec.per) or case.settings.get("kernel", "") if spec.per else ""
            parts.setdefault(str(part), []).append(case)
        for part, members in sorted(parts.items()):
            title = f"{spec.title}: {part}" if part else spec.title
            yield _grid(title, spec, members, material)


def _grid(title: str, spec: TableSpec, cases: Sequence[TableCase], material: _Material) -> Grid:
    columns = [column for column in spec.columns if not column.optional or any(_cell(case, column) for case in cases)]
    if material.base and any(column.key == "speedup" for column in columns):
        at = [column.key for column in columns].index("speedup") + 1
        columns.insert(at, Column(title=f"times {material.base}, same ranks", key="over_base"))
    ordered = sorted(cases, key=lambda case: _order(case, columns))
    beside = paired(published_of(spec.published), ordered, spec.pair_by)
    columns = [_readable(column, ordered, beside) for column in columns]
    rows: list[tuple[str, ...]] = []
    blocks: list[tuple[TableCase, PublishedLine]] = []
    for index, case in enumerate(ordered):
        rows.append((*(_cell(case, column) for column in columns), case.missing))
        for line in beside.get(index, []):
            rows.append((*(_published_cell(line, column) for column in columns), ""))
            blocks.append((case, line))
    remarks = any(row[-1] for row in rows)
    shown = {column.key: column.title for column in columns if column.value}
    return Grid(
        title=title,
        columns=(*(column.title for column in columns), *(["not measured because"] if remarks else [])),
        rows=tuple(row if remarks else row[:-1] for row in rows),
        notes=(*spec.notes, *_doubts(ordered, shown), *_empty(ordered, columns), *notes_of(blocks, shown)),
    )


def _readable(column: Column, cases: Sequence[TableCase], beside: Mapping[int, Sequence[PublishedLine]]) -> Column:
    """A column of sizes in the unit that all its figures, published ones among them, read best in; others as is."""
    if not column.in_gib:
        return column
    published = (line.figures[column.key] for lines in beside.values() for line in lines if column.key in line.figures)
    sizes = [*(case.values.get(column.key, 0.0) for case in cases), *(figure.metric_value for figure in published)]
    unit, unit_bytes = readable_unit([size * GIB for size in sizes])
    return dataclasses.replace(column, title=column.title.replace("GiB", unit), scale=GIB / unit_bytes)


def _order(case: TableCase, columns: Sequence[Column]) -> tuple[Any, ...]:
    """Platforms apart; then columns left of the layout, the ranks, and the settings right of it; numbers by size."""
    keys = [column.key for column in columns if not column.value]
    at = keys.index("layout") if "layout" in keys else 0
    left, right = keys[:at], keys[at + 1 :]
    return (
        case.platform,
        case.fingerprint,
        *(_sortable(case, key) for key in left),
        case.ranks,
        *(_sortable(case, key) for key in right),
        case.case,
    )


def _sortable(case: TableCase, key: str) -> tuple[int, float, str]:
    value = case.settings.get(f"{key}_order", case.settings.get(key))
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    return (1, 0.0, str(value or ""))


def _cell(case: TableCase, column: Column) -> str:
    if not column.value:
        value = case.settings.get(column.key)
        return "" if value is None else str(value)
    number = case.values.get(column.key)
    if number is None:
        return ""
    base = case.bases.get(column.key)
    if base is None:
        return f"{significant(number * column.scale)}{_interval(case, column)}"
    if case.ranks == case.base_ranks:
        return f"{significant(number * column.scale, 3)} (base)"
    return f"{significant(number * column.scale, 3)} vs {base}"


def _interval(case: TableCase, column: Column) -> str:
    """Two digits say how far a value is known."""
    ends = [case.values.get(f"{column.key}_{end}") for end in ("low", "high")]
    low, high = (None if end is None else significant(end * column.scale, 2) for end in ends)
    return "" if low is None or high is None or low == high else f" ({low} to {high})"


def _published_cell(line: PublishedLine, column: Column) -> str:
    if column.key == "layout":
        return line.name
    if not column.value:
        value = line.setting(column.key)
        return "" if value is None else str(value)
    figure = line.figures.get(column.key)
    return f"{significant(figure.metric_value * column.scale)} [{figure.label}]" if figure else ""


def _empty(cases: Sequence[TableCase], columns: Sequence[Column]) -> Iterator[str]:
    """Why measured rows have empty cells, columns of one reason together."""
    found: dict[str, list[str]] = {}
    for column in columns:
        measured = [case for case in cases if case.values] if column.value else []
        for reason in dict.fromkeys(filter(None, (why_empty(case, column.key) for case in measured))):
            count = sum(why_empty(case, column.key) == reason for case in measured)
            whole = f"empty: {{}}: {reason}" if count == len(measured) else f"empty in {count} rows: {{}}: {reason}"
            found.setdefault(whole.replace("1 rows", "1 row"), []).append(column.title)
    for text, titles in found.items():
        yield text.replace("{}", "; ".join(titles))


def _doubts(cases: Sequence[TableCase], shown: Mapping[str, str]) -> Iterator[str]:
    """What is odd about speed-ups: nothing was added to gain from, or more was gained than was added."""
    if not {"speedup", "scaling_efficiency"} & set(shown):
        return
    if any(case.shared for case in cases):
        yield "ranks share one device: more ranks brought no more hardware, so linear is out of reach"
    for case in cases:
        if "speedup" in case.values:
            said = speed_up_violation(case.values["speedup"], case.ranks, case.base_ranks)
            if said:
                yield f"{said}, look at the base: `{case.case}`"
