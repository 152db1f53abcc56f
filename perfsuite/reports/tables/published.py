"""Published figures beside measured rows: the rows of a report's table on as many devices, their labels, and why not.

A published row stands below the measured rows that it is paired with, in the same columns and units.  Whether the two
may be compared is said below the table: another platform, model or setting, or the label of the figure itself.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from perfsuite.published.lookup import PublishedFigure, PublishedRun, differences, runs, select, shipped, snake
from perfsuite.reports.tables.case import TableCase
from perfsuite.reports.tables.case_names import case_name

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

NOT_HERE = "not measured here"

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
        stages = run.parameters.get("stages")
        if isinstance(stages, int) and run.world_size:
            known["devices_per_stage"] = run.world_size // stages
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


@dataclass(frozen=True, kw_only=True)
class PlacedLine:
    """A published row in a table: below a case of the same settings, or between them in the report's order."""

    line: PublishedLine
    after: int
    """Index of the case that it stands below; -1: above all."""
    case: TableCase | None
    """The measured case that it belongs to; None where nothing here was measured of it."""

    @property
    def missing(self) -> str:
        """What its last cell says."""
        return "; ".join(filter(None, (self.line.missing, "" if self.case else NOT_HERE)))


def placed(lines: Iterable[PublishedLine], cases: Sequence[TableCase], pair_by: Sequence[str]) -> list[PlacedLine]:
    """Where the published rows of one table stand among its measured rows; every row has a place.

    The rows of one published table and platform go together with one series of cases, which are of one test function,
    strategy and platform: the one that is most of the very runs, then has most of them, then differs least.  A row
    stands below the case that has all its settings named in ``pair_by``, of several the one that differs least.  A row
    without such a case follows the row before it in the report; where none of them has a case, they stand at the end.
    """
    whole: list[PlacedLine] = []
    for members in _grouped(((line.table, line.run.platforms), line) for line in lines).values():
        beside = _beside(members, cases, pair_by)
        first = next((beside[index] for index in range(len(members)) if index in beside), len(cases))
        after = first - 1
        for index, line in enumerate(members):
            after = beside.get(index, after)
            whole.append(PlacedLine(line=line, after=after, case=cases[after] if index in beside else None))
    return whole


def shared_out(
    lines: Sequence[PublishedLine], groups: Mapping[str, Sequence[TableCase]], pair_by: Sequence[str]
) -> dict[str, list[PublishedLine]]:
    """Which table of several has which published rows: that of their model, one of its own where others have theirs;
    where no model is one of the reports', the table with most of their like.  A table that is not per model is the only
    one and has no name.

    A table without any case of a row's workload has none: one that emulates a model by sleeping.
    """
    blocks = _grouped(((line.table, line.run.model), line) for line in lines)
    models = {_plain(model) for _, model in blocks} - {""}
    theirs = {
        _plain(case.model): name for name, cases in groups.items() for case in cases if _plain(case.model) in models
    }
    shares: dict[str, list[PublishedLine]] = {}
    for (_, model), members in blocks.items():
        known = [name for name in sorted(groups) if any(_does(case, members[0].run.workload) for case in groups[name])]
        best = max(known, key=lambda name: len(_beside(members, groups[name], pair_by)), default=None)
        if best is not None:
            alone = model if theirs and best else best
            shares.setdefault(theirs.get(_plain(model), alone), []).extend(members)
    return shares


def _does(case: TableCase, workload: str) -> bool:
    return snake(case.workload) == workload


def _beside(lines: Sequence[PublishedLine], cases: Sequence[TableCase], pair_by: Sequence[str]) -> dict[int, int]:
    """Index of the case beside each row that has one, by index of the row: of one series, the best that there is."""
    best: dict[int, int] = {}
    best_rank = (0, 0, 0)
    for members in _grouped((_series(case), index) for index, case in enumerate(cases)).values():
        pairs, differing = {}, []
        for number, line in enumerate(lines):
            at = [index for index in members if _alike(line, cases[index], pair_by)]
            if at:
                pairs[number] = min(reversed(at), key=lambda index: _distance(cases[index], line))
                differing.append(_distance(cases[pairs[number]], line)[0])
        rank = (differing.count(0), len(pairs), -sum(differing))
        if rank >= best_rank:
            best, best_rank = pairs, rank
    return best


def _series(case: TableCase) -> tuple[str, ...]:
    """What cases of one series have in common."""
    return (case.platform, case.fingerprint, case.case.partition("[")[0], str(case.parameters.get("strategy", "")))


def _distance(case: TableCase, line: PublishedLine) -> tuple[int, bool]:
    mine, theirs = case_name(str(case.settings.get("case_name", ""))), case_name(line.run.name)
    same_group = mine is not None and theirs is not None and mine.prefix == theirs.prefix
    return len(_differences(case, line)), not same_group


def _alike(line: PublishedLine, case: TableCase, pair_by: Sequence[str]) -> bool:
    """Whether a case can have the row beside it; one that emulates a model by sleeping has none."""
    return _does(case, line.run.workload) and all(
        line.setting(name) is not None and _plain(line.setting(name)) == _plain(case.settings.get(name))
        for name in pair_by
    )


def _plain(value: object) -> str:
    return "".join(letter for letter in str(value).lower() if letter.isalnum())


def notes_of(rows: Sequence[PlacedLine], shown: Mapping[str, str]) -> list[str]:
    """What a reader must know of the published rows: whether they may be compared, labels with reasons, conventions.

    ``shown`` are titles of the columns by metric.
    """
    notes: list[str] = []
    for why, lines in _grouped((_comparable(row.case, row.line), row.line) for row in rows if row.case).items():
        notes.append(f"published, {_places(lines)}: {why}")
    labelled = (
        (f"[{figure.label}] {{}}: {figure.reason}", (row.line, shown[metric]))
        for row in rows
        for metric, figure in row.line.figures.items()
        if metric in shown and figure.label != "M"
    )
    for reason, cells in _grouped(labelled).items():
        columns = ", ".join(dict.fromkeys(title for _, title in cells))
        numbers = sorted({line.line for line, _ in cells})
        notes.append(reason.format(f"{columns}; line{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"))
    conventions = {
        f"{shown[metric]}: {figure.convention}": None
        for row in rows
        for metric, figure in row.line.figures.items()
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


def _grouped(pairs: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
