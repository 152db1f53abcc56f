"""Rules about tables that disagree with each other."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

from perfsuite.audit.quantities import devices, global_batch, throughput
from perfsuite.audit.repeats import NOISE
from perfsuite.audit.rule import Hit, Rule
from perfsuite.audit.table import AuditTable, Row, Value

APART = Fraction(3, 2)
"""Best throughputs of two tables for one model on as many devices: more than this apart is worth a remark."""

RatedRow = tuple[AuditTable, Row, Value]


def _runs(tables: tuple[AuditTable, ...]) -> dict[tuple[str, Fraction], list[RatedRow]]:
    """Rows with a throughput by model and number of devices."""
    rated: dict[tuple[str, Fraction], list[RatedRow]] = {}
    for table in tables:
        for row in table.rows:
            count, rate, model = devices(table, row), throughput(table, row), table.text(row, "model")
            if count and rate and model:
                rated.setdefault((model, count.interval.middle), []).append((table, row, rate))
    return rated


@Rule(
    name="same-run-disagrees",
    severity="contradiction",
    label="R",
    reach="table",
    checks="one model with one batch on one device has one throughput (10 % allowed), in all tables",
    source="on one device no strategy differs",
    roles=("throughput|latency", "model", "devices"),
).of_tables
def same_run_disagrees(tables: tuple[AuditTable, ...]) -> Iterator[tuple[AuditTable, Hit]]:
    """Compare one-device runs of different tables that state one model and one batch."""
    for (model, count), runs in _runs(tables).items():
        for (table, row, rate), (other, twin, again) in combinations(runs if count == 1 else [], 2):
            batch, same = _one_device_batch(table, row), _one_device_batch(other, twin)
            apart = max(rate.interval.low / again.interval.high, again.interval.low / rate.interval.high)
            if _one_set(table, other) or batch is None or batch != same or apart <= 1 + NOISE:
                continue
            message = (
                f"{model} on one device with a batch of {batch}: {rate.interval} samples/s in {table.name}"
                f" ({row.name}), {again.interval} in {other.name} ({twin.name})"
            )
            yield table, Hit(message=message, rows=(row,), columns=rate.columns)
            yield other, Hit(message=message, rows=(twin,), columns=again.columns)


def _one_set(table: AuditTable, other: AuditTable) -> bool:
    """Tables of one run set describe the same runs; what disagrees there, their join finds."""
    return table is other or (bool(table.run_set) and table.run_set == other.run_set)


def _one_device_batch(table: AuditTable, row: Row) -> Fraction | None:
    """On one device the batch is the batch, whatever it is called."""
    batch = global_batch(table, row) or table.value(row, "local_batch_size") or table.value(row, "batch_size")
    return batch.interval.middle if batch else None


@Rule(
    name="tables-differ",
    severity="note",
    label=None,
    reach="table",
    checks="best throughputs for one model on as many devices lie within 1.5 times, in all tables",
    source="one machine",
    roles=("throughput|latency", "model", "devices"),
).of_tables
def tables_differ(tables: tuple[AuditTable, ...]) -> Iterator[tuple[AuditTable, Hit]]:
    """Note tables whose best throughputs for one model on as many devices are far apart."""
    for (model, count), runs in _runs(tables).items():
        best: dict[str, RatedRow] = {}
        for run in runs:
            known = best.get(run[0].name)
            if known is None or run[2].interval.middle > known[2].interval.middle:
                best[run[0].name] = run
        ordered = sorted(best.values(), key=lambda run: run[2].interval.middle)
        if len(ordered) < 2 or _one_set(ordered[0][0], ordered[-1][0]):
            continue
        if ordered[-1][2].interval.low > ordered[0][2].interval.high * APART:
            slow, fast = ordered[0], ordered[-1]
            yield (
                slow[0],
                Hit(
                    message=f"{model} on {count} devices: at best {slow[2].interval} samples/s here,"
                    f" {fast[2].interval} in {fast[0].name}",
                    rows=(slow[1],),
                    columns=slow[2].columns,
                ),
            )
