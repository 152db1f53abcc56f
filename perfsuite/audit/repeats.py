"""Rules about figures that repeat, are missing or stand in the wrong column."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

from perfsuite.audit.quantities import devices, step_time, throughput
from perfsuite.audit.rule import Hit, Rule
from perfsuite.audit.table import AuditColumn, AuditTable, Row, Value
from perfsuite.published.numbers import Printed

MANY_DIGITS = 7
"""Two measurements do not agree in this many digits by chance: one in a million rows of noise of 1 %."""

NOISE = Fraction(1, 10)
"""Repeats of one run may differ by this much."""

CARD_SIZES_GB = frozenset({8, 12, 16, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 192})
"""Memory sizes of accelerators, for tables that do not state theirs."""

_PAIR = re.compile(r"\s*\d+(?:\.\d+)?\s*/\s*\d+(?:\.\d+)?\s*")


def _measured(table: AuditTable) -> tuple[AuditColumn, ...]:
    return tuple(column for column in table.of_kind("measured") if column.meaning.dimension != "memory")


def _distinct(table: AuditTable, row: Row, other: Row) -> bool:
    return table.configuration(row) != table.configuration(other)


@Rule(
    name="equal-digits",
    severity="contradiction",
    label="X",
    reach="cells",
    checks=f"measurements of different runs do not agree in {MANY_DIGITS} digits (simulations excepted)",
    source="noise",
    roles=("loss|latency|throughput",),
).of_table
def equal_digits(table: AuditTable) -> Iterator[Hit]:
    """Find measurements that agree to many digits between runs that differ."""
    if table.simulated:
        return
    for column in _measured(table):
        for row, other in combinations(table.rows, 2):
            mine, theirs = (either.cells.get(column.name) for either in (row, other))
            number, twin = (cell.number(column.index) if cell else None for cell in (mine, theirs))
            equal = number and twin and number.digits >= MANY_DIGITS and number.value == twin.value
            if mine and number and equal and _distinct(table, row, other):
                yield Hit(
                    message=f"{column.printed_name} is {mine.text.strip()} in {row.name} and in {other.name}:"
                    f" {number.digits} equal digits",
                    rows=(row, other),
                    columns=(column,),
                )


@Rule(
    name="constant-measurement",
    severity="note",
    label="M?",
    reach="cells",
    checks="a measured column is not one value of three digits in three or more different runs",
    source="noise",
    roles=("loss|latency|throughput",),
).of_table
def constant_measurement(table: AuditTable) -> Iterator[Hit]:
    """Find times, rates and losses that are one value for three or more runs that differ."""
    if table.simulated:
        return
    for column in (measured for measured in _measured(table) if measured.meaning.dimension != "share"):
        cells = [(row, cell) for row in table.rows if (cell := row.cells.get(column.name))]
        numbers = [(row, number) for row, cell in cells if (number := cell.number(column.index))]
        settings = {tuple(sorted(table.configuration(row).items())) for row, _ in numbers}
        values = {number.value for _, number in numbers}
        if len(settings) >= 3 and len(values) == 1 and numbers[0][1].digits >= 3:
            yield Hit(
                message=f"{column.printed_name} is {float(numbers[0][1].value):g} in all {len(numbers)} rows",
                rows=tuple(row for row, _ in numbers),
                columns=(column,),
            )


@Rule(
    name="repeated-row",
    severity="note",
    label="M?",
    reach="rows",
    checks="a run on more devices does not repeat every measurement of a smaller one",
    source="more devices communicate more",
    roles=("devices", "latency|iterations_per_s", "memory"),
).of_table
def repeated_row(table: AuditTable) -> Iterator[Hit]:
    """Find rows that repeat every measurement of a run on fewer devices; memory alone may be the same on any number."""
    columns = [column for column in table.of_kind("measured") if column.role not in ("throughput", "tokens_per_s")]
    for row, other in combinations(table.rows, 2):
        if not _more_devices(table, other, row):
            continue
        pairs = [(row.cells.get(column.name), other.cells.get(column.name), column) for column in columns]
        known = [(_digits(mine, column), mine, theirs, column) for mine, theirs, column in pairs if mine and theirs]
        known = [entry for entry in known if entry[0]]
        equal = all(_equal(mine, theirs, column) for _, mine, theirs, column in known)
        if all(column.role.startswith("memory") for *_, column in known):
            continue
        if len(known) >= 2 and sum(digits for digits, *_ in known) >= 6 and equal:
            yield Hit(
                message=f"{other.name} repeats {row.name} in "
                + ", ".join(f"{column.printed_name} ({mine.text.strip()})" for _, mine, _, column in known),
                rows=(other,),
                columns=tuple(column for *_, column in known),
            )


def _more_devices(table: AuditTable, row: Row, other: Row) -> bool:
    count, fewer = devices(table, row), devices(table, other)
    return bool(count and fewer and count.interval.low > fewer.interval.high)


def _digits(cell: Printed, column: AuditColumn) -> int:
    number = cell.number(column.index)
    return number.digits if number else 0


def _equal(cell: Printed, other: Printed, column: AuditColumn) -> bool:
    mine, theirs = cell.number(column.index), other.number(column.index)
    return bool(mine and theirs and mine.value == theirs.value)


def _repeats(table: AuditTable) -> Iterator[tuple[Row, Row, Value, Fraction]]:
    """Pairs of rows with one configuration and a rate each: the rows, the second rate and how far they are apart."""
    for row, other in combinations(table.rows, 2):
        settings = table.configuration(row)
        if not settings or settings != table.configuration(other):
            continue
        pair = step_time(table, row), step_time(table, other)
        if not all(pair):
            pair = throughput(table, row), throughput(table, other)
        if pair[0] and pair[1]:
            low, high = sorted((pair[0].interval.middle, pair[1].interval.middle))
            yield row, other, pair[1], high / low - 1 if low else Fraction(0)


@Rule(
    name="repeat-noise",
    severity="note",
    label=None,
    reach="rows",
    checks="rows of one configuration: how far they are apart",
    source="noise",
    roles=("throughput|latency",),
).of_table
def repeat_noise(table: AuditTable) -> Iterator[Hit]:
    """Note how far repeats of one run are apart: the noise of the table."""
    for row, other, value, apart in _repeats(table):
        if apart <= NOISE:
            yield Hit(
                message=f"{row.name} and {other.name} are the same run: {float(apart):.2%} apart",
                rows=(row, other),
                columns=value.columns,
            )


@Rule(
    name="repeats-disagree",
    severity="contradiction",
    label="R",
    reach="rows",
    checks="rows of one configuration agree within 10 %",
    source="noise",
    roles=("throughput|latency",),
).of_table
def repeats_disagree(table: AuditTable) -> Iterator[Hit]:
    """Flag repeats of one run that are too far apart to be noise."""
    for row, other, value, apart in _repeats(table):
        if apart > NOISE:
            yield Hit(
                message=f"{row.name} and {other.name} are the same run and {float(apart):.0%} apart",
                rows=(row, other),
                columns=value.columns,
            )


@Rule(
    name="shifted-columns",
    severity="mislabel",
    label="M?",
    reach="table",
    checks="a cell x/48.0 of a 48 GB device stands in a memory column",
    source="sizes of device memories",
    roles=("memory", "memory_capacity"),
).of_table
def shifted_columns(table: AuditTable) -> Iterator[Hit]:
    """Find cells that look like "memory used of memory there" in a column that is no memory."""
    if not table.of_role("memory"):
        return
    for column in table.columns:
        if column.meaning.dimension in ("memory", "text"):
            continue
        for row in table.rows:
            cell = row.cells.get(column.name)
            if cell is None or column.index or not _PAIR.fullmatch(cell.text) or len(cell.numbers) != 2:
                continue
            used, there = (number.value for number in cell.numbers)
            stated = table.value(row, "memory_capacity")
            card = stated.interval.low <= there * 2**30 and there * 10**9 <= stated.interval.high if stated else False
            if used <= there and (card or (stated is None and there in CARD_SIZES_GB)):
                memory = table.of_role("memory")[0]
                instead = row.cells[memory.name].text.strip() if memory.name in row.cells else "nothing"
                yield Hit(
                    message=f"{row.name}: {column.printed_name} {cell.text.strip()} has the shape of memory on a device"
                    f" of {float(there):g} GB; {memory.printed_name} holds {instead}",
                    rows=(row,),
                    columns=(column, memory),
                )


@Rule(
    name="blank-metric",
    severity="note",
    label=None,
    reach="cells",
    checks="every run that did not run out of memory has every metric of its table",
    source="a missing figure is no figure",
    roles=("throughput|latency|mfu|memory",),
).of_table
def blank_metric(table: AuditTable) -> Iterator[Hit]:
    """Note metrics that rows leave blank without having run out of memory."""
    for column in table.of_kind("measured", "derived"):
        rows = [row for row in table.rows if not any(cell.out_of_memory for cell in row.cells.values())]
        blank = [row for row in rows if row.cells.get(column.name) is None or row.cells[column.name].blank]
        if blank:
            yield Hit(
                message=f"{column.printed_name} is blank in {len(blank)} of {len(rows)} rows",
                rows=tuple(blank),
                columns=(column,),
            )
