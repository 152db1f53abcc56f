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
from fractions import Fraction
from itertools import combinations, product
from types import MappingProxyType

from perfsuite.audit import compute, memory, rates, repeats, scaling
from perfsuite.audit.table import (
    LAST_DIGIT,
    TOTAL_NAMES,
    AuditColumn,
    AuditTable,
    Hit,
    Row,
    Rule,
    Severity,
    Value,
    hit_of,
    merged,
    quotient,
)
from perfsuite.published.numbers import Interval, printed, total
from perfsuite.published.records import DEGREES, LABELS, PARTS, Label

Parts = list[tuple[AuditColumn, Value]]


def _parts_of(table: AuditTable, row: Row) -> Parts:
    return [(column, value) for column in table.of_role(*PARTS) if (value := table.read(row, column))]


def _is_total(row: Row) -> bool:
    return any(cell.text.strip().lower() in TOTAL_NAMES for cell in row.cells.values())


def _whole(table: AuditTable, row: Row) -> Value | None:
    return table.value(row, "whole") or table.value(row, "latency")


def _wholes(table: AuditTable) -> list[tuple[Row, Parts, Value]]:
    rows = [(row, _parts_of(table, row), _whole(table, row)) for row in table.rows]
    return [(row, parts, whole) for row, parts, whole in rows if whole and len(parts) >= 2]


def _sum(parts: Parts) -> Interval:
    return total([value for _, value in parts])


def _nested(rows: list[tuple[Row, Parts, Value]]) -> tuple[AuditColumn, ...]:
    """Return the columns without which the parts of every row sum to the whole; empty if no columns explain the gap."""
    names = [column.name for column, _ in rows[0][1]]
    if any([column.name for column, _ in parts] != names for _, parts, _ in rows):
        return ()
    for count in range(1, len(names) - 1):
        for chosen in combinations(rows[0][1], count):
            left_out = {column.name for column, _ in chosen}
            if all(_explains(parts, whole, left_out) for _, parts, whole in rows):
                return tuple(column for column, _ in chosen)
    return ()


def _explains(parts: Parts, whole: Value, left_out: set[str]) -> bool:
    kept = [part for part in parts if part[0].name not in left_out]
    inside = all(
        any(value.low <= other.high for _, other in kept) for column, value in parts if column.name in left_out
    )
    return inside and _sum(kept).meets(whole)


def _parts_above_whole(table: AuditTable) -> Iterator[Hit]:
    """More than the whole is either nesting, which has its own rule, or a contradiction."""
    rows = _wholes(table)
    over = [entry for entry in rows if _sum(entry[1]).low > entry[2].high]
    if over and len(over) == len(rows) and _nested(rows):
        return
    for row, parts, whole in over:
        text = f"the parts sum to {_sum(parts)} s, the whole is {whole} s"
        columns = merged(*(value for _, value in parts), whole)
        yield hit_of(row, columns, text, _sum(parts).gap(whole))


def _nested_part(table: AuditTable) -> Iterator[Hit]:
    """The outer part is the last one that is large enough in every row to contain the nested parts."""
    rows = _wholes(table)
    if not rows or not all(_sum(parts).low > whole.high for _, parts, whole in rows):
        return
    names = {column.name for column in _nested(rows)}
    if not names:
        return
    kept = [column.name for column, _ in rows[0][1] if column.name not in names]
    middles = [{column.name: value.middle for column, value in parts} for _, parts, _ in rows]
    rests = {name: [values[name] - sum(values[part] for part in names) for values in middles] for name in kept}
    outer = next((name for name in reversed(kept) if min(rests[name]) >= 0), "several of them")
    own = ", ".join([f"{float(rest):.4g}" for rest in rests.get(outer, ())] or ["unknown"] * len(rows))
    yield Hit(
        message=f"{' + '.join(kept)} make the whole in every row, so {' and '.join(sorted(names))} is nested,"
        f" most likely in {outer}: by itself that is {own} s",
        rows=tuple(row for row, _, _ in rows),
        columns=tuple(column for column, _ in rows[0][1]),
    )


def _parts_below_whole(table: AuditTable) -> Iterator[Hit]:
    if table.of_role("remainder_time"):
        return
    for row, parts, whole in _wholes(table):
        gap = _sum(parts).gap(whole)
        if _sum(parts).high < whole.low and gap >= LAST_DIGIT:
            columns = merged(*(value for _, value in parts), whole)
            yield hit_of(row, columns, f"{float(gap):.1%} of the whole are in no part")


def _total_row(table: AuditTable) -> Iterator[Hit]:
    rows = [row for row in table.rows if not _is_total(row)]
    for row in (row for row in table.rows if _is_total(row)):
        for column in table.of_role(*PARTS, "whole", "share"):
            stated = table.raw(row, column)
            values = [table.raw(part_row, column) for part_row in rows]
            if stated is None or not values or any(value is None for value in values):
                continue
            expected = total([value for value in values if value])
            if gap := stated.gap(expected):
                text = f"{column.printed_name} is printed {stated}, the rows sum to {expected}"
                yield hit_of(row, (column,), text, gap)


def _share_of_total(table: AuditTable) -> Iterator[Hit]:
    rows = [row for row in table.rows if not _is_total(row)]
    parts = [_parts_of(table, row) for row in rows]
    if not rows or not all(parts):
        return
    grand = total([_sum(each) for each in parts])
    for column in table.of_role("share"):
        for row, each in zip(rows, parts, strict=True):
            stated, expected = table.read(row, column), _sum(each).over(grand)
            if stated and expected and (gap := stated.gap(expected)):
                text = (
                    f"{column.printed_name} is printed {float(stated.middle):.1%},"
                    f" its parts are {float(expected.middle):.1%} of the total"
                )
                yield hit_of(row, (column,), text, gap)


def _share_range(table: AuditTable) -> Iterator[Hit]:
    """A range is a fact of the table with two percentages: ``15-33%``."""
    fact = table.facts.get("communication_share")
    ends = printed(fact.text).numbers if fact else ()
    shares: list[tuple[Fraction, Row, Value]] = []
    for row in table.rows:
        if share := quotient(table.value(row, "communication_time"), _whole(table, row)):
            shares.append((share.middle, row, share))
    if len(ends) != 2 or not shares:
        return
    shares.sort(key=lambda entry: entry[0])
    for end, (_, row, share) in zip(ends, (shares[0], shares[-1]), strict=True):
        if gap := (end.interval * Interval.exactly(Fraction(1, 100))).gap(share):
            text = f"communication is {float(share.middle):.1%} of the whole, the range ends at {float(end.value):g} %"
            yield hit_of(row, share.columns, text, gap)


_PARTS = (
    Rule("parts-above-whole", "contradiction", "X", "rows", _parts_above_whole,
         roles=("|".join(PARTS), "whole|latency"),
         checks="the parts of a step sum to at most the step",
         source="parts of one timeline do not overlap"),
    Rule("nested-part", "mislabel", "M?", "table", _nested_part,
         roles=("|".join(PARTS), "whole|latency"),
         checks="the whole is the sum of some of the parts in every row: the others lie inside them",
         source="arithmetic"),
    Rule("parts-below-whole", "note", None, "rows", _parts_below_whole,
         roles=("|".join(PARTS), "whole|latency"),
         checks="a time outside all parts is listed as a remainder",
         source="arithmetic"),
    Rule("total-row", "contradiction", "X", "cells", _total_row,
         roles=("|".join((*PARTS, "share")),),
         checks="the total row is the sum of its columns",
         source="arithmetic"),
    Rule("share-of-total", "contradiction", "X", "cells", _share_of_total,
         roles=("share", "|".join(PARTS)),
         checks="share = the row's parts / the parts of all rows",
         source="arithmetic"),
    Rule("share-range", "contradiction", "X", "cells", _share_range,
         roles=("communication_share", "communication_time", "whole|latency"),
         checks="a stated range of communication shares begins and ends where the rows do",
         source="arithmetic"),
)  # fmt: skip
"""Rules about sums: parts and the whole, total rows, shares."""


RULES: tuple[Rule, ...] = tuple(
    rule
    for family in (scaling.RULES, _PARTS, compute.RULES, rates.RULES, memory.RULES, repeats.RULES)
    for rule in family
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


def unnoticed(table: AuditTable) -> list[str]:
    """Return the columns in which no rule notices a figure 3 times too large or small, at the table's ends."""
    short = replace(table, rows=(*table.rows[:6], *table.rows[6:][-6:]))  # an audit of all takes seconds
    breaches, figures = _breaches(short), short.of_kind("measured", "derived")
    return [one.printed_name for one in figures if all(_breaches(wrong) <= breaches for wrong in _wrong(short, one))]


def _breaches(table: AuditTable) -> set[str]:
    return {found.message for found in _audit_one(table) if found.label and found.rule != "share-out-of-range"}


def _wrong(table: AuditTable, column: AuditColumn) -> Iterator[AuditTable]:
    for (at, row), by in product(enumerate(table.rows), (Fraction(3), Fraction(1, 3))):
        if cell := row.cells.get(column.name):
            numbers = (replace(one, value=one.value * by, last_place=one.last_place * by) for one in cell.numbers)
            changed = replace(row, cells={**row.cells, column.name: replace(cell, numbers=tuple(numbers))})
            yield replace(table, rows=(*table.rows[:at], changed, *table.rows[at + 1 :]))


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
