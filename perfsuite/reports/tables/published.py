"""Published figures beside measured rows: the rows of a report's table on as many devices, their labels, and why not.

A published row stands below the measured rows that it is paired with, in the same columns and units.  Whether the two
may be compared is said below the table: another platform, model or setting, or the label of the figure itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from perfsuite.published.lookup import PublishedFigure, differences, select
from perfsuite.reports.tables.case import TableCase

T = TypeVar("T")

_ALSO = {"accumulation": "num_micro_batches", "local_batch_size": "micro_batch_size"}
"""Other names that a report may state a setting under."""


@dataclass(frozen=True, kw_only=True)
class PublishedLine:
    """One row of a published table, by metric."""

    table: str
    """``000/overview``."""
    line: int
    """Line of the report."""
    figures: Mapping[str, PublishedFigure]
    """By name of the metric."""

    @property
    def any(self) -> PublishedFigure:
        """One of them: what they have in common."""
        return next(iter(self.figures.values()))

    @property
    def file(self) -> str:
        """The report's file."""
        return self.any.source.partition(",")[0]

    def setting(self, name: str) -> object:
        """What the report states of a setting, under perfsuite's name for it; None when it says nothing."""
        figure = self.any
        if name == "ranks":
            return figure.world_size
        if name == "model":
            return figure.model
        return figure.parameters.get(name, figure.parameters.get(_ALSO.get(name, "")))

    @property
    def name(self) -> str:
        """``published: 8 s4000 opensora``."""
        figure = self.any
        count = "" if figure.world_size is None else f"{figure.world_size} "
        nodes = figure.parameters.get("nodes")
        if isinstance(nodes, int) and figure.world_size:
            count = f"{nodes} x {figure.world_size // nodes} "
        return f"published: {count}{' or '.join(figure.platforms)} {figure.model}".strip()


@functools.cache
def published_of(tables: tuple[str, ...]) -> tuple[PublishedLine, ...]:
    """The rows of these tables that have figures, in the reports' order; a table is ``report/id``."""
    rows: dict[tuple[str, int], dict[str, PublishedFigure]] = {}
    for figure in select():
        table = f"{figure.report}/{figure.table}"
        if table in tables:
            rows.setdefault((table, figure.line), {})[figure.metric] = figure
    return tuple(PublishedLine(table=table, line=line, figures=by) for (table, line), by in rows.items())


def paired(
    lines: Iterable[PublishedLine], cases: Sequence[TableCase], pair_by: Sequence[str]
) -> dict[int, list[PublishedLine]]:
    """Published rows by the index of the case they stand below: of those that have all their settings named in
    ``pair_by`` the one that differs least, the last of equals.

    Where any case is of a model that the reports have, rows of other models stay out.
    """
    lines = tuple(lines)
    models = {case.model for case in cases} & {line.any.model for line in lines}
    below: dict[int, list[PublishedLine]] = {}
    for line in lines:
        if models and line.any.model not in models:
            continue
        at = [index for index, case in enumerate(cases) if _alike(line, case, pair_by)]
        if at:
            nearest = min(reversed(at), key=lambda index: len(_differences(cases[index], line)))
            below.setdefault(nearest, []).append(line)
    return below


def _alike(line: PublishedLine, case: TableCase, pair_by: Sequence[str]) -> bool:
    """Whether a case can have the row beside it; one that emulates a model by sleeping has none."""
    return bool(case.model) and all(
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
    return differences(line.any, case.platform, {**case.settings, **case.parameters})


def _comparable(case: TableCase, line: PublishedLine) -> str:
    differing = list(_differences(case, line))
    if _plain(line.any.model) != _plain(case.model):  # of another model nothing else needs to be told apart
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
