"""Rules about memory: lower bounds, unsharded parts, and columns that were computed instead of measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import combinations
from types import MappingProxyType

from perfsuite.audit.table import AuditColumn, AuditTable, Hit, Row, Rule, hit_of, quotient
from perfsuite.published.numbers import total

WEIGHT_BYTES: Mapping[str, int] = MappingProxyType(
    {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "amp": 2, "fp8": 1, "int8": 1}
)
"""Bytes of a weight by dtype; 1 for an unknown dtype."""

UNSHARDED_SHARE = Fraction(2, 100)
"""Smallest share of a device's memory for activations, buffers and the context."""

SHARED_FIT = Fraction(2, 1000)
"""Largest deviation of a column from a + b / n, as a share of its largest value."""

PARTS = ("memory_weights", "memory_gradients", "memory_optimizer", "memory_activations", "memory_fragmentation")
TOTALS = ("memory", "memory_final")


def _weights_above_memory(table: AuditTable) -> Iterator[Hit]:
    """Compare the weights with the memory of all devices of the run."""
    for row in table.rows:
        offloaded = "offload" in f"{table.text(row, 'strategy')} {table.text(row, 'config')}".lower()
        least = WEIGHT_BYTES.get(table.text(row, "dtype").lower(), 1)
        share, memory = quotient(table.value(row, "parameters"), table.devices(row)), table.value(row, "memory")
        if share and memory and not offloaded and memory.high < share.low * least:
            needed = float(share.middle * least / 10**9)
            text = (
                f"the weights alone take {needed:.4g} GB per device in {8 * least} bit"
                f" ({needed * 2 / least:.4g} GB in 16 bit); {_memory_text(table, row)} are printed"
            )
            yield hit_of(row, memory.columns, text)


def _memory_text(table: AuditTable, row: Row) -> str:
    """Return the printed memory of a row, with its column's unit if the cell has none."""
    for column in table.of_role("memory"):
        cell = row.cells.get(column.name)
        if cell and cell.number(column.index):
            text = cell.text.strip()
            return text if any(letter.isalpha() for letter in text) else f"{text} {column.unit or 'GB'}"
    return table.text(row, "memory")


def _memory_exactly_inverse(table: AuditTable) -> Iterator[Hit]:
    """Find memory that falls exactly as 1 / n although every device keeps its batch and its activations."""
    for column in table.of_role("memory"):
        for base, fewest in table.smallest_runs():
            whole, batch = table.raw(base, column), table.value(base, "local_batch_size")
            for row in table.rows if whole and batch else ():
                count, printed = table.devices(row), table.raw(row, column)
                own_batch = table.value(row, "local_batch_size")
                same = own_batch and batch and (own_batch.low, own_batch.high) == (batch.low, batch.high)
                if not count or not printed or not whole or not same or table.work(row) != table.work(base):
                    continue
                if count.low < 4 * fewest.high:
                    continue
                n = count.middle / fewest.middle
                unsharded = (printed.high * n - whole.low) / (n - 1)  # of m(n) = a + (m(1) - a) / n, the largest a
                if printed.low * n <= whole.high and unsharded < UNSHARDED_SHARE * whole.low:
                    kept = (
                        f"at most {float(unsharded / whole.middle):.1%} of it does not shard at a constant local batch"
                    )
                    text = f"{column.printed_name} {printed} is 1/{n} of {whole} in {base.name}, so {kept}"
                    yield hit_of(row, (column,), text, base=base)


def _memory_above_capacity(table: AuditTable) -> Iterator[Hit]:
    for column, row, value in table.figures(*TOTALS):
        there = table.value(row, "memory_capacity")
        if there and value.low > there.high:
            text = f"{column.printed_name} {table.raw(row, column)} is more than the device has"
            yield hit_of(row, (column,), text)


def _rate_of_out_of_memory(table: AuditTable) -> Iterator[Hit]:
    for memory in table.of_role("memory"):
        for row in table.rows:
            cell = row.cells.get(memory.name)
            if cell is None or not cell.out_of_memory:
                continue
            for column in table.of_kind("measured", "derived"):
                if column.meaning.dimension != "memory" and table.raw(row, column):
                    text = (
                        f"{column.printed_name} is {row.cells[column.name].text.strip()}"
                        f" although {memory.printed_name} says {cell.text.strip()}"
                    )
                    yield hit_of(row, (column, memory), text)


def _residual_column(table: AuditTable) -> Iterator[Hit]:
    """Find parts of the memory that equal a total minus one or two other columns in every row."""
    totals, parts = table.of_role(*TOTALS), table.of_role(*PARTS)
    for part in () if table.of_role("memory_remainder") else parts:
        candidates = [*totals, *(column for column in parts if column != part)]
        formulas = (
            (whole, *chosen)
            for subtracted in (1, 2)
            for whole in totals
            for chosen in combinations([column for column in candidates if column != whole], subtracted)
        )
        formula = next((formula for formula in formulas if _gives(table, part, *formula)), None)
        if formula:
            text = " - ".join(column.printed_name for column in formula)
            yield Hit(
                message=f"{part.printed_name} = {text} to the printed digit in every row: computed, not measured",
                rows=table.rows,
                columns=(part,),
            )


def _gives(table: AuditTable, part: AuditColumn, whole: AuditColumn, *chosen: AuditColumn) -> bool:
    """Return whether ``part`` is ``whole`` minus the chosen columns in all rows, of which three or more differ."""
    seen = set()
    for row in table.rows:
        values = [table.raw(row, column) for column in (part, whole, *chosen)]
        present = [value for value in values if value]
        if len(present) < len(values):
            continue
        if not present[0].meets(present[1] - total(present[2:])):
            return False
        seen.add(present[0].middle)
    return len(seen) >= 3


def _optimizer_not_sharded(table: AuditTable) -> Iterator[Hit]:
    """Find optimizer columns of the form a + b / n: the constant part is not sharded."""
    for column in table.of_role("memory_optimizer"):
        points = []
        for row in table.rows:
            count, printed = table.devices(row), table.raw(row, column)
            if count and printed:
                points.append((1 / count.middle, printed.middle))
        if len({inverse for inverse, _ in points}) < 4:
            continue
        mean_x, mean_y = (sum(values, Fraction(0)) / len(points) for values in zip(*points, strict=True))
        spread = sum(((x - mean_x) ** 2 for x, _ in points), Fraction(0))
        slope = sum(((x - mean_x) * (y - mean_y) for x, y in points), Fraction(0)) / spread
        start = mean_y - slope * mean_x
        worst = max(abs(start + slope * x - y) for x, y in points)
        largest = max(y for _, y in points)
        if min(start, slope) > largest / 10 and worst <= SHARED_FIT * largest:
            yield Hit(
                message=f"{column.printed_name} = {float(start):.3f} + {float(slope):.3f} / n within"
                f" {float(worst):.3f}: {float(start):.3f} stay on every device and are not sharded",
                rows=table.rows,
                columns=(column,),
            )


RULES = (
    Rule("weights-above-memory", "contradiction", "X", "table", _weights_above_memory,
         roles=("memory", "parameters", "devices"),
         checks="memory per device >= parameters x bytes per weight / n (1 byte where the dtype is not stated)",
         source="the weights must be somewhere; no offloading stated"),
    Rule("memory-exactly-inverse", "contradiction", "X", "table", _memory_exactly_inverse,
         roles=("memory", "devices", "local_batch_size"),
         checks="m(n) = a + s / n: a >= 2 % of m(1) at a constant local batch",
         source="ZeRO (Rajbhandari et al. 2020): states shard, activations and buffers of a local batch do not"),
    Rule("memory-above-capacity", "contradiction", "X", "rows", _memory_above_capacity,
         roles=("memory|memory_final", "memory_capacity"),
         checks="memory per device <= memory of the device",
         source="the device's data sheet"),
    Rule("rate-of-out-of-memory", "contradiction", "X", "table", _rate_of_out_of_memory,
         roles=("memory", "throughput|latency|speedup"),
         checks="a row that ran out of memory has no throughput, time or speed-up",
         source="it did not run"),
    Rule("residual-column", "note", "M?", "table", _residual_column,
         roles=("memory_optimizer|memory_activations|memory_weights", "memory|memory_final"),
         checks="part = total - other columns in every row, without a column declared as the remainder",
         source="separately measured parts do not add up to the last digit of an allocator's total"),
    Rule("optimizer-not-sharded", "note", "M?", "cells", _optimizer_not_sharded,
         roles=("memory_optimizer", "devices"),
         checks="optimizer = a + b / n with both parts above 10 % (fit within 0.2 %)",
         source="sharded optimizer state falls as 1 / n, replicated state is constant (ZeRO)"),
)  # fmt: skip
"""The rules of this family; findings come in this order."""
