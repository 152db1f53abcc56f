"""Rules about pipelines and meshes: bubbles, micro-batches in flight, products and divisors of degrees, machines."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from perfsuite.audit.quantities import devices, merged, product
from perfsuite.audit.rule import Hit, Rule
from perfsuite.audit.table import AuditTable, Row, Value
from perfsuite.published.numbers import Interval
from perfsuite.published.roles import DEGREES
from perfsuite.schedules.catalog import fill_drain_bubble, naive_bubble

LAYOUT = frozenset({"stages", "devices", "nodes", "devices_per_node", *DEGREES})
GROWS = Fraction(105, 100)
"""Memory may grow by this much with the number of micro-batches (inputs and losses of the step) without a word."""


def _schedule(table: AuditTable, row: Row) -> str:
    return table.text(row, "schedule").lower().replace("-", "").replace("_", "").replace(" ", "")


def _stages(table: AuditTable, row: Row) -> Value | None:
    return table.value(row, "stages") or table.value(row, "pp")


def _bound(schedule: str, stages: Fraction, micro_batches: Fraction | None, virtual: Fraction | None) -> Fraction:
    """Smallest bubble of a schedule; 0 where none is known (zero-bubble schedules, unknown micro-batches).

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


@Rule(
    name="bubble-below-bound",
    severity="contradiction",
    label="X",
    reach="table",
    checks="bubble >= (p-1)/(m+p-1); naive (p-1)/p; interleaved (p-1)/(vm+p-1); zero-bubble schedules 0",
    source="GPipe (Huang et al. 2019); Narayanan et al. 2021, section 2.2",
    roles=("bubble", "stages|pp", "num_micro_batches", "schedule"),
).of_table
def bubble_below_bound(table: AuditTable) -> Iterator[Hit]:
    """Compare each bubble with the smallest that its schedule allows."""
    for column in table.of_role("bubble"):
        for row in table.rows:
            stages, printed = _stages(table, row), table.read(row, column)
            if not stages or not printed:
                continue
            micro, virtual = table.value(row, "num_micro_batches"), table.value(row, "virtual_stages")
            bound = _bound(
                _schedule(table, row),
                stages.interval.middle,
                micro.interval.middle if micro else None,
                virtual.interval.middle if virtual else None,
            )
            if printed.interval.high < bound:
                yield Hit(
                    message=f"{row.name}: bubble {float(printed.interval.middle):.1%} is below the bound"
                    f" {float(bound):.1%} of {_schedule(table, row) or 'a plain schedule'}"
                    f" with p={stages.interval}" + (f", m={micro.interval}" if micro else ""),
                    rows=(row,),
                    columns=printed.columns,
                )


@Rule(
    name="bubble-falls-with-stages",
    severity="contradiction",
    label="X",
    reach="table",
    checks="bubble does not fall with every added stage, three or more sizes, at constant m",
    source="(p-1)/(m+p-1) grows with p",
    roles=("bubble", "stages|pp"),
).of_table
def bubble_falls_with_stages(table: AuditTable) -> Iterator[Hit]:
    """Find bubbles that fall with every added stage while micro-batches are not added."""
    for column in table.of_role("bubble"):
        runs: dict[tuple[tuple[str, str], ...], list[tuple[Fraction, Row, Interval]]] = {}
        for row in table.rows:
            stages, printed = _stages(table, row), table.read(row, column)
            if stages and printed:
                settings = table.configuration(row)
                key = tuple(sorted(setting for setting in settings.items() if setting[0] not in LAYOUT))
                runs.setdefault(key, []).append((stages.interval.middle, row, printed.interval))
        for rows in runs.values():
            rows.sort(key=lambda run: run[0])
            falling = all(few[0] < many[0] and many[2].high < few[2].low for few, many in pairwise(rows))
            if len(rows) >= 3 and falling:
                first, last = rows[0], rows[-1]
                yield Hit(
                    message=f"the bubble falls from {float(first[2].middle):.1%} with {first[0]} stages to"
                    f" {float(last[2].middle):.1%} with {last[0]}; (p-1)/(m+p-1) grows with p"
                    + ("" if table.says("num_micro_batches") else " (m is not stated: taken as constant)"),
                    rows=tuple(row for _, row, _ in rows),
                    columns=(column,),
                )


@Rule(
    name="1f1b-memory-grows",
    severity="contradiction",
    label="X",
    reach="table",
    checks="1F1B memory does not grow with m >= p (5 % allowed)",
    source="Narayanan et al. 2021, section 2.2.1: at most p micro-batches in flight",
    roles=("memory", "num_micro_batches", "stages|pp", "schedule"),
).of_table
def memory_of_1f1b_grows(table: AuditTable) -> Iterator[Hit]:
    """Find 1F1B memory that grows with the micro-batches: it keeps at most p of them, however many there are."""
    runs: dict[tuple[tuple[str, str], ...], list[tuple[Fraction, Row, Value]]] = {}
    for row in table.rows:
        stages, micro, memory = _stages(table, row), table.value(row, "num_micro_batches"), table.value(row, "memory")
        if not stages or not micro or not memory or _schedule(table, row) != "1f1b":
            continue
        if micro.interval.low >= stages.interval.high:
            settings = table.configuration(row)
            settings = {name: value for name, value in settings.items() if name not in ("num_micro_batches", "case")}
            settings.pop("global_batch_size", None)
            runs.setdefault(tuple(sorted(settings.items())), []).append((micro.interval.middle, row, memory))
    for rows in runs.values():
        rows.sort(key=lambda run: run[0])
        for (m, few, small), (n, many, large) in pairwise(rows):
            column = small.columns[0] if small.columns else None
            first, second = (table.raw(few, column), table.raw(many, column)) if column else (None, None)
            if first and second and m < n and second.low > first.high * GROWS:
                yield Hit(
                    message=f"{many.name}: 1F1B needs {second} with {n} micro-batches and {first} with {m};"
                    " it keeps at most p of them in flight",
                    rows=(few, many),
                    columns=merged(small, large),
                )


@Rule(
    name="does-not-divide",
    severity="contradiction",
    label="X",
    reach="rows",
    checks="tp divides the heads, heads divide the width, stages <= layers",
    source="Shoeybi et al. 2019: whole heads per tensor-parallel rank",
    roles=("tp|num_heads|pp", "num_heads|hidden_size|num_layers"),
).of_table
def does_not_divide(table: AuditTable) -> Iterator[Hit]:
    """Flag degrees that do not divide what they split."""
    for row in table.rows:
        heads, layers, width = (table.value(row, role) for role in ("num_heads", "num_layers", "hidden_size"))
        tensor, stages = table.value(row, "tp"), _stages(table, row)
        pairs = [("tp", tensor, "heads", heads), ("num_heads", heads, "width", width)]
        for name, divisor, what, number in pairs:
            if divisor and number and number.interval.middle % divisor.interval.middle:
                yield Hit(
                    message=f"{row.name}: {name}={divisor.interval} does not divide {number.interval} {what}",
                    rows=(row,),
                    columns=merged(divisor, number),
                )
        if stages and layers and stages.interval.low > layers.interval.high:
            yield Hit(
                message=f"{row.name}: {stages.interval} stages for {layers.interval} layers",
                rows=(row,),
                columns=merged(stages, layers),
            )


@Rule(
    name="layout-product",
    severity="contradiction",
    label="X",
    reach="rows",
    checks="devices = dp x tp x pp (x sp, x ep)",
    source="every device has one place in the mesh",
    roles=("devices|nodes", "dp", "tp", "pp"),
).of_table
def layout_product(table: AuditTable) -> Iterator[Hit]:
    """Compare the number of devices with the product of the mesh's sizes; ep and sp may lie inside other axes."""
    for row in table.rows:
        stated = table.value(row, "devices") or product(table.value(row, "nodes"), table.value(row, "devices_per_node"))
        degrees = {role: value for role in DEGREES if (value := table.value(row, role))}
        if not stated or not {"dp", "tp", "pp"} <= set(degrees):
            continue
        allowed = []
        for inside in ((), ("ep",), ("sp",), ("ep", "sp")):
            factors = product(*(value for role, value in degrees.items() if role not in inside))
            allowed += [factors] if factors else []
        if not any(stated.interval.meets(value.interval) for value in allowed):
            sizes = " x ".join(f"{role}{value.interval}" for role, value in degrees.items())
            yield Hit(
                message=f"{row.name}: {sizes} are not {stated.interval} devices",
                rows=(row,),
                columns=merged(stated, *degrees.values()),
            )


@Rule(
    name="more-devices-than-there-are",
    severity="contradiction",
    label="R",
    reach="rows",
    checks="n <= devices of the largest machine",
    source="the report's own hardware section",
    roles=("devices", "available_devices"),
).of_table
def more_devices_than_there_are(table: AuditTable) -> Iterator[Hit]:
    """Flag rows on more devices than the largest machine had."""
    for row in table.rows:
        count, there = devices(table, row), table.value(row, "available_devices")
        if count and there and count.interval.low > there.interval.high:
            yield Hit(
                message=f"{row.name}: {count.interval} devices; the largest machine had {there.interval}",
                rows=(row,),
                columns=count.columns,
            )


@Rule(
    name="batch-product",
    severity="contradiction",
    label="X",
    reach="rows",
    checks="global batch = local batch x dp = micro-batch x dp x accumulation steps",
    source="definition of the global batch",
    roles=("global_batch_size", "local_batch_size|micro_batch_size"),
).of_table
def batch_product(table: AuditTable) -> Iterator[Hit]:
    """Compare the global batch with its factors; where dp is not stated, it must be a multiple of the local batch."""
    for row in table.rows:
        stated, shards = table.value(row, "global_batch_size"), table.value(row, "dp")
        steps, micro = table.value(row, "num_micro_batches"), table.value(row, "micro_batch_size")
        local = table.value(row, "local_batch_size") or product(micro, steps)
        if not stated or not local or local.interval.low <= 0:
            continue
        ratio = stated.interval.middle / local.interval.middle
        allowed = {shards.interval.middle} if shards else set()
        if shards and steps:
            allowed.add(shards.interval.middle * steps.interval.middle)  # "local" may mean one micro-batch
        wrong = ratio not in allowed if shards else ratio.denominator != 1
        if wrong:
            rule = f"x dp={shards.interval}" if shards else "x a whole number"
            yield Hit(
                message=f"{row.name}: the global batch is {stated.interval}; it should be {local.interval} {rule}",
                rows=(row,),
                columns=merged(stated, local, shards),
            )
