"""The tables before the figures: machine and software as reports 002 to 004 have them, peaks as 001 has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.units import significant
from perfsuite.published.lookup import shipped
from perfsuite.record.result import Peak
from perfsuite.reports.document import Grid

_HARDWARE = (
    ("machine", "machine_model"),
    ("accelerators", "devices"),
    ("CPU", "cpu"),
    ("memory GiB", "memory_gib"),
    ("network", "network"),
    ("power caps", "power_caps"),
)
_SOFTWARE = (("operating system", "os"), ("kernel", "kernel"), ("container", "container"), ("Python", "python"))
_LIBRARIES = ("driver", "packages", "variables", "declared")
"""Fields that are tables of their own: a row per entry."""
_DTYPES = ("fp32", "tf32", "fp16", "bf16")


def environment_grids(machines: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Grid]:
    """Hardware and software of each machine, a column each; what no tool could read is empty.

    ``machines`` are names and environments as results carry them; a baseline file has the environment of its runs.
    """
    known = [(name, environment) for name, environment in machines if environment]
    if not known:
        return
    columns = ("", *(name for name, _ in known))
    environments = [environment for _, environment in known]
    for title, fields in (("Hardware", _HARDWARE), ("Software", _SOFTWARE)):
        rows = [(label, *(_text(environment.get(name)) for environment in environments)) for label, name in fields]
        rows += _library_rows(environments) if title == "Software" else []
        told = tuple(row for row in rows if any(row[1:]))
        if told:
            yield Grid(title=title, columns=columns, rows=told)


def _library_rows(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for field in _LIBRARIES:
        tables = [environment.get(field) or {} for environment in environments]
        names = sorted({name for table in tables for name in table})
        rows += [(name, *(_text(table.get(name)) for table in tables)) for name in names]
    return rows


def _text(value: Any) -> str:
    """One cell; ``unknown`` is no knowledge and stays out."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        counted = {text: sum(other == text for other in value) for text in dict.fromkeys(map(str, value))}
        return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counted.items())
    return "" if value in (None, "unknown") else str(value)


def topology_lines(machines: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The vendor tool's topology matrix of each machine that has one, as it printed it."""
    lines: list[str] = []
    for name, environment in machines:
        if environment.get("topology"):
            lines += [f"### Topology: {name}", "", "```", *str(environment["topology"]).splitlines(), "```", ""]
    return lines


def peaks_grid(peaks: Mapping[str, Mapping[str, Peak]]) -> Grid:
    """Dense peaks by platform with their sources, and those that report 001 states, with labels."""
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for platform, by_dtype in peaks.items():
        rows.append((platform, *(significant(by_dtype[dtype].value) if dtype in by_dtype else "" for dtype in _DTYPES)))
        sources = dict.fromkeys(peak.source for dtype, peak in by_dtype.items() if dtype in _DTYPES)
        notes.append(f"{platform}: {'; '.join(sources) or 'no peak is published'}")
    for name, stated in _stated_peaks():
        rows.append((f"published: {name}", *(stated[column][0] if column in stated else "" for column in _COLUMNS)))
        notes += [f"published: {name}, {column}: {reason}" for column, (_, reason) in stated.items() if reason]
        notes += [] if any(figure for figure, _ in stated.values()) else [f"published: {name}: a row without a figure"]
    rows = [(*row, *[""] * (1 + len(_COLUMNS) - len(row))) for row in rows]
    return Grid(
        title="Peaks, dense TFLOPS per device", columns=("platform", *_COLUMNS), rows=tuple(rows), notes=tuple(notes)
    )


_STATED = {"fp32": "fp32", "fp16_tensor": "fp16", "fp16": "fp16 (CUDA cores)"}
"""Columns of report 001's table of peaks -> column here."""
_COLUMNS = (*_DTYPES, "fp16 (CUDA cores)")


def _stated_peaks() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Device, and by column the peak with its label, empty without one, and why when the label is not M."""
    for table in (table for report in shipped() for table in report.tables if (report.report, table.id) == _PEAKS):
        columns = {column.name: column for column in table.columns}
        for row in table.rows:
            stated = {}
            for name, here in _STATED.items():
                cell, judgement = table.cell(row, columns[name]), table.judge(row, columns[name])
                number = cell.number(columns[name].index) if cell else None
                figure = f"{significant(float(number.value))} [{judgement.label}]" if number is not None else ""
                stated[here] = (figure, judgement.reason if figure and judgement.label != "M" else "")
            device = table.cell(row, columns["device"])
            if device:
                yield device.text, stated


_PEAKS = ("001", "peaks")
