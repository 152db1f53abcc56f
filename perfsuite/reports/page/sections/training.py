"""Training steps: parts of time and memory, exposed communication, throughput, published rows, scaling, pipelines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.text import bare_name
from perfsuite.base.units import GIB, count, format_seconds, plural, readable_unit, significant, size
from perfsuite.metrics.pipeline import impossible_bubble
from perfsuite.record.result import Result
from perfsuite.reports.document import (
    MOST_BARS,
    MOST_ROWS,
    Block,
    Chart,
    Charts,
    Drawing,
    Grid,
    Section,
    Table,
    Words,
    grid,
    grid_of,
    left_out,
    spread_out,
)
from perfsuite.reports.families import drawable, marked
from perfsuite.reports.ids import class_of, test_of, without_ranks, words_of
from perfsuite.reports.material import Material, recordings
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels, shortened, time_unit
from perfsuite.reports.pipeline import binding_sentence, pipeline_row
from perfsuite.reports.scaling import Scaling, scaling_grid, scalings
from perfsuite.reports.tables.grids import grids_of
from perfsuite.reports.tables.recording import gathered
from perfsuite.reports.tables.report import STYLES
from perfsuite.reports.timelines.picture import timeline_svg

MOST_MODELS = 2  # Maximum charts of time, and of memory: one for each of the models with the most cases.


class _Parts(NamedTuple):
    """The parts of a step's time or of a device's memory."""

    title: str
    names: tuple[str, ...]
    end: str  # Suffix of the metrics.
    in_unit: float  # Seconds or bytes of one unit of the metrics.
    unit: str  # s or B.

    def amount(self, case: Result, name: str) -> float | None:
        """Return the seconds or bytes of a part; None for an unknown part."""
        value = case.values.get(f"{name}_{self.end}")
        return None if value is None else value * self.in_unit

    def text(self, amount: float | None) -> str:
        """Return an amount with its unit."""
        return "" if amount is None else format_seconds(amount, 3) if self.unit == "s" else size(amount)


_TIME_PARTS = _Parts("Time of one step", ("data", "forward", "backward", "optimizer", "remainder"), "ms", 1e-3, "s")
_MEMORY_PARTS = _Parts(
    "Memory per device", ("weights", "gradients", "optimizer", "activations", "untracked"), "gib", GIB, "B"
)


def section(material: Material) -> Section | None:
    """Return the section; None without training steps."""
    training = [case for case in material.measured if "step_time_s" in case.values]
    if not training:
        return None
    charts = [*_stacks(training, _TIME_PARTS), *_stacks(training, _MEMORY_PARTS), *_exposed(training)]
    blocks: list[Block] = [Charts(charts=charts)] if charts else []
    if (throughput := _throughput(training)).rows:
        blocks.append(Table(grid=throughput))
    blocks += [Table(grid=published, folded=True) for published in _published(material)]
    return Section(key="training", title="Training", blocks=blocks)


def short(case: Result) -> str:
    """Return the test and the words of the id, without platform and model."""
    words = words_of(case.case).removeprefix(f"{case.platform}-").replace(str(case.parameters.get("model", "\0")), "")
    return f"{test_of(case.case).removeprefix('test_')} {words.strip('-').replace('--', '-')}".strip()


def _stacks(cases: Sequence[Result], parts: _Parts) -> list[Chart]:
    models: dict[str, list[Result]] = {}
    for case in cases:
        if sum(f"{name}_{parts.end}" in case.values for name in parts.names) > 1:
            models.setdefault(str(case.parameters.get("model", class_of(case.workload))), []).append(case)
    largest = sorted(models.items(), key=lambda pair: -len(pair[1]))[:MOST_MODELS]
    return [_stack(members, parts, f"{parts.title}, {model}") for model, members in largest]


def _stack(cases: Sequence[Result], parts: _Parts, title: str) -> Chart:
    calm, disturbed = drawable(cases) if parts.unit == "s" else (cases, [])
    drawn = spread_out(calm)
    labelled = labels([short(case) for case in drawn])
    whole = [sum(max(0.0, parts.amount(case, name) or 0.0) for name in parts.names) for case in drawn]
    unit, in_unit = time_unit(max(whole, default=1.0)) if parts.unit == "s" else readable_unit(whole)
    values = []
    for row, case in zip(labelled, drawn, strict=True):
        for place, name in enumerate(parts.names):
            amount = parts.amount(case, name)
            tip = f"{case.name}: {name} {parts.text(amount) or 'unknown'}"
            value = max(0.0, amount or 0.0) / in_unit
            values.append({"row": row, "part": name, "place": place, "value": value, "tip": tip})
    mark = marked if parts.unit == "s" else lambda _, text: text
    cells = [
        (case.name, *(mark(case, parts.text(parts.amount(case, name))) for name in parts.names))
        for case in cases[:MOST_ROWS]
    ]
    table = grid(("case", *parts.names), cells, disturbed, of=len(cases))
    axis = f"{unit} per {'step' if parts.unit == 's' else 'device'}"
    spec = rows.stack(values, labelled, list(parts.names), axis) if drawn else {}
    return Chart(title=title, spec=spec, grid=table, caption=left_out(len(drawn), len(calm)))


def _exposed(cases: Sequence[Result]) -> Iterator[Chart]:
    """Yield the chart of the share of a step that waits for communication, with its interval."""
    name = "exposed_communication_percent"
    found = [case for case in cases if name in case.values and case.world_size > 1]
    if not found:
        return
    drawn = spread_out(sorted(found, key=lambda case: -case.values[name]))
    names = labels([short(case) for case in drawn])
    values = []
    for row, case in zip(names, drawn, strict=True):
        low, high = _interval(case) or (None, None)
        tip = f"{case.name}: {case.values[name]:.0f} % {_between(case)}".strip()
        ends = {"low": low and low / 100, "high": high and high / 100}
        values.append({"row": row, "at": case.values[name] / 100, **ends, "tone": "plain", "tip": tip})
    columns: dict[str, Callable[[Result], str]] = {
        "case": lambda case: case.name,
        "ranks": lambda case: str(case.world_size),
        "exposed": lambda case: f"{case.values[name]:.1f} %",
        "95 % interval": _between,
    }
    note = "share of the step that waits for communication, without the overlapped part; below 0: disturbed machine"
    table = grid_of(found, columns, [note])
    spec = rows.forest(values, names, "share of the step")
    yield Chart(title="Exposed communication", spec=spec, grid=table, caption=left_out(len(drawn), len(found)))


def _interval(case: Result) -> tuple[float, float] | None:
    low, high = (case.values.get(f"exposed_communication_{end}_percent") for end in ("low", "high"))
    return None if low is None or high is None else (low, high)


def _between(case: Result) -> str:
    ends = _interval(case)
    return f"[{ends[0]:.1f}, {ends[1]:.1f}] %" if ends else ""


_PROCESSED = frozenset({"tokens_per_s_per_device", "samples_per_s"})


def _throughput(cases: Sequence[Result]) -> Grid:
    cases = [case for case in cases if not _PROCESSED.isdisjoint(case.values)]
    conventions = dict.fromkeys(
        metric.convention for case in cases[:MOST_ROWS] for metric in case.metrics if metric.name == "mfu_percent"
    )
    mfu = f"MFU ({', '.join(conventions)})" if conventions else "MFU"

    def rate(name: str) -> Callable[[Result], str]:
        return lambda case: marked(case, count(case.values[name])) if name in case.values else ""

    columns: dict[str, Callable[[Result], str]] = {
        "case": lambda case: case.name,
        "ranks": lambda case: str(case.world_size),
        "step": lambda case: marked(case, format_seconds(case.median_s, 3)),
        "tokens/s per device": rate("tokens_per_s_per_device"),
        "samples/s, all": rate("samples_per_s"),
        mfu: _mfu,
        "MFU (PaLM)": _of_palm,
    }
    return grid_of(cases, columns, title="Throughput")


def _mfu(case: Result) -> str:
    metric = next((metric for metric in case.metrics if metric.name == "mfu_percent"), None)
    if metric is None:
        return f"{significant(case.values['mfu_percent'], 3)} %" if "mfu_percent" in case.values else ""
    if metric.is_above_measured_peak or (metric.value or 0) > 100:
        return "above the peak"
    return "" if metric.value is None else f"{significant(metric.value, 3)} %"


def _of_palm(case: Result) -> str:
    """Return the MFU by the formula of the PaLM paper, over the same peak."""
    exact, palm = (case.values.get(f"{name}tflops_per_device") for name in ("", "palm_"))
    mfu = case.values.get("mfu_percent")
    if not exact or not palm or mfu is None or mfu * palm / exact > 100:
        return ""
    return f"{significant(mfu * palm / exact, 3)} %"


def _published(material: Material) -> list[Grid]:
    """Return the tables of published reports that have both measured and published rows."""
    found = gathered(recordings(material), None)
    lines = []
    for style in STYLES.values():
        tables = tuple(spec for spec in style.tables if spec.published)
        for table in grids_of(dataclasses.replace(style, tables=tables), found):
            if any("published:" in cell for row in table.rows for cell in row):
                title = f"{table.title}, published rows after them"
                lines.append(grid(table.columns, table.rows, table.notes, title))
    return lines


MOST_SERIES = 6  # Maximum lines of a chart: the series with the most numbers of ranks.
_MOST_COMPUTED = 30  # Maximum series of the table.


def scaling(material: Material) -> Section | None:
    """Return a chart per kind of scaling."""
    results = _of_series(material.measured)
    series: dict[tuple[str, str], list[Scaling]] = {}
    for one in scalings(results).values():
        if not one.doubt:  # neither a disturbed time nor a speed-up above linear is drawn
            series.setdefault((one.kind, without_ranks(one.point.case)), []).append(one)
    charts = []
    for kind in ("weak", "strong", "mixed"):
        found = {
            case: sorted(points, key=lambda one: one.point.ranks) for (of, case), points in series.items() if of == kind
        }
        several = {case: points for case, points in found.items() if len({p.point.ranks for p in points}) > 1}
        if several:
            charts.append(_scaling_chart(kind, several))
    if not charts:
        return None
    return Section(key="scaling", title="Scaling", blocks=[Charts(charts=charts)])


def _of_series(cases: Sequence[Result]) -> list[Result]:
    """Return the results of the series with the most numbers of ranks."""
    series: dict[str, dict[int, Result]] = {}
    for case in cases:
        if case.work.samples or case.work.tokens:
            series.setdefault(f"{case.fingerprint} {without_ranks(case.case)}", {})[case.world_size] = case
    several = sorted((members for members in series.values() if len(members) > 1), key=lambda members: -len(members))
    return [result for members in several[:_MOST_COMPUTED] for result in members.values()]


def _scaling_chart(kind: str, series: dict[str, list[Scaling]]) -> Chart:
    ordered = sorted(series.items(), key=lambda pair: -len(pair[1]))
    drawn = ordered[:MOST_SERIES]
    names = {case: shortened(bare_name(case).removeprefix("test_"), 30) for case, _ in drawn}
    points: list[dict[str, Any]] = []
    for case, members in drawn:
        for one in members:
            tip = f"{bare_name(one.point.case)}: x {one.speed_up:.3g} over {one.base_name}"
            points.append({"ranks": one.point.ranks, "speed": one.speed_up, "series": names[case], "tip": tip})
    least = min(one.base.ranks for _, members in drawn for one in members)
    most = max(one.point.ranks for _, members in drawn for one in members)
    linear = [{"ranks": ranks, "speed": ranks / least} for ranks in (least, most)]
    table = scaling_grid(one for _, members in ordered for one in members)
    caption = "; ".join(filter(None, ("dotted: linear", left_out(len(drawn), len(ordered)))))
    spec = rows.scaling(points, linear, list(dict.fromkeys(names.values())), f"speed-up over {plural(least, 'rank')}")
    return Chart(title=f"{kind.capitalize()} scaling", spec=spec, grid=table, caption=caption)


_BUBBLES = (
    ("equal stages", "balanced_bubble_ratio"),
    ("same durations, simulated", "simulated_bubble_ratio"),
    ("measured", "bubble_ratio"),
)
_STEP_PX = 860  # Width of a step on a page of 1280 pixels.
MOST_TIMELINES = 24
MOST_BYTES = 700_000  # Maximum size of all timelines; the page has 5 MB for them and 10,000 cases.


def pipelines(material: Material) -> Section | None:
    """Return the bubbles on one axis, then the timelines."""
    cases = sorted(
        (case for case in material.measured if "bubble_ratio" in case.values),
        key=lambda case: (-case.values["bubble_ratio"], case.case),
    )
    if not cases:
        return None
    drawings, rest = _timelines(cases)
    blocks: list[Block] = [Charts(charts=_bubbles(cases)), *drawings]
    if rest:
        blocks.append(Words(text=f"{plural(rest, 'more timeline')}: perfsuite trace JOURNAL --out DIR draws all"))
    return Section(key="pipelines", title="Pipelines", blocks=blocks)


def _bubbles(cases: Sequence[Result]) -> list[Chart]:
    cells = []
    for case in cases:
        is_wrong = impossible_bubble(case.values["bubble_ratio"], case.values.get("simulated_bubble_ratio", 0.0))
        remark = "smaller than simulated with the same durations: a measurement error" if is_wrong else ""
        cells.append((case.name, *(_percent(case, key) for _, key in _BUBBLES), remark))
    columns = ("case", *(name for name, _ in _BUBBLES), "remark")
    table = grid(columns, cells, ("bubble_ratio: idle share of all ranks' time",))
    drawn = cases[: 2 * MOST_BARS]
    caption = left_out(len(drawn), len(cases))
    charts = [Chart(title="Bubbles, worst first", spec=_spec(drawn[:MOST_BARS]), grid=table, caption=caption)]
    if len(drawn) > MOST_BARS:
        charts.append(Chart(title="Bubbles, continued", spec=_spec(drawn[MOST_BARS:])))
    return charts


def _spec(cases: Sequence[Result]) -> Mapping[str, Any]:
    names = labels([short(case) for case in cases])
    values = [
        {"row": row, "what": name, "value": case.values[key], "tip": f"{case.name}: {name} {_percent(case, key)}"}
        for row, case in zip(names, cases, strict=True)
        for name, key in _BUBBLES
        if key in case.values
    ]
    return rows.several(values, names, [name for name, _ in _BUBBLES], "idle share of the step", "~%")


def _percent(case: Result, key: str) -> str:
    return f"{100 * case.values[key]:.1f} %" if key in case.values else ""


def _timelines(cases: Sequence[Result]) -> tuple[list[Drawing], int]:
    """Return the pictures that fit, and the number of those that do not."""
    there = [case for case in cases if case.measurement is not None]
    drawings: list[Drawing] = []
    room = MOST_BYTES
    for case in there[:MOST_TIMELINES]:
        drawing = _timeline(case, folded=bool(drawings))
        if drawing is None:
            continue
        room -= len(drawing.svg)
        if room < 0:
            break
        drawings.append(drawing)
    return drawings, len(there) - len(drawings)


def _timeline(case: Result, *, folded: bool) -> Drawing | None:
    if case.measurement is None or (timeline := case.measurement.timeline) is None:
        return None
    title = f"{case.name}: bubble {case.values['bubble_ratio']:.0%}"
    try:
        row = pipeline_row(case.case, timeline, case.measurement)
        svg = timeline_svg(timeline, title=case.name, step_px=_STEP_PX)
    except InvalidParameter as damage:
        return Drawing(title=title, svg="", grid=grid(("damaged",), [(str(damage),)]), folded=folded)
    facts = [
        ("step", format_seconds(case.median_s, 3)),
        ("schedule", row.schedule),
        ("micro-batches", "" if row.num_micro_batches is None else str(row.num_micro_batches)),
        ("stages per rank", "" if row.stages_per_rank is None else str(row.stages_per_rank)),
        ("maximum in flight, by rank", " ".join(map(str, row.in_flight))),
        ("bottleneck", binding_sentence(row.imbalance) if row.imbalance else ""),
    ]
    table = grid(("this step", ""), [fact for fact in facts if fact[1]])
    return Drawing(title=title, svg=svg, grid=table, folded=folded)
