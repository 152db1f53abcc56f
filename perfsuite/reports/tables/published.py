"""Published figures beside measured rows: the rows of a report's table on as many devices, their labels, and why not.

A published row stands below the measured rows that it is paired with, in the same columns and units.  Whether the two
may be compared is said below the table: another platform, model or setting, or the label of the figure itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from perfsuite.published.lookup import PublishedFigure, PublishedRun, differences, runs, select, shipped, snake
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.case_names import case_name

T = TypeVar("T")

_ALSO = {"accumulation": "num_micro_batches", "local_batch_size": "micro_batch_size"}
"""Other names that a report may state a setting under."""


@dataclass(frozen=True, kw_only=True)
class PublishedLine:
    """One row of a published table, by metric."""

    table: str
    """``000/overview``."""
    run: PublishedRun
    figures: Mapping[str, PublishedFigure]
    """By name of the metric; none where the run did not fit."""

    @property
    def line(self) -> int:
        """Line of the report."""
        return self.run.line

    @property
    def file(self) -> str:
        """The report's file."""
        return self.run.source.partition(",")[0]

    def setting(self, name: str) -> object:
        """What the report states of a setting, under perfsuite's name for it; None when it says nothing."""
        run = self.run
        told = run.parameters.get(name, run.parameters.get(_ALSO.get(name, "")))
        return told if told is not None else self._derived().get(name)

    def _derived(self) -> dict[str, object]:
        """What has no column of its own, or follows from others."""
        run = self.run
        known: dict[str, object] = {"ranks": run.world_size, "model": run.model, "case_name": run.name or None}
        name = case_name(run.name)
        known["group"] = name.group if name else None
        nodes, micro, dp = (run.parameters.get(name) for name in ("nodes", "micro_batch_size", "dp"))
        if isinstance(nodes, int) and run.world_size:
            known["devices_per_node"] = run.world_size // nodes
        if isinstance(micro, int) and isinstance(dp, int):
            known["micro_times_dp"] = micro * dp
        return known

    @property
    def name(self) -> str:
        """``published: 8 s4000 opensora``."""
        run = self.run
        count = "" if run.world_size is None else f"{run.world_size} "
        nodes = run.parameters.get("nodes")
        if isinstance(nodes, int) and run.world_size:
            count = f"{nodes} x {run.world_size // nodes} "
        return f"published: {count}{' or '.join(run.platforms)} {run.model}".strip()

    @property
    def missing(self) -> str:
        """Why the report has no figure in the row."""
        return "" if self.figures else "out of memory, as published"


@functools.cache
def published_of(tables: tuple[str, ...]) -> tuple[PublishedLine, ...]:
    """The rows of these tables that have results, in the reports' order; a table is ``report/id``."""
    figures: dict[tuple[str, int], dict[str, PublishedFigure]] = {}
    for figure in select():
        figures.setdefault((f"{figure.report}/{figure.table}", figure.line), {})[figure.metric] = figure
    every = ((f"{run.report}/{run.table}", run) for run in runs(shipped()))
    return tuple(
        PublishedLine(table=table, run=run, figures=figures.get((table, run.line), {}))
        for table, run in every
        if table in tables
    )


def paired(
    lines: Iterable[PublishedLine], cases: Sequence[TableCase], pair_by: Sequence[str]
) -> dict[int, list[PublishedLine]]:
    """Published rows by the index of the case they stand below: of those that have all their settings named in
    ``pair_by`` the one that differs least, one of the same name before others, the last of equals.

    Where any case is of a model that the reports have, rows of other models stay out.
    """
    lines = tuple(lines)
    models = {case.model for case in cases} & {line.run.model for line in lines}
    below: dict[int, list[PublishedLine]] = {}
    for line in lines:
        if models and line.run.model not in models:
            continue
        at = [index for index, case in enumerate(cases) if _alike(line, case, pair_by)]
        if at:
            nearest = min(reversed(at), key=lambda index: _distance(cases[index], line))
            below.setdefault(nearest, []).append(line)
    return below


def _distance(case: TableCase, line: PublishedLine) -> tuple[int, bool]:
    mine, theirs = case_name(str(case.settings.get("case_name", ""))), case_name(line.run.name)
    same_group = mine is not None and theirs is not None and mine.prefix == theirs.prefix
    return len(_differences(case, line)), not same_group


def _alike(line: PublishedLine, case: TableCase, pair_by: Sequence[str]) -> bool:
    """Whether a case can have the row beside it; one that emulates a model by sleeping has none."""
    return line.run.workload == snake(case.workload) and all(
        line.setting(name) is not None and _plain(line.setting(name)) == _plain(case.settings.get(name))
        for name in pair_by
    )


def _plain(value: object) -> str:
    return "".join(letter for letter in str(value).lower() if letter.isalnum())


def notes_of(blocks: Sequence[tuple[TableCase, PublishedLine]], shown: Mapping[str, str]) -> list[str]:
    """What a reader must know of the published rows: whether they may be compared, labels with reasons, conventions.

    ``shown`` are titles of the columns by metric.
    """
    notes: list[str] = []
    for why, lines in _grouped((_comparable(case, line), line) for case, line in blocks).items():
        notes.append(f"published, {_places(lines)}: {why}")
    labelled = (
        (f"[{figure.label}] {{}}: {figure.reason}", (line, shown[metric]))
        for _, line in blocks
        for metric, figure in line.figures.items()
        if metric in shown and figure.label != "M"
    )
    for reason, cells in _grouped(labelled).items():
        columns = ", ".join(dict.fromkeys(title for _, title in cells))
        numbers = sorted({line.line for line, _ in cells})
        notes.append(reason.format(f"{columns}; line{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"))
    conventions = {
        f"{shown[metric]}: {figure.convention}": None
        for _, line in blocks
        for metric, figure in line.figures.items()
        if metric in shown and figure.convention
    }
    if conventions:
        notes.append(f"as published: {'; '.join(conventions)}")
    return notes


def _differences(case: TableCase, line: PublishedLine) -> tuple[str, ...]:
    return differences(line.run, case.platform, {**case.settings, **case.parameters})


def _comparable(case: TableCase, line: PublishedLine) -> str:
    differing = list(_differences(case, line))
    if _plain(line.run.model) != _plain(case.model):  # of another model nothing else needs to be told apart
        differing = [difference for difference in differing if difference.startswith(("platform ", "model "))]
    if case.simulated:
        differing.insert(0, "the devices here are simulated")
    return (
        f"not comparable with the row above: {'; '.join(differing)}"
        if differing
        else "the same run, as far as is stated"
    )


def _places(lines: Sequence[PublishedLine]) -> str:
    files: dict[str, set[int]] = {}
    for line in lines:
        files.setdefault(line.file, set()).add(line.line)
    return "; ".join(
        f"line{'s' if len(numbers) > 1 else ''} {_listed(sorted(numbers))} of {file}" for file, numbers in files.items()
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _grouped(pairs: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
