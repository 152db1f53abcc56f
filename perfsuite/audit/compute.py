"""Rules about arithmetic: achieved FLOPs against peaks, utilisation against throughput, sizes against counts."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from perfsuite.audit.quantities import (
    devices,
    flops_per_sample,
    global_batch,
    knows_attention,
    merged,
    product,
    quotient,
    throughput,
    work,
)
from perfsuite.audit.rule import Hit, Rule
from perfsuite.audit.table import AuditTable, Row, Value
from perfsuite.base.collectives import TRAFFIC, busbw_factor
from perfsuite.published.numbers import Interval

TERA = Fraction(10**12)
CONVENTIONS = 2
"""Conventions of counting model FLOPs differ by up to 70 / 46 for one run (docs/published.md): twice is none."""


def _constant(value: int) -> Value:
    return Value(interval=Interval.exactly(Fraction(value)))


def _per_device_flops(table: AuditTable, row: Row) -> Value | None:
    total = product(throughput(table, row), flops_per_sample(table, row))
    return quotient(total, devices(table, row))


@Rule(
    name="flops-above-peak",
    severity="contradiction",
    label="R",
    reach="table",
    checks="throughput x FLOPs per sample <= n x dense peak",
    source="the peak is the maker's; FLOPs per sample = 6 N S + 12 L h S^2 (PaLM, appendix B)",
    roles=("tflops|throughput", "peak_tflops", "flops_per_sample|parameters", "devices"),
).of_table
def flops_above_peak(table: AuditTable) -> Iterator[Hit]:
    """Compare the achieved operations per second of a device with its dense peak."""
    for row in table.rows:
        peak = table.value(row, "peak_tflops")
        achieved = [table.read(row, column) for column in table.of_role("tflops")]
        for value in [_per_device_flops(table, row), *achieved]:
            if peak and value and value.interval.low > peak.interval.high:
                ratio = value.interval.over(peak.interval)
                yield Hit(
                    message=f"{row.name}: {float(value.interval.middle / TERA):.4g} TFLOPS per device,"
                    f" {ratio} times the peak of {float(peak.interval.middle / TERA):.4g}",
                    rows=(row,),
                    columns=value.columns,
                )


@Rule(
    name="share-out-of-range",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="0 <= MFU, bubble, communication share <= 100 %",
    source="a share of a whole",
    roles=("mfu|bubble|communication_share|share",),
).of_table
def share_out_of_range(table: AuditTable) -> Iterator[Hit]:
    """Flag shares outside what a share can be."""
    for column in table.of_role("mfu", "bubble", "communication_share", "share"):
        for row in table.rows:
            value = table.read(row, column)
            if value and (value.interval.low > 1 or value.interval.high < 0):
                stated = float(value.interval.middle)
                yield Hit(
                    message=f"{row.name}: {column.printed_name} is {stated:.1%}; a share is 0 to 100 %",
                    rows=(row,),
                    columns=(column,),
                )


def _implied_peak(table: AuditTable, row: Row, flops: Value | None) -> Value | None:
    """throughput x FLOPs per sample / (n x MFU): the peak that the row was computed with."""
    used = product(devices(table, row), table.value(row, "mfu"))
    return quotient(product(throughput(table, row), flops), used)


def _count(table: AuditTable, row: Row) -> Fraction:
    count = devices(table, row)
    return count.interval.low if count else Fraction(1)


@Rule(
    name="mfu-throughput",
    severity="contradiction",
    label="X",
    reach="table",
    checks="MFU ratio = ratio of throughput x FLOPs per sample / n, between rows on the same devices",
    source="MFU = throughput x FLOPs per sample / (n x peak) (PaLM, appendix B)",
    roles=("mfu", "throughput", "devices"),
).of_table
def mfu_throughput(table: AuditTable) -> Iterator[Hit]:
    """Compare the ratios of MFU with those of throughput per device, against the smallest run."""
    known = [row for row in table.rows if table.value(row, "mfu") and throughput(table, row)]
    for base in sorted(known, key=lambda row: _count(table, row))[:1]:
        for row in table.rows:
            mine, theirs = flops_per_sample(table, row), flops_per_sample(table, base)
            same_work = work(table, row) == work(table, base)
            if row is base or table.text(row, "device") != table.text(base, "device"):
                continue
            if not same_work and not all(knows_attention(table, run) for run in (row, base)):
                continue
            flops = (mine, theirs) if not same_work else (_constant(1), _constant(1))
            ratio = quotient(_implied_peak(table, row, flops[0]), _implied_peak(table, base, flops[1]))
            gap = ratio.interval.gap(Interval.exactly(Fraction(1))) if ratio else Fraction(0)
            if ratio and gap:
                yield Hit(
                    message=f"{row.name}: throughput per device over MFU is {ratio.interval} times that of {base.name}"
                    f" ({ratio.interval.ends} by rounding); the same work on the same devices gives 1",
                    rows=(row, base),
                    columns=ratio.columns,
                    gap=gap,
                )


@Rule(
    name="mfu-peak",
    severity="contradiction",
    label="R",
    reach="table",
    checks="MFU = throughput x FLOPs per sample / (n x peak), within a factor of 2 for the convention",
    source="MFU = throughput x FLOPs per sample / (n x peak) (PaLM, appendix B)",
    roles=("mfu", "throughput", "peak_tflops", "flops_per_sample|parameters", "devices"),
).of_table
def mfu_peak(table: AuditTable) -> Iterator[Hit]:
    """Compare each MFU with throughput x FLOPs / (n x peak)."""
    for row in table.rows:
        peak = table.value(row, "peak_tflops")
        implied = _implied_peak(table, row, flops_per_sample(table, row))
        ratio = quotient(implied, peak)
        below = ratio and ratio.interval.high < Fraction(1, CONVENTIONS) and knows_attention(table, row)
        if ratio and (ratio.interval.low > CONVENTIONS or below):
            mfu = table.value(row, "mfu")
            stated, rate = float(mfu.interval.middle if mfu else 0), throughput(table, row)
            fitting = rate.interval.middle / ratio.interval.middle if rate else Fraction(0)
            yield Hit(
                message=f"{row.name}: MFU {stated:.1%} means {float(fitting):.3g} samples/s,"
                f" {rate.interval if rate else ''} are printed: {ratio.interval} times as many",
                rows=(row,),
                columns=ratio.columns,
            )


def _least_parameters(table: AuditTable, row: Row) -> Value | None:
    """A lower bound of the parameters that a token passes; 4 bytes per parameter at most where only bytes are known."""
    active = table.value(row, "active_parameters")
    if active:
        return active
    experts, chosen = table.value(row, "experts"), table.value(row, "top_k")
    total = table.value(row, "parameters")
    if experts:
        return product(total, quotient(chosen, experts)) if chosen else None
    if total:
        return total
    weights = table.value(row, "memory_weights")
    return quotient(weights, _constant(4))


@Rule(
    name="implied-parameters",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="FLOPs per token >= 2 x parameters that a token passes",
    source="every weight of a layer takes part in one multiplication and one addition per token and pass",
    roles=("tflops|mfu", "latency|throughput", "sequence_length", "parameters|active_parameters|memory_weights"),
).of_table
def implied_parameters(table: AuditTable) -> Iterator[Hit]:
    """Compare the parameters that achieved FLOPs allow, at 2 operations per parameter and token, with the model's."""
    for row in table.rows:
        least = _least_parameters(table, row)
        length = table.value(row, "sequence_length")
        batch = quotient(global_batch(table, row), devices(table, row))
        tokens = product(batch, length)
        flops_per_token = [
            quotient(product(table.read(row, column), table.value(row, "latency")), tokens)
            for column in table.of_role("tflops")
        ]
        if not flops_per_sample(table, row):
            used = product(table.value(row, "mfu"), table.value(row, "peak_tflops"), devices(table, row))
            flops_per_token.append(quotient(used, product(throughput(table, row), length)))
        for flops in flops_per_token:
            implied = quotient(flops, _constant(2))
            if implied and least and implied.interval.high < least.interval.low and flops:
                blamed = tuple(column for column in flops.columns if column.role in ("tflops", "mfu"))
                what = blamed[0].printed_name if blamed else "throughput and MFU"
                passes = float(flops.interval.middle / 8), float(flops.interval.middle / 6)
                yield Hit(
                    message=f"{row.name}: {what}: {float(flops.interval.middle):.3g} FLOP per token imply"
                    f" {passes[0]:.2g} to {passes[1]:.2g} parameters (8 or 6 per parameter);"
                    f" at least {float(least.interval.low):.3g} are there",
                    rows=(row,),
                    columns=blamed,
                )


@Rule(
    name="peak-not-dense",
    severity="mislabel",
    label="M?",
    reach="cells",
    checks="stated peak <= dense peak of the maker",
    source="data sheets; sparse figures and 16-bit accumulation are twice the dense one",
    roles=("stated_peak_tflops", "dense_peak_tflops"),
).of_table
def peak_not_dense(table: AuditTable) -> Iterator[Hit]:
    """Compare a peak as the table states it with the maker's dense figure."""
    for column in table.of_role("stated_peak_tflops"):
        for row in table.rows:
            stated, dense = table.read(row, column), table.value(row, "dense_peak_tflops")
            ratio = quotient(stated, dense)
            if ratio and ratio.interval.low > Fraction(102, 100):
                twice = " (twice: sparse, or accumulated in 16 bit)" if abs(ratio.interval.middle - 2) < 0.02 else ""
                yield Hit(
                    message=f"{row.name}: {column.printed_name} {table.raw(row, column)} is {ratio.interval} times"
                    f" the dense peak{twice}",
                    rows=(row,),
                    columns=(column,),
                )


@Rule(
    name="size-is-count",
    severity="mislabel",
    label="M?",
    reach="table",
    checks="bytes of the weights / parameters >= 1.5 outside 8-bit formats",
    source="16-bit weights have 2 bytes, 32-bit weights 4",
    roles=("model_size|memory_weights", "parameters"),
).of_table
def size_is_count(table: AuditTable) -> Iterator[Hit]:
    """Find sizes of weights that are about one byte per parameter: a count called bytes."""
    for row in table.rows:
        parameters = table.value(row, "parameters")
        count = devices(table, row)
        roles = ["model_size"] + (["memory_weights"] if count and count.interval.high == 1 else [])
        for role in roles:
            size = table.value(row, role)
            parameter_bytes = quotient(size, parameters)
            narrow = table.text(row, "dtype").lower() in {"fp8", "int8", "uint8"}
            if parameter_bytes and not narrow and parameter_bytes.interval.high < Fraction(3, 2):
                yield Hit(
                    message=f"{row.name}: {role} is {parameter_bytes.interval.ends} bytes per parameter;"
                    " it is the number of parameters, called bytes",
                    rows=(row,),
                    columns=size.columns if size else (),
                )


@Rule(
    name="bandwidth-time",
    severity="contradiction",
    label="X",
    reach="table",
    checks="bandwidth x time / busbw factor of the collective = the same message in all rows",
    source="nccl-tests, doc/PERFORMANCE.md",
    roles=("bandwidth", "communication_time", "collective", "devices"),
).of_table
def bandwidth_time(table: AuditTable) -> Iterator[Hit]:
    """Compare the message that time, bandwidth and collective of each row imply; it is one message in all rows."""
    sized: list[tuple[Row, Value, Interval]] = []
    for row in table.rows:
        moved = product(table.value(row, "bandwidth"), table.value(row, "communication_time"))
        count, collective = devices(table, row), table.text(row, "collective")
        if not moved or not count or collective not in TRAFFIC or moved.interval.high <= 0:
            continue
        if count.interval.low < 2:
            continue
        factor = Fraction(busbw_factor(collective, int(count.interval.low))).limit_denominator(10**6)
        # the bandwidth may be S / t or S / t x factor: either is some author's bandwidth
        span = Interval(low=1 / max(Fraction(1), factor), high=1 / min(Fraction(1), factor))
        sized.append((row, moved, moved.interval * span))
    for row, moved, message in sized[1:]:
        first, other, reference = sized[0]
        if not message.meets(reference):
            yield Hit(
                message=f"{row.name}: bandwidth x time is {float(moved.interval.middle / 10**6):.3g} MB, that of"
                f" {first.name} {float(other.interval.middle / 10**6):.3g} MB; the same result was exchanged",
                rows=(row, first),
                columns=merged(moved, other),
            )
