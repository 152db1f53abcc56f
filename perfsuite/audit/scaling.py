"""Rules about throughput: steps and batches, speed-up and efficiency, per-device and aggregate figures, lengths."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from perfsuite.audit.table import ONE, AuditColumn, AuditTable, Hit, Row, Rule, Value, hit_of, merged, product, quotient
from perfsuite.metrics.spec import SUPERLINEAR_SLACK
from perfsuite.published.numbers import Interval

BATCHES = ("local_batch_size", "micro_batch_size", "global_batch_size", "batch_size")
SUPERLINEAR = 1 + Fraction(SUPERLINEAR_SLACK).limit_denominator(1000)
LINEAR_STEP = Fraction(105, 100)  # Tolerated ratio of a step to its share of a larger batch.
SATURATED_TOKENS = 16384  # Tokens per step and device above which a longer sequence cannot use more of the device.


def _ratios(table: AuditTable, row: Row, base: Row) -> list[Value]:
    """Return the possible values of "how much faster than ``base``" from the row's own figures."""
    rate, base_rate = table.throughput(row), table.throughput(base)
    tokens, base_tokens = table.value(row, "tokens_per_s"), table.value(base, "tokens_per_s")
    ratios = [quotient(rate, base_rate), quotient(tokens, base_tokens)]
    if not any(ratios) and not any(table.says(role) for role in BATCHES):
        latency = quotient(table.value(base, "latency"), table.value(row, "latency"))
        ratios += [latency, product(latency, quotient(table.devices(row), table.devices(base)))]
    return [value for value in ratios if value]


def _is_one(printed: Interval | None) -> bool:
    return printed is not None and printed.low <= 1 <= printed.high


def _nearest(
    row: Row, column: AuditColumn, printed: Interval, computed: list[Value], accepted: list[Value] | None = None
) -> Iterator[Hit]:
    gap = min(map(printed.gap, accepted or computed), default=Fraction(0))
    if computed and gap:
        best = min(computed, key=printed.gap)
        text = f"{column.printed_name} is printed {printed}, the row gives {best} ({best.ends} by its rounding)"
        yield hit_of(row, (column, *(other for other in best.columns if other != column)), text, gap)


def _speedup_ratio(table: AuditTable) -> Iterator[Hit]:
    """A speed-up may refer to the smallest runs, and to every row with a printed speed-up of 1.

    Speed-ups of smallest runs that are not 1 refer to a run outside the table.
    """
    smallest = [id(row) for row, _ in table.smallest_runs()]
    for column in table.of_role("speedup"):
        bases = [row for row in table.rows if id(row) in smallest or _is_one(table.raw(row, column))]
        for row in table.rows:
            printed = table.raw(row, column)
            if printed is None:
                continue
            expected: list[Value] = [ONE] if any(row is base for base in bases) else []
            for base in (base for base in bases if base is not row and table.work(base) == table.work(row)):
                ratios = _ratios(table, row, base)
                start = table.raw(base, column)
                expected += [value.times(start) for value in ratios] if start and not _is_one(start) else ratios
            yield from _nearest(row, column, printed, [value for value in expected if value is not ONE], expected)


def _efficiency_ratio(table: AuditTable) -> Iterator[Hit]:
    bases = table.smallest_runs()
    for column, row, printed in table.figures("efficiency"):
        expected: list[Value | None] = []
        for base, fewest in bases if table.devices(row) else ():
            share = quotient(table.devices(row), fewest)
            if base is row or table.work(base) != table.work(row):
                continue
            if _is_one(table.value(base, "speedup")):
                expected.append(quotient(table.value(row, "speedup"), share))
            expected += [quotient(ratio, share) for ratio in _ratios(table, row, base)]
        yield from _nearest(row, column, printed, [value for value in expected if value])


def _expected_rates(table: AuditTable, row: Row, role: str, *, per_device: bool) -> list[Value]:
    """Return the rates by the row's steps and batch; ``role`` is the aggregate's."""
    batch, latency = table.global_batch(row), table.value(row, "latency")
    done = product(batch, table.value(row, "sequence_length")) if role == "tokens_per_s" else batch
    rates = [quotient(done, latency), product(done, table.value(row, "iterations_per_s"))]
    if per_device:
        rates = [quotient(value, table.devices(row)) for value in rates]
    return [value for value in rates if value]


def _rate_columns(table: AuditTable) -> Iterator[tuple[AuditColumn, str, bool]]:
    for role in ("throughput", "tokens_per_s"):
        for suffix in ("", "_per_device"):
            for column in table.of_role(role + suffix):
                yield column, role, bool(suffix)


def _throughput_time(table: AuditTable) -> Iterator[Hit]:
    """A figure that fits the other of per-device and aggregate is left to the mislabel rule."""
    for column, row, steps in table.figures("iterations_per_s"):
        expected = quotient(ONE, table.value(row, "latency"))
        yield from _nearest(row, column, steps, [expected] if expected else [])
    for column, role, per_device in _rate_columns(table):
        for row in table.rows:
            printed = table.read(row, column)
            other = _expected_rates(table, row, role, per_device=not per_device)
            if printed is None or any(map(printed.meets, other)):
                continue
            for value in _expected_rates(table, row, role, per_device=per_device):
                yield from _nearest(row, column, printed, [value])


def _aggregate_as_per_device(table: AuditTable) -> Iterator[Hit]:
    for column, role, per_device in _rate_columns(table):
        rows, mistaken = [], True
        for row in table.rows:
            printed, count = table.read(row, column), table.devices(row)
            own = _expected_rates(table, row, role, per_device=per_device)
            other = _expected_rates(table, row, role, per_device=not per_device)
            if printed is None or count is None or count.high <= 1 or not own:
                continue
            fits_own = any(map(printed.meets, own))
            fits_other = any(map(printed.meets, other))
            mistaken = mistaken and fits_other and not fits_own
            rows.append(row)
        if rows and mistaken:
            named, meant = ("per device", "the aggregate") if per_device else ("the aggregate", "per device")
            value = _expected_rates(table, rows[-1], role, per_device=not per_device)[0]
            yield Hit(
                message=f"{column.printed_name} is called {named} and is {meant}: {rows[-1].name} prints"
                f" {table.raw(rows[-1], column)}, batch over time gives {value} for {meant}",
                rows=tuple(rows),
                columns=(column,),
            )


def _speedup_above_n(table: AuditTable) -> Iterator[Hit]:
    """The base is the smallest run of the same device model."""
    for base, fewest in table.smallest_runs():
        for row in table.rows:
            count, setting, start = table.devices(row), table.configuration(row), table.configuration(base)
            same = all(setting.get(role) == start.get(role) for role in ("device", "local_batch_size"))
            comparable = same and table.work(row) == table.work(base)
            if count is None or row is base or not comparable or count.low <= fewest.high:
                continue
            ratio = quotient(table.throughput(row), table.throughput(base))
            if ratio is None and _is_one(table.value(base, "speedup")):
                ratio = table.value(row, "speedup")
            limit = count.over(fewest)
            if ratio and limit and ratio.low > limit.high * SUPERLINEAR:
                text = f"{ratio} times {base.name} on {limit} times the devices"
                yield hit_of(row, ratio.columns, text)


def _step_grows_faster_than_batch(table: AuditTable) -> Iterator[Hit]:

    def settings(row: Row) -> dict[str, str]:
        ignored = (*BATCHES, "num_workers")
        return {name: text for name, text in table.configuration(row).items() if name not in ignored}

    for row in table.rows:
        for other in table.rows:
            if row is other or settings(row) != settings(other):
                continue
            growth = quotient(table.global_batch(row), table.global_batch(other))
            slowdown = quotient(table.step_time(row), table.step_time(other))
            if not growth or not slowdown or growth.low <= 1:
                continue
            if slowdown.low > growth.high * LINEAR_STEP:
                text = f"a step takes {slowdown} times that of {other.name} for {growth} times the batch"
                yield hit_of(row, slowdown.columns, text)


def _tokens_rise_with_length(table: AuditTable) -> Iterator[Hit]:
    """Only rows whose devices have SATURATED_TOKENS in every step are compared."""
    points = []
    for row in table.rows:
        length, count = table.value(row, "sequence_length"), table.devices(row)
        rate = table.value(row, "tokens_per_s") or product(table.throughput(row), length)
        tokens = product(table.global_batch(row) or table.value(row, "batch_size"), length)
        if tokens and tokens.low >= SATURATED_TOKENS * (count.low if count else 1):
            points.append((length, row, rate))
    for rows in table.series(points, ("sequence_length", "global_batch_size")):
        rising = all(x < longer and y.high < z.low for (x, _, y), (longer, _, z) in pairwise(rows))
        if len(rows) >= 3 and rising:
            (shortest, _, first), (longest, _, last) = rows[0], rows[-1]
            yield Hit(
                message=f"tokens/s rise with every length, from {first} at {shortest} tokens"
                f" to {last} at {longest}; attention costs more per token, not less",
                rows=tuple(row for _, row, _ in rows),
                columns=merged(*(rate for _, _, rate in rows)),
            )


def _overhead_ratio(table: AuditTable) -> Iterator[Hit]:
    """The base is the row whose overhead is 0."""
    for column in table.of_role("overhead"):
        bases = [row for row in table.rows if (raw := table.raw(row, column)) and raw.middle == 0]
        for row in table.rows:
            printed = table.read(row, column)
            if printed is None or row in bases:
                continue
            expected = []
            for base in bases:
                slowdown = quotient(table.throughput(base), table.throughput(row))
                kept = quotient(table.throughput(row), table.throughput(base))
                if slowdown and kept:
                    expected += [Value.of(slowdown - ONE, slowdown.columns), Value.of(ONE - kept, kept.columns)]
            yield from _nearest(row, column, printed, expected)


RULES = (
    Rule("speedup-ratio", "contradiction", "X", "cells", _speedup_ratio,
         roles=("speedup", "throughput|latency|tokens_per_s"),
         checks="speed-up = throughput / throughput of the row that it is counted from",
         source="definition of speed-up"),
    Rule("efficiency-ratio", "contradiction", "X", "cells", _efficiency_ratio,
         roles=("efficiency", "devices", "speedup|throughput|latency"),
         checks="efficiency = speed-up / n, or throughput ratio / n",
         source="definition of scaling efficiency"),
    Rule("throughput-time", "contradiction", "X", "cells", _throughput_time,
         roles=("throughput|tokens_per_s|iterations_per_s", "latency|iterations_per_s", "global_batch_size"),
         checks="throughput x step time = batch; tokens/s = samples/s x sequence length; steps/s = 1 / step time",
         source="definition of throughput"),
    Rule("aggregate-as-per-device", "mislabel", "M?", "table", _aggregate_as_per_device,
         roles=("throughput|throughput_per_device|tokens_per_s|tokens_per_s_per_device", "latency", "devices"),
         checks="a per-device rate is batch / step time / n; the aggregate is n times that",
         source="definition of throughput"),
    Rule("speedup-above-n", "note", "M?", "rows", _speedup_above_n,
         roles=("speedup|throughput", "devices"),
         checks="speed-up over the smallest run <= n / n0 (5 % allowed for caches)",
         source="n devices do at most n times the work of one"),
    Rule("step-grows-faster-than-batch", "note", "M?", "rows", _step_grows_faster_than_batch,
         roles=("latency|iterations_per_s|throughput", "local_batch_size|global_batch_size"),
         checks="step time ratio <= batch ratio while nothing else changes (5 % allowed)",
         source="computation is at most linear in the batch, communication does not grow with it"),
    Rule("tokens-rise-with-length", "contradiction", "X", "table", _tokens_rise_with_length,
         roles=("tokens_per_s|throughput", "sequence_length", "batch_size|global_batch_size|local_batch_size"),
         checks="tokens/s must not rise with every longer sequence once a step has 16384 tokens per device",
         source="FLOPs per token = 6 N + 12 L h S grow with the length S (PaLM, appendix B)"),
    Rule("overhead-ratio", "mislabel", "M?", "cells", _overhead_ratio,
         roles=("overhead", "throughput"),
         checks="overhead = base throughput / throughput - 1, or 1 - throughput / base throughput",
         source="definition of overhead"),
)  # fmt: skip
"""The rules of this family; findings come in this order."""
