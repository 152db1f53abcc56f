"""Records of the files under ``baselines/published/``: reports, tables, columns, rows and their labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from perfsuite.published.numbers import Printed, printed
from perfsuite.record.codec import from_json

SCHEMA = 1
"""Version of the files; a reader refuses a higher one."""

Label = Literal["M", "M?", "R", "X"]
LABELS: tuple[Label, ...] = ("M", "M?", "R", "X")
"""Measured; measured but mislabelled or anomalous; ratios usable, absolutes not; contradictory.  From best to worst."""

Basis = Literal["rules", "outside"]
Kind = Literal["result", "claim", "configuration", "environment", "advice"]


@dataclass(frozen=True, kw_only=True)
class LabelJudgement:
    """A label and why."""

    label: Label
    reason: str
    basis: Basis = "rules"
    """``rules``: the audit finds it by itself; ``outside``: it takes knowledge that is not in the report."""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """Something that holds for a whole table or row: printed around it, or known from elsewhere."""

    role: str
    text: str
    """As printed."""
    unit: str = ""
    line: int = 0
    """Line of the report; 0 for knowledge from elsewhere."""
    source: str = ""
    """Where knowledge from elsewhere comes from."""


@dataclass(frozen=True, kw_only=True)
class PublishedColumn:
    """One column: what is printed over it, and what its figures really are."""

    name: str
    role: str = "setting"
    """What the report says it is: a role of the audit."""
    title: str = ""
    """As printed."""
    unit_published: str = ""
    unit: str = ""
    """What the unit really is; empty: as published."""
    convention: str = ""
    """How the figure was counted."""
    metric: str = ""
    """Metric of perfsuite that it can be shown beside; empty: none."""
    scale: float = 1.0
    """Figure x scale is in the metric's unit."""
    of: str = ""
    """For a second number within the cells of another column: that column."""
    index: int = 0
    """Which number of the cell."""
    prose: bool = False
    """The cells are sentences and are not copied."""
    judgement: LabelJudgement | None = None
    """Where it differs from the table's."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row."""

    line: int
    """Line of the report."""
    cells: tuple[Any, ...]
    """By printed column: null, text, or [text, number or numbers]."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run, by audit role or workload parameter."""
    known: tuple[Stated, ...] = ()
    judgement: LabelJudgement | None = None
    """Where it differs from the table's."""
    cell_judgements: Mapping[str, Any] = field(default_factory=dict)
    """Column -> judgement, where it differs from the row's."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """One table, or one block of figures."""

    id: str
    title: str
    columns: tuple[PublishedColumn, ...]
    rows: tuple[PublishedRow, ...]
    kind: Kind = "result"
    layout: Literal["table", "lines"] = "table"
    """``lines``: figures picked out of lines of text; the first column is perfsuite's own name for each."""
    heading: str = ""
    """Nearest heading of the report."""
    line: int = 0
    """Line of the report with the column titles."""
    platforms: tuple[str, ...] = ()
    """Platforms that it is a reference for; several where the report does not say which."""
    hardware: str = ""
    model: str = ""
    workload: str = ""
    """Workload in snake case: train_step, ..."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of every run of the table."""
    stated: tuple[Stated, ...] = ()
    """Printed above or below the table."""
    known: tuple[Stated, ...] = ()
    """Known from elsewhere."""
    run_set: str = ""
    """Tables with one run set describe the same runs."""
    judgement: LabelJudgement = LabelJudgement(label="M", reason="")
    digest: str = ""
    """SHA-256 of the cells, see :func:`digest`."""

    @property
    def printed_columns(self) -> tuple[PublishedColumn, ...]:
        """The columns that the report prints, in its order."""
        return tuple(column for column in self.columns if not column.of)

    def cell(self, row: PublishedRow, column: PublishedColumn) -> Printed | None:
        """What is printed; None for an empty cell."""
        names = [column.name for column in self.printed_columns]
        raw = row.cells[names.index(column.of or column.name)]
        return printed(raw if isinstance(raw, str) else raw[0]) if raw is not None else None

    def judge(self, row: PublishedRow | None = None, column: PublishedColumn | None = None) -> LabelJudgement:
        """The label of a cell, a row, a column or the table: the nearest one wins."""
        if row and column and column.name in row.cell_judgements:
            return from_json(LabelJudgement, row.cell_judgements[column.name])
        return (row and row.judgement) or (column and column.judgement) or self.judgement


@dataclass(frozen=True, kw_only=True)
class PublishedReport:
    """One report."""

    schema: int
    report: str
    """Three digits."""
    file: str
    title: str
    tables: tuple[PublishedTable, ...]
    sha256: str = ""
    """Of the report's file."""
