"""Rules about rates where no step time is printed, as of language models: tokens/s, samples/s, TFLOPS, MFU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

from perfsuite.audit.quantities import (
    devices,
    flops_per_sample,
    knows_attention,
    merged,
    product,
    quotient,
    throughput,
    work,
)
from perfsuite.audit.rule import Hit, Rule
from perfsuite.audit.table import AuditColumn, AuditTable, Row, Value
from perfsuite.published.numbers import Interval

# What language models' rows say of tokens: rates of one device, and what a token costs.

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
    """The number of devices; None where none is stated and sequence or expert parallelism may share ranks."""
    stated = table.value(row, "devices") or table.value(row, "nodes")
    return devices(table, row) if stated or not (table.value(row, "sp") or table.value(row, "ep")) else None


def rates_per_device(table: AuditTable, row: Row) -> Iterator[tuple[AuditColumn, Value]]:
    """Every printed rate, as tokens per second of one device.

    A rate in samples is left out where no sequence length is known, a rate of all devices where their number is not.
    """
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


TERA = Fraction(10**12)
MODEL_CONVENTIONS = 2
"""Model FLOPs of one run are counted differently by up to 70 / 46 (docs/published.md): twice is no convention."""
HARDWARE_CONVENTIONS = Fraction(8, 3)
"""Achieved FLOPs may count recomputation too, 8 in place of 6 per parameter."""
_COUNTING = ("device", "dtype", "strategy", "experts", "top_k")
"""Settings beside the work that figures of FLOPs may depend on."""


def _has_steps(table: AuditTable, row: Row) -> bool:
    return bool(table.value(row, "latency") or table.value(row, "iterations_per_s"))


def _achieved(table: AuditTable, row: Row) -> Value | None:
    return product(tokens_per_device(table, row), flops_per_token(table, row))


def _tera(value: Value) -> str:
    return f"{float(value.interval.low / TERA):.4g}"


@Rule(
    name="rates-disagree",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="tokens/s = samples/s x sequence length; the rate of all = n x that of one; where no step time is printed",
    source="definition of throughput",
    roles=("tokens_per_s|tokens_per_s_per_device", "throughput|throughput_per_device|tokens_per_s", "devices"),
).of_table
def rates_disagree(table: AuditTable) -> Iterator[Hit]:
    """Compare every two rates of a row."""
    for row in table.rows:
        if _has_steps(table, row):
            continue  # throughput-time judges each by its own
        for (first, one), (second, other) in combinations(rates_per_device(table, row), 2):
            gap = one.interval.gap(other.interval)
            ratio = quotient(one, other)
            if first.role != second.role and gap and ratio:
                yield Hit(
                    message=f"{row.name}: {first.printed_name} {table.raw(row, first)} and {second.printed_name}"
                    f" {table.raw(row, second)} are {ratio.interval} times what one is of the other"
                    f"{_as_devices(table, row, ratio)}",
                    rows=(row,),
                    columns=(first, second),
                    gap=gap,
                )


def _as_devices(table: AuditTable, row: Row, ratio: Value) -> str:
    count = sure_devices(table, row)
    if count is None or count.interval.low < 2:
        return ""
    inverse = Interval.exactly(1 / count.interval.low)
    fits = ratio.interval.meets(count.interval) or ratio.interval.meets(inverse)
    return f": one is of all {count.interval} devices and the other of each" if fits else ""


@Rule(
    name="tokens-above-peak",
    severity="contradiction",
    label="R",
    reach="table",
    checks="tokens/s of a device x FLOPs per token <= dense peak",
    source="FLOPs per token = 6 N + 12 L h S (PaLM, appendix B), 2 N where nothing says training",
    roles=("tokens_per_s|tokens_per_s_per_device", "peak_tflops", "flops_per_sample|parameters"),
).of_table
def tokens_above_peak(table: AuditTable) -> Iterator[Hit]:
    """Compare what the tokens of a device cost with its dense peak."""
    for row in table.rows:
        achieved, peak = _achieved(table, row), table.value(row, "peak_tflops")
        if throughput(table, row) and devices(table, row):
            continue  # flops-above-peak judges it
        if achieved and peak and achieved.interval.low > peak.interval.high:
            ratio = achieved.interval.low / peak.interval.high
            yield Hit(
                message=f"{row.name}: its tokens/s take {_tera(achieved)} TFLOPS per device at least,"
                f" {float(ratio):.4g} times the peak of {_tera(peak)}",
                rows=(row,),
                columns=achieved.columns,
            )


@Rule(
    name="mfu-tokens",
    severity="contradiction",
    label="R",
    reach="table",
    checks="MFU = tokens/s of a device x FLOPs per token / peak, within a factor of 2 for the convention",
    source="definition of MFU (PaLM, appendix B)",
    roles=("mfu", "tokens_per_s|tokens_per_s_per_device", "peak_tflops", "flops_per_sample|parameters"),
).of_table
def mfu_tokens(table: AuditTable) -> Iterator[Hit]:
    """Compare each MFU with what the tokens of a device cost."""
    for row in table.rows:
        if throughput(table, row) and devices(table, row):
            continue  # mfu-peak judges it
        used = product(table.value(row, "mfu"), table.value(row, "peak_tflops"))
        yield from _apart(table, row, "MFU and peak", used, Fraction(MODEL_CONVENTIONS))


@Rule(
    name="tflops-rate",
    severity="contradiction",
    label="R",
    reach="table",
    checks="TFLOPS = tokens/s of a device x FLOPs per token, within a factor of 8/3 for convention and recomputation",
    source="FLOPs per token = 6 N + 12 L h S (PaLM, appendix B)",
    roles=("tflops", "tokens_per_s|tokens_per_s_per_device|throughput", "flops_per_sample|parameters"),
).of_table
def tflops_rate(table: AuditTable) -> Iterator[Hit]:
    """Compare achieved FLOPs with what the tokens of a device cost."""
    for row in table.rows:
        if _has_steps(table, row):
            continue  # implied-parameters judges it
        for column in table.of_role("tflops"):
            yield from _apart(table, row, column.printed_name, table.read(row, column), HARDWARE_CONVENTIONS)


def _apart(table: AuditTable, row: Row, name: str, said: Value | None, factor: Fraction) -> Iterator[Hit]:
    """A hit where the FLOPs that tokens take and those that are said are further apart than ``factor``."""
    achieved = _achieved(table, row)
    ratio = quotient(achieved, said)
    if not ratio or not achieved or not said:
        return
    below = ratio.interval.high < 1 / factor and knows_attention(table, row)
    if ratio.interval.low > factor or below:
        yield Hit(
            message=f"{row.name}: its tokens/s take {_tera(achieved)} TFLOPS per device, {name} give {_tera(said)}",
            rows=(row,),
            columns=merged(ratio),
        )


def _same_runs(table: AuditTable, row: Row, base: Row) -> bool:
    """Whether two rows differ in nothing that FLOPs per token, or how they are counted, could depend on."""
    mine, theirs = table.configuration(row), table.configuration(base)
    names = {*_COUNTING, *(column.name for column in table.of_role("config"))}
    return work(table, row) == work(table, base) and all(mine.get(name) == theirs.get(name) for name in names)


def _in_step(table: AuditTable, what: str, quotients: list[tuple[Row, Value | None]]) -> Iterator[Hit]:
    """Hits where the quotient of two figures is not the same in all rows of the same work."""
    pairs = [(row, value) for row, value in quotients if value]
    for index, (row, value) in enumerate(pairs):
        base = next((known for known in pairs[:index] if _same_runs(table, row, known[0])), None)
        ratio = quotient(value, base[1]) if base else None
        gap = ratio.interval.gap(Interval.exactly(Fraction(1))) if ratio else Fraction(0)
        if base and ratio and gap:
            yield Hit(
                message=f"{row.name}: {what} is {ratio.interval} times that of {base[0].name}"
                f" ({ratio.interval.ends} by rounding); the same work on the same devices gives 1",
                rows=(row, base[0]),
                columns=ratio.columns,
                gap=gap,
            )


@Rule(
    name="mfu-tflops",
    severity="contradiction",
    label="X",
    reach="table",
    checks="TFLOPS / MFU = the same peak in all rows of the same work on the same devices",
    source="definition of MFU",
    roles=("mfu", "tflops", "device|peak_tflops"),
).of_table
def mfu_tflops(table: AuditTable) -> Iterator[Hit]:
    """Compare the peaks that TFLOPS and MFU of the rows imply."""
    if not _knows_devices(table):
        return
    for column in table.of_role("tflops"):
        peaks = [(row, _over_mfu(table, row, table.read(row, column))) for row in table.rows]
        yield from _in_step(table, f"{column.printed_name} over MFU", peaks)


@Rule(
    name="mfu-tflops-peak",
    severity="contradiction",
    label="R",
    reach="table",
    checks="TFLOPS = MFU x peak, within a factor of 2 for what is counted (recomputation, attention)",
    source="definition of MFU",
    roles=("mfu", "tflops", "peak_tflops"),
).of_table
def mfu_tflops_peak(table: AuditTable) -> Iterator[Hit]:
    """Compare achieved FLOPs with MFU times the peak."""
    for column in table.of_role("tflops"):
        for row in table.rows:
            ratio = quotient(table.read(row, column), product(table.value(row, "mfu"), table.value(row, "peak_tflops")))
            apart = MODEL_CONVENTIONS
            if ratio and (ratio.interval.low > apart or ratio.interval.high < Fraction(1, apart)):
                yield Hit(
                    message=f"{row.name}: {column.printed_name} is {ratio.interval} times MFU x peak",
                    rows=(row,),
                    columns=merged(ratio),
                )


def _knows_devices(table: AuditTable) -> bool:
    """Whether rows on other devices could be told."""
    return table.says("device") or table.says("peak_tflops")


def _over_mfu(table: AuditTable, row: Row, figure: Value | None) -> Value | None:
    """``figure`` over MFU; also over the peak where it is known, so that devices may differ."""
    ratio, peak = quotient(figure, table.value(row, "mfu")), table.value(row, "peak_tflops")
    return quotient(ratio, peak) if peak else ratio


@Rule(
    name="tflops-tokens",
    severity="contradiction",
    label="X",
    reach="table",
    checks="TFLOPS (or MFU) / tokens/s of a device = the same FLOPs per token in all rows of the same work",
    source="a token of one model and length costs the same on any number of devices",
    roles=("tflops|mfu", "tokens_per_s|tokens_per_s_per_device", "model|parameters|active_parameters"),
).of_table
def tflops_tokens(table: AuditTable) -> Iterator[Hit]:
    """Compare the FLOPs per token that TFLOPS, or MFU, and tokens per second of the rows imply."""
    if not any(table.says(role) for role in ("model", "parameters", "active_parameters")):
        return
    rows = [row for row in table.rows if not _has_steps(table, row)]
    for column in table.of_role("tflops"):
        costs = [(row, quotient(tokens_per_device(table, row), table.read(row, column))) for row in rows]
        yield from _in_step(table, f"tokens/s of a device over {column.printed_name}", costs)
    judged = table.says("throughput") and table.says("devices")  # by mfu-throughput
    if table.says("mfu") and _knows_devices(table) and not judged:
        costs = [(row, _over_mfu(table, row, tokens_per_device(table, row))) for row in rows]
        yield from _in_step(table, "tokens/s of a device over MFU", costs)
