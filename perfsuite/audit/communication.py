"""Rules about messages: size, time and bandwidths, and algbw against busbw."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from perfsuite.audit.table import WORK_ROLES, AuditTable, Hit, Row, Rule, Value, hit_of, merged, product, quotient
from perfsuite.base.collectives import TRAFFIC, busbw_factor
from perfsuite.published.numbers import Interval
from perfsuite.published.records import PARTS

_BY_LETTERS = {name.replace("_", ""): name for name in TRAFFIC} | {"alltoallsingle": "all_to_all"}
_OF_PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives for which some tools print the size of one rank's part."""
_OF_A_STEP = (*WORK_ROLES, "whole", "latency", "model_size", *(part for part in PARTS if part != "communication_time"))
"""Roles of a table of model steps, in which all rows send the same message."""


def _collective(table: AuditTable, row: Row) -> str:
    """Return perfsuite's name of the collective; empty for a collective without a factor."""
    letters = "".join(letter for letter in table.text(row, "collective").lower() if letter.isalpha())
    return _BY_LETTERS.get(letters.removesuffix("perf"), "")


def _factors(table: AuditTable, row: Row) -> list[Interval]:
    """busbw over algbw: of the stated collective, else of every kind of collective; empty where it is not known."""
    count, name = table.devices(row), _collective(table, row)
    if count is None or count.low < 2 or (table.text(row, "collective") and not name):
        return []
    names = (name,) if name else ("all_reduce", "all_gather", "broadcast")
    ranks = int(count.low)
    return [Interval.exactly(Fraction(busbw_factor(name, ranks)).limit_denominator(10**6)) for name in names]


def _bandwidth_size(table: AuditTable) -> Iterator[Hit]:
    """Each bandwidth fits the size over some time of its row, or that times the factor of the collective.

    A latency is the time of a message only in a table that says nothing of a model.
    """
    is_step = any(table.says(role) for role in (*WORK_ROLES, "global_batch_size", "local_batch_size"))
    columns = table.of_role("communication_time") or (() if is_step else table.of_role("latency"))
    for row in table.rows:
        size, factors = table.value(row, "message_size"), _factors(table, row)
        times = [table.read(row, column) for column in columns]
        rates = [rate for time in times if (rate := quotient(size, time))]
        if not rates:
            continue
        count, own = table.devices(row), list(rates)
        if count and _collective(table, row) in _OF_PARTS:
            own += [rate.times(count) for rate in rates]
        buses = [rate.times(factor) for rate in own for factor in factors]
        for column in table.of_role("bandwidth", "algbw", "busbw"):
            printed = table.read(row, column)
            allowed = {"algbw": own, "busbw": buses}.get(column.role, [*own, *buses] if buses else [])
            if printed and allowed and (gap := min(map(printed.gap, allowed))):
                giga = [float(value.middle / 10**9) for value in (rates[0], *buses[:1])]
                bus = f", busbw {giga[1]:.4g}" if buses else ""
                text = (
                    f"{column.printed_name} is printed {table.raw(row, column)}, size / time is {giga[0]:.4g} GB/s{bus}"
                )
                yield hit_of(row, merged(printed, rates[0]), text, gap)


def _busbw_algbw(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        ratio, factors = quotient(table.value(row, "busbw"), table.value(row, "algbw")), _factors(table, row)
        if ratio and factors and (gap := min(map(ratio.gap, factors))):
            name = _collective(table, row) or "any collective"
            values = " or ".join(f"{float(factor.middle):.4g}" for factor in factors)
            text = f"busbw / algbw is {ratio}, that of {name} on {table.devices(row)} devices {values}"
            yield hit_of(row, ratio.columns, text, gap)


def _bandwidth_time(table: AuditTable) -> Iterator[Hit]:
    """In a table of steps, time, bandwidth and collective of a row give a message size, equal in all rows.

    Rows of one configuration with different messages are a sweep of sizes and are skipped.
    """
    if table.says("message_size") or not any(table.says(role) for role in _OF_A_STEP):
        return
    sized: list[tuple[Row, Value, Interval]] = []
    for row in table.rows:
        moved = product(table.value(row, "bandwidth"), table.value(row, "communication_time"))
        factors = _factors(table, row) if _collective(table, row) else []
        if not moved or not factors or moved.high <= 0 or factors[0].low <= 0:
            continue
        factor = factors[0].low
        # the bandwidth may be S / t or S / t x factor: either is some author's bandwidth
        span = Interval(low=1 / max(Fraction(1), factor), high=1 / min(Fraction(1), factor))
        sized.append((row, moved, moved * span))
    seen: dict[tuple[tuple[str, str], ...], Interval] = {}
    for row, _, message in sized:
        key = tuple(sorted(table.configuration(row).items()))
        if not seen.setdefault(key, message).meets(message):
            return
    for row, moved, message in sized[1:]:
        first, other, reference = sized[0]
        if not message.meets(reference):
            sizes = [f"{float(each.middle / 10**6):.3g} MB" for each in (moved, other)]
            text = f"bandwidth x time is {sizes[0]}, that of {first.name} {sizes[1]}; the same result was exchanged"
            yield hit_of(row, merged(moved, other), text, base=first)


RULES = (
    Rule("bandwidth-time", "contradiction", "X", "table", _bandwidth_time,
         roles=("bandwidth", "communication_time", "collective", "devices"),
         checks="bandwidth x time / busbw factor of the collective = the same message in all rows of a step's table",
         source="nccl-tests, doc/PERFORMANCE.md"),
    Rule("bandwidth-size", "contradiction", "X", "cells", _bandwidth_size,
         roles=("message_size", "communication_time|latency", "bandwidth|algbw|busbw"),
         checks="algbw = message size / time; busbw = algbw x factor of the collective, row by row",
         source="nccl-tests, doc/PERFORMANCE.md"),
    Rule("busbw-algbw", "contradiction", "X", "cells", _busbw_algbw,
         roles=("busbw", "algbw", "devices"),
         checks="busbw / algbw = factor of the collective on n ranks, or of some collective where none is stated",
         source="nccl-tests, doc/PERFORMANCE.md"),
)  # fmt: skip
"""The rules of this family; findings come in this order."""
