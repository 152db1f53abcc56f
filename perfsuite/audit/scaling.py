"""Rules about throughput: steps and batches, speed-up and efficiency, per-device and aggregate figures, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from perfsuite.audit.quantities import (
    devices,
    global_batch,
    merged,
    product,
    quotient,
    smallest_runs,
    step_time,
    throughput,
    work,
)
from perfsuite.audit.rule import Hit, Rule
from perfsuite.audit.table import AuditColumn, AuditTable, Row, Value
from perfsuite.metrics.scaling import SUPERLINEAR_SLACK
from perfsuite.published.numbers import Interval

ONE = Value(interval=Interval.exactly(Fraction(1)))
BATCHES = ("local_batch_size", "micro_batch_size", "global_batch_size", "batch_size")
SUPERLINEAR = 1 + Fraction(SUPERLINEAR_SLACK).limit_denominator(1000)
LINEAR_STEP = Fraction(105, 100)
"""A step may take this much more than its share of a larger batch before it is called anomalous."""
SATURATED_TOKENS = 16384
"""Tokens per step and device from which on a longer sequence can no longer fill idle units of the device."""


def _ratios(table: AuditTable, row: Row, base: Row) -> list[Value]:
    """Readings of "how much faster than ``base``" that the row's own figures allow."""
    rate, base_rate = throughput(table, row), throughput(table, base)
    tokens, base_tokens = table.value(row, "tokens_per_s"), table.value(base, "tokens_per_s")
    ratios = [quotient(rate, base_rate), quotient(tokens, base_tokens)]
    if not any(ratios) and not any(table.says(role) for role in BATCHES):
        latency = quotient(table.value(base, "latency"), table.value(row, "latency"))
        ratios += [latency, product(latency, quotient(devices(table, row), devices(table, base)))]
    return [value for value in ratios if value]


def _bases(table: AuditTable, column: AuditColumn) -> list[Row]:
    """Rows that a speed-up may be counted from: printed as 1, or the smallest runs."""
    smallest = [id(row) for row, _ in smallest_runs(table)]
    return [row for row in table.rows if id(row) in smallest or _is_one(table.raw(row, column))]


def _is_one(printed: Interval | None) -> bool:
    return printed is not None and printed.low <= 1 <= printed.high


@Rule(
    name="speedup-ratio",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="speed-up = throughput / throughput of the row that it is counted from",
    source="definition of speed-up",
    roles=("speedup", "throughput|latency|tokens_per_s"),
).of_table
def speedup_ratio(table: AuditTable) -> Iterator[Hit]:
    """Compare each printed speed-up with the ratios to every row that it may be counted from."""
    for column in table.of_role("speedup"):
        bases = _bases(table, column)
        for row in table.rows:
            printed = table.raw(row, column)
            if printed is None:
                continue
            expected: list[Value] = [ONE] if any(row is base for base in bases) else []
            for base in (base for base in bases if base is not row and work(table, base) == work(table, row)):
                ratios = _ratios(table, row, base)
                start = table.raw(base, column)
                expected += ratios
                if start and not _is_one(start):
                    expected += [Value(interval=value.interval * start, columns=value.columns) for value in ratios]
            hit = _nearest(row, column, printed, [value for value in expected if value is not ONE], expected)
            if hit:
                yield hit


def _nearest(
    row: Row, column: AuditColumn, printed: Interval, computed: list[Value], accepted: list[Value] | None = None
) -> Hit | None:
    """A hit when the printed figure agrees with none of the values that it could have been computed as."""
    if not computed:
        return None
    gap = min(printed.gap(value.interval) for value in accepted or computed)
    if not gap:
        return None
    best = min(computed, key=lambda value: printed.gap(value.interval))
    return Hit(
        message=f"{row.name}: {column.printed_name} is printed {printed}, the row gives {best.interval}"
        f" ({best.interval.ends} by its rounding)",
        rows=(row,),
        columns=(column, *(other for other in best.columns if other != column)),
        gap=gap,
    )


@Rule(
    name="efficiency-ratio",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="efficiency = speed-up / n, or throughput ratio / n",
    source="definition of scaling efficiency",
    roles=("efficiency", "devices", "speedup|throughput|latency"),
).of_table
def efficiency_ratio(table: AuditTable) -> Iterator[Hit]:
    """Compare each printed efficiency with speed-up over n and with the ratio of throughputs over n."""
    bases = smallest_runs(table)
    for column in table.of_role("efficiency"):
        for row in table.rows:
            printed, count = table.read(row, column), devices(table, row)
            if printed is None or count is None:
                continue
            expected: list[Value | None] = []
            for base, fewest in bases:
                share = quotient(count, fewest)
                if base is row or work(table, base) != work(table, row):
                    continue
                if _is_one(speed.interval if (speed := table.value(base, "speedup")) else None):
                    expected.append(quotient(table.value(row, "speedup"), share))
                expected += [quotient(ratio, share) for ratio in _ratios(table, row, base)]
            hit = _nearest(row, column, printed.interval, [value for value in expected if value])
            if hit:
                yield hit


def _expected_rates(table: AuditTable, row: Row, role: str, *, per_device: bool) -> list[Value]:
    """Rates by the row's steps and batch; ``role`` is the aggregate's."""
    batch, latency = global_batch(table, row), table.value(row, "latency")
    steps = table.value(row, "iterations_per_s")
    done = product(batch, table.value(row, "sequence_length")) if role == "tokens_per_s" else batch
    rates = [quotient(done, latency), product(done, steps)]
    if per_device:
        rates = [quotient(value, devices(table, row)) for value in rates]
    return [value for value in rates if value]


RATES = ("throughput", "tokens_per_s")


@Rule(
    name="throughput-time",
    severity="contradiction",
    label="X",
    reach="cells",
    checks="throughput x step time = batch; tokens/s = samples/s x sequence length; steps/s = 1 / step time",
    source="definition of throughput",
    roles=("throughput|tokens_per_s|iterations_per_s", "latency|iterations_per_s", "global_batch_size"),
).of_table
def throughput_time(table: AuditTable) -> Iterator[Hit]:
    """Compare rates with batch over time; a figure that fits the other of per-device and aggregate is left to the
    mislabel rule.
    """
    for column in table.of_role("iterations_per_s"):
        for row in table.rows:
            printed = table.read(row, column)
            expected = quotient(ONE, table.value(row, "latency"))
            hit = _nearest(row, column, printed.interval, [expected]) if printed and expected else None
            if hit:
                yield hit
    for column, role, per_device in _rate_columns(table):
        for row in table.rows:
            printed = table.read(row, column)
            if printed is None:
                continue
            own = _expected_rates(table, row, role, per_device=per_device)
            other = _expected_rates(table, row, role, per_device=not per_device)
            if any(printed.interval.meets(value.interval) for value in other):
                continue
            for value in own:
                hit = _nearest(row, column, printed.interval, [value])
                if hit:
                    yield hit


def _rate_columns(table: AuditTable) -> Iterator[tuple[AuditColumn, str, bool]]:
    for role in RATES:
        for suffix in ("", "_per_device"):
            for column in table.of_role(role + suffix):
                yield column, role, bool(suffix)


@Rule(
    name="aggregate-as-per-device",
    severity="mislabel",
    label="M?",
    reach="table",
    checks="a per-device rate is batch / step time / n; the aggregate is n times that",
    source="definition of throughput",
    roles=("throughput|throughput_per_device|tokens_per_s|tokens_per_s_per_device", "latency", "devices"),
).of_table
def aggregate_as_per_device(table: AuditTable) -> Iterator[Hit]:
    """Find columns that are per device by name and aggregate by their figures, or the other way round."""
    for column, role, per_device in _rate_columns(table):
        rows, mistaken = [], True
        for row in table.rows:
            printed, count = table.read(row, column), devices(table, row)
            own = _expected_rates(table, row, role, per_device=per_device)
            other = _expected_rates(table, row, role, per_device=not per_device)
            if printed is None or count is None or count.interval.high <= 1 or not own:
                continue
            fits_own = any(printed.interval.meets(value.interval) for value in own)
            fits_other = any(printed.interval.meets(value.interval) for value in other)
            mistaken = mistaken and fits_other and not fits_own
            rows.append(row)
        if rows and mistaken:
            said, is_ = ("per device", "the aggregate") if per_device else ("the aggregate", "per device")
            example = rows[-1]
            value = _expected_rates(table, example, role, per_device=not per_device)[0]
            yield Hit(
                message=f"{column.printed_name} is called {said} and is {is_}: {example.name} prints"
                f" {table.raw(example, column)}, batch over time gives {value.interval} for {is_}",
                rows=tuple(rows),
                columns=(column,),
            )


@Rule(
    name="speedup-above-n",
    severity="note",
    label="M?",
    reach="rows",
    checks="speed-up over the smallest run <= n / n0 (5 % allowed for caches)",
    source="n devices do at most n times the work of one",
    roles=("speedup|throughput", "devices"),
).of_table
def speedup_above_n(table: AuditTable) -> Iterator[Hit]:
    """Flag speed-ups above the number of devices, against the smallest run of the same device model."""
    for base, fewest in smallest_runs(table):
        for row in table.rows:
            count = devices(table, row)
            comparable = work(table, row) == work(table, base) and _same(table, row, base, "device", "local_batch_size")
            if count is None or row is base or not comparable or count.interval.low <= fewest.interval.high:
                continue
            ratio = _speedup(table, row, base)
            limit = count.interval.over(fewest.interval)
            if ratio and limit and ratio.interval.low > limit.high * SUPERLINEAR:
                yield Hit(
                    message=f"{row.name}: {ratio.interval} times {base.name} on {limit} times the devices",
                    rows=(row,),
                    columns=ratio.columns,
                )


def _speedup(table: AuditTable, row: Row, base: Row) -> Value | None:
    known = quotient(throughput(table, row), throughput(table, base))
    if known:
        return known
    printed, start = table.value(row, "speedup"), table.value(base, "speedup")
    return printed if start and _is_one(start.interval) else None


def _same(table: AuditTable, row: Row, other: Row, *roles: str) -> bool:
    mine, theirs = table.configuration(row), table.configuration(other)
    return all(mine.get(role) == theirs.get(role) for role in roles)


def _settings(table: AuditTable, row: Row, *but: str) -> dict[str, str]:
    return {name: value for name, value in table.configuration(row).items() if name not in but}


@Rule(
    name="step-grows-faster-than-batch",
    severity="note",
    label="M?",
    reach="rows",
    checks="step time ratio <= batch ratio while nothing else changes (5 % allowed)",
    source="computation is at most linear in the batch, communication does not grow with it",
    roles=("latency|iterations_per_s|throughput", "local_batch_size|global_batch_size"),
).of_table
def step_grows_faster_than_batch(table: AuditTable) -> Iterator[Hit]:
    """Flag steps that grow faster than their batch while nothing else changes."""
    for row in table.rows:
        for other in table.rows:
            settings = _settings(table, row, *BATCHES, "num_workers")
            if row is other or settings != _settings(table, other, *BATCHES, "num_workers"):
                continue
            growth = quotient(global_batch(table, row), global_batch(table, other))
            slowdown = quotient(step_time(table, row), step_time(table, other))
            if not growth or not slowdown or growth.interval.low <= 1:
                continue
            if slowdown.interval.low > growth.interval.high * LINEAR_STEP:
                yield Hit(
                    message=f"{row.name}: a step takes {slowdown.interval} times that of {other.name}"
                    f" for {growth.interval} times the batch",
                    rows=(row,),
                    columns=slowdown.columns,
                )


@Rule(
    name="tokens-rise-with-length",
    severity="contradiction",
    label="X",
    reach="table",
    checks="tokens/s must not rise with every longer sequence once a step has 16384 tokens per device",
    source="FLOPs per token = 6 N + 12 L h S grow with the length S (PaLM, appendix B)",
    roles=("tokens_per_s|throughput", "sequence_length", "batch_size|global_batch_size|local_batch_size"),
).of_table
def tokens_rise_with_length(table: AuditTable) -> Iterator[Hit]:
    """Flag tokens per second that rise with every longer sequence on devices that were full already."""
    runs: dict[tuple[tuple[str, str], ...], list[tuple[Fraction, Row, Value]]] = {}
    for row in table.rows:
        length = table.value(row, "sequence_length")
        rate = table.value(row, "tokens_per_s") or product(throughput(table, row), length)
        if length and rate and _saturated(table, row):
            key = tuple(sorted(_settings(table, row, "sequence_length", "global_batch_size").items()))
            runs.setdefault(key, []).append((length.interval.low, row, rate))
    for rows in runs.values():
        rows.sort(key=lambda run: run[0])
        rising = all(
            short[0] < long[0] and short[2].interval.high < long[2].interval.low for short, long in pairwise(rows)
        )
        if len(rows) >= 3 and rising:
            first, last = rows[0], rows[-1]
            yield Hit(
                message=f"tokens/s rise with every length, from {first[2].interval} at {first[0]} tokens"
                f" to {last[2].interval} at {last[0]}; attention costs more per token, not less",
                rows=tuple(row for _, row, _ in rows),
                columns=merged(*(rate for _, _, rate in rows)),
            )


def _saturated(table: AuditTable, row: Row) -> bool:
    batch = global_batch(table, row) or table.value(row, "batch_size")
    tokens = product(batch, table.value(row, "sequence_length"))
    count = devices(table, row)
    return bool(tokens and tokens.interval.low >= SATURATED_TOKENS * (count.interval.low if count else 1))


@Rule(
    name="overhead-ratio",
    severity="mislabel",
    label="M?",
    reach="cells",
    checks="overhead = base throughput / throughput - 1, or 1 - throughput / base throughput",
    source="definition of overhead",
    roles=("overhead", "throughput"),
).of_table
def overhead_ratio(table: AuditTable) -> Iterator[Hit]:
    """Compare each printed overhead with the slowdown against the row whose overhead is 0."""
    for column in table.of_role("overhead"):
        bases = [row for row in table.rows if (raw := table.raw(row, column)) and raw.middle == 0]
        for row in table.rows:
            printed = table.read(row, column)
            if printed is None or row in bases:
                continue
            expected = []
            for base in bases:
                slowdown = quotient(throughput(table, base), throughput(table, row))
                kept = quotient(throughput(table, row), throughput(table, base))
                if slowdown and kept:
                    expected += [
                        Value(interval=slowdown.interval - ONE.interval, columns=slowdown.columns),
                        Value(interval=ONE.interval - kept.interval, columns=kept.columns),
                    ]
            hit = _nearest(row, column, printed.interval, expected)
            if hit:
                yield hit
