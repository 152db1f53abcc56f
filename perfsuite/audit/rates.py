"""Rules about rates without a step time: tokens/s, samples/s, TFLOPS, MFU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

from perfsuite.audit.compute import CONVENTIONS, TERA, same_work_differs
from perfsuite.audit.table import AuditColumn, AuditTable, Hit, Row, Rule, Value, hit_of, product, quotient
from perfsuite.published.numbers import Interval

TRAINING = (
    "global_batch_size", "micro_batch_size", "num_micro_batches", "loss", "backward_time", "optimizer_time",
    "memory_optimizer", "memory_gradients", "bubble",
)  # fmt: skip
"""Roles of a training run; without any of them tokens may only pass forward."""
_SPARSE = re.compile(r"moe|mixtral|deepseek|\d+x\d+(\.\d+)?b|a\d+(\.\d+)?b", re.IGNORECASE)
"""Names of models with experts, of which a token uses a part."""
RATES = ("throughput", "throughput_per_device", "tokens_per_s", "tokens_per_s_per_device")
HARDWARE_CONVENTIONS = Fraction(8, 3)  # Achieved FLOPs may include recomputation: 8 instead of 6 per parameter.
_MODEL = ("model", "parameters", "active_parameters")  # Roles that distinguish rows of different models.
_COUNTING = ("strategy", "experts", "top_k")  # Further settings that figures of FLOPs may depend on.
_HARDWARE = ("device", "dtype")  # Settings that a peak depends on; FLOPs per token do not.
ELSEWHERE = Fraction(1, 20)  # Tolerance between hardware: published rates are often rounded once more, per machine.
_WORD = re.compile(r"[^\W\d_]{2,}")


def _sure_devices(table: AuditTable, row: Row) -> Value | None:
    """Return the number of devices; None if it is not stated and sequence or expert parallelism may share ranks."""
    stated = table.value(row, "devices") or table.value(row, "nodes")
    return table.devices(row) if stated or not (table.value(row, "sp") or table.value(row, "ep")) else None


def _rates_per_device(table: AuditTable, row: Row) -> Iterator[tuple[AuditColumn, Value]]:
    """Yield every printed rate as tokens per second of one device.

    Rates in samples need a sequence length, rates of all devices a number of devices. A rate may be truncated, so it
    may be half a digit above its rounding interval.
    """
    length, count = table.value(row, "sequence_length"), _sure_devices(table, row)
    for column in (column for role in RATES for column in table.of_role(role)):
        rate = table.read(row, column)
        if rate:
            spare = Interval(low=Fraction(0), high=(rate.high - rate.low) / 2)
            rate = Value.of(rate + spare, rate.columns)
        if not column.role.startswith("tokens"):
            rate = product(rate, length)
        if not column.role.endswith("per_device"):
            rate = quotient(rate, count)
        if rate:
            yield column, rate


def _tokens_per_device(table: AuditTable, row: Row) -> Value | None:
    return next((rate for _, rate in _rates_per_device(table, row)), None)


def _achieved(table: AuditTable, row: Row) -> Value | None:
    """Return operations per second of a device by its tokens: forward only without evidence of training, up to all.

    Without a sequence length the figure is a lower bound.
    """
    flops = quotient(table.flops_per_sample(row), table.value(row, "sequence_length"))
    active = table.value(row, "active_parameters")
    is_sparse = table.says("experts") or _SPARSE.search(table.text(row, "model"))
    if is_sparse and not active and not table.value(row, "flops_per_sample"):
        return None
    if not flops and (parameters := active or table.value(row, "parameters")):
        flops = parameters.times(Interval.exactly(Fraction(6)))
    if flops:
        least = 1 if any(table.says(role) for role in TRAINING) else Fraction(1, 3)
        flops = flops.times(Interval(low=Fraction(least), high=Fraction(1)))
    return product(_tokens_per_device(table, row), flops)


def _has_steps(table: AuditTable, row: Row) -> bool:
    return bool(table.value(row, "latency") or table.value(row, "iterations_per_s"))


def _follows_from_steps(table: AuditTable, row: Row) -> bool:
    """Return whether rules on the step time judge the tokens/s of a row: its batch and sequence length are known."""
    return bool(_has_steps(table, row) and table.global_batch(row) and table.value(row, "sequence_length"))


def _is_judged(table: AuditTable, row: Row) -> bool:
    return bool(table.throughput(row) and table.devices(row))


def _tera(value: Value) -> str:
    return f"{float(value.low / TERA):.4g}"


def _rates_disagree(table: AuditTable) -> Iterator[Hit]:
    for row in (row for row in table.rows if not _follows_from_steps(table, row)):
        for (first, one), (second, other) in combinations(_rates_per_device(table, row), 2):
            gap = one.gap(other)
            ratio = quotient(one, other)
            if first.role != second.role and gap and ratio:
                count = _sure_devices(table, row)
                is_of_all = count and count.low >= 2 and any(map(ratio.meets, (count, Interval.exactly(1 / count.low))))
                of_all = f": one is of all {count} devices and the other of each" if is_of_all else ""
                text = (
                    f"{first.printed_name} {table.raw(row, first)} and {second.printed_name}"
                    f" {table.raw(row, second)} differ from equality by a factor {ratio}{of_all}"
                )
                yield hit_of(row, (first, second), text, gap)


def _tokens_above_peak(table: AuditTable) -> Iterator[Hit]:
    for row in (row for row in table.rows if not _is_judged(table, row)):
        achieved, peak = _achieved(table, row), table.value(row, "peak_tflops")
        if achieved and peak and achieved.low > peak.high:
            ratio = achieved.low / peak.high
            text = (
                f"its tokens/s take {_tera(achieved)} TFLOPS per device at least,"
                f" {float(ratio):.4g} times the peak of {float(peak.middle / TERA):.4g}"
            )
            yield hit_of(row, achieved.columns, text)


def _mfu_tokens(table: AuditTable) -> Iterator[Hit]:
    for row in (row for row in table.rows if not _is_judged(table, row)):
        used = product(table.value(row, "mfu"), table.value(row, "peak_tflops"))
        yield from _apart(table, row, "MFU and peak", used, Fraction(CONVENTIONS))


def _tflops_rate(table: AuditTable) -> Iterator[Hit]:
    """Rows with a step time, a batch and a length are left to implied-parameters."""
    for row in (row for row in table.rows if not _follows_from_steps(table, row)):
        for column in table.of_role("tflops"):
            yield from _apart(table, row, column.printed_name, table.read(row, column), HARDWARE_CONVENTIONS)


def _apart(table: AuditTable, row: Row, name: str, stated: Value | None, factor: Fraction) -> Iterator[Hit]:
    """Return a hit if FLOPs by tokens and stated FLOPs differ by more than ``factor``."""
    achieved = _achieved(table, row)
    ratio = quotient(achieved, stated)
    if not ratio or not achieved or not stated:
        return
    below = ratio.high < 1 / factor and table.knows_attention(row)
    if ratio.low > factor or below:
        text = f"its tokens/s take {_tera(achieved)} TFLOPS per device, {name} give {_tera(stated)}"
        yield hit_of(row, ratio.columns, text)


def _in_step(
    table: AuditTable, what: str, quotients: list[tuple[Row, Value | None]], *, of_peak: bool = False
) -> Iterator[Hit]:
    """Yield hits if the quotient of two figures is not equal in all rows of the same work.

    Rows have the same work if they differ in nothing that affects FLOPs per token or their counting, and in no word
    of a column without a role.  A quotient ``of_peak`` is compared on the same hardware only.
    """
    names = (*_COUNTING, *(_HARDWARE if of_peak else ()), *(column.name for column in table.of_role("config")))
    first: dict[object, tuple[Row, Value]] = {}
    for row, value in quotients:
        if not value:
            continue
        settings, note = table.configuration(row), row.facts.get("note")
        words = _WORD.findall(note.text) if note else ()
        key = (*sorted(table.work(row).items()), *map(settings.get, names), *words)
        base, other = first.setdefault(key, (row, value))
        start = table.configuration(base)
        least = 0 if all(settings.get(name) == start.get(name) for name in _HARDWARE) else ELSEWHERE
        hits = same_work_differs(row, base, what, quotient(value, other)) if row is not base else ()
        yield from (hit for hit in hits if hit.gap and hit.gap >= least)


def _knows_devices(table: AuditTable) -> bool:
    return table.says("device") or table.says("peak_tflops")


def _over_mfu(table: AuditTable, row: Row, figure: Value | None) -> Value | None:
    """Return ``figure`` over MFU, and over the peak if it is stated, so that devices may differ."""
    ratio, peak = quotient(figure, table.value(row, "mfu")), table.value(row, "peak_tflops")
    return quotient(ratio, peak) if peak else ratio


def _mfu_tflops(table: AuditTable) -> Iterator[Hit]:
    for column in table.of_role("tflops") if _knows_devices(table) else ():
        peaks = [(row, _over_mfu(table, row, table.read(row, column))) for row in table.rows]
        yield from _in_step(table, f"{column.printed_name} over MFU", peaks, of_peak=True)


def _mfu_tflops_peak(table: AuditTable) -> Iterator[Hit]:
    for column, row, achieved in table.figures("tflops"):
        ratio = quotient(achieved, product(table.value(row, "mfu"), table.value(row, "peak_tflops")))
        if ratio and (ratio.low > CONVENTIONS or ratio.high < Fraction(1, CONVENTIONS)):
            yield hit_of(row, ratio.columns, f"{column.printed_name} is {ratio} times MFU x peak")


def _tflops_tokens(table: AuditTable) -> Iterator[Hit]:
    if not any(table.says(role) for role in _MODEL):
        return
    rows = [row for row in table.rows if not _follows_from_steps(table, row)]
    for column in table.of_role("tflops"):
        costs = [(row, quotient(_tokens_per_device(table, row), table.read(row, column))) for row in rows]
        yield from _in_step(table, f"tokens/s of a device over {column.printed_name}", costs)
    judged = table.says("throughput") and table.says("devices")  # by mfu-throughput
    if table.says("mfu") and _knows_devices(table) and not judged:
        costs = [(row, _over_mfu(table, row, _tokens_per_device(table, row))) for row in rows]
        yield from _in_step(table, "tokens/s of a device over MFU", costs, of_peak=True)


def _tflops_time(table: AuditTable) -> Iterator[Hit]:
    if not any(table.says(role) for role in _MODEL):
        return
    for column in table.of_role("tflops"):
        rates = [(row, product(table.read(row, column), table.devices(row))) for row in table.rows]
        steps = [
            (row, quotient(product(rate, table.step_time(row)), table.global_batch(row)))
            for row, rate in rates
            if _has_steps(table, row)
        ]
        yield from _in_step(table, f"{column.printed_name} x time x devices / batch", steps)
        runs = [(row, product(rate, table.value(row, "training_time"))) for row, rate in rates]
        yield from _in_step(table, f"{column.printed_name} x training time x devices", runs)


RULES = (
    Rule("rates-disagree", "contradiction", "X", "cells", _rates_disagree,
         roles=("tokens_per_s|tokens_per_s_per_device", "throughput|throughput_per_device|tokens_per_s", "devices"),
         checks="tokens/s = samples/s x sequence length, and the rate of all devices = n x the rate of one; "
                "throughput-time checks rows with step time, batch and sequence length",
         source="definition of throughput"),
    Rule("tokens-above-peak", "contradiction", "R", "table", _tokens_above_peak,
         roles=("tokens_per_s|tokens_per_s_per_device", "peak_tflops", "flops_per_sample|parameters"),
         checks="tokens/s of a device x FLOPs per token <= dense peak",
         source="FLOPs per token = 6 N + 12 L h S (PaLM, appendix B), 2 N where nothing says training"),
    Rule("mfu-tokens", "contradiction", "R", "table", _mfu_tokens,
         roles=("mfu", "tokens_per_s|tokens_per_s_per_device", "peak_tflops", "flops_per_sample|parameters"),
         checks="MFU = tokens/s of a device x FLOPs per token / peak, within a factor of 2 for the convention",
         source="definition of MFU (PaLM, appendix B)"),
    Rule("tflops-rate", "contradiction", "R", "table", _tflops_rate,
         roles=("tflops", "tokens_per_s|tokens_per_s_per_device|throughput", "flops_per_sample|parameters"),
         checks="TFLOPS = tokens/s of a device x FLOPs per token, within a factor of 8/3 for convention and "
                "recomputation",
         source="FLOPs per token = 6 N + 12 L h S (PaLM, appendix B)"),
    Rule("mfu-tflops", "contradiction", "X", "table", _mfu_tflops,
         roles=("mfu", "tflops", "device|peak_tflops"),
         checks="TFLOPS / MFU = the same peak in all rows of the same work on the same devices",
         source="definition of MFU"),
    Rule("mfu-tflops-peak", "contradiction", "R", "table", _mfu_tflops_peak,
         roles=("mfu", "tflops", "peak_tflops"),
         checks="TFLOPS = MFU x peak, within a factor of 2 for different counting (recomputation, attention)",
         source="definition of MFU"),
    Rule("tflops-tokens", "contradiction", "X", "table", _tflops_tokens,
         roles=("tflops|mfu", "tokens_per_s|tokens_per_s_per_device", "model|parameters|active_parameters"),
         checks="TFLOPS (or MFU) / tokens/s of a device = the same FLOPs per token in all rows of the same work",
         source="a token of one model and length costs the same on any number of devices"),
    Rule("tflops-time", "contradiction", "X", "table", _tflops_time,
         roles=("tflops", "latency|iterations_per_s|training_time", "devices", "global_batch_size|training_time",
                "|".join(_MODEL)),
         checks="TFLOPS x step time x n / global batch, and TFLOPS x training time x n = the same in all rows of the "
                "same work",
         source="a sample, or a whole run, of one model and length costs the same on any number of devices"),
)  # fmt: skip
"""The rules of this family; findings come in this order."""
