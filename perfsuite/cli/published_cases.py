"""``perfsuite published --cases``: list the case that reproduces each published row, or the reason to skip it.

The cases come from the recipes; no test file is collected and no rank is started.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite import workloads
from perfsuite.base.errors import InvalidParameter, first_line
from perfsuite.base.mesh import MeshShape
from perfsuite.base.units import plural
from perfsuite.platforms import Catalog, Machine, detect_machine
from perfsuite.platforms.detection import too_few_devices
from perfsuite.published.lookup import PublishedRun, recipes_of, rows_of, shipped, table_of, tables_of_runs
from perfsuite.published.recipes import Recipe, why_none
from perfsuite.published.recipes.recipe import DEVICES_PER_NODE
from perfsuite.published.records import ROLES, PublishedTable
from perfsuite.record.workload import Workload
from perfsuite.reports.document import Grid
from perfsuite.suite import runnable
from perfsuite.workloads.training.train_step import TrainStep, why_not_fit


@dataclass(frozen=True, kw_only=True)
class RowCase:
    """One published row on one platform: the case that reproduces it, or the reason why there is none."""

    row: PublishedRun
    name: str  # The settings that the report prints in the row.
    platform: str
    title: str  # Title of the platform, such as MTT S4000.
    case: str  # Node id; empty for a row without a case.
    ranks: int | None
    why_not: str  # Reason of the skip; empty if the case runs.

    @property
    def plain(self) -> dict[str, Any]:
        """Return the row as a record for JSON and CSV."""
        return {
            "report": self.row.report,
            "table": self.row.table,
            "line": self.row.line,
            "row": self.name,
            "published_for": " ".join(self.row.platforms),
            "platform": self.platform,
            "ranks": self.ranks,
            "case": self.case,
            "skipped": self.why_not,
        }


def case_records(names: Sequence[str], platform: str | None, devices: int | None, catalog: Catalog) -> list[RowCase]:
    """Return the cases of every row of these reports or tables, on ``platform`` or on the platforms of each row.

    ``devices`` is the number of devices of a run; None: those found here, else those of one node of the platform.
    Raises ConfigurationError for an unknown report, table or platform.
    """
    tables = tables_of_runs(names)
    machine_of = functools.cache(functools.partial(detect_machine, catalog))
    machines = [machine_of(platform)] if platform else []
    records: list[RowCase] = []
    for row in rows_of(tables):
        for machine in machines or [machine_of(name) for name in row.platforms]:
            records += _of_row(row, machine, devices)
    return records


def _of_row(row: PublishedRun, machine: Machine, devices: int | None) -> Iterator[RowCase]:
    for recipe in recipes_of(row) or (None,):
        yield RowCase(
            row=row,
            name=_name(row),
            platform=machine.name,
            title=machine.model.title,
            case=recipe.case(machine.name) if recipe else "",
            ranks=recipe.world_size if recipe else row.world_size,
            why_not=_why_not(recipe, machine, devices)
            if recipe
            else f"impossible as declared: {why_none(table_of(row), row.line)}",
        )


def _why_not(recipe: Recipe, machine: Machine, devices: int | None) -> str:
    """Return the reason to skip a case on a platform, whether or not its device is here; empty if it runs."""
    workload, ranks = _workload(recipe), recipe.world_size
    try:
        workload.work(MeshShape.on(ranks, workload.layout()))
    except InvalidParameter as error:
        return f"impossible as declared: {first_line(error)}"
    if machine.scale == "small":
        return f"only at --perf-scale=full; else {recipe.small} runs"
    dtype, model = workload.native_dtype(), machine.model
    dtypes = {*model.tflops, *model.native}
    if dtype and not (dtype in dtypes if machine.absent and dtypes else machine.natively(dtype)):
        return f"no native {dtype} on {model.title}"
    if isinstance(workload, TrainStep) and (why := why_not_fit(workload, ranks, model)):
        return f"cannot fit: {why}"
    node = int(model.devices_per_node.value) if model.devices_per_node else DEVICES_PER_NODE
    there = devices or machine.device_count or node
    if ranks > there and not machine.family.shareable:
        return f"{ranks} ranks, on {plural(there, 'device')}" if devices else too_few_devices(ranks, there)
    return ""


def _workload(recipe: Recipe) -> Workload:
    name = "".join(part.capitalize() for part in recipe.workload.split("_"))
    workload: Workload = getattr(workloads, name)(**recipe.parameters)
    return workload


@functools.cache
def _tables() -> dict[str, PublishedTable]:
    return {f"{report.report}/{table.id}": table for report in shipped() for table in report.tables}


def _name(row: PublishedRun) -> str:
    """Return the name of a row, else the settings in its cells: ``8``, ``GPipe 16``."""
    table = _tables()[table_of(row)]
    printed = next(one for one in table.rows if one.line == row.line)
    cells = [(column, table.cell(printed, column)) for column in table.printed_columns]
    settings = [cell.text for column, cell in cells if cell and ROLES[column.role].kind == "configuration"]
    return row.name or " ".join(settings)


def cases_grids(records: Sequence[RowCase]) -> Iterator[Grid]:
    """Yield a table per published table and platform: line, row, ranks, case, and the reason of a skip."""
    groups: dict[tuple[str, str, str], list[RowCase]] = {}
    for record in records:
        groups.setdefault((table_of(record.row), record.platform, record.title), []).append(record)
    for (table, platform, title), members in groups.items():
        rows = [("line", "row", "published for", "ranks", "case", "skipped there because")]
        rows += [
            (
                str(one.row.line),
                one.name,
                " or ".join(one.row.platforms),
                "" if one.ranks is None else str(one.ranks),
                one.case,
                one.why_not,
            )
            for one in members
        ]
        kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
        lines = {one.row.line for one in members}
        can_run = {one.row.line for one in members if not one.why_not}
        yield Grid(
            title=f"{table} on {title} ({platform})",
            columns=tuple(rows[0][at] for at in kept),
            rows=tuple(tuple(row[at] for at in kept) for row in rows[1:]),
            notes=(
                f"{len(can_run)} of {plural(len(lines), 'row')} can run there: "
                + runnable(f"pytest test_perf --perf-published={table} -k {platform}"),
            ),
        )
