"""Training steps: where their time and memory go, what communication they wait for, how fast they train."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfsuite.base.units import GIB, count, format_seconds, readable_unit, significant, size
from perfsuite.record.result import Result
from perfsuite.reports.document import MOST_ROWS, Block, Chart, Charts, Grid, Section, Table, grid, left_out, spread_out
from perfsuite.reports.ids import class_of, test_of, words_of
from perfsuite.reports.material import Material, recordings
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels
from perfsuite.reports.tables.grids import grids_of
from perfsuite.reports.tables.recording import gathered
from perfsuite.reports.tables.styles import STYLES

MOST_MODELS = 2
"""Charts of time and of memory: the models with most cases have one each."""


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What sums up to a step's time or to a device's memory."""

    title: str
    names: tuple[str, ...]
    end: str
    """Of the metric's name."""
    in_unit: float
    """Seconds or bytes of one."""
    unit: str


_TIME_PARTS = _Parts(
    title="Time of one step",
    names=("data", "forward", "backward", "optimizer", "remainder"),
    end="ms",
    in_unit=1e-3,
    unit="s",
)
_MEMORY_PARTS = _Parts(
    title="Memory per device",
    names=("weights", "gradients", "optimizer", "activations", "untracked"),
    end="gib",
    in_unit=GIB,
    unit="B",
)


def section(material: Material) -> Section | None:
    """Stacks per model, exposed communication, throughput and MFU, published rows beside."""
    training = [case for case in material.measured if "step_time_s" in case.values]
    if not training:
        return None
    charts = [
        *_stacks(training, _TIME_PARTS),
        *_stacks(training, _MEMORY_PARTS),
    ]
    exposed = _exposed(training)
    blocks: list[Block] = [Charts(charts=[*charts, *([exposed] if exposed else [])])] if charts or exposed else []
    if (throughput := _throughput(training)).rows:
        blocks.append(Table(grid=throughput))
    blocks += [Table(grid=beside, folded=True) for beside in _published(material)]
    return Section(key="training", title="Training", blocks=blocks)


def by_model(cases: Sequence[Result]) -> dict[str, list[Result]]:
    """Cases by model, the model with most of them first."""
    models: dict[str, list[Result]] = {}
    for case in cases:
        models.setdefault(str(case.parameters.get("model", class_of(case.workload))), []).append(case)
    return dict(sorted(models.items(), key=lambda pair: -len(pair[1])))


def short(case: Result) -> str:
    """Test and words without platform and model, which the chart's title has."""
    words = words_of(case.case).removeprefix(f"{case.platform}-").replace(str(case.parameters.get("model", "\0")), "")
    return f"{test_of(case.case).removeprefix('test_')} {words.strip('-').replace('--', '-')}".strip()


def _stacks(cases: Sequence[Result], parts: _Parts) -> list[Chart]:
    known = [case for case in cases if sum(f"{name}_{parts.end}" in case.values for name in parts.names) > 1]
    return [
        _stack(members, parts, f"{parts.title}, {model}")
        for model, members in list(by_model(known).items())[:MOST_MODELS]
    ]


def _stack(cases: Sequence[Result], parts: _Parts, title: str) -> Chart:
    drawn = spread_out(cases)
    labelled = labels([short(case) for case in drawn])
    whole = [sum(_amounts(case, parts).values()) for case in drawn]
    said, axis_unit = ("s per step", 1.0) if parts.unit == "s" else _in_bytes(whole)
    values: list[dict[str, Any]] = []
    for row, case in zip(labelled, drawn, strict=True):
        for place, (name, amount) in enumerate(_amounts(case, parts).items()):
            told = f"{case.name}: {name} {_amount(amount, parts.unit)}"
            values.append({"row": row, "part": name, "place": place, "value": amount / axis_unit, "told": told})
    table = grid(
        ("case", *parts.names),
        [(case.name, *_cells(case, parts)) for case in cases[:MOST_ROWS]],
        of=len(cases),
    )
    spec = rows.stack(values, labelled, list(parts.names), said)
    return Chart(title=title, spec=spec, grid=table, caption=left_out(len(drawn), len(cases)))


def _amounts(case: Result, parts: _Parts) -> dict[str, float]:
    """Seconds or bytes of each part; a part that is not known or below 0 has no length."""
    return {name: max(0.0, case.values.get(f"{name}_{parts.end}", 0.0)) * parts.in_unit for name in parts.names}


def _cells(case: Result, parts: _Parts) -> list[str]:
    known = (case.values.get(f"{name}_{parts.end}") for name in parts.names)
    return ["" if value is None else _amount(value * parts.in_unit, parts.unit) for value in known]


def _in_bytes(sizes: Sequence[float]) -> tuple[str, float]:
    name, unit_bytes = readable_unit(sizes)
    return f"{name} per device", float(unit_bytes)


def _amount(amount: float, unit: str) -> str:
    return format_seconds(amount, 3) if unit == "s" else size(amount)


def _exposed(cases: Sequence[Result]) -> Chart | None:
    """What steps lose to communication, with its interval."""
    name = "exposed_communication_percent"
    known = [case for case in cases if name in case.values and case.world_size > 1]
    if not known:
        return None
    drawn = spread_out(sorted(known, key=lambda case: -case.values[name]))
    names = labels([short(case) for case in drawn])
    values = []
    for row, case in zip(names, drawn, strict=True):
        low, high = (_end(case, end) for end in ("low", "high"))
        at = case.values[name] / 100
        between = "" if low is None or high is None else f" [{low:.0%}, {high:.0%}]"
        values.append(
            {
                "row": row,
                "at": at,
                "low": low,
                "high": high,
                "tone": "plain",
                "told": f"{case.name}: {at:.0%}{between}",
            }
        )
    table = grid(
        ("case", "ranks", "exposed", "95 % interval"),
        [(case.name, str(case.world_size), f"{case.values[name]:.1f} %", _between(case)) for case in known[:MOST_ROWS]],
        ("the share of the step that waits for communication, overlap taken off; below 0: the machine was not quiet",),
        of=len(known),
    )
    spec = rows.forest(values, names, "share of the step")
    return Chart(title="Exposed communication", spec=spec, grid=table, caption=left_out(len(drawn), len(known)))


def _end(case: Result, end: str) -> float | None:
    value = case.values.get(f"exposed_communication_{end}_percent")
    return None if value is None else value / 100


def _between(case: Result) -> str:
    low, high = _end(case, "low"), _end(case, "high")
    return "" if low is None or high is None else f"[{100 * low:.1f}, {100 * high:.1f}] %"


_PROCESSED = frozenset({"tokens_per_s_per_device", "samples_per_s"})


def _throughput(cases: Sequence[Result]) -> Grid:
    cases = [case for case in cases if not _PROCESSED.isdisjoint(case.values)]
    conventions = dict.fromkeys(
        metric.convention for case in cases[:MOST_ROWS] for metric in case.metrics if metric.name == "mfu_percent"
    )
    mfu = f"MFU ({', '.join(conventions)})" if conventions else "MFU"
    rows_ = [
        (
            case.name,
            str(case.world_size),
            format_seconds(case.median_s, 3),
            _rate(case.values, "tokens_per_s_per_device"),
            _rate(case.values, "samples_per_s"),
            _mfu(case),
            _of_palm(case),
        )
        for case in cases[:MOST_ROWS]
    ]
    columns = ("case", "ranks", "step", "tokens/s per device", "samples/s, all", mfu, "MFU (PaLM)")
    return grid(columns, rows_, title="Throughput", of=len(cases))


def _rate(values: Mapping[str, float], name: str) -> str:
    return count(values[name]) if name in values else ""


def _mfu(case: Result) -> str:
    metric = next((metric for metric in case.metrics if metric.name == "mfu_percent"), None)
    if metric is None:
        return f"{significant(case.values['mfu_percent'], 3)} %" if "mfu_percent" in case.values else ""
    if metric.is_above_measured_peak or (metric.value or 0) > 100:
        return "above the peak"
    return "" if metric.value is None else f"{significant(metric.value, 3)} %"


def _of_palm(case: Result) -> str:
    """MFU counted as the PaLM paper does, over the same peak."""
    exact, palm = (case.values.get(f"{name}tflops_per_device") for name in ("", "palm_"))
    told = case.values.get("mfu_percent")
    if not exact or not palm or told is None or told * palm / exact > 100:
        return ""
    return f"{significant(told * palm / exact, 3)} %"


def _published(material: Material) -> list[Grid]:
    """Tables of the published reports that have rows of both: measured, and published with label and reason."""
    told = gathered(recordings(material), None)
    lines = []
    for style in STYLES.values():
        tables = tuple(spec for spec in style.tables if spec.published)
        for table in grids_of(dataclasses.replace(style, tables=tables), told):
            if any("published:" in cell for row in table.rows for cell in row):
                title = f"{table.title}, published rows after them"
                lines.append(grid(table.columns, table.rows, table.notes, title))
    return lines
