"""Rules about memory: what must be there, what cannot shard, columns that were computed and not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import combinations
from types import MappingProxyType

from perfsuite.audit.quantities import devices, quotient, smallest_runs, work
from perfsuite.audit.rule import Hit, Rule
from perfsuite.audit.table import AuditColumn, AuditTable, Row
from perfsuite.published.numbers import Interval, total

WEIGHT_BYTES: Mapping[str, int] = MappingProxyType(
    {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "amp": 2, "fp8": 1, "int8": 1}
)
"""Bytes of a weight by dtype; an unknown dtype counts as one byte."""

UNSHARDED_SHARE = Fraction(2, 100)
"""Activations, buffers and the device's context never are less than this share of a device's memory."""

SHARED_FIT = Fraction(2, 1000)
"""How well a + b / n must describe a column, as a share of its largest value."""

PARTS = ("memory_weights", "memory_gradients", "memory_optimizer", "memory_activations", "memory_fragmentation")
TOTALS = ("memory", "memory_final")


@Rule(
    name="weights-above-memory",
    severity="contradiction",
    label="X",
    reach="table",
    checks="memory per device >= parameters x bytes per weight / n (1 byte where the dtype is not stated)",
    source="the weights must be somewhere; no offloading stated",
    roles=("memory", "parameters", "devices"),
).of_table
def weights_above_memory(table: AuditTable) -> Iterator[Hit]:
    """Compare the memory of a device with its share of the weights alone, spread over every device of the run."""
    for row in table.rows:
        parameters, count = table.value(row, "parameters"), devices(table, row)
        offloaded = "offload" in f"{table.text(row, 'strategy')} {table.text(row, 'config')}".lower()
        least = WEIGHT_BYTES.get(table.text(row, "dtype").lower(), 1)
        share = quotient(parameters, count)
        memory = table.value(row, "memory")
        if share and memory and not offloaded and memory.interval.high < share.interval.low * least:
            needed = float(share.interval.middle * least / 10**9)
            yield Hit(
                message=f"{row.name}: the weights alone take {needed:.4g} GB per device in {8 * least} bit"
                f" ({needed * 2 / least:.4g} GB in 16 bit); {memory_text(table, row)} are printed",
                rows=(row,),
                columns=memory.columns,
            )


def memory_text(table: AuditTable, row: Row) -> str:
    """The memory of a row as it is printed, with its column's unit where the cell has none."""
    for column in table.of_role("memory"):
        cell = row.cells.get(column.name)
        if cell and cell.number(column.index):
            text = cell.text.strip()
            return text if any(letter.isalpha() for letter in text) else f"{text} {column.unit or 'GB'}"
    return table.text(row, "memory")


@Rule(
    name="memory-exactly-inverse",
    severity="contradiction",
    label="X",
    reach="table",
    checks="m(n) = a + s / n: a >= 2 % of m(1) at a constant local batch",
    source="ZeRO (Rajbhandari et al. 2020): states shard, activations and buffers of a local batch do not",
    roles=("memory", "devices", "local_batch_size"),
).of_table
def memory_exactly_inverse(table: AuditTable) -> Iterator[Hit]:
    """Find memory that falls as 1 / n to the printed digit while every device keeps its batch and its activations."""
    for column in table.of_role("memory"):
        for base, fewest in smallest_runs(table):
            whole = table.raw(base, column)
            for row in table.rows if whole else ():
                count, printed = devices(table, row), table.raw(row, column)
                same = work(table, row) == work(table, base) and _keeps_batch(table, row, base)
                if not count or not printed or not whole or not same or count.interval.low < 4 * fewest.interval.high:
                    continue
                n = count.interval.middle / fewest.interval.middle
                unsharded = (printed.high * n - whole.low) / (n - 1)  # of m(n) = a + (m(1) - a) / n, the largest a
                falls = printed.low * n <= whole.high
                if falls and unsharded < UNSHARDED_SHARE * whole.low:
                    kept = float(unsharded / whole.middle)
                    yield Hit(
                        message=f"{row.name}: {column.printed_name} {printed} is 1/{n} of {whole} in {base.name},"
                        f" so at most {kept:.1%} of it does not shard at a constant local batch",
                        rows=(row, base),
                        columns=(column,),
                    )


def _keeps_batch(table: AuditTable, row: Row, base: Row) -> bool:
    mine, theirs = table.value(row, "local_batch_size"), table.value(base, "local_batch_size")
    return bool(mine and theirs and mine.interval == theirs.interval)


@Rule(
    name="memory-above-capacity",
    severity="contradiction",
    label="X",
    reach="rows",
    checks="memory per device <= memory of the device",
    source="the device's data sheet",
    roles=("memory|memory_final", "memory_capacity"),
).of_table
def memory_above_capacity(table: AuditTable) -> Iterator[Hit]:
    """Flag memory above what the device has."""
    for column in table.of_role(*TOTALS):
        for row in table.rows:
            value, there = table.read(row, column), table.value(row, "memory_capacity")
            if value and there and value.interval.low > there.interval.high:
                yield Hit(
                    message=f"{row.name}: {column.printed_name} {table.raw(row, column)} is more than the device has",
                    rows=(row,),
                    columns=(column,),
                )


@Rule(
    name="rate-of-out-of-memory",
    severity="contradiction",
    label="X",
    reach="table",
    checks="a row that ran out of memory has no throughput, time or speed-up",
    source="it did not run",
    roles=("memory", "throughput|latency|speedup"),
).of_table
def rate_of_out_of_memory(table: AuditTable) -> Iterator[Hit]:
    """Flag rates and times of rows that ran out of memory."""
    for memory in table.of_role("memory"):
        for row in table.rows:
            cell = row.cells.get(memory.name)
            if cell is None or not cell.out_of_memory:
                continue
            for column in table.of_kind("measured", "derived"):
                if column.meaning.dimension != "memory" and table.raw(row, column):
                    yield Hit(
                        message=f"{row.name}: {column.printed_name} is {row.cells[column.name].text.strip()}"
                        f" although {memory.printed_name} says {cell.text.strip()}",
                        rows=(row,),
                        columns=(column, memory),
                    )


@Rule(
    name="residual-column",
    severity="note",
    label="M?",
    reach="table",
    checks="part = total - other columns in every row, without a column declared as the remainder",
    source="separately measured parts do not add up to the last digit of an allocator's total",
    roles=("memory_optimizer|memory_activations|memory_weights", "memory|memory_final"),
).of_table
def residual_column(table: AuditTable) -> Iterator[Hit]:
    """Find parts of the memory that equal a total minus other columns in every row: computed, not measured."""
    if table.of_role("memory_remainder"):
        return
    totals = table.of_role(*TOTALS)
    for part in table.of_role(*PARTS):
        formula = _formula(table, part, totals)
        if formula:
            whole, *others = formula
            text = " - ".join(column.printed_name for column in (whole, *others))
            yield Hit(
                message=f"{part.printed_name} = {text} to the printed digit in every row: computed, not measured",
                rows=table.rows,
                columns=(part,),
            )


def _formula(table: AuditTable, part: AuditColumn, totals: tuple[AuditColumn, ...]) -> tuple[AuditColumn, ...]:
    """(total, subtracted columns) that give ``part`` in at least three rows that differ; empty when there are none."""
    candidates = [*totals, *(column for column in table.of_role(*PARTS) if column != part)]
    for subtracted in (1, 2):
        for whole in totals:
            others = [column for column in candidates if column != whole]
            for chosen in combinations(others, subtracted):
                if _gives(table, part, whole, chosen):
                    return (whole, *chosen)
    return ()


def _gives(table: AuditTable, part: AuditColumn, whole: AuditColumn, chosen: tuple[AuditColumn, ...]) -> bool:
    seen = set()
    for row in table.rows:
        values = [table.raw(row, column) for column in (part, whole, *chosen)]
        known = [value for value in values if value]
        if len(known) < len(values):
            continue
        if not known[0].meets(known[1] - total(known[2:])):
            return False
        seen.add(known[0].middle)
    return len(seen) >= 3


@Rule(
    name="optimizer-not-sharded",
    severity="note",
    label="M?",
    reach="cells",
    checks="optimizer = a + b / n with both parts above 10 % (fit within 0.2 %)",
    source="sharded optimizer state falls as 1 / n, replicated state is constant (ZeRO)",
    roles=("memory_optimizer", "devices"),
).of_table
def optimizer_not_sharded(table: AuditTable) -> Iterator[Hit]:
    """Find optimizer columns that are a + b / n: the constant part is on every device and no sharded state."""
    for column in table.of_role("memory_optimizer"):
        points = []
        for row in table.rows:
            count, printed = devices(table, row), table.raw(row, column)
            if count and printed:
                points.append((1 / count.interval.middle, printed))
        if len({inverse for inverse, _ in points}) < 4:
            continue
        constant, slope = _line(points)
        worst = max(abs(constant + slope * inverse - printed.middle) for inverse, printed in points)
        largest = max(printed.middle for _, printed in points)
        shared = min(constant, slope) > largest / 10
        if shared and worst <= SHARED_FIT * largest:
            yield Hit(
                message=f"{column.printed_name} = {float(constant):.3f} + {float(slope):.3f} / n within"
                f" {float(worst):.3f}: {float(constant):.3f} stay on every device and are no sharded optimizer state",
                rows=table.rows,
                columns=(column,),
            )


def _line(points: list[tuple[Fraction, Interval]]) -> tuple[Fraction, Fraction]:
    """Least squares of value = constant + slope x inverse."""
    mean_x = sum((x for x, _ in points), Fraction(0)) / len(points)
    mean_y = sum((y.middle for _, y in points), Fraction(0)) / len(points)
    spread = sum(((x - mean_x) ** 2 for x, _ in points), Fraction(0))
    slope = sum(((x - mean_x) * (y.middle - mean_y) for x, y in points), Fraction(0)) / spread
    return mean_y - slope * mean_x, slope
