"""What a plausibility rule is and what its check yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from perfsuite.audit.table import AuditColumn, AuditTable, Row
from perfsuite.published.records import Label

Severity = Literal["contradiction", "mislabel", "note"]

LAST_DIGIT = Fraction(1, 100)
"""An identity missed by less than this is careless rounding: a note without a label."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One breach of a rule."""

    message: str
    """The numbers, in one line."""
    rows: tuple[Row, ...] = ()
    """Rows that break the rule; empty: the whole table."""
    columns: tuple[AuditColumn, ...] = ()
    """Columns whose figures are in doubt; empty: none of the table's cells."""
    gap: Fraction | None = None
    """How far an identity is missed, for rules that grade it."""


def hit_of(row: Row, columns: tuple[AuditColumn, ...], text: str, gap: Fraction | None = None) -> Hit:
    """The breach of one row; its message begins with the row's name."""
    return Hit(message=f"{row.name}: {text}", rows=(row,), columns=columns, gap=gap)


Check = Callable[[AuditTable], Iterator[Hit]]
CrossCheck = Callable[[tuple[AuditTable, ...]], Iterator[tuple[AuditTable, Hit]]]


@dataclass(frozen=True)
class Rule:
    """One plausibility rule: a row of its family's ``RULES``."""

    name: str
    severity: Severity
    label: Label | None
    """What a figure that breaks the rule is worth; None: the rule says nothing about that."""
    reach: Literal["table", "rows", "cells"]
    """What the label falls on: the whole table, the rows, or only the cells that were compared."""
    check: Check | None = None
    across: CrossCheck | None = None
    """For rules that compare tables with each other."""
    roles: tuple[str, ...] = ()
    """Roles that the rule reads, most important first; ``a|b`` where one of them is enough."""
    checks: str = ""
    """The formula, in one line."""
    source: str = ""
    """Why it must hold, or where it was published."""
