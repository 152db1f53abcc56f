"""Rules about pipelines and meshes: bubbles, micro-batches in flight, products and divisors of degrees, machines."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations, pairwise

from perfsuite.audit.table import AuditTable, Hit, Row, Rule, Value, hit_of, merged, product
from perfsuite.published.records import DEGREES
from perfsuite.schedules.catalog import fill_drain_bubble, naive_bubble

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
    """Find bubbles that fall with every added stage at a constant number of micro-batches."""
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
