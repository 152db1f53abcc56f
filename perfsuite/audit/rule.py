"""What a plausibility rule is and what it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from types import ModuleType
from typing import Literal

from perfsuite.audit.table import AuditColumn, AuditTable, Row
from perfsuite.published.records import Label

Severity = Literal["contradiction", "mislabel", "note"]
Reach = Literal["table", "rows", "cells"]

LAST_DIGIT = Fraction(1, 100)
"""An identity missed by less than this is careless rounding: a note without a label."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """What a rule's check yields."""

    message: str
    """The numbers, in one line."""
    rows: tuple[Row, ...] = ()
    """Rows that break the rule; empty: the whole table."""
    columns: tuple[AuditColumn, ...] = ()
    """Columns whose figures are in doubt; empty: none of the table's cells."""
    gap: Fraction | None = None
    """How far an identity is missed, for rules that grade it."""


Check = Callable[[AuditTable], Iterator[Hit]]
CrossCheck = Callable[[tuple[AuditTable, ...]], Iterator[tuple[AuditTable, Hit]]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One plausibility rule; written as the decorator of its check, which so becomes the rule.

    ``@Rule(name=..., ...).of_table`` stands over a check of one table, ``.of_tables`` over one that compares tables.
    """

    name: str
    severity: Severity
    label: Label | None
    """What a figure that breaks the rule is worth; None: the rule says nothing about that."""
    reach: Reach
    """What the label falls on: the whole table, the rows, or only the cells that were compared."""
    checks: str
    """The formula, in one line."""
    source: str
    """Why it must hold, or where it was published."""
    roles: tuple[str, ...]
    """Roles it reads, most important first; ``a|b`` where one of them will do."""
    check: Check | None = None
    across: CrossCheck | None = None
    """For rules that compare tables with each other."""

    def of_table(self, check: Check) -> Rule:
        """The rule with its check of one table."""
        return dataclasses.replace(self, check=check)

    def of_tables(self, across: CrossCheck) -> Rule:
        """The rule with its comparison of tables."""
        return dataclasses.replace(self, across=across)


def rules_in(family: ModuleType) -> tuple[Rule, ...]:
    """The rules that a module defines, in the order in which they stand there."""
    return tuple(rule for rule in vars(family).values() if isinstance(rule, Rule))


@dataclass(frozen=True, kw_only=True)
class TablePlace:
    """A cell, a row or a column of a published table."""

    table: str
    row: int | None = None
    """From 0; None: every row."""
    column: str | None = None
    """None: every column."""


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """A rule broken by a table."""

    rule: str
    severity: Severity
    label: Label | None
    tables: tuple[str, ...]
    """Tables that the label concerns."""
    places: tuple[TablePlace, ...]
    """What was compared, and what the label falls on when there is one."""
    rows: tuple[str, ...]
    """Names of the rows that break the rule."""
    message: str
    details: tuple[str, ...] = field(default=())
    """Names of the columns that were compared."""


def finding_of(rule: Rule, table: AuditTable, hit: Hit) -> AuditFinding:
    """The finding of one hit: a graded miss of the last digit becomes a note."""
    careless = hit.gap is not None and hit.gap < LAST_DIGIT
    label = None if careless else rule.label
    tables = tuple(dict.fromkeys(column.table or table.name for column in hit.columns)) or (table.name,)
    return AuditFinding(
        rule=rule.name,
        severity="note" if careless else rule.severity,
        label=label,
        tables=tables,
        places=_places(rule, table, hit, tables),
        rows=tuple(row.name for row in hit.rows),
        message=f"{hit.message}; off by {float(hit.gap or 0):.2%}, the last digit" if careless else hit.message,
        details=tuple(column.printed_name for column in hit.columns),
    )


def _places(rule: Rule, table: AuditTable, hit: Hit, tables: tuple[str, ...]) -> tuple[TablePlace, ...]:
    if rule.reach == "table" or not hit.columns:
        return tuple(TablePlace(table=name) for name in tables)
    places = []
    for column in hit.columns:
        name = column.table or table.name
        indexes = [row.index.get(name) for row in hit.rows if name in row.index] or [None]
        places += [
            TablePlace(table=name, row=index, column=column.printed_name if rule.reach == "cells" else None)
            for index in indexes
        ]
    return tuple(dict.fromkeys(places))
