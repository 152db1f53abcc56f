"""What language models' rows say of tokens: rates of one device, and what a token costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from perfsuite.audit.quantities import devices, flops_per_sample, product, quotient
from perfsuite.audit.table import AuditColumn, AuditTable, Row, Value
from perfsuite.published.numbers import Interval

TRAINING = (
    "global_batch_size", "micro_batch_size", "num_micro_batches", "loss", "backward_time", "optimizer_time",
    "memory_optimizer", "memory_gradients", "bubble",
)  # fmt: skip
"""Roles that only a training run has; without any of them a token may have passed forward alone."""
_SPARSE = re.compile(r"moe|mixtral|deepseek|\d+x\d+(\.\d+)?b|a\d+(\.\d+)?b", re.IGNORECASE)
"""Names of models that have experts: a token passes a part of their parameters."""
RATES = ("throughput", "throughput_per_device", "tokens_per_s", "tokens_per_s_per_device")


def _times(value: Value | None, low: Fraction | int, high: Fraction | int) -> Value | None:
    factor = Interval(low=Fraction(low), high=Fraction(high))
    return Value(interval=value.interval * factor, columns=value.columns) if value else None


def sure_devices(table: AuditTable, row: Row) -> Value | None:
    """n, where it is sure: sequence and expert parallel ranks may be those of another degree too."""
    stated = table.value(row, "devices") or table.value(row, "nodes")
    return devices(table, row) if stated or not (table.value(row, "sp") or table.value(row, "ep")) else None


def rates_per_device(table: AuditTable, row: Row) -> Iterator[tuple[AuditColumn, Value]]:
    """Every printed rate as tokens per second of one device; rates of samples need a length, those of all devices n."""
    length, count = table.value(row, "sequence_length"), sure_devices(table, row)
    for role in RATES:
        for column in table.of_role(role):
            rate = _untruncated(table.read(row, column))
            if not role.startswith("tokens"):
                rate = product(rate, length)
            if not role.endswith("per_device"):
                rate = quotient(rate, count)
            if rate:
                yield column, rate


def _untruncated(rate: Value | None) -> Value | None:
    """A rate that may have been cut off where it was printed: as far above as half a digit more."""
    if rate is None:
        return None
    spare = Interval(low=Fraction(0), high=(rate.interval.high - rate.interval.low) / 2)
    return Value(interval=rate.interval + spare, columns=rate.columns)


def tokens_per_device(table: AuditTable, row: Row) -> Value | None:
    """Tokens per second of one device, from the first column that allows it."""
    return next((rate for _, rate in rates_per_device(table, row)), None)


def flops_per_token(table: AuditTable, row: Row) -> Value | None:
    """From forward alone, where nothing says training, to all of it; without a length a lower bound."""
    exact = quotient(flops_per_sample(table, row), table.value(row, "sequence_length"))
    active, stated = table.value(row, "active_parameters"), table.value(row, "flops_per_sample")
    is_sparse = table.says("experts") or _SPARSE.search(table.text(row, "model"))
    if is_sparse and not active and not stated:
        return None
    flops = exact or _times(active or table.value(row, "parameters"), 6, 6)
    return _times(flops, 1 if any(table.says(role) for role in TRAINING) else Fraction(1, 3), 1)
