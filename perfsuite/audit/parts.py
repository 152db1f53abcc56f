"""Rules about sums: parts and the whole, total rows, shares."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from perfsuite.audit.quantities import merged, quotient
from perfsuite.audit.rule import LAST_DIGIT, Hit, Rule
from perfsuite.audit.table import AuditColumn, AuditTable, Row, Value, is_total, parts_of
from perfsuite.published.numbers import Interval, printed, total
from perfsuite.published.roles import PARTS

Parts = list[tuple[AuditColumn, Value]]


def _wholes(table: AuditTable) -> list[tuple[Row, Parts, Value]]:
    """Rows with at least two parts and the whole that they belong to."""
    wholes = []
    for row in table.rows:
        parts = list(parts_of(table, row))
        whole = table.value(row, "whole") or table.value(row, "latency")
        if whole and len(parts) >= 2:
            wholes.append((row, parts, whole))
    return wholes


def _sum(parts: Parts) -> Interval:
    return total([value.interval for _, value in parts])


def _nested(rows: list[tuple[Row, Parts, Value]]) -> tuple[AuditColumn, ...]:
    """Columns that must be left out of every row to make the whole; empty when that is no explanation."""
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
        any(value.interval.low <= other.interval.high for _, other in kept)
        for column, value in parts
        if column.name in left_out
    )
    return inside and _sum(kept).meets(whole.interval)


@Rule(
    name="parts-above-whole",
    severity="contradiction",
    label="X",
    reach="rows",
    checks="the parts of a step sum to at most the step",
    source="parts of one timeline do not overlap",
    roles=("|".join(PARTS), "whole|latency"),
).of_table
def parts_above_whole(table: AuditTable) -> Iterator[Hit]:
    """Compare the sum of the parts with the whole; more than the whole is either nesting or a contradiction."""
    rows = _wholes(table)
    over = [entry for entry in rows if _sum(entry[1]).low > entry[2].interval.high]
    if over and len(over) == len(rows) and _nested(rows):
        return
    for row, parts, whole in over:
        yield Hit(
            message=f"{row.name}: the parts sum to {_sum(parts)} s, the whole is {whole.interval} s",
            rows=(row,),
            columns=merged(*(value for _, value in parts), whole),
            gap=_sum(parts).gap(whole.interval),
        )


@Rule(
    name="nested-part",
    severity="mislabel",
    label="M?",
    reach="table",
    checks="the whole is the sum of some of the parts in every row: the others lie inside them",
    source="arithmetic",
    roles=("|".join(PARTS), "whole|latency"),
).of_table
def nested_part(table: AuditTable) -> Iterator[Hit]:
    """Find parts that lie inside other parts: without them the rest is the whole, in every row."""
    rows = _wholes(table)
    if not rows or not all(_sum(parts).low > whole.interval.high for _, parts, whole in rows):
        return
    nested = _nested(rows)
    if nested:
        names = {column.name for column in nested}
        outer = _outer(rows, names)
        own = ", ".join(_own(parts, names, outer) for _, parts, _ in rows)
        kept = " + ".join(column.name for column, _ in rows[0][1] if column.name not in names)
        yield Hit(
            message=f"{kept} make the whole in every row, so {' and '.join(sorted(names))} is nested,"
            f" most likely in {outer}: by itself that is {own} s",
            rows=tuple(row for row, _, _ in rows),
            columns=tuple(column for column, _ in rows[0][1]),
        )


def _outer(rows: list[tuple[Row, Parts, Value]], nested: set[str]) -> str:
    """The part that is large enough in every row to hold the nested ones; the last such one."""
    names = [column.name for column, _ in rows[0][1] if column.name not in nested]

    def holds(name: str) -> bool:
        for _, parts, _ in rows:
            values = {column.name: value.interval.middle for column, value in parts}
            if values[name] < sum(values[name_inside] for name_inside in nested):
                return False
        return True

    return next((name for name in reversed(names) if holds(name)), "several of them")


def _own(parts: Parts, nested: set[str], outer: str) -> str:
    values = {column.name: value.interval.middle for column, value in parts}
    return f"{float(values.get(outer, 0) - sum(values[part] for part in nested)):.4g}" if outer in values else "unknown"


@Rule(
    name="parts-below-whole",
    severity="note",
    label=None,
    reach="rows",
    checks="what is in no part is named as a remainder",
    source="arithmetic",
    roles=("|".join(PARTS), "whole|latency"),
).of_table
def parts_below_whole(table: AuditTable) -> Iterator[Hit]:
    """Note wholes that are more than their parts, where no column is declared as the remainder."""
    if table.of_role("remainder_time"):
        return
    for row, parts, whole in _wholes(table):
        gap = _sum(parts).gap(whole.interval)
        if _sum(parts).high < whole.interval.low and gap >= LAST_DIGIT:
            yield Hit(
                message=f"{row.name}: {float(gap):.1%} of the whole are in no part",
                rows=(row,),
                columns=merged(*(value for _, value in parts), whole),
            )


@Rule(
    name="total-row",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="the total row is the sum of its columns",
    source="arithmetic",
    roles=("|".join(PARTS) + "|share",),
).of_table
def total_row(table: AuditTable) -> Iterator[Hit]:
    """Compare a total row with the sums of the columns above it."""
    rows = [row for row in table.rows if not is_total(row)]
    for row in (row for row in table.rows if is_total(row)):
        for column in table.of_role(*PARTS, "whole", "share"):
            stated = table.raw(row, column)
            values = [table.raw(part_row, column) for part_row in rows]
            if stated is None or not values or any(value is None for value in values):
                continue
            expected = total([value for value in values if value])
            gap = stated.gap(expected)
            if gap:
                yield Hit(
                    message=f"{row.name}: {column.printed_name} is printed {stated}, the rows sum to {expected}",
                    rows=(row,),
                    columns=(column,),
                    gap=gap,
                )


@Rule(
    name="share-of-total",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="share = the row's parts / the parts of all rows",
    source="arithmetic",
    roles=("share", "|".join(PARTS)),
).of_table
def share_of_total(table: AuditTable) -> Iterator[Hit]:
    """Compare each row's share with its parts over the parts of all rows."""
    rows = [row for row in table.rows if not is_total(row)]
    for column in table.of_role("share"):
        sums = {id(row): _sum(list(parts_of(table, row))) for row in table.rows if list(parts_of(table, row))}
        if any(id(row) not in sums for row in rows) or not rows:
            continue
        grand = total([sums[id(row)] for row in rows])
        for row in rows:
            stated, expected = table.read(row, column), sums[id(row)].over(grand)
            gap = stated.interval.gap(expected) if stated and expected else None
            if gap and stated and expected:
                yield Hit(
                    message=f"{row.name}: {column.printed_name} is printed {float(stated.interval.middle):.1%},"
                    f" its parts are {float(expected.middle):.1%} of the total",
                    rows=(row,),
                    columns=(column,),
                    gap=gap,
                )


@Rule(
    name="share-range",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="a stated range of communication shares begins and ends where the rows do",
    source="arithmetic",
    roles=("communication_share", "communication_time", "whole|latency"),
).of_table
def share_range(table: AuditTable) -> Iterator[Hit]:
    """Compare a stated range of communication shares (``15-33%``) with the rows."""
    fact = table.facts.get("communication_share")
    ends = printed(fact.text).numbers if fact else ()
    shares = []
    for row in table.rows:
        whole = table.value(row, "whole") or table.value(row, "latency")
        share = quotient(table.value(row, "communication_time"), whole)
        if share:
            shares.append((share.interval.middle, row, share))
    if len(ends) != 2 or not shares:
        return
    shares.sort(key=lambda entry: entry[0])
    for end, (_, row, share) in zip(ends, (shares[0], shares[-1]), strict=True):
        stated = end.interval * Interval.exactly(printed("0.01").numbers[0].value)
        gap = stated.gap(share.interval)
        if gap:
            yield Hit(
                message=f"{row.name}: communication is {float(share.interval.middle):.1%} of the whole, the range"
                f" ends at {float(end.value):g} %",
                rows=(row,),
                columns=share.columns,
                gap=gap,
            )
