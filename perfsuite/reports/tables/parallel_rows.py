"""Rows that are not a single case: parts of a case, a case with its sibling, cases that differ in one setting."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.collectives import TRAFFIC, busbw_factor
from perfsuite.base.errors import PerfsuiteError
from perfsuite.base.mesh import AXES, MeshShape
from perfsuite.base.units import gb_per_s, significant
from perfsuite.published.lookup import chosen
from perfsuite.record.step import Traffic
from perfsuite.reports.document import grouped
from perfsuite.reports.tables.case import TableCase
from perfsuite.strategies.traffic import Call


def _grouped(cases: Iterable[TableCase], *names: str) -> list[list[TableCase]]:
    """Cases of one test function on one machine that have these settings in common."""

    def key(case: TableCase) -> tuple[str, ...]:
        settings = (str(case.settings.get(name)) for name in names)
        return (case.platform, case.fingerprint, case.case.partition("[")[0], *settings)

    return list(grouped((key(case), case) for case in cases).values())


def _different(cases: Sequence[TableCase], name: str) -> int:
    return len({str(case.settings.get(name)) for case in cases})


def _with_values(case: TableCase, settings: Mapping[str, Any], values: Mapping[str, float]) -> TableCase:
    return dataclasses.replace(case, settings={**case.settings, **settings}, values={**case.values, **values})


def of_several_lengths(cases: Sequence[TableCase]) -> list[TableCase]:
    """Return cases of several lengths, those with sequence parallelism compared with those without it."""
    rows: list[TableCase] = []
    for series in _grouped(cases, "model", "ranks", "global_batch_size", "dtype", "checkpointing"):
        both_ways = len({_splits_sequences(case) for case in series}) > 1
        if both_ways or _different(series, "sequence_length") > 1:
            for members in _grouped(series, "sequence_length"):
                rows += _beside_without(members)
    return rows


def _beside_without(members: Sequence[TableCase]) -> Iterator[TableCase]:
    split = [case for case in members if _splits_sequences(case)]
    whole = [case for case in members if not _splits_sequences(case)]
    for case in split or whole:
        yield _compared(case, whole[0] if whole else None, is_whole=not split)


def _splits_sequences(case: TableCase) -> bool:
    options = case.parameters.get("options")
    chosen = options.get("sequence_parallel", True) if isinstance(options, Mapping) else True
    return chosen is not False or int(case.settings.get("cp", 1)) > 1


def _compared(case: TableCase, whole: TableCase | None, *, is_whole: bool) -> TableCase:
    values, reasons = dict(case.values), dict(case.reasons)
    if is_whole:
        values = {name: value for name, value in values.items() if name != "peak_gib"}
        reasons["peak_gib"] = "nothing was measured with sequence parallelism"
    missing = "nothing was measured without sequence parallelism" if whole is None else whole.missing
    for name, source in (("peak_without_gib", "peak_gib"), ("speedup_same_length", "samples_per_s")):
        value = None if whole is None else whole.values.get(source)
        if value is None:
            reasons[name] = missing or f"the case without it has no {source}"
        elif source == "peak_gib":
            values[name] = value
        elif not is_whole and source in values:
            values[name] = values[source] / value
    return dataclasses.replace(case, values=values, reasons=reasons)


def of_several_methods(cases: Sequence[TableCase]) -> list[TableCase]:
    """Cases of the same model, length and ranks, one of them at least with attention over ranks."""
    return [
        case
        for group in _grouped(cases, "model", "sequence_length", "ranks")
        if any(int(case.settings.get("cp", 1)) > 1 for case in group)
        for case in group
    ]


def of_several_meshes(cases: Sequence[TableCase]) -> list[TableCase]:
    """Cases of the same model, ranks and batch, one of them at least on a mesh of several axes."""
    spread = [case for case in cases if case.settings.get("axes") and case.parameters.get("strategy") == "hybrid"]
    return [
        case
        for group in _grouped(spread, "model", "sequence_length", "ranks", "global_batch_size")
        if any("D (" in case.settings["axes"] for case in group)
        for case in group
    ]


def of_constant_devices(cases: Sequence[TableCase]) -> list[TableCase]:
    """Cases of the same model and devices cut into different numbers of stages; all cases where there are none."""
    groups = [group for group in _grouped(cases, "model", "ranks") if _different(group, "stages") > 1]
    return [case for group in groups for case in group] or list(cases)


def claimed(rows: Sequence[TableCase]) -> Iterator[str]:
    """Yield how much faster experts train than the dense model on as many ranks, and the claim of report 004."""
    for group in _grouped(rows, "ranks"):
        dense = [case for case in group if not case.settings.get("experts") and case.values.get("samples_per_s")]
        for case in group:
            rate = case.values.get("samples_per_s")
            if dense and rate and case.settings.get("experts"):
                ratio = significant(rate / dense[0].values["samples_per_s"], 3)
                yield (
                    f"{case.model} over {dense[0].model} on {case.ranks} {case.platform}: {ratio} times the samples/s; "
                    f"{_claim()}"
                )


@functools.cache
def _claim() -> str:
    ((_, table),) = chosen(["004/moe-claims"])
    column = next(column for column in table.columns if column.name == "value")
    cell = table.cell(table.rows[0], column)
    assert cell is not None, "the claim has a cell"
    label = f"[{table.judge().label}: {table.judge().reason}]"
    return f"the published report claims {cell.text.replace('×', '')} times {label}"


_COMPONENTS: Mapping[str, str] = {
    "mlp": "MLP or experts",
    "attention": "attention",
    "data": "gradients and parameters over data axes",
    "pipeline": "between stages",
    "other": "other",
}
"""In report 004's order, by part of the step."""
_TOTAL = "total"


def component_rows(cases: Sequence[TableCase]) -> list[TableCase]:
    """A row for each part of a step and one for all, as report 004 has them."""
    rows = []
    for case in cases:
        parts = {part.name: (part.compute_s, part.communication_s) for part in case.components}
        ordered = [(title, parts[name]) for name, title in _COMPONENTS.items() if name in parts]
        whole = tuple(sum(times) for times in zip(*parts.values(), strict=True))
        for place, (title, (compute_s, communication_s)) in enumerate([*ordered, (_TOTAL, whole)]):
            values = {"compute_time_s": compute_s, "communication_time_s": communication_s}
            if sum(whole) > 0:
                values["component_share"] = (compute_s + communication_s) / sum(whole)
            rows.append(_with_values(case, {"component": title, "component_order": place}, values))
    return rows


def step_remarks(rows: Sequence[TableCase]) -> Iterator[str]:
    """Throughput and MFU of the whole step, measured and published."""
    for case in {row.case: row for row in rows}.values():
        samples, mfu = case.values.get("samples_per_s"), case.values.get("mfu_percent")
        figures = [f"{significant(samples)} samples/s"] if samples else []
        figures.append(f"MFU {significant(mfu)} %" if mfu is not None else f"no MFU: {case.reasons.get('mfu_percent')}")
        yield f"whole step of {case.model} on {case.settings.get('mesh') or case.ranks}: {', '.join(figures)}"
    yield _published_step()


@functools.cache
def _published_step() -> str:
    ((_, table),) = chosen(["004/5d"])
    stated = {figure.role: figure for figure in table.stated}
    throughput, mfu = stated["throughput"], stated["mfu"]
    return (
        f"published, lines {throughput.line}, {mfu.line}: {throughput.text.replace(',', '')} samples/s, "
        f"MFU {mfu.text} % [{table.judge().label}]"
    )


_NO_FIGURES = {"expected_bytes": "no closed form", "message_busbw_gb_per_s": "a receive is timed at its sender"}


def traffic_rows(cases: Sequence[TableCase]) -> list[TableCase]:
    """A row for each axis, collective and part, with the bytes that the closed form has."""
    rows = []
    for case in cases:
        expected = _closed_form(case)
        for entry in case.traffic:
            axis = next((AXES.index(name) for name in entry.axis.split("-") if name in AXES), len(AXES))
            settings = {
                "axis": entry.axis,
                "axis_order": axis,
                "collective": entry.collective,
                "part": f"{entry.part}, uneven" if entry.uneven else entry.part,
            }
            row = _with_values(case, settings, _figures(entry, expected))
            rows.append(dataclasses.replace(row, reasons={**row.reasons, **_NO_FIGURES}))
    return rows


def _figures(entry: Traffic, expected: Mapping[tuple[str, str, str], float]) -> dict[str, float]:
    values = {"calls": float(entry.calls), "message_bytes": float(entry.message_bytes), "message_time_s": entry.time_s}
    key = (entry.axis, entry.collective, entry.part)
    if key in expected:
        values["expected_bytes"] = expected[key]
    if entry.time_s > 0 and entry.ranks > 1:
        factor = busbw_factor(entry.collective, entry.ranks) if entry.collective in TRAFFIC else 1.0
        values["message_busbw_gb_per_s"] = gb_per_s(entry.message_bytes * factor, entry.time_s)
    return values


def _closed_form(case: TableCase) -> dict[tuple[str, str, str], float]:
    """Bytes of the rank that has most, by axis, collective and part; empty where there is no closed form."""
    most: dict[tuple[str, str, str], float] = {}
    for call in _calls(case):
        key = (call.axis, call.collective, call.part)
        most[key] = max(most.get(key, 0.0), float(call.message_bytes))
    return most


def _calls(case: TableCase) -> Iterator[Call]:
    from perfsuite.workloads.training.train_step import TrainStep  # brings NumPy, which few reports need

    try:
        step = TrainStep(**{**case.parameters, "builds": tuple(case.parameters.get("builds", ()))})
        shape = MeshShape.on(case.ranks, step.mesh)
        plan, strategy = step.plan(shape), step.find_strategy()
    except (PerfsuiteError, TypeError):  # an unknown model or strategy, or an older perfsuite
        return
    for rank in range(shape.world_size):
        yield from strategy.traffic(plan, shape, rank) or ()
