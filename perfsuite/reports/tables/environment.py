"""The tables before the figures: machine and software as reports 002 to 004 have them, peaks as 001 has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsuite.base.units import significant
from perfsuite.published.lookup import chosen
from perfsuite.published.records import PublishedTable
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
_LIBRARIES = ("driver", "packages", "variables", "declared")  # Fields that are tables of their own: a row per entry.
_DTYPES = ("fp32", "tf32", "fp16", "bf16")


_PUBLISHED: Mapping[str, str] = {
    "accelerator": "accelerators",
    "cpu": "CPU",
    "memory": "memory GiB",
    "container image": "container",
    "musa toolkits": "musa_toolkits",
}
"""Names of a report's quantities -> labels here, where they differ."""
_PUBLISHED_HARDWARE = ("hosts", "accelerators per host", "network adapter")
"""Quantities of the reports that are hardware and have no label here."""
_NEITHER = ("model by the title", "model by the text", "logs")
"""Quantities among them that are neither hardware nor software."""


def environment_grids(machines: Sequence[tuple[str, Mapping[str, Any]]], reports: Sequence[str] = ()) -> Iterator[Grid]:
    """Hardware and software of each machine, a column each, then of ``reports`` that print them; unknown is empty.

    ``machines`` are names and environments as results carry them; a baseline file has the environment of its runs.
    """
    machines_known = [(name, environment) for name, environment in machines if environment]
    published = {report: values for report in reports if (values := _published_environment(report))}
    columns = ("", *(name for name, _ in machines_known), *(f"published: {report}" for report in published))
    environments = [environment for _, environment in machines_known]
    hardware = [label for label, _ in _HARDWARE] + list(_PUBLISHED_HARDWARE)
    for title, fields in (("Hardware", _HARDWARE), ("Software", _SOFTWARE)):
        rows = [(label, *(_text(environment.get(name)) for environment in environments)) for label, name in fields]
        rows += _library_rows(environments) if title == "Software" else []
        labels = [row[0] for row in rows]
        there = dict.fromkeys(label for values in published.values() for label in values)
        further = [label for label in there if label not in labels and (label in hardware) == (title == "Hardware")]
        rows += [(label, *[""] * len(machines_known)) for label in further]
        whole = ((*row, *(values.get(row[0], "") for values in published.values())) for row in rows)
        if kept := tuple(row for row in whole if any(row[1:])):
            yield Grid(title=title, columns=columns, rows=kept)


def _published_environment(report: str) -> Mapping[str, str]:
    values: dict[str, str] = {}
    for table in _published_tables(report, "environment"):
        for row in table.rows:
            quantity, value = (table.cell(row, column) for column in table.printed_columns)
            if quantity and value and quantity.text not in _NEITHER:
                values.setdefault(_PUBLISHED.get(quantity.text, quantity.text), value.text)
    return values


def _published_tables(report: str, name: str) -> list[PublishedTable]:
    return [table for _, table in chosen([report]) if table.id == name]


def _library_rows(environments: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for field in _LIBRARIES:
        tables = [environment.get(field) or {} for environment in environments]
        names = sorted({name for table in tables for name in table})
        rows += [(name, *(_text(table.get(name)) for table in tables)) for name in names]
    return rows


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        counted = Counter(map(str, value))
        return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counted.items())
    return "" if value in (None, "unknown") else str(value)


def topology_lines(machines: Sequence[tuple[str, Mapping[str, Any]]], reports: Sequence[str] = ()) -> list[str]:
    """The vendor tool's topology matrix of each machine that has one, as it printed it, then of ``reports``."""
    lines: list[str] = []
    for name, environment in machines:
        if environment.get("topology"):
            lines += [f"### Topology: {name}", "", "```", *str(environment["topology"]).splitlines(), "```", ""]
    for report in reports:
        for table in _published_tables(report, "topology"):
            matrix = [["", *(column.title for column in table.printed_columns[1:])]]
            for row in table.rows:
                cells = (table.cell(row, column) for column in table.printed_columns)
                matrix.append([cell.text if cell else "" for cell in cells])
            widths = [max(map(len, column)) for column in zip(*matrix, strict=True)]
            printed = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in matrix)
            lines += [f"### Topology: published, {report}", "", "```", *printed, "```", ""]
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
    title = "Peaks, dense TFLOPS per device"
    return Grid(title=title, columns=("platform", *_COLUMNS), rows=tuple(rows), notes=tuple(notes))


_STATED = {"fp32": "fp32", "fp16_tensor": "fp16", "fp16": "fp16 (CUDA cores)"}
"""Columns of report 001's table of peaks -> column here."""
_COLUMNS = (*_DTYPES, "fp16 (CUDA cores)")


def _stated_peaks() -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Device, and by column the peak with its label, empty without one, and why when the label is not M."""
    for table in _published_tables("001", "peaks"):
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
