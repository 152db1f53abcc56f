"""The published reference tables: every figure of five reports as printed, with source, meaning and label.

Figures are shown for comparison and never judge a run.  Labels: M measured and plausible, M? measured but mislabelled
or anomalous, R only ratios usable, X contradictory.  The files under ``baselines/published/`` hold figures and short
headings, no sentences; each table has a digest of its cells, which shows accidental edits.

Reports and tables are selected by name, with the recipes that run their rows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from perfsuite import models
from perfsuite.base.errors import ConfigurationError, nearest
from perfsuite.base.mesh import MeshShape
from perfsuite.published.numbers import printed
from perfsuite.published.recipes import Recipe, recipes
from perfsuite.published.records import ROLES, Label, PublishedReport, PublishedRow, PublishedTable, directory, read_all


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row of a published table: its run and its place."""

    report: str
    table: str
    line: int
    source: str  # File, heading and line
    platforms: tuple[str, ...]
    hardware: str
    model: str
    workload: str
    parameters: Mapping[str, Any]  # Configuration of the run
    world_size: int | None
    name: str  # Name of the row in the report; empty without one
    out_of_memory: Mapping[str, Label]  # Metrics replaced by a note that the run did not fit, with their labels


@dataclass(frozen=True, kw_only=True)
class PublishedFigure(PublishedRun):
    """One published figure with all data for a comparison with a measurement."""

    metric: str
    column: str
    text: str  # As printed
    value: float  # The printed number
    unit: str  # The real unit of the number
    unit_published: str
    metric_value: float  # Value in the unit of ``metric``
    convention: str
    label: Label
    reason: str

    def __str__(self) -> str:
        note = f" ({self.convention})" if self.convention else ""
        return f"published {self.value:g} {self.unit}{note} [{self.label}: {self.reason}] {self.source}"


@functools.cache
def shipped() -> tuple[PublishedReport, ...]:
    """Return the reports that perfsuite ships, read once."""
    return read_all(directory())


def figures(reports: tuple[PublishedReport, ...]) -> Iterator[PublishedFigure]:
    """Yield every measured figure that has a metric, in report order."""
    for table, row, run in _rows(reports):
        for column in table.columns:
            cell = table.cell(row, column) if column.metric else None
            if cell and (number := cell.number(column.index)):
                judgement = table.judge(row, column)
                yield PublishedFigure(
                    **vars(run),
                    metric=column.metric,
                    column=column.name,
                    text=cell.text,
                    value=float(number.value),
                    unit=column.unit or column.unit_published,
                    unit_published=column.unit_published,
                    metric_value=float(number.value * Fraction(str(column.scale))),
                    convention=column.convention,
                    label=judgement.label,
                    reason=judgement.reason,
                )


@functools.cache
def _shipped_figures() -> tuple[PublishedFigure, ...]:
    return tuple(figures(shipped()))


def rows(reports: tuple[PublishedReport, ...]) -> Iterator[PublishedRun]:
    """Yield every row that is a run, in report order, also without figures; headings of groups are not runs."""
    for table, row, run in _rows(reports):
        if any(table.cell(row, column) for column in table.columns if column.role != "case"):
            yield run


def _rows(reports: tuple[PublishedReport, ...]) -> Iterator[tuple[PublishedTable, PublishedRow, PublishedRun]]:
    for report in reports:
        for table in report.tables:
            for row in table.rows if table.kind == "result" else ():
                yield table, row, _run(report, table, row)


def _run(report: PublishedReport, table: PublishedTable, row: PublishedRow) -> PublishedRun:
    parameters = _parameters(table, row)
    world_size, platform = parameters.pop("devices", None), parameters.pop("platform", None)
    cells = [(column, cell) for column in table.columns if (cell := table.cell(row, column)) and not cell.blank]
    names = [cell.text for column, cell in cells if column.role == "case"]
    return PublishedRun(
        report=report.report,
        table=table.id,
        line=row.line,
        source=f"{report.file}, {table.heading}, line {row.line}",
        platforms=(platform,) if platform else table.platforms,
        hardware=table.hardware,
        model=str(parameters.get("model", table.model)),
        workload=table.workload,
        parameters=parameters,
        world_size=world_size,
        name=names[-1] if names else "",
        out_of_memory={
            column.metric: table.judge(row, column).label
            for column, cell in cells
            if column.metric and cell.out_of_memory
        },
    )


def _parameters(table: PublishedTable, row: PublishedRow) -> dict[str, Any]:
    """Return the configuration of a row's run: from the table, the text around it, its columns, and the row itself."""
    parameters: dict[str, Any] = dict(table.parameters)
    parameters.update({stated.role: stated.text for stated in table.stated if _is_setting(stated.role)})
    for column in table.columns:
        cell = table.cell(row, column) if _is_setting(column.role) else None
        if cell and not cell.blank:
            parameters[column.role] = cell.text
    for role, text in parameters.items():
        number = printed(text).number() if role in ROLES and ROLES[role].exact and isinstance(text, str) else None
        parameters[role] = int(number.value) if number else text
    return parameters | dict(row.parameters)


def _is_setting(role: str) -> bool:
    """Return whether a role is a setting of a run; numbers of parameters follow from the model and are not."""
    return ROLES[role].kind == "configuration" and ROLES[role].dimension != "size"


def lookup(
    platform: str,
    workload: str,
    parameters: Mapping[str, Any],
    world_size: int,
    *,
    metric: str = "",
    reports: tuple[PublishedReport, ...] | None = None,
) -> list[PublishedFigure]:
    """Return the published figures of a case's run: same platform, workload, model and number of ranks.

    ``workload`` is a class's import path or name, or its name in snake case (``train_step``).  Parameters that report
    and case both state must agree.  A mesh counts as the sizes of its axes, a model of perfsuite as its width, layers,
    heads, length and vocabulary.  A report that names a model matches a case with that name, or with its width, layers
    and heads.

    >>> [str(figure.text) for figure in lookup("s4000", "train_step", {"model": "opensora"}, 8, metric="step_time_s")]
    ['3.950', '3949.72']
    """
    settings = _settings(parameters)
    return [
        figure
        for figure in (_shipped_figures() if reports is None else figures(reports))
        if platform in figure.platforms
        and figure.world_size == world_size
        and figure.workload == snake(workload)
        and metric in ("", figure.metric)
        and _agrees(figure, settings)
    ]


def select(
    *, platform: str = "", model: str = "", metric: str = "", world_size: int | None = None
) -> list[PublishedFigure]:
    """Return the shipped figures by platform, model, metric and number of ranks; absent arguments match everything."""
    return [
        figure
        for figure in _shipped_figures()
        if (not platform or platform in figure.platforms)
        and (not model or plain(figure.model) == plain(model))
        and metric in ("", figure.metric)
        and world_size in (None, figure.world_size)
    ]


_SHAPE = ("hidden_size", "num_layers", "num_heads")


def _agrees(figure: PublishedFigure, settings: Mapping[str, Any]) -> bool:
    stated = {**figure.parameters, "model": figure.model}
    shaped = all(name in settings and name in stated for name in _SHAPE)
    if figure.model and "model" not in settings and not shaped:
        return False
    names = [name for name in stated if name in settings and not (shaped and name == "model")]
    return all(plain(stated[name]) == plain(settings[name]) for name in names)


def _settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a case states (not None), the sizes of dp, tp and pp and the model's shape."""
    settings = {name: value for name, value in parameters.items() if value is not None}
    options = settings.get("options")
    if isinstance(options, Mapping) and "schedule" in options:
        settings.update(schedule=options["schedule"], num_micro_batches=settings.get("accumulation", 1))
    mesh = settings.pop("mesh", None)
    shape = MeshShape.parse(mesh) if isinstance(mesh, str) and mesh else mesh
    if isinstance(shape, MeshShape):
        settings.update({"dp": shape.replicas // shape.size("ep"), "tp": shape.size("tp"), "pp": shape.size("pp")})
    if settings.get("micro_batch_size"):
        steps = settings.get("num_micro_batches", settings.get("accumulation", 1))
        settings.setdefault("local_batch_size", settings["micro_batch_size"] * steps)
    return {**models.stated(settings, settings.get("tp", 1)), **settings}


def snake(workload: str) -> str:
    """Return a workload's name in the reports' tables: ``train_step`` of ``perfsuite.workloads.training:TrainStep``."""
    name = workload.rpartition(":")[2].rpartition(".")[2]
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def plain(value: Any) -> str:
    """Return a value for comparison: llama2_7b is Llama2-7B, and 8 is 8.0."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{float(value):g}"
    return "".join(letter for letter in str(value).lower() if letter.isalnum())


Tables = Sequence[tuple[PublishedReport, PublishedTable]]


def table_of(row: PublishedRun) -> str:
    """Return the name of a row's table, as recipes have it: ``002/performance``."""
    return f"{row.report}/{row.table}"


def chosen(names: Sequence[str]) -> Tables:
    """Return the tables of these reports (``002``) or tables (``002/batch``) in the reports' order; all without a name.
    Raises ConfigurationError for an unknown name; the message lists the existing ones.
    """
    all_tables = {f"{report.report}/{table.id}": (report, table) for report in shipped() for table in report.tables}
    legal = {*all_tables, *(report.report for report, _ in all_tables.values())}
    for name in names:
        if name not in legal:
            raise ConfigurationError(_unknown(name, legal))
    return [found for name, found in all_tables.items() if not names or {name, found[0].report} & {*names}]


def _unknown(name: str, legal: Collection[str]) -> str:
    report = name.partition("/")[0]
    among = sorted(full for full in legal if full.startswith(f"{report}/")) or sorted(legal)
    same = sorted(full for full in legal if name.zfill(3) == full or full.endswith(f"/{name}"))
    near = same or nearest(name, among)[:2]
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    there = f"tables of report {report}: {', '.join(among)}; " if report in legal else ""
    reports = ", ".join(sorted(full for full in legal if "/" not in full))
    return (
        f"no published report or table is called {name!r}; {meant}{there}reports: {reports}; "
        "perfsuite published lists all"
    )


def tables_of_runs(names: Sequence[str]) -> tuple[str, ...]:
    """Return the named tables that have rows of runs, in order. Raises ConfigurationError for other names."""
    having = dict.fromkeys(map(table_of, rows(shipped())))

    def among(named: Sequence[str]) -> tuple[str, ...]:
        tables = {f"{report.report}/{table.id}" for report, table in chosen(named)}
        return tuple(table for table in having if table in tables)

    for name in names:
        if not among([name]):
            report = name.partition("/")[0]
            raise ConfigurationError(
                f"{name} has no row that is a run, so no case reproduces it; tables of report {report} with runs: "
                f"{', '.join(table for table in having if table.startswith(f'{report}/'))}"
            )
    return among(names)


def rows_of(tables: Collection[str]) -> Iterator[PublishedRun]:
    """Yield the rows of these tables that are runs, in the reports' order, also those without a figure."""
    return (row for row in rows(shipped()) if table_of(row) in tables)


def recipes_of(row: PublishedRun) -> tuple[Recipe, ...]:
    """Return every recipe that runs a row; empty for a row that cannot be run."""
    return tuple(recipe for recipe in recipes() if (table_of(row), row.line) in recipe.rows)
