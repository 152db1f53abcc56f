"""Quantities that a row states directly or lets one compute: devices, batches, throughput, model FLOPs."""

from __future__ import annotations

from fractions import Fraction

from perfsuite.audit.table import AuditColumn, AuditTable, Row, Value
from perfsuite.published.numbers import Interval
from perfsuite.published.roles import DEGREES

WORK_ROLES = frozenset(
    {"model", "sequence_length", "hidden_size", "num_layers", "num_heads", "parameters", "active_parameters"}
)
"""Settings that change what one sample costs: throughputs of rows that differ in them are not comparable."""


def product(*factors: Value | None) -> Value | None:
    """The product, read from the columns of all factors; None when one is missing."""
    result = Value(interval=Interval.exactly(Fraction(1)))
    for factor in factors:
        if factor is None:
            return None
        result = Value(interval=result.interval * factor.interval, columns=merged(result, factor))
    return result


def quotient(dividend: Value | None, divisor: Value | None) -> Value | None:
    """The quotient, read from both; None when one is missing or the divisor may be 0."""
    ratio = dividend.interval.over(divisor.interval) if dividend and divisor else None
    if dividend is None or divisor is None or ratio is None:
        return None
    return Value(interval=ratio, columns=merged(dividend, divisor))


def merged(*values: Value | None) -> tuple[AuditColumn, ...]:
    """The columns behind several values, each once."""
    columns: dict[AuditColumn, None] = {}
    for value in values:
        columns.update(dict.fromkeys(value.columns if value else ()))
    return tuple(columns)


def devices(table: AuditTable, row: Row) -> Value | None:
    """n: as stated, or hosts times devices per host, or the product of the mesh's sizes."""
    stated = table.value(row, "devices") or product(table.value(row, "nodes"), table.value(row, "devices_per_node"))
    if stated:
        return stated
    degrees = [value for role in DEGREES if (value := table.value(row, role))]
    return product(*degrees) if degrees else None


def data_parallel(table: AuditTable, row: Row) -> Value | None:
    """The data-parallel degree: as stated, or all devices where no other degree is stated."""
    stated = table.value(row, "dp")
    if stated or any(table.value(row, role) for role in (*DEGREES, "stages")):
        return stated
    return devices(table, row)


def global_batch(table: AuditTable, row: Row) -> Value | None:
    """Samples per step over all devices."""
    stated = table.value(row, "global_batch_size")
    if stated:
        return stated
    shards = data_parallel(table, row)
    local = product(table.value(row, "local_batch_size"), shards)
    if local:
        return local
    return product(table.value(row, "micro_batch_size"), shards, table.value(row, "num_micro_batches"))


def step_time(table: AuditTable, row: Row) -> Value | None:
    """Seconds of a step: as stated, or from the rate of steps, or from batch and throughput."""
    one = Value(interval=Interval.exactly(Fraction(1)))
    return (
        table.value(row, "latency")
        or quotient(one, table.value(row, "iterations_per_s"))
        or quotient(global_batch(table, row), table.value(row, "throughput"))
    )


def throughput(table: AuditTable, row: Row) -> Value | None:
    """Samples per second of all devices: as stated, or from the steps and their batch."""
    return (
        table.value(row, "throughput")
        or product(table.value(row, "iterations_per_s"), global_batch(table, row))
        or quotient(global_batch(table, row), table.value(row, "latency"))
        or product(table.value(row, "throughput_per_device"), devices(table, row))
    )


def flops_per_sample(table: AuditTable, row: Row) -> Value | None:
    """Model FLOPs of a sample, forward and backward: as stated, or 6 N S + 12 L h S^2 (PaLM, appendix B).

    N counts the parameters that a token passes, so a model of experts needs ``active_parameters``; without layers and
    width the attention term is left out and the figure is a lower bound.  GPT-2 1.5B with 2048 tokens:
    6 x 1.5576e9 x 2048 + 12 x 48 x 1600 x 2048^2 = 2.30e13.
    """
    stated = table.value(row, "flops_per_sample")
    parameters = table.value(row, "active_parameters") or table.value(row, "parameters")
    sequence = table.value(row, "sequence_length")
    sparse = table.value(row, "experts") and not table.value(row, "active_parameters")
    if stated or parameters is None or sequence is None or sparse:
        return stated
    flops = Interval.exactly(Fraction(6)) * parameters.interval * sequence.interval
    layers, width = table.value(row, "num_layers"), table.value(row, "hidden_size")
    if layers and width:
        attention = Interval.exactly(Fraction(12)) * layers.interval * width.interval
        flops = flops + attention * sequence.interval * sequence.interval
    return Value(interval=flops, columns=merged(parameters, sequence))


def knows_attention(table: AuditTable, row: Row) -> bool:
    """Whether FLOPs computed from this row are more than a lower bound, which long sequences are many times above."""
    stated = table.value(row, "flops_per_sample")
    return bool(stated or all(table.value(row, role) for role in ("num_layers", "hidden_size", "sequence_length")))


def work(table: AuditTable, row: Row) -> dict[str, str]:
    """The settings that decide what a sample costs; rows with equal ones have comparable throughputs."""
    settings = {name: value for name, value in table.configuration(row).items() if name in WORK_ROLES}
    if "active_parameters" in settings:  # what a token passes counts, not what is stored
        settings.pop("parameters", None)
        settings.pop("model", None)
    return settings


def smallest_runs(table: AuditTable) -> list[tuple[Row, Value]]:
    """The rows with the fewest devices, and that number."""
    counted = [(row, count) for row in table.rows if (count := devices(table, row))]
    fewest = min((count.interval.low for _, count in counted), default=Fraction(0))
    return [(row, count) for row, count in counted if count.interval.low == fewest]
