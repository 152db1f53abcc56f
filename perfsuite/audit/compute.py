"""Rules about arithmetic and messages: FLOPs against peaks, utilisation, sizes against counts, bandwidths."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from perfsuite.audit.table import (
    ONE,
    WORK_ROLES,
    AuditTable,
    Hit,
    Row,
    Rule,
    Value,
    constant,
    hit_of,
    merged,
    product,
    quotient,
)
from perfsuite.base.collectives import TRAFFIC, busbw_factor
from perfsuite.published.numbers import Interval
from perfsuite.published.records import PARTS

TERA = Fraction(10**12)
CONVENTIONS = 2
"""Conventions of model FLOPs differ by up to 70 / 46 for one run (perfsuite docs published); a factor 2 is an error."""


def _flops_above_peak(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        peak = table.value(row, "peak_tflops")
        total = product(table.throughput(row), table.flops_per_sample(row))
        achieved = [table.read(row, column) for column in table.of_role("tflops")]
        for value in [quotient(total, table.devices(row)), *achieved]:
            if peak and value and value.low > peak.high:
                ratio = value.over(peak)
                text = (
                    f"{float(value.middle / TERA):.4g} TFLOPS per device,"
                    f" {ratio} times the peak of {float(peak.middle / TERA):.4g}"
                )
                yield hit_of(row, value.columns, text)


def _share_out_of_range(table: AuditTable) -> Iterator[Hit]:
    for column in table.of_role("mfu", "bubble", "communication_share", "share"):
        for row in table.rows:
            value, least = table.read(row, column), table.least(row, column)  # least: about 120 %, more than 110 %
            if (least and least > 1) or (value and (value.low > 1 or value.high < 0)):
                text = f"{column.printed_name} is {row.cells[column.name].text.strip()}; a share is 0 to 100 %"
                yield hit_of(row, (column,), text)


def _implied_peak(table: AuditTable, row: Row, flops: Value | None) -> Value | None:
    used = product(table.devices(row), table.value(row, "mfu"))
    return quotient(product(table.throughput(row), flops), used)


def _mfu_throughput(table: AuditTable) -> Iterator[Hit]:
    """The base is the smallest run."""
    usable = [row for row in table.rows if table.value(row, "mfu") and table.throughput(row)]
    counts = [(count.low if (count := table.devices(row)) else Fraction(1)) for row in usable]
    if not usable:
        return
    base = usable[counts.index(min(counts))]
    for row in table.rows:
        same_work = table.work(row) == table.work(base)
        if row is base or table.text(row, "device") != table.text(base, "device"):
            continue
        if not same_work and not all(table.knows_attention(run) for run in (row, base)):
            continue
        peaks = [_implied_peak(table, run, ONE if same_work else table.flops_per_sample(run)) for run in (row, base)]
        yield from same_work_differs(row, base, "throughput per device over MFU", quotient(*peaks))


def same_work_differs(row: Row, base: Row, what: str, ratio: Value | None) -> Iterator[Hit]:
    """Return a hit if a quotient that must be equal for the same work on the same devices differs between two rows."""
    if ratio and (gap := ratio.gap(ONE)):
        rounding = f"({ratio.ends} by rounding); the same work gives 1"
        text = f"{what} is {ratio} times that of {base.name} {rounding}"
        yield hit_of(row, ratio.columns, text, gap, base=base)


def _mfu_peak(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        rate, mfu = table.throughput(row), table.value(row, "mfu")
        implied = _implied_peak(table, row, table.flops_per_sample(row))
        ratio = quotient(implied, table.value(row, "peak_tflops"))
        if not rate or not mfu or not ratio or not ratio.middle:
            continue  # a rate of 0 is none
        below = ratio.high < Fraction(1, CONVENTIONS) and table.knows_attention(row)
        if ratio.low > CONVENTIONS or below:
            fitting = rate.middle / ratio.middle
            text = (
                f"MFU {float(mfu.middle):.1%} means {float(fitting):.3g} samples/s,"
                f" {rate} are printed: {ratio} times as many"
            )
            yield hit_of(row, ratio.columns, text)


def _least_parameters(table: AuditTable, row: Row) -> Value | None:
    """Return a lower bound of the parameters per token; at most 4 bytes per parameter if only bytes are stated."""
    active = table.value(row, "active_parameters")
    if active:
        return active
    experts, chosen = table.value(row, "experts"), table.value(row, "top_k")
    total = table.value(row, "parameters")
    if experts:
        return product(total, quotient(chosen, experts)) if chosen else None
    return total or quotient(table.value(row, "memory_weights"), constant(4))


def _implied_parameters(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        least = _least_parameters(table, row)
        length, latency = table.value(row, "sequence_length"), table.value(row, "latency")
        tokens = product(quotient(table.global_batch(row), table.devices(row)), length)
        flops_per_token = [
            quotient(product(table.read(row, column), latency), tokens) for column in table.of_role("tflops")
        ]
        if not table.flops_per_sample(row):
            used = product(table.value(row, "mfu"), table.value(row, "peak_tflops"), table.devices(row))
            flops_per_token.append(quotient(used, product(table.throughput(row), length)))
        for flops in flops_per_token:
            if flops and least and flops.high / 2 < least.low:
                blamed = tuple(column for column in flops.columns if column.role in ("tflops", "mfu"))
                what = blamed[0].printed_name if blamed else "throughput and MFU"
                middle = flops.middle
                text = (
                    f"{what}: {float(middle):.3g} FLOP per token imply"
                    f" {float(middle / 8):.2g} to {float(middle / 6):.2g} parameters (8 or 6 per parameter);"
                    f" at least {float(least.low):.3g} are there"
                )
                yield hit_of(row, blamed, text)


def _peak_not_dense(table: AuditTable) -> Iterator[Hit]:
    roles = ("stated_peak_tflops", "peak_tflops")
    for row in table.rows:
        columns = [table.read(row, column) for column in table.of_role(*roles)]
        for stated in columns or [table.value(row, role) for role in roles]:
            dense = table.value(row, "dense_peak_tflops")
            ratio = quotient(stated, dense)
            if stated and dense and ratio and ratio.low > Fraction(102, 100):
                name = stated.columns[0].printed_name if stated.columns else "the stated peak"
                twice = " (twice: sparse, or accumulated in 16 bit)" if abs(ratio.middle - 2) < Fraction(2, 100) else ""
                figures = [f"{float(value.middle / TERA):.6g}" for value in (stated, dense)]
                text = f"{name} {figures[0]} is {ratio} times the dense peak {figures[1]}{twice}"
                yield hit_of(row, stated.columns, text)


def _size_is_count(table: AuditTable) -> Iterator[Hit]:
    for row in table.rows:
        count = table.devices(row)
        narrow = table.text(row, "dtype").lower() in {"fp8", "int8", "uint8"}
        for role in ["model_size"] + (["memory_weights"] if count and count.high == 1 else []):
            size = table.value(row, role)
            parameter_bytes = quotient(size, table.value(row, "parameters"))
            if size and parameter_bytes and not narrow and parameter_bytes.meets(ONE):
                text = (
                    f"{role} is {parameter_bytes.ends} bytes per parameter;"
                    " it is the number of parameters, called bytes"
                )
                yield hit_of(row, size.columns, text)


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
    Rule("flops-above-peak", "contradiction", "R", "table", _flops_above_peak,
         roles=("tflops|throughput", "peak_tflops", "flops_per_sample|parameters", "devices"),
         checks="throughput x FLOPs per sample <= n x dense peak",
         source="the peak is the maker's; FLOPs per sample = 6 N S + 12 L h S^2 (PaLM, appendix B)"),
    Rule("share-out-of-range", "contradiction", "X", "cells", _share_out_of_range,
         roles=("mfu|bubble|communication_share|share",),
         checks="0 <= MFU, bubble, communication share <= 100 %",
         source="a share of a whole"),
    Rule("mfu-throughput", "contradiction", "X", "table", _mfu_throughput,
         roles=("mfu", "throughput", "devices"),
         checks="MFU ratio = ratio of throughput x FLOPs per sample / n, between rows on the same devices",
         source="MFU = throughput x FLOPs per sample / (n x peak) (PaLM, appendix B)"),
    Rule("mfu-peak", "contradiction", "R", "table", _mfu_peak,
         roles=("mfu", "throughput", "peak_tflops", "flops_per_sample|parameters", "devices"),
         checks="MFU = throughput x FLOPs per sample / (n x peak), within a factor of 2 for the convention",
         source="MFU = throughput x FLOPs per sample / (n x peak) (PaLM, appendix B)"),
    Rule("implied-parameters", "contradiction", "X", "cells", _implied_parameters,
         roles=("tflops|mfu", "latency|throughput", "sequence_length", "parameters|active_parameters|memory_weights"),
         checks="FLOPs per token >= 2 x parameters that a token passes",
         source="every weight of a layer takes part in one multiplication and one addition per token and pass"),
    Rule("peak-not-dense", "mislabel", "M?", "cells", _peak_not_dense,
         roles=("stated_peak_tflops|peak_tflops", "dense_peak_tflops"),
         checks="stated peak <= dense peak of the maker",
         source="data sheets; sparse figures and 16-bit accumulation are twice the dense one"),
    Rule("size-is-count", "mislabel", "M?", "table", _size_is_count,
         roles=("model_size|memory_weights", "parameters"),
         checks="bytes of the weights are not their number, outside 8-bit formats",
         source="16-bit weights have 2 bytes, 32-bit weights 4, weights of 4 and 5 bits less than 1"),
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
