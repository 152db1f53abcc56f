"""Plausibility rules for performance tables, from arithmetic, data sheets and published bounds.

The rules run on any table whose columns have roles (:data:`perfsuite.published.records.ROLES`). A rule without its
roles is skipped. Numbers are intervals of values that round to the printed digits: correct rounding is never flagged.
A finding implies a label: M? (mislabelled or anomalous), R (ratios usable, absolute values not) or X (contradictory).
Figures without a finding are M (measured, plausible).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from perfsuite.audit import compute, memory, parts, rates, repeats, scaling
from perfsuite.audit.table import LAST_DIGIT, AuditTable, Hit, Row, Rule, Severity
from perfsuite.published.records import DEGREES, LABELS, Label

RULES: tuple[Rule, ...] = tuple(
    rule for family in (scaling, parts, compute, rates, memory, repeats) for rule in family.RULES
)
"""Every rule, by family; findings keep this order."""

_STANDS_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "devices": ("devices", "nodes", *DEGREES),
        "global_batch_size": ("global_batch_size", "local_batch_size", "micro_batch_size"),
        "flops_per_sample": ("flops_per_sample", "parameters", "active_parameters"),
    }
)


@dataclass(frozen=True, kw_only=True)
class TablePlace:
    """A cell, a row or a column of a published table."""

    table: str
    row: int | None = None  # Row from 0; None: every row.
    column: str | None = None  # None: every column.


@dataclass(frozen=True, kw_only=True)
class AuditFinding:
    """A rule broken by a table."""

    rule: str
    severity: Severity
    label: Label | None
    tables: tuple[str, ...]  # Tables with this label.
    places: tuple[TablePlace, ...]  # Compared cells; the label applies to them.
    rows: tuple[str, ...]  # Names of the rows that break the rule.
    message: str
    details: tuple[str, ...] = ()  # Names of the columns that were compared.


def audit(tables: Sequence[AuditTable]) -> list[AuditFinding]:
    """Return the findings in every table, in joined tables of one run set, and between tables."""
    findings = [finding for table in tables for finding in _audit_one(table)]
    earlier = {(finding.rule, finding.places) for finding in findings}
    for run_set in dict.fromkeys(table.run_set for table in tables if table.run_set):
        members = tuple(table for table in tables if table.run_set == run_set)
        joined = _audit_one(_join(members)) if len(members) > 1 else []
        findings += [finding for finding in joined if (finding.rule, finding.places) not in earlier]
    for rule in RULES:
        if rule.across:
            findings += [_finding(rule, table, hit) for table, hit in rule.across(tuple(tables))]
    return findings


def _audit_one(table: AuditTable) -> Iterator[AuditFinding]:
    """Yield the findings of one table; a hit caused by facts of the whole table is reported once."""
    for rule in RULES:
        seen: set[str] = set()
        for hit in rule.check(table) if rule.check else ():
            if hit.columns:
                yield _finding(rule, table, hit)
                continue
            message = hit.message
            for row in hit.rows:
                message = message.removeprefix(f"{row.name}: ")
            if message not in seen:
                seen.add(message)
                yield _finding(rule, table, Hit(message=message, gap=hit.gap))


def _finding(rule: Rule, table: AuditTable, hit: Hit) -> AuditFinding:
    """Return the finding of a hit; an identity missed in the last digit becomes a note."""
    careless = hit.gap is not None and hit.gap < LAST_DIGIT
    tables = tuple(dict.fromkeys(column.table or table.name for column in hit.columns)) or (table.name,)
    places = [TablePlace(table=name) for name in tables]
    if rule.reach != "table" and hit.columns:
        places = []
        for column in hit.columns:
            name, title = column.table or table.name, column.printed_name if rule.reach == "cells" else None
            indexes = [row.index.get(name) for row in hit.rows if name in row.index] or [None]
            places += [TablePlace(table=name, row=index, column=title) for index in indexes]
    return AuditFinding(
        rule=rule.name,
        severity="note" if careless else rule.severity,
        label=None if careless else rule.label,
        tables=tables,
        places=tuple(dict.fromkeys(places)),
        rows=tuple(row.name for row in hit.rows),
        message=f"{hit.message}; off by {float(hit.gap or 0):.2%}, the last digit" if careless else hit.message,
        details=tuple(column.printed_name for column in hit.columns),
    )


def _join(tables: tuple[AuditTable, ...]) -> AuditTable:
    """Join tables of the same runs: rows are matched by their facts, columns are put side by side."""
    rows: dict[tuple[tuple[str, str], ...], Row] = {}
    for table in tables:
        for row in table.rows:
            key = tuple(sorted((role, fact.text) for role, fact in row.facts.items()))
            joined = rows.get(key)
            cells = {f"{table.name}:{name}": cell for name, cell in row.cells.items()}
            rows[key] = Row(
                name=joined.name if joined else row.name,
                cells={**(joined.cells if joined else {}), **cells},
                facts=row.facts,
                index={**(joined.index if joined else {}), **row.index},
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


def applicable(rule: Rule, table: AuditTable) -> bool:
    """Return whether the table has every role that the rule needs.

    One of ``a|b`` suffices. The number of devices may follow from the sizes of a mesh.
    """
    return not _lacking(rule, table)


def _lacking(rule: Rule, table: AuditTable) -> list[str]:
    """Return the roles that the rule needs and the table lacks."""
    lacking = []
    for need in rule.roles:
        roles = [other for role in need.split("|") for other in _STANDS_FOR.get(role, (role,))]
        if not any(table.says(role) for role in roles):
            lacking.append(need)
    return lacking


def more_with(tables: Sequence[AuditTable]) -> dict[str, int]:
    """Return the number of additional rules per missing role, most first.

    Rules that lack more than one role are not counted.
    """
    gains: Counter[str] = Counter()
    for rule in RULES:
        lacking = [_lacking(rule, table) for table in tables]
        if rule.check and all(lacking):
            roles = [role for needs in lacking if len(needs) == 1 for role in needs[0].split("|")]
            gains.update(dict.fromkeys(roles, 1))
    return dict(gains.most_common())


def derived_label(
    findings: Iterable[AuditFinding], table: str, *, row: int | None = None, column: str | None = None
) -> Label:
    """Return the worst label of a cell, a row, a column or (without either) the whole table."""
    implied = [
        finding.label
        for finding in findings
        if finding.label
        and any(
            place.table == table and place.row in (None, row) and place.column in (None, column)
            for place in finding.places
        )
    ]
    return max(implied, key=LABELS.index, default="M")
