"""Pipelines: the bubble for equal stages, for the measured durations, and as measured; timelines, worst first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perfsuite.base.errors import InvalidParameter
from perfsuite.base.units import format_seconds, plural
from perfsuite.metrics.pipeline import SIMULATION_TOLERANCE
from perfsuite.record.result import Result
from perfsuite.reports.document import MOST_BARS, Block, Chart, Charts, Drawing, Section, Words, grid, left_out
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.look import labels
from perfsuite.reports.page.sections.training import short
from perfsuite.reports.pipeline import binding_sentence, pipeline_row
from perfsuite.reports.timelines.picture import timeline_svg

_BUBBLES = (
    ("equal stages", "balanced_bubble_ratio"),
    ("same durations, simulated", "simulated_bubble_ratio"),
    ("measured", "bubble_ratio"),
)
_STEP_PX = 860
"""Width of a step on a page of 1280 pixels."""
MOST_TIMELINES = 24
MOST_BYTES = 700_000
"""Maximum size of all timelines; the page has 5 MB for them and 10,000 cases."""


def section(material: Material) -> Section | None:
    """Return the bubbles on one axis, then the timelines."""
    pipelines = sorted(
        (case for case in material.measured if "bubble_ratio" in case.values),
        key=lambda case: (-case.values["bubble_ratio"], case.case),
    )
    if not pipelines:
        return None
    drawings, rest = _timelines(pipelines)
    blocks: list[Block] = [Charts(charts=_bubbles(pipelines)), *drawings]
    if rest:
        text = f"{plural(rest, 'more timeline')}: perfsuite trace JOURNAL --out DIR draws all"
        blocks.append(Words(text=text))
    return Section(key="pipelines", title="Pipelines", blocks=blocks)


def _bubbles(cases: Sequence[Result]) -> list[Chart]:
    """Return at most two charts, the worst bubbles in the first."""
    table = grid(
        ("case", *(name for name, _ in _BUBBLES), "remark"),
        [
            (
                case.name,
                *(_percent(case, key) for _, key in _BUBBLES),
                "smaller than simulated with the same durations: a measurement error"
                if case.values["bubble_ratio"] < case.values.get("simulated_bubble_ratio", 0.0) - SIMULATION_TOLERANCE
                else "",
            )
            for case in cases
        ],
        ("bubble_ratio: idle share of all ranks' time",),
    )
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
