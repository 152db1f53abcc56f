"""A table for the plausibility rules (columns with roles and units, rows of printed cells, facts), and the rules.

A rule asks a row for a *role* (``latency``, ``devices``, ``mfu``). The answer comes from the first column with that
role, else from the facts of the row, else from the facts of the table. It is an interval in SI units (seconds, bytes,
operations per second, shares of 1) together with its source columns. The last methods compute quantities from several
roles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from perfsuite.published.numbers import Interval, Number, PrintedCell, printed
from perfsuite.published.records import DEGREES, NEVER_ZERO, ROLES, Label, Role, scale

WORK_ROLES = frozenset(
    {"model", "sequence_length", "hidden_size", "num_layers", "num_heads", "parameters", "active_parameters"}
)
"""Settings that change the cost of a sample: throughputs of rows that differ in them are not comparable."""


@dataclass(frozen=True, kw_only=True)
class AuditColumn:
    """A column and its meaning."""

    name: str
    role: str  # A key of ROLES.
    unit: str = ""  # A unit of the role's dimension; empty for the default.
    table: str = ""  # Identifier of the table that has the column; a join of tables has columns of several.
    index: int = 0  # Index of the number within the cell.

    @property
    def printed_name(self) -> str:
        """Return the column's name in its own table; a join adds the table's name."""
        return self.name.removeprefix(f"{self.table}:")

    @property
    def meaning(self) -> Role:
        """Return the role."""
        return ROLES[self.role]


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A fact of a row or of the whole table."""

    text: str
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row."""

    name: str
    cells: Mapping[str, PrintedCell]  # Cells by column name, without empty ones.
    facts: Mapping[str, Fact] = field(default_factory=dict)  # Facts of this row that are in no column, by role.
    index: Mapping[str, int] = field(default_factory=dict)  # Row number from 0 by identifier of the table.


@dataclass(frozen=True, kw_only=True)
class Value(Interval):
    """The value of a role in a row, in SI units."""

    columns: tuple[AuditColumn, ...] = ()  # Source columns; empty for a fact.

    @classmethod
    def of(cls, interval: Interval, columns: tuple[AuditColumn, ...] = ()) -> Value:
        """Return a value from columns."""
        return cls(low=interval.low, high=interval.high, columns=columns)

    def times(self, factor: Interval) -> Value:
        """Return the value times a factor without source columns."""
        return Value.of(self * factor, self.columns)


Series = list[tuple[Fraction, Row, Value]]


def constant(number: int) -> Value:
    """Return a number without source columns."""
    return Value.of(Interval.exactly(Fraction(number)))


ONE = constant(1)


def product(*factors: Value | None) -> Value | None:
    """Return the product with the columns of all factors; None if one is missing."""
    result = ONE
    for factor in factors:
        if factor is None:
            return None
        result = Value.of(result * factor, merged(result, factor))
    return result


def quotient(dividend: Value | None, divisor: Value | None) -> Value | None:
    """Return the quotient with the columns of both; None if one is missing or the divisor may be 0."""
    ratio = dividend.over(divisor) if dividend and divisor else None
    if dividend is None or divisor is None or ratio is None:
        return None
    return Value.of(ratio, merged(dividend, divisor))


def merged(*values: Value | None) -> tuple[AuditColumn, ...]:
    """Return the columns of several values, each once."""
    columns: dict[AuditColumn, None] = {}
    for value in values:
        columns.update(dict.fromkeys(value.columns if value else ()))
    return tuple(columns)


@dataclass(frozen=True, kw_only=True)
class AuditTable:
    """A table to audit."""

    name: str
    columns: tuple[AuditColumn, ...]
    rows: tuple[Row, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict)  # Facts of every row by role.
    simulated: bool = False  # Measured on a simulated device, whose times repeat exactly.
    summaries: tuple[str, ...] = ()  # Names of left out rows, such as means of the others.
    unread: tuple[str, ...] = ()  # Row, column, text and reason of each cell that cannot be read.
    run_set: str = ""  # Tables of one run set describe the same runs, row by row.

    def of_role(self, *roles: str) -> tuple[AuditColumn, ...]:
        """Return the columns with one of these roles, in table order."""
        return tuple(column for column in self.columns if column.role in roles)

    def of_kind(self, *kinds: str) -> tuple[AuditColumn, ...]:
        """Return the columns whose role is of one of these kinds."""
        return tuple(column for column in self.columns if column.meaning.kind in kinds)

    def number(self, row: Row, column: AuditColumn) -> Number | None:
        """Return the printed number of a cell."""
        cell = row.cells.get(column.name)
        return cell.number(column.index) if cell else None

    def raw(self, row: Row, column: AuditColumn) -> Interval | None:
        """Return the printed number of a cell without scaling, for ratios within a column.

        A count, rate or time of 0 is None.
        """
        number = self.number(row, column)
        if number is None or (number.value == 0 and column.role in NEVER_ZERO):
            return None
        if column.meaning.exact:
            return Interval.exactly(number.value) if number.value > 0 else None
        return number.rounded if column.meaning.kind in ("measured", "derived") else number.interval

    def read(self, row: Row, column: AuditColumn) -> Value | None:
        """Return the number of a cell in SI units."""
        raw = self.raw(row, column)
        if raw is None:
            return None
        return Value.of(raw * self._scale(column), (column,))

    def least(self, row: Row, column: AuditColumn) -> Fraction | None:
        """Return the lower end in SI units of an estimate or a lower bound (``~120%``); None for another cell."""
        cell = row.cells.get(column.name)
        if cell is None or not cell.bounded or not cell.numbers or cell.text.lstrip()[0] not in "~≈>≥":
            return None
        return (cell.numbers[0].interval * self._scale(column)).low

    def figures(self, *roles: str) -> Iterator[tuple[AuditColumn, Row, Value]]:
        """Yield the numbers in the columns with one of these roles, column by column."""
        for column in self.of_role(*roles):
            for row in self.rows:
                if value := self.read(row, column):
                    yield column, row, value

    @functools.cached_property
    def _known(self) -> dict[tuple[int, str], Any]:
        """Cached values by row identity and role, because rules repeat the same questions."""
        return {}

    def value(self, row: Row, role: str) -> Value | None:
        """Return the value of ``role`` in a row; None without one."""
        key = (id(row), role)
        if key not in self._known:
            values = (self.read(row, column) for column in self.of_role(role))
            self._known[key] = next((value for value in values if value), None) or self._fact_value(row, role)
        value: Value | None = self._known[key]
        return value

    def _fact_value(self, row: Row, role: str) -> Value | None:
        fact = row.facts.get(role) or self.facts.get(role)
        number = printed(fact.text).number() if fact else None
        meaning = ROLES[role]
        if fact is None or number is None or (meaning.exact and number.value <= 0):
            return None
        interval = Interval.exactly(number.value) if meaning.exact else number.interval
        return Value.of(interval * scale(meaning.dimension, fact.unit))

    def text(self, row: Row, role: str) -> str:
        """Return the text of a role in a row; empty without one."""
        for column in self.of_role(role):
            if column.name in row.cells:
                return row.cells[column.name].text
        fact = row.facts.get(role) or self.facts.get(role)
        return fact.text if fact else ""

    def says(self, role: str) -> bool:
        """Return whether any column, row or fact has ``role``."""
        return bool(self.of_role(role)) or role in self.facts or any(role in row.facts for row in self.rows)

    def configuration(self, row: Row) -> dict[str, str]:
        """Return the configuration of a run: value by role, or by column name for ``config``."""
        key = (id(row), "")
        if key not in self._known:
            facts = {**self.facts, **row.facts}
            settings = {role: _same(fact.text) for role, fact in facts.items() if ROLES[role].kind == "configuration"}
            for column in self.of_kind("configuration"):
                cell = row.cells.get(column.name)
                if cell and not cell.blank:
                    number = cell.number(column.index) if column.meaning.dimension != "text" else None
                    name = column.name if column.role == "config" else column.role
                    settings[name] = str(number.value) if number else _same(cell.text)
            self._known[key] = settings
        configuration: dict[str, str] = self._known[key]
        return configuration

    def _scale(self, column: AuditColumn) -> Interval:
        """Return the factor to SI; a share above 2 without a unit is a percentage."""
        unit = column.unit
        if column.meaning.dimension == "share" and not unit:
            raws = [self.raw(row, column) for row in self.rows]
            signs = any("%" in row.cells[column.name].text for row in self.rows if column.name in row.cells)
            unit = "%" if signs or any(raw.low > 2 for raw in raws if raw) else ""
        return scale(column.meaning.dimension, unit)

    def series(self, points: Iterable[tuple[Value | None, Row, Value | None]], but: Iterable[str]) -> list[Series]:
        """Return (x, row, y) of rows that differ only in these settings, in the order of x.

        Points without x or y are left out.
        """
        runs: dict[tuple[tuple[str, str], ...], Series] = {}
        for x, row, y in points:
            if x and y:
                key = tuple(sorted(setting for setting in self.configuration(row).items() if setting[0] not in but))
                runs.setdefault(key, []).append((x.middle, row, y))
        return [sorted(run, key=lambda point: point[0]) for run in runs.values()]

    # ---- quantities that a row states directly or lets one compute ----

    def devices(self, row: Row) -> Value | None:
        """Return n: as stated, or hosts times devices per host, or the product of the mesh's sizes."""
        stated = self.value(row, "devices") or product(self.value(row, "nodes"), self.value(row, "devices_per_node"))
        if stated:
            return stated
        degrees = [value for role in DEGREES if (value := self.value(row, role))]
        return product(*degrees) if degrees else None

    def data_parallel(self, row: Row) -> Value | None:
        """Return the data-parallel degree: as stated, or all devices if no other degree is stated."""
        stated = self.value(row, "dp")
        if stated or any(self.value(row, role) for role in (*DEGREES, "stages")):
            return stated
        return self.devices(row)

    def global_batch(self, row: Row) -> Value | None:
        """Return the samples per step over all devices."""
        stated = self.value(row, "global_batch_size")
        if stated:
            return stated
        shards = self.data_parallel(row)
        local = product(self.value(row, "local_batch_size"), shards)
        if local:
            return local
        return product(self.value(row, "micro_batch_size"), shards, self.value(row, "num_micro_batches"))

    def step_time(self, row: Row) -> Value | None:
        """Return the seconds of a step: as stated, or from the rate of steps, or from batch and throughput."""
        return (
            self.value(row, "latency")
            or quotient(ONE, self.value(row, "iterations_per_s"))
            or quotient(self.global_batch(row), self.value(row, "throughput"))
        )

    def throughput(self, row: Row) -> Value | None:
        """Return samples per second of all devices: as stated, or from the steps and their batch."""
        return (
            self.value(row, "throughput")
            or product(self.value(row, "iterations_per_s"), self.global_batch(row))
            or quotient(self.global_batch(row), self.value(row, "latency"))
            or product(self.value(row, "throughput_per_device"), self.devices(row))
        )

    def flops_per_sample(self, row: Row) -> Value | None:
        """Return model FLOPs of a sample, forward and backward: as stated, or 6 N S + 12 L h S^2 (PaLM, appendix B).

        N counts the parameters that a token passes, so a model of experts needs ``active_parameters``. Without layers
        and width the attention term is missing and the figure is a lower bound. GPT-2 1.5B with 2048 tokens: 6 x
        1.5576e9 x 2048 + 12 x 48 x 1600 x 2048^2 = 2.30e13.
        """
        stated = self.value(row, "flops_per_sample")
        parameters = self.value(row, "active_parameters") or self.value(row, "parameters")
        sequence = self.value(row, "sequence_length")
        sparse = self.value(row, "experts") and not self.value(row, "active_parameters")
        if stated or parameters is None or sequence is None or sparse:
            return stated
        flops = Interval.exactly(Fraction(6)) * parameters * sequence
        layers, width = self.value(row, "num_layers"), self.value(row, "hidden_size")
        if layers and width:
            attention = Interval.exactly(Fraction(12)) * layers * width
            flops = flops + attention * sequence * sequence
        return Value.of(flops, merged(parameters, sequence))

    def knows_attention(self, row: Row) -> bool:
        """Return whether the row determines the FLOPs of attention; otherwise its FLOPs are a lower bound."""
        stated = self.value(row, "flops_per_sample")
        return bool(stated or all(self.value(row, role) for role in ("num_layers", "hidden_size", "sequence_length")))

    def work(self, row: Row) -> dict[str, str]:
        """Return the settings that determine the cost of a sample; rows with equal ones have comparable throughputs."""
        settings = {name: value for name, value in self.configuration(row).items() if name in WORK_ROLES}
        if "active_parameters" in settings:  # parameters per token count, not stored ones
            settings.pop("parameters", None)
            settings.pop("model", None)
        return settings

    def smallest_runs(self) -> list[tuple[Row, Value]]:
        """Return the rows with the fewest devices, and that number."""
        counted = [(row, count) for row in self.rows if (count := self.devices(row))]
        fewest = min((count.low for _, count in counted), default=Fraction(0))
        return [(row, count) for row, count in counted if count.low == fewest]


def _same(text: str) -> str:
    number = printed(text).number()
    if number is not None and text.strip().replace(",", "").lstrip("+-").replace(".", "").isdigit():
        return str(number.value)
    return " ".join(text.lower().split())


# ---- rules ----

Severity = Literal["contradiction", "mislabel", "note"]

TOTAL_NAMES = frozenset({"total", "sum", "总计", "合计"})  # Texts of a row that is the sum of the others.
LAST_DIGIT = Fraction(1, 100)
"""Largest relative miss of an identity that counts as careless rounding: a note without a label."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One breach of a rule."""

    message: str
    rows: tuple[Row, ...] = ()  # Rows that break the rule; empty: the whole table.
    columns: tuple[AuditColumn, ...] = ()  # Columns with doubtful figures; empty: none of the table's cells.
    gap: Fraction | None = None  # Relative miss of an identity, for rules that grade it.


def hit_of(
    row: Row, columns: tuple[AuditColumn, ...], text: str, gap: Fraction | None = None, *, base: Row | None = None
) -> Hit:
    """Return the breach of one row, compared with ``base``; its message begins with the row's name."""
    return Hit(message=f"{row.name}: {text}", rows=(row, base) if base else (row,), columns=columns, gap=gap)


Check = Callable[[AuditTable], Iterator[Hit]]
CrossCheck = Callable[[tuple[AuditTable, ...]], Iterator[tuple[AuditTable, Hit]]]


@dataclass(frozen=True)
class Rule:
    """One plausibility rule: a row of its family's ``RULES``."""

    name: str
    severity: Severity
    label: Label | None  # Label of a figure that breaks the rule; None: no label.
    reach: Literal["table", "rows", "cells"]
    """Scope of the label: the whole table, the rows, or only the compared cells."""
    check: Check | None = None
    across: CrossCheck | None = None  # Check of rules that compare tables.
    roles: tuple[str, ...] = ()  # Roles of the rule, most important first; ``a|b``: one of them suffices.
    checks: str = ""
    source: str = ""  # Reason of the rule, or its publication.
