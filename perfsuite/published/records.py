"""Records and reader of the files under ``baselines/published/``: reports, tables, columns, rows, labels.

Each error in a file is a BaselineError that names file, place and reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perfsuite.base.errors import BaselineError
from perfsuite.base.files import shipped
from perfsuite.published.numbers import Printed, printed
from perfsuite.published.roles import ROLES
from perfsuite.record.codec import from_json, read_json

SCHEMA = 1  # Version of the files; a higher one is refused

Label = Literal["M", "M?", "R", "X"]
LABELS: tuple[Label, ...] = ("M", "M?", "R", "X")
"""Measured; measured but mislabelled or anomalous; only ratios usable; contradictory.  From best to worst."""

Basis = Literal["rules", "outside"]
Kind = Literal["result", "claim", "configuration", "environment", "advice"]


@dataclass(frozen=True, kw_only=True)
class LabelJudgement:
    """A label and its reason."""

    label: Label
    reason: str
    basis: Basis = "rules"  # ``rules``: the audit finds it; ``outside``: it needs knowledge that the report lacks


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A fact about a whole table or row: printed around it, or from another source."""

    role: str
    text: str  # As printed
    unit: str = ""
    line: int = 0  # Line of the report; 0 for facts from another source
    source: str = ""  # The other source


@dataclass(frozen=True, kw_only=True)
class PublishedColumn:
    """One column: its printed title and the real meaning of its figures."""

    name: str
    role: str = "setting"  # Meaning by the report: a role of the audit
    title: str = ""  # As printed
    unit_published: str = ""
    unit: str = ""  # The real unit; empty: as published
    convention: str = ""  # How the figure was counted
    metric: str = ""  # perfsuite's metric of the same meaning; empty: none
    scale: float = 1.0  # Figure x scale is in the metric's unit
    of: str = ""  # Column whose cells have this second number
    index: int = 0  # Number of the figure in the cell
    prose: bool = False  # Whether the cells are sentences, which are not copied
    judgement: LabelJudgement | None = None  # Where it differs from the table's


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One row."""

    line: int  # Line of the report
    cells: tuple[Any, ...]  # By printed column: null, text, or [text, number or numbers]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run, by audit role or workload parameter."""
    added_facts: tuple[Stated, ...] = ()
    judgement: LabelJudgement | None = None  # Where it differs from the table's
    cell_judgements: Mapping[str, LabelJudgement] = field(default_factory=dict)
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
    """``lines``: figures from lines of text; the first column is perfsuite's name for each."""
    heading: str = ""  # Nearest heading of the report
    line: int = 0  # Line of the report with the column titles
    platforms: tuple[str, ...] = ()  # Platforms of the figures; several if the report does not say which
    hardware: str = ""
    model: str = ""
    workload: str = ""  # Workload in snake case, such as train_step
    parameters: Mapping[str, Any] = field(default_factory=dict)  # Configuration of every run of the table
    stated: tuple[Stated, ...] = ()  # Facts printed above or below the table
    added_facts: tuple[Stated, ...] = ()  # Facts from another source
    run_set: str = ""  # Tables with the same run set describe the same runs
    judgement: LabelJudgement = LabelJudgement(label="M", reason="")
    digest: str = ""  # SHA-256 of the cells, see :func:`digest`

    @property
    def printed_columns(self) -> tuple[PublishedColumn, ...]:
        """Columns that the report prints, in its order."""
        return tuple(column for column in self.columns if not column.of)

    def cell(self, row: PublishedRow, column: PublishedColumn) -> Printed | None:
        """Return the printed cell; None for an empty one."""
        names = [column.name for column in self.printed_columns]
        raw = row.cells[names.index(column.of or column.name)]
        return printed(raw if isinstance(raw, str) else raw[0]) if raw is not None else None

    def judge(self, row: PublishedRow | None = None, column: PublishedColumn | None = None) -> LabelJudgement:
        """Return the label of a cell, a row, a column or the table: the nearest one wins."""
        if row and column and column.name in row.cell_judgements:
            return row.cell_judgements[column.name]
        return (row and row.judgement) or (column and column.judgement) or self.judgement


@dataclass(frozen=True, kw_only=True)
class PublishedReport:
    """One report."""

    schema: int
    report: str  # Number of three digits
    file: str
    title: str
    tables: tuple[PublishedTable, ...]
    sha256: str = ""  # SHA-256 of the report's file


def digest(table: PublishedTable) -> str:
    """Return the SHA-256 of the printed cells: columns joined by a bar, rows by a newline, sentences as empty text."""
    rows = [
        ["" if raw is None else raw if isinstance(raw, str) else str(raw[0]) for raw in row.cells] for row in table.rows
    ]
    return hashlib.sha256("\n".join(map("|".join, rows)).encode()).hexdigest()


def read_report(path: Path) -> PublishedReport:
    """Return one report's file; raises BaselineError, with file, place and reason, if it is damaged or newer."""
    plain = read_json(path, BaselineError, "restore the file, or give a file of tables")
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or "tables" not in plain:
        raise BaselineError(f"{path}: not a file of published tables (it lacks schema and tables); give such a file")
    if schema > SCHEMA:
        raise BaselineError(f"{path}: schema {schema} is newer than {SCHEMA}; update perfsuite to read it")
    try:
        report = from_json(PublishedReport, plain)
        for table in report.tables:
            _check(table)
    except ValueError as error:
        raise BaselineError(f"{path}: {error}; restore the file") from None
    return report


def _check(table: PublishedTable) -> None:
    """Raise ValueError unless roles, cells, numbers and digest of a table fit together."""
    names = [column.name for column in table.columns]
    for column in table.columns:
        if column.role not in ROLES:
            raise ValueError(f"table {table.id}: column {column.name} has the unknown role {column.role!r}")
        if column.of and column.of not in names:
            raise ValueError(f"table {table.id}: column {column.name} is part of {column.of!r}, which is not a column")
    if len(set(names)) != len(names):
        raise ValueError(f"table {table.id}: two columns have one name")
    for stated in (*table.stated, *table.added_facts, *(fact for row in table.rows for fact in row.added_facts)):
        if stated.role not in ROLES:
            raise ValueError(f"table {table.id}: {stated.text!r} is stated for the unknown role {stated.role!r}")
    for row in table.rows:
        _check_row(table, row)
    if table.digest and table.digest != digest(table):
        raise ValueError(f"table {table.id}: the cells do not match their digest")


def _check_row(table: PublishedTable, row: PublishedRow) -> None:
    where = f"table {table.id}, row of line {row.line}"
    if len(row.cells) != len(table.printed_columns):
        raise ValueError(f"{where}: {len(row.cells)} cells for {len(table.printed_columns)} columns")
    for name in row.cell_judgements:
        if name not in {column.name for column in table.columns}:
            raise ValueError(f"{where}: a label for {name!r}, which is not a column")
    for column, raw in zip(table.printed_columns, row.cells, strict=True):
        if raw is None or isinstance(raw, str):
            continue
        if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], str):
            raise ValueError(f"{where}: {column.name} is {raw!r:.60}, not null, text or [text, number]")
        numbers = [float(number.value) for number in printed(raw[0]).numbers]
        if raw[1] != (numbers if len(numbers) > 1 else numbers[0] if numbers else None):
            raise ValueError(f"{where}: {column.name} prints {raw[0]!r:.60}, which is not {raw[1]!r:.60}")


def directory() -> Path:
    """Return the folder of the shipped tables; raises BaselineError if it is missing."""
    return shipped("baselines/published", "published", "*.json", BaselineError)


def read_all(place: Path) -> tuple[PublishedReport, ...]:
    """Return every report of a directory, by name."""
    return tuple(read_report(path) for path in sorted(place.glob("*.json")))
