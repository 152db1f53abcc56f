"""A report in Markdown: the tables of a style with the results of runs and published figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.text import code_text, listed, without_paths
from perfsuite.base.units import plural
from perfsuite.reports.document import grouped
from perfsuite.reports.pairs import pair_grids
from perfsuite.reports.projected import remarks
from perfsuite.reports.screen import accepted
from perfsuite.reports.stored import Recording
from perfsuite.reports.tables import spec as c
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.environment import environment_grids, peaks_grid, topology_lines
from perfsuite.reports.tables.grids import escape, grids_of, markdown
from perfsuite.reports.tables.parallel import PARALLEL
from perfsuite.reports.tables.parallel_rows import of_constant_devices
from perfsuite.reports.tables.recording import ReportCases, gathered, projected_cases, scaled, table_cases
from perfsuite.reports.tables.spec import ColumnSpec, Style, TableSpec, is_gpt, parts, setting
from perfsuite.reports.tables.training import FLAGPERF, KERNELS, LATTE, ONEFLOW, OPENSORA
from perfsuite.suite import runnable

_PIPELINE = (
    setting("micro-batches", "num_micro_batches"),
    c.LAYOUT,
    c.MESH,
    setting("micro-batch", "micro_batch_size"),
    c.SAMPLES,
    ColumnSpec(title="bubble %", key="bubble_ratio", scale=100),
    ColumnSpec(title="bubble % (simulated)", key="simulated_bubble_ratio", scale=100),
    c.PEAK,
)
"""Columns of both tables of pipelines."""
_SET_UP = (c.MODEL, c.STRATEGY, c.LAYOUT, c.MESH, c.LOCAL, c.OPTIONS)
_MEMORY = parts("GiB", "weights", "gradients", "optimizer", "activations", "peak activations?", "untracked", "peak")


_LARGEST = "LargestBatch"


def _strategy(*names: str) -> Callable[[TableCase], bool]:
    return lambda case: is_gpt(case) and case.settings.get("strategy") in names and case.workload != _LARGEST


def _pipelines(case: TableCase) -> bool:
    return "bubble_ratio" in case.values or (bool(case.missing) and "schedule" in case.settings)


METHODS = Style(
    name="methods",
    report="004",
    title="Methods",
    needs="pytest test_perf",
    applies=lambda case: not case.model or is_gpt(case) or "experts" in case.settings,
    environment=True,
    tables=(
        *KERNELS,
        TableSpec(
            title="Data parallel, DDP",
            select=_strategy("ddp"),
            published=("004/ddp",),
            per="model",
            columns=(c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.SAMPLES, c.STEP_S, c.SPEED_UP, c.MFU, c.EXPOSED),
            notes=(c.NAMED_BASE, c.MFU_NOTE, c.COMMUNICATION),
        ),
        TableSpec(
            title="Data parallel, FSDP",
            select=_strategy("fsdp"),
            published=("004/fsdp", "004/multi-node"),
            per="model",
            columns=(c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.SAMPLES, c.STEP_S, c.PEAK, c.SPEED_UP, c.EXPOSED),
            notes=(c.NAMED_BASE, c.COMMUNICATION),
        ),
        TableSpec(
            title="ZeRO",
            select=_strategy("zero0", "zero1", "zero2", "zero3", "zero_redundancy"),
            per="model",
            columns=(c.STRATEGY, c.LAYOUT, c.LOCAL, c.OPTIONS, c.SAMPLES, c.PEAK, c.SPEED_UP),
        ),
        TableSpec(
            title="Memory per device",
            select=lambda case: (
                bool(case.model) and ("peak_gib" in case.values or "memory" in case.parameters.get("builds", ()))
            ),
            columns=(*_SET_UP, *_MEMORY),
            notes=("untracked: allocated after a step beyond weights, gradients and optimizer",),
        ),
        TableSpec(
            title="Largest local batch",
            select=lambda case: case.workload == _LARGEST or "largest_local_batch_samples" in case.values,
            columns=(
                c.MODEL,
                c.STRATEGY,
                c.LAYOUT,
                c.OPTIONS,
                ColumnSpec(title="most samples per rank", key="largest_local_batch_samples"),
                c.PEAK,
                c.SAMPLES,
            ),
        ),
        TableSpec(
            title="Weak scaling",
            select=lambda case: is_gpt(case) and case.kind == "weak",
            published=("004/weak",),
            per="model",
            columns=(c.STRATEGY, c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.STEP_S, c.SPEED_UP, c.EFFICIENCY, c.EXPOSED),
            notes=(c.NAMED_BASE, c.COMMUNICATION),
        ),
        TableSpec(
            title="Strong scaling",
            select=lambda case: is_gpt(case) and case.kind == "strong",
            published=("004/strong",),
            per="model",
            columns=(c.STRATEGY, c.LAYOUT, c.LOCAL, c.GLOBAL, c.OPTIONS, c.STEP_S, c.SPEED_UP, c.EFFICIENCY),
            notes=(c.NAMED_BASE,),
        ),
        TableSpec(
            title="Pipeline schedules",
            select=_pipelines,
            published=("004/schedules",),
            per="model",
            pair_by=("schedule", "num_micro_batches"),
            columns=(c.SCHEDULE, c.STAGES, *_PIPELINE),
        ),
        TableSpec(
            title="Number of stages",
            select=lambda case: _pipelines(case) and str(case.settings.get("schedule", "")).lower() == "1f1b",
            published=("004/stages",),
            per="model",
            pair_by=("stages", "schedule"),
            rows=of_constant_devices,
            columns=(c.STAGES, setting("devices per stage", "devices_per_stage"), c.SCHEDULE, *_PIPELINE),
        ),
        *PARALLEL,
    ),
)


_NAMED = 4  # Cases without a row that are named for each reason.
LABELS = "[M] measured, [M?] mislabelled or anomalous, [R] ratios usable, [X] contradictory: perfsuite docs published"


def best_style(recordings: Sequence[Recording], styles: Sequence[Style]) -> Style:
    """Return the style that has a table for most cases; of several the first."""
    cases = [case for recording in recordings for case in (*table_cases(recording), *projected_cases(recording))]
    return max(styles, key=lambda style: sum(bool(case.values) and _has_row(style, case) for case in cases))


def fitting_styles(recordings: Iterable[Recording]) -> tuple[Style, ...]:
    """Return the styles that have a table for a measured or projected case."""
    kinds = (of_kind(recording) for recording in recordings for of_kind in (table_cases, projected_cases))
    cases = [case for members in kinds for case in scaled(members) if case.values]
    return tuple(style for style in STYLES.values() if any(_has_row(style, case) for case in cases))


def _has_row(style: Style, case: TableCase) -> bool:
    return style.applies(case) and any(spec.select(case) for spec in style.tables)


def find_style(name: str) -> Style:
    """The style of this name; ConfigurationError names those there are."""
    if name not in STYLES:
        raise ConfigurationError(f"style {name!r} is unknown; choose from {', '.join(STYLES)}")
    return STYLES[name]


def report(recordings: Sequence[Recording], styles: Sequence[Style], base: Recording | None = None) -> str:
    """The whole report.

    ``base`` is of another machine: its rows stand in the tables too, and rows of the same model, batch and ranks say
    how much faster they are.  Raises ConfigurationError where there is nothing to show for a style, or the base cannot
    be compared.
    """
    material = gathered(recordings, base)
    for style in styles:
        _require_rows(style, recordings, material)
    lines = ["# perfsuite report", "", *_head(recordings, base), ""]
    printed: list[list[str]] = []
    for style in styles:
        lines += [f"## {style.title}", ""]
        for block in (*_preamble(style, styles, recordings, base), *map(markdown, grids_of(style, material))):
            if block not in printed:  # machine, software and kernels belong to several styles: once is enough
                lines += block
                printed.append(block)
    rest = {
        case: reason
        for case, reason in material.rest.items()
        if not reason.startswith("skipped") or _style_of(case, material) in styles
    }
    if rest:  # failures, and skips of these styles
        lines += ["## Not measured", "", *_unmeasured_lines(rest), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _style_of(node: str, material: ReportCases) -> Style:
    """The style that a case without a result belongs to: that of its test's other cases, else by words of its id."""
    test = node.partition("[")[0]
    tested = [case for case in material.cases if case.case.partition("[")[0] == test]
    by_words = (style for style in STYLES.values() if any(word in node.lower() for word in style.words))
    of_test = (style for style in STYLES.values() if any(_has_row(style, case) for case in tested))
    general = next(style for style in STYLES.values() if not style.words)
    return next(by_words, None) or next(of_test, general)


def _unmeasured_lines(reasons: Mapping[str, str]) -> Iterator[str]:
    cases = grouped((without_paths(reason), code_text(case)) for case, reason in sorted(reasons.items()))
    for reason, names in sorted(cases.items()):
        yield f"- {escape(reason)}: {listed(names, _NAMED)}"


def _preamble(
    style: Style, styles: Sequence[Style], recordings: Sequence[Recording], base: Recording | None
) -> Iterator[list[str]]:
    """Machine, software, topology and peaks, where the style begins with them."""
    all_recordings = (*recordings, *([base] if base else []))
    if style.environment:
        machines = list({recording.run.hardware: recording.run.environment for recording in all_recordings}.items())
        reports = [each.report for each in styles]  # all of them at the first style: the blocks are printed once
        yield from map(markdown, environment_grids(machines, reports))
        yield topology_lines(machines, reports)
        yield from (markdown(grid) for one in all_recordings for grid in pair_grids(one.run.results.values()))
    if style.peaks:
        peaks = {one.run.platform: one.device.tflops if one.device else {} for one in all_recordings}
        yield markdown(peaks_grid(peaks))


def _head(recordings: Sequence[Recording], base: Recording | None) -> Iterator[str]:
    for recording in recordings:
        yield f"- measured: {escape(without_paths(recording.run.name))}, {_described(recording)}"
        run = recording.run
        yield from (f"- verdict: {escape(without_paths(verdict))}" for verdict in accepted([run]))
        shown = {case: one for case, one in run.projections.items() if case not in run.results}
        yield from (f"- projected, {escape(without_paths(remark))}" for remark in remarks(shown))
    if base is not None:
        yield f"- base: {escape(without_paths(base.run.name))}, {_described(base)}"
    yield f"- published figures are references, no gates; {LABELS}"


def _described(recording: Recording) -> str:
    measured, projected = sum(bool(case.values) for case in table_cases(recording)), len(projected_cases(recording))
    torch = f", torch {recording.run.versions['torch']}" if "torch" in recording.run.versions else ""
    simulated = "; the devices are simulated: no time here is a measurement" if recording.run.simulated else ""
    projected_rows = f"; rows of {plural(projected, 'projected case')} begin with 'projected'" if projected else ""
    return escape(f"{plural(measured, 'measured case')} on {recording.run.hardware}{torch}{projected_rows}{simulated}")


def _require_rows(style: Style, recordings: Sequence[Recording], material: ReportCases) -> None:
    if any(case.values and spec.select(case) for spec in style.tables for case in material.cases):
        return
    names, needs = ", ".join(recording.run.name for recording in recordings), runnable(style.needs)
    if not any(case.values for case in material.cases):
        raise ConfigurationError(f"{names}: nothing was measured, so there is nothing for a table; run {needs}")
    there = ", ".join(sorted({case.model or case.workload for case in material.cases if case.values}))
    fitting = ", ".join(f"--style={other.name}" for other in fitting_styles(recordings)) or "another file"
    raise ConfigurationError(
        f"style {style.name} has no table for the cases of {names} ({there}); choose {fitting}, or run {needs}"
    )


STYLES: Mapping[str, Style] = {style.name: style for style in (OPENSORA, LATTE, FLAGPERF, ONEFLOW, METHODS)}
"""In the order of the reports."""
