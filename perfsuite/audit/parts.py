"""Rules about sums: parts and the whole, total rows, shares."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

from perfsuite.audit.table import LAST_DIGIT, AuditColumn, AuditTable, Hit, Row, Rule, Value, hit_of, merged, quotient
from perfsuite.published.numbers import Interval, printed, total
from perfsuite.published.records import PARTS

TOTALS = frozenset({"total", "sum", "总计", "合计"})  # Texts of a row that is the sum of the others.
Parts = list[tuple[AuditColumn, Value]]


def _parts_of(table: AuditTable, row: Row) -> Parts:
    return [(column, value) for column in table.of_role(*PARTS) if (value := table.read(row, column))]


def _is_total(row: Row) -> bool:
    return any(cell.text.strip().lower() in TOTALS for cell in row.cells.values())


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


RULES = (
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
"""The rules of this family; findings come in this order."""
