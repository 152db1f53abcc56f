"""Rules about figures that repeat, are missing, are in the wrong column or disagree between tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations

from perfsuite.audit.table import AuditColumn, AuditTable, Hit, Row, Rule, Value, hit_of, product, quotient
from perfsuite.published.records import NEVER_ZERO, ROLES

MANY_DIGITS = 7  # Digits in which two measurements do not agree by chance: one in a million rows at 1 % noise.

NOISE = Fraction(1, 10)  # Largest difference of repeats of one run.

APART = Fraction(3, 2)
"""Ratio of the best throughputs of two tables, for one model on as many devices, above which a note is printed."""

CARD_SIZES_GB = frozenset({8, 12, 16, 24, 32, 40, 48, 64, 80, 94, 96, 128, 141, 192})
"""Memory sizes of accelerators, for tables that do not state theirs."""

_WORD = re.compile(r"[^\W_]+(?:[.-][^\W_]+)*")
_NUMBERING = re.compile(r"#+\s*(?:\d+[.)]?)+(?=\s)|\b(?:table|figure|fig|section|appendix)\.?\s*\d[\d.]*\b")
_COMMON = re.compile(
    r"\b(?:"
    "a|all|an|and|are|below|benchmark|benchmarks|card|cards|comparison|detail|details|"
    "device|devices|experiment|experiments|figure|figures|following|for|gpu|gpus|in|is|main|"
    "measured|measurement|measurements|number|numbers|of|on|our|overview|performance|result|"
    "results|scalability|scaling|shown|shows|speed|summary|table|tables|that|the|"
    "these|this|throughput|throughputs|we|were|with"
    r")\b"
)
"""Words of headings that state no setting."""

_PAIR = re.compile(r"\s*\d+(?:\.\d+)?\s*/\s*\d+(?:\.\d+)?\s*")


def _measured(table: AuditTable) -> tuple[AuditColumn, ...]:
    """Return measured columns except memory; none in a simulation, which repeats exactly."""
    columns = table.of_kind("measured")
    return () if table.simulated else tuple(column for column in columns if column.meaning.dimension != "memory")


def _equal_digits(table: AuditTable) -> Iterator[Hit]:
    for column in _measured(table):
        for row, other in combinations(table.rows, 2):
            number, twin = table.number(row, column), table.number(other, column)
            equal = number and twin and number.digits >= MANY_DIGITS and number.value == twin.value
            if number and equal and table.configuration(row) != table.configuration(other):
                yield Hit(
                    message=f"{column.printed_name} is {row.cells[column.name].text.strip()} in {row.name} and in"
                    f" {other.name}: {number.digits} equal digits",
                    rows=(row, other),
                    columns=(column,),
                )


def _constant_measurement(table: AuditTable) -> Iterator[Hit]:
    for column in (measured for measured in _measured(table) if measured.meaning.dimension != "share"):
        numbers = [(row, number) for row in table.rows if (number := table.number(row, column))]
        settings = {tuple(sorted(table.configuration(row).items())) for row, _ in numbers}
        values = {number.value for _, number in numbers}
        if len(settings) >= 3 and len(values) == 1 and numbers[0][1].digits >= 3:
            yield Hit(
                message=f"{column.printed_name} is {float(numbers[0][1].value):g} in all {len(numbers)} rows",
                rows=tuple(row for row, _ in numbers),
                columns=(column,),
            )


def _repeated_row(table: AuditTable) -> Iterator[Hit]:
    columns = [column for column in table.of_kind("measured") if column.role not in ("throughput", "tokens_per_s")]
    for row, other in combinations(table.rows, 2):
        fewer, count = table.devices(row), table.devices(other)
        if not count or not fewer or count.low <= fewer.high:
            continue
        digits, equal, repeated = 0, True, []
        for column in columns:
            number, twin = table.number(row, column), table.number(other, column)
            if number and number.digits and column.name in other.cells:
                equal = equal and twin is not None and number.value == twin.value
                digits += number.digits
                repeated.append((column, row.cells[column.name].text.strip()))
        if all(column.role.startswith("memory") for column, _ in repeated):
            continue
        if len(repeated) >= 2 and digits >= 6 and equal:
            yield Hit(
                message=f"{other.name} repeats {row.name} in "
                + ", ".join(f"{column.printed_name} ({text})" for column, text in repeated),
                rows=(other,),
                columns=tuple(column for column, _ in repeated),
            )


def _repeats(table: AuditTable, *, disagree: bool) -> Iterator[Hit]:
    """Yield the groups of rows of one configuration that differ by more than NOISE, or by less.

    Rows with different cells in a column without a role are not one group: such a column may be a setting.
    """
    groups: dict[object, list[tuple[Row, Value]]] = {}
    for row in table.rows:
        settings, time = table.configuration(row), table.step_time(row)
        value = time or table.throughput(row)
        if settings and value:
            key = (*sorted(settings.items()), row.facts.get("note"), time is None)
            groups.setdefault(key, []).append((row, value))
    for group in groups.values():
        low, *_, high = sorted(value.middle for _, value in [*group, *group])
        apart = high / low - 1 if low else Fraction(0)
        if len(group) > 1 and (apart > NOISE) == disagree:
            how = f" and {float(apart):.0%} apart" if disagree else f": {float(apart):.2%} apart"
            *names, last = (row.name for row, _ in group)
            text = f"{', '.join(names)} and {last} are the same run{how}"
            yield Hit(message=text, rows=tuple(row for row, _ in group), columns=group[-1][1].columns)


def _shifted_columns(table: AuditTable) -> Iterator[Hit]:
    memory = next(iter(table.of_role("memory")), None)
    for column in table.columns if memory else ():
        if memory is None or column.meaning.dimension in ("memory", "text"):
            continue
        for row in table.rows:
            cell = row.cells.get(column.name)
            if cell is None or column.index or not _PAIR.fullmatch(cell.text) or len(cell.numbers) != 2:
                continue
            used, there = (number.value for number in cell.numbers)
            stated = table.value(row, "memory_capacity")
            card = stated.low <= there * 2**30 and there * 10**9 <= stated.high if stated else False
            if used <= there and (card or (stated is None and there in CARD_SIZES_GB)):
                instead = row.cells[memory.name].text.strip() if memory.name in row.cells else "nothing"
                text = (
                    f"{column.printed_name} {cell.text.strip()} has the shape of memory on a device"
                    f" of {float(there):g} GB; {memory.printed_name} holds {instead}"
                )
                yield hit_of(row, (column, memory), text)


def _blank_metric(table: AuditTable) -> Iterator[Hit]:
    """Rows that ran out of memory are skipped."""
    rows = [row for row in table.rows if not any(cell.out_of_memory for cell in row.cells.values())]
    counts = (column for column in table.of_kind("configuration") if column.role in NEVER_ZERO)
    for column in (*table.of_kind("measured", "derived"), *counts):
        blank = [row for row in rows if (cell := row.cells.get(column.name)) is None or not cell.numbers]
        if blank:
            has_text = any(column.name in row.cells and not row.cells[column.name].blank for row in blank)
            state = "blank or without a number" if has_text else "blank"
            text = f"{column.printed_name} is {state} in {len(blank)} of {len(rows)} rows ({_first(blank)})"
            yield Hit(message=text, rows=tuple(blank), columns=(column,))


def _first(rows: Sequence[Row]) -> str:
    """Return the names of the first three rows."""
    return ", ".join(row.name for row in rows[:3]) + (", ..." if len(rows) > 3 else "")


def _zero_figure(table: AuditTable) -> Iterator[Hit]:
    for column in (column for column in table.columns if column.role in NEVER_ZERO):
        rows = [row for row in table.rows if (number := table.number(row, column)) and number.value == 0]
        if column.meaning.dimension == "bandwidth":  # one device sends nothing
            rows = [row for row in rows if not (count := table.devices(row)) or count.high > 1]
        if rows:
            text = f"{column.printed_name} is 0 in {len(rows)} of {len(table.rows)} rows"
            text = f"{text} ({_first(rows)}): not measured, or below the printed digits; no rule uses it"
            yield Hit(message=text, rows=tuple(rows), columns=(column,))


# ---- between tables ----

RatedRow = tuple[AuditTable, Row, Value]


def _runs(tables: tuple[AuditTable, ...]) -> dict[tuple[str, Fraction], list[RatedRow]]:
    rated: dict[tuple[str, Fraction], list[RatedRow]] = {}
    for table in tables:
        for row in table.rows:
            count, model = table.devices(row), table.text(row, "model")
            tokens = table.value(row, "tokens_per_s") or product(table.value(row, "tokens_per_s_per_device"), count)
            rate = table.throughput(row) or quotient(tokens, table.value(row, "sequence_length"))
            if count and rate and model:
                rated.setdefault((model, count.middle), []).append((table, row, rate))
    return rated


def _disagreeing(tables: tuple[AuditTable, ...]) -> Iterator[tuple[str, Fraction, RatedRow, RatedRow]]:
    """Yield model, batch and two rows on one device whose throughputs are apart, if all their roles are equal."""
    for (model, count), runs in _runs(tables).items():
        for one, two in combinations(runs if count == 1 else [], 2):
            batch, same = _one_device_batch(*one[:2]), _one_device_batch(*two[:2])
            apart = max(one[2].low / two[2].high, two[2].low / one[2].high)
            if batch is not None and batch == same and apart > 1 + NOISE and not _incomparable(one, two):
                yield model, batch, one, two


def _same_run_disagrees(tables: tuple[AuditTable, ...]) -> Iterator[tuple[AuditTable, Hit]]:
    for model, batch, one, two in _disagreeing(tables):
        if _have_same_words(one, two):
            (table, row, rate), (other, twin, again) = one, two
            message = (
                f"{model} on one device with a batch of {batch}: {rate} samples/s in {table.name}"
                f" ({row.name}), {again} in {other.name} ({twin.name})"
            )
            yield table, Hit(message=message, rows=(row,), columns=rate.columns)
            yield other, Hit(message=message, rows=(twin,), columns=again.columns)


def not_compared(tables: Sequence[AuditTable]) -> int:
    """Return the number of pairs that would contradict each other if their headings and other cells were equal."""
    return sum(not _have_same_words(one, two) for *_, one, two in _disagreeing(tuple(tables)))


def _incomparable(one: RatedRow, two: RatedRow) -> bool:
    """Return whether two rows differ in a setting that both state, or are of one set, whose join is audited."""
    (table, row, _), (other, twin, _) = one, two
    stated = ((table.text(row, role), other.text(twin, role)) for role in ("device", "dtype", "sequence_length"))
    is_one_set = table is other or (bool(table.run_set) and table.run_set == other.run_set)
    return is_one_set or any(one and two and one != two for one, two in stated)


def _have_same_words(one: RatedRow, two: RatedRow) -> bool:
    """Return whether headings, and cells without a role, have the same words that may state a setting.

    Words that every report uses do not, nor do numbers of sections and tables, and words in cells with a role.
    """
    words: list[frozenset[str]] = []
    for table, row, _ in (one, two):
        note = table.text(row, "note")
        if not note and "note" not in row.facts:  # a published table without a note
            return True
        stated = {word for cell in row.cells.values() for word in _WORD.findall(cell.text.lower())}
        words.append(frozenset(_WORD.findall(_COMMON.sub(" ", _NUMBERING.sub(" ", note.lower())))) - stated)
    return words[0] == words[1]


def _one_device_batch(table: AuditTable, row: Row) -> Fraction | None:
    """Return the batch on one device, whichever role states it."""
    batch = table.global_batch(row) or table.value(row, "local_batch_size") or table.value(row, "batch_size")
    return batch.middle if batch else None


def _tables_differ(tables: tuple[AuditTable, ...]) -> Iterator[tuple[AuditTable, Hit]]:
    for (model, count), runs in _runs(tables).items():
        best: dict[str, RatedRow] = {}
        for run in runs:
            record = best.get(run[0].name)
            if record is None or run[2].middle > record[2].middle:
                best[run[0].name] = run
        ordered = sorted(best.values(), key=lambda run: run[2].middle)
        (table, row, slow), (other, _, fast) = slowest, fastest = ordered[0], ordered[-1]
        is_one = not _incomparable(slowest, fastest) and _have_same_words(slowest, fastest)
        if len(ordered) >= 2 and is_one and fast.low > slow.high * APART:
            text = f"{model} on {count} devices: at best {slow} samples/s here, {fast} in {other.name}"
            yield table, Hit(message=text, rows=(row,), columns=slow.columns)


RULES = (
    Rule("equal-digits", "contradiction", "X", "cells", _equal_digits,
         roles=("loss|latency|throughput",),
         checks=f"measurements of different runs do not agree in {MANY_DIGITS} digits (simulations excepted)",
         source="noise"),
    Rule("constant-measurement", "note", "M?", "cells", _constant_measurement,
         roles=("loss|latency|throughput",),
         checks="a measured column is not one value of three digits in three or more different runs",
         source="noise"),
    Rule("repeated-row", "note", "M?", "rows", _repeated_row,
         roles=("devices", "latency|iterations_per_s", "memory"),
         checks="a run on more devices does not repeat every measurement of a smaller one",
         source="more devices communicate more"),
    Rule("repeat-noise", "note", None, "rows", partial(_repeats, disagree=False),
         roles=("throughput|latency",),
         checks="rows of one configuration: how far they are apart",
         source="noise"),
    Rule("repeats-disagree", "contradiction", "R", "rows", partial(_repeats, disagree=True),
         roles=("throughput|latency",),
         checks="rows of one configuration agree within 10 %",
         source="noise"),
    Rule("shifted-columns", "mislabel", "M?", "table", _shifted_columns,
         roles=("memory", "memory_capacity"),
         checks="a cell x/48.0 of a 48 GB device stands in a memory column",
         source="sizes of device memories"),
    Rule("blank-metric", "note", None, "cells", _blank_metric,
         roles=("throughput|throughput_per_device|tokens_per_s|tokens_per_s_per_device|latency|tflops|mfu|memory|bandwidth",),
         checks="every run that did not run out of memory has every metric of its table",
         source="a missing figure cannot be checked"),
    Rule("zero-figure", "note", None, "cells", _zero_figure,
         roles=("|".join(role for role in ROLES if role in NEVER_ZERO and ROLES[role].kind != "configuration"),),
         checks="0 devices, 0 tokens/s, 0 ms or 0 GB/s are not figures",
         source="a run that took place has devices, a time and a rate"),
    Rule("same-run-disagrees", "contradiction", "R", "table", across=_same_run_disagrees,
         roles=("throughput|latency|tokens_per_s|tokens_per_s_per_device", "model", "devices"),
         checks="one model with one batch on one device has one throughput (10 % allowed), in all tables",
         source="on one device no strategy differs"),
    Rule("tables-differ", "note", None, "table", across=_tables_differ,
         roles=("throughput|latency|tokens_per_s|tokens_per_s_per_device", "model", "devices"),
         checks="best throughputs for one model on as many devices lie within 1.5 times, in all tables",
         source="one machine"),
)  # fmt: skip
"""The rules of this family; findings come in this order."""
