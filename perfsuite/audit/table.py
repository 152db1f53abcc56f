"""A table as the plausibility rules see it: columns with roles and units, rows of printed cells, facts of the table.

A rule asks a row for a *role* (``latency``, ``devices``, ``mfu``).  The answer comes from the first column with that
role, else from what is known of the row, else from the facts of the whole table, as an interval in SI units (seconds,
bytes, operations per second, shares of 1) together with the columns that it was read from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from perfsuite.published.numbers import Interval, Printed, printed
from perfsuite.published.roles import PARTS, ROLES, Role, scale


@dataclass(frozen=True, kw_only=True)
class AuditColumn:
    """A column and its meaning."""

    name: str
    role: str
    """A key of ROLES."""
    unit: str = ""
    """A unit of the role's dimension; empty for the default."""
    table: str = ""
    """Identifier of the table that printed it; a join of tables has columns of several."""
    index: int = 0
    """Which number of the cell is meant."""

    @property
    def printed_name(self) -> str:
        """The name within its own table: a join puts the table's name before it."""
        return self.name.removeprefix(f"{self.table}:")

    @property
    def meaning(self) -> Role:
        """The role itself."""
        return ROLES[self.role]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something known of a row or of the whole table."""

    text: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row."""

    name: str
    """What a person finds it by."""
    cells: Mapping[str, Printed]
    """By column name; an empty cell is left out."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """By role: what holds for this row and stands in no column."""
    index: Mapping[str, int] = field(default_factory=dict)
    """Identifier of the table -> place of the row in it, from 0."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """What a row says about a role."""

    interval: Interval
    """In SI units."""
    columns: tuple[AuditColumn, ...] = ()
    """Where it was read; empty for a fact."""


@dataclass(frozen=True, kw_only=True)
class AuditTable:
    """A table to audit."""

    name: str
    columns: tuple[AuditColumn, ...]
    rows: tuple[Row, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """By role: what holds for every row."""
    simulated: bool = False
    """Times of a simulated device repeat to the bit; that is no contradiction there."""
    run_set: str = ""
    """Tables of one run set describe the same runs, row by row."""

    def of_role(self, *roles: str) -> tuple[AuditColumn, ...]:
        """The columns with one of these roles, in table order."""
        return tuple(column for column in self.columns if column.role in roles)

    def of_kind(self, *kinds: str) -> tuple[AuditColumn, ...]:
        """The columns whose role is of one of these kinds."""
        return tuple(column for column in self.columns if column.meaning.kind in kinds)

    def raw(self, row: Row, column: AuditColumn) -> Interval | None:
        """The printed number of a cell, unscaled: for ratios within one column.  A count is positive or no count."""
        cell = row.cells.get(column.name)
        number = cell.number(column.index) if cell else None
        if number is None:
            return None
        if column.meaning.exact:
            return Interval.exactly(number.value) if number.value > 0 else None
        return number.rounded if column.meaning.kind in ("measured", "derived") else number.interval

    def read(self, row: Row, column: AuditColumn) -> Value | None:
        """The number of a cell in SI units."""
        raw = self.raw(row, column)
        if raw is None:
            return None
        return Value(interval=raw * self._scale(column), columns=(column,))

    def value(self, row: Row, role: str) -> Value | None:
        """What the row says about ``role``; None when nothing does."""
        key = (id(row), role)
        if key not in self._values:
            self._values[key] = self._value(row, role)
        return self._values[key]

    @functools.cached_property
    def _values(self) -> dict[tuple[int, str], Value | None]:
        """What rows were found to say: the rules ask the same again and again."""
        return {}

    def _value(self, row: Row, role: str) -> Value | None:
        for column in self.of_role(role):
            value = self.read(row, column)
            if value:
                return value
        fact = row.facts.get(role) or self.facts.get(role)
        number = printed(fact.text).number() if fact else None
        meaning = ROLES[role]
        if fact is None or number is None or (meaning.exact and number.value <= 0):
            return None
        interval = Interval.exactly(number.value) if meaning.exact else number.interval
        return Value(interval=interval * scale(meaning.dimension, fact.unit))

    def text(self, row: Row, role: str) -> str:
        """What the row says about a role in words; empty when nothing does."""
        for column in self.of_role(role):
            if column.name in row.cells:
                return row.cells[column.name].text
        fact = row.facts.get(role) or self.facts.get(role)
        return fact.text if fact else ""

    def says(self, role: str) -> bool:
        """Whether any column, row or fact speaks of ``role``."""
        return bool(self.of_role(role)) or role in self.facts or any(role in row.facts for row in self.rows)

    def configuration(self, row: Row) -> dict[str, str]:
        """Everything that distinguishes this run: role, or column name for ``config`` -> value."""
        if id(row) not in self._configurations:
            self._configurations[id(row)] = self._configuration(row)
        return self._configurations[id(row)]

    @functools.cached_property
    def _configurations(self) -> dict[int, dict[str, str]]:
        """By identity of the row, which the table keeps alive."""
        return {}

    def _configuration(self, row: Row) -> dict[str, str]:
        settings = {}
        for source in (self.facts, row.facts):
            for role, fact in source.items():
                if ROLES[role].kind == "configuration":
                    settings[role] = _same(fact.text)
        for column in self.of_kind("configuration"):
            cell = row.cells.get(column.name)
            if cell and not cell.blank:
                number = cell.number(column.index) if column.meaning.dimension != "text" else None
                name = column.name if column.role == "config" else column.role
                settings[name] = str(number.value) if number else _same(cell.text)
        return settings

    def _scale(self, column: AuditColumn) -> Interval:
        dimension = column.meaning.dimension
        if dimension == "share" and not column.unit and self._in_percent(column):
            return scale(dimension, "%")
        return scale(dimension, column.unit)

    def _in_percent(self, column: AuditColumn) -> bool:
        """A share without a unit and above 2 can only have been meant in percent."""
        raws = [self.raw(row, column) for row in self.rows]
        signs = any("%" in row.cells[column.name].text for row in self.rows if column.name in row.cells)
        return signs or any(raw.low > 2 for raw in raws if raw)


def _same(text: str) -> str:
    number = printed(text).number()
    if number is not None and text.strip().replace(",", "").lstrip("+-").replace(".", "").isdigit():
        return str(number.value)
    return " ".join(text.lower().split())


def join(tables: tuple[AuditTable, ...]) -> AuditTable:
    """One table of several that describe the same runs: rows are matched by their facts, columns put side by side."""
    rows: dict[tuple[tuple[str, str], ...], Row] = {}
    for table in tables:
        for row in table.rows:
            key = tuple(sorted((role, fact.text) for role, fact in row.facts.items()))
            known = rows.get(key)
            cells = {f"{table.name}:{name}": cell for name, cell in row.cells.items()}
            rows[key] = Row(
                name=known.name if known else row.name,
                cells={**(known.cells if known else {}), **cells},
                facts=row.facts,
                index={**(known.index if known else {}), **row.index},
            )
    return AuditTable(
        name=" + ".join(table.name for table in tables),
        columns=tuple(
            replace(column, name=f"{table.name}:{column.name}", table=table.name)
            for table in tables
            for column in table.columns
        ),
        rows=tuple(rows.values()),
        facts={role: fact for table in reversed(tables) for role, fact in table.facts.items()},
        simulated=any(table.simulated for table in tables),
    )


def is_total(row: Row) -> bool:
    """Whether a row is the sum of the others, by its name."""
    return any(cell.text.strip().lower() in {"total", "sum", "总计", "合计"} for cell in row.cells.values())


def parts_of(table: AuditTable, row: Row) -> Iterator[tuple[AuditColumn, Value]]:
    """The columns of a row that are parts of its step, with their values."""
    for column in table.of_role(*PARTS):
        value = table.read(row, column)
        if value:
            yield column, value
