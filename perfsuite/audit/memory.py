"""Rules about memory, pipelines and meshes: lower bounds, unsharded parts, bubbles, products of degrees."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import combinations, pairwise
from types import MappingProxyType

from perfsuite.audit.table import AuditColumn, AuditTable, Hit, Row, Rule, Value, hit_of, merged, product, quotient
from perfsuite.published.numbers import total
from perfsuite.published.records import DEGREES
from perfsuite.schedules.catalog import fill_drain_bubble, naive_bubble

WEIGHT_BYTES: Mapping[str, int] = MappingProxyType(
    {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "amp": 2, "fp8": 1, "int8": 1}
)
"""Bytes of a weight by dtype; 1 for an unknown dtype."""

# Words of runs whose weights are elsewhere, or have less than 8 bits
_SMALLER = re.compile(r"offload|qlora|gptq|awq|(?:\b|_)i?q[2-6]|(?<!\d)[2-6].?bit|(?:int|fp|nf)4", re.IGNORECASE)
UNSHARDED_SHARE = Fraction(2, 100)  # Smallest share of a device's memory for activations, buffers and the context.

SHARED_FIT = Fraction(2, 1000)  # Largest deviation of a column from a + b / n, as a share of its largest value.

PARTS = ("memory_weights", "memory_gradients", "memory_optimizer", "memory_activations", "memory_fragmentation")
TOTALS = ("memory", "memory_final")


def _weights_above_memory(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        settings = " ".join(table.text(row, role) for role in ("strategy", "config", "dtype", "model", "note"))
        least = WEIGHT_BYTES.get(table.text(row, "dtype").lower(), 1)
        share, memory = quotient(table.value(row, "parameters"), table.devices(row)), table.value(row, "memory")
        if share and memory and not _SMALLER.search(settings) and memory.high < share.low * least:
            needed, printed = float(share.middle * least / 10**9), table.text(row, "memory").strip()
            unit = "" if any(map(str.isalpha, printed)) else f" {(memory.columns and memory.columns[0].unit) or 'GB'}"
            text = (
                f"the weights alone take {needed:.4g} GB per device in {8 * least} bit"
                f" ({needed * 2 / least:.4g} GB in 16 bit); {printed}{unit} are printed"
            )
            yield hit_of(row, memory.columns, text)


def _memory_exactly_inverse(table: AuditTable) -> Iterator[Hit]:
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


LAYOUT = frozenset({"stages", "devices", "nodes", "devices_per_node", *DEGREES})
GROWS = Fraction(105, 100)
"""Tolerated growth of memory with the number of micro-batches (inputs and losses of the step)."""


def _schedule(table: AuditTable, row: Row) -> str:
    return table.text(row, "schedule").lower().replace("-", "").replace("_", "").replace(" ", "")


def _stages(table: AuditTable, row: Row) -> Value | None:
    return table.value(row, "stages") or table.value(row, "pp")


def _bound(schedule: str, stages: Fraction, micro_batches: Fraction | None, virtual: Fraction | None) -> Fraction:
    """Return the smallest bubble of a schedule; 0 if unknown (zero-bubble schedules, unknown micro-batches).

    >>> _bound("1f1b", Fraction(4), Fraction(8), None), _bound("naive", Fraction(4), None, None)
    (Fraction(3, 11), Fraction(3, 4))
    """
    if schedule == "naive":
        return naive_bubble(stages)
    if micro_batches is None or schedule not in ("", "gpipe", "1f1b", "interleaved", "interleaved1f1b"):
        return Fraction(0)
    if schedule.startswith("interleaved"):
        return fill_drain_bubble(stages, micro_batches, virtual) if virtual else Fraction(0)
    return fill_drain_bubble(stages, micro_batches, 1)


def _bubble_below_bound(table: AuditTable) -> Iterator[Hit]:
    for _, row, printed in table.figures("bubble"):
        stages, schedule = _stages(table, row), _schedule(table, row)
        micro, virtual = table.value(row, "num_micro_batches"), table.value(row, "virtual_stages")
        if not stages:
            continue
        counts = [value.middle if value else None for value in (micro, virtual)]
        bound = _bound(schedule, stages.middle, *counts)
        if printed.high < bound:
            text = (
                f"bubble {float(printed.middle):.1%} is below the bound {float(bound):.1%} of"
                f" {schedule or 'a plain schedule'} with p={stages}{f', m={micro}' if micro else ''}"
            )
            yield hit_of(row, printed.columns, text)


def _bubble_falls_with_stages(table: AuditTable) -> Iterator[Hit]:
    for column in table.of_role("bubble"):
        points = [(_stages(table, row), row, table.read(row, column)) for row in table.rows]
        for rows in table.series(points, LAYOUT):
            falling = all(p < q and y.high < x.low for (p, _, x), (q, _, y) in pairwise(rows))
            if len(rows) >= 3 and falling:
                (fewest, _, first), (most, _, last) = rows[0], rows[-1]
                yield Hit(
                    message=f"the bubble falls from {float(first.middle):.1%} with {fewest} stages to"
                    f" {float(last.middle):.1%} with {most}; (p-1)/(m+p-1) grows with p"
                    + ("" if table.says("num_micro_batches") else " (m is not stated: taken as constant)"),
                    rows=tuple(row for _, row, _ in rows),
                    columns=(column,),
                )


def _memory_of_1f1b_grows(table: AuditTable) -> Iterator[Hit]:
    """1F1B keeps at most p micro-batches, for any total number."""
    points = []
    for row in table.rows:
        stages, micro = _stages(table, row), table.value(row, "num_micro_batches")
        if stages and micro and _schedule(table, row) == "1f1b" and micro.low >= stages.high:
            points.append((micro, row, table.value(row, "memory")))
    for rows in table.series(points, ("num_micro_batches", "case", "global_batch_size")):
        for (m, few, small), (n, many, large) in pairwise(rows):
            first, second = (table.raw(row, small.columns[0]) if small.columns else None for row in (few, many))
            if first and second and m < n and second.low > first.high * GROWS:
                yield Hit(
                    message=f"{many.name}: 1F1B needs {second} with {n} micro-batches and {first} with {m};"
                    " it keeps at most p of them in flight",
                    rows=(few, many),
                    columns=merged(small, large),
                )


def _does_not_divide(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        heads, layers, width = (table.value(row, role) for role in ("num_heads", "num_layers", "hidden_size"))
        tensor, stages = table.value(row, "tp"), _stages(table, row)
        for name, divisor, what, number in (("tp", tensor, "heads", heads), ("num_heads", heads, "width", width)):
            if divisor and number and number.middle % divisor.middle:
                text = f"{name}={divisor} does not divide {number} {what}"
                yield hit_of(row, merged(divisor, number), text)
        if stages and layers and stages.low > layers.high:
            yield hit_of(row, merged(stages, layers), f"{stages} stages for {layers} layers")


def _layout_product(table: AuditTable) -> Iterator[Hit]:
    """cp, ep and sp may lie inside other axes."""
    for row in table.rows:
        stated = table.value(row, "devices") or product(table.value(row, "nodes"), table.value(row, "devices_per_node"))
        degrees = {role: value for role in DEGREES if (value := table.value(row, role))}
        if not stated or not {"dp", "tp", "pp"} <= set(degrees):
            continue
        allowed = [
            product(*(value for role, value in degrees.items() if role not in inside))
            for count in range(4)
            for inside in combinations(("cp", "ep", "sp"), count)
        ]
        if not any(value and stated.meets(value) for value in allowed):
            sizes = " x ".join(f"{role}{value}" for role, value in degrees.items())
            text = f"{sizes} are not {stated} devices"
            yield hit_of(row, merged(stated, *degrees.values()), text)


def _more_devices_than_there_are(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        count, there = table.devices(row), table.value(row, "available_devices")
        if count and there and count.low > there.high:
            text = f"{count} devices; the largest machine had {there}"
            yield hit_of(row, count.columns, text)


def _batch_product(table: AuditTable) -> Iterator[Hit]:
    """Without dp, the global batch must be a multiple of the local batch."""
    for row in table.rows:
        stated, shards = table.value(row, "global_batch_size"), table.value(row, "dp")
        steps, micro = table.value(row, "num_micro_batches"), table.value(row, "micro_batch_size")
        local = table.value(row, "local_batch_size") or product(micro, steps)
        if not stated or not local or local.low <= 0:
            continue
        ratio = stated.middle / local.middle
        allowed = {shards.middle} if shards else set()
        if shards and steps:
            allowed.add(shards.middle * steps.middle)  # "local" may mean one micro-batch
        if ratio not in allowed if shards else ratio.denominator != 1:
            rule = f"x dp={shards}" if shards else "x a whole number"
            text = f"the global batch is {stated}; it should be {local} {rule}"
            yield hit_of(row, merged(stated, local, shards), text)


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
    Rule("bubble-below-bound", "contradiction", "X", "table", _bubble_below_bound,
         roles=("bubble", "stages|pp", "num_micro_batches", "schedule"),
         checks="bubble >= (p-1)/(m+p-1); naive (p-1)/p; interleaved (p-1)/(vm+p-1); zero-bubble schedules 0",
         source="GPipe (Huang et al. 2019); Narayanan et al. 2021, section 2.2"),
    Rule("bubble-falls-with-stages", "contradiction", "X", "table", _bubble_falls_with_stages,
         roles=("bubble", "stages|pp"),
         checks="bubble does not fall with every added stage, three or more sizes, at constant m",
         source="(p-1)/(m+p-1) grows with p"),
    Rule("1f1b-memory-grows", "contradiction", "X", "table", _memory_of_1f1b_grows,
         roles=("memory", "num_micro_batches", "stages|pp", "schedule"),
         checks="1F1B memory does not grow with m >= p (5 % allowed)",
         source="Narayanan et al. 2021, section 2.2.1: at most p micro-batches in flight"),
    Rule("does-not-divide", "contradiction", "X", "rows", _does_not_divide,
         roles=("tp|num_heads|pp", "num_heads|hidden_size|num_layers"),
         checks="tp divides the heads, heads divide the width, stages <= layers",
         source="Shoeybi et al. 2019: whole heads per tensor-parallel rank"),
    Rule("layout-product", "contradiction", "X", "rows", _layout_product,
         roles=("devices|nodes", "dp", "tp", "pp"),
         checks="devices = dp x tp x pp (x cp, x sp, x ep)",
         source="every device has one place in the mesh"),
    Rule("more-devices-than-there-are", "contradiction", "R", "rows", _more_devices_than_there_are,
         roles=("devices", "available_devices"),
         checks="n <= devices of the largest machine",
         source="the report's own hardware section"),
    Rule("batch-product", "contradiction", "X", "rows", _batch_product,
         roles=("global_batch_size", "local_batch_size|micro_batch_size"),
         checks="global batch = local batch x dp = micro-batch x dp x accumulation steps",
         source="definition of the global batch"),
)  # fmt: skip
"""The rules of this family; findings come in this order."""
