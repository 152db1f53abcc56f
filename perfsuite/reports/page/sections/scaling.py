"""Scaling: speed-up over ranks beside the linear line, weak and strong apart; efficiency in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfsuite.base.text import bare_name
from perfsuite.base.units import plural
from perfsuite.record.result import Result
from perfsuite.reports.document import Chart, Charts, Section, left_out
from perfsuite.reports.ids import without_ranks
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts.curves import scaling as curves
from perfsuite.reports.page.charts.look import shortened
from perfsuite.reports.scaling import Scaling, scaling_grid, scalings

MOST_SERIES = 6
"""Lines of a chart: those with most numbers of ranks."""
_MOST_KNOWN = 30
"""Series that are looked at."""


def section(material: Material) -> Section | None:
    """A chart per kind of scaling."""
    results = _of_series(material.measured)
    series: dict[tuple[str, str], list[Scaling]] = {}
    for scaling in scalings(results).values():
        if not scaling.doubt:  # neither a disturbed time nor a speed-up above linear is drawn
            series.setdefault((scaling.kind, without_ranks(scaling.point.case)), []).append(scaling)
    charts = []
    for kind in ("weak", "strong", "mixed"):
        mine = {case: sorted(points, key=_ranks) for (of, case), points in series.items() if of == kind}
        several = {case: points for case, points in mine.items() if len({p.point.ranks for p in points}) > 1}
        if several:
            charts.append(_chart(kind, several))
    if not charts:
        return None
    return Section(key="scaling", title="Scaling", blocks=[Charts(charts=charts)])


def _of_series(cases: Sequence[Result]) -> list[Result]:
    """Results of the series with most numbers of ranks, no more than a reader looks through."""
    series: dict[str, dict[int, Result]] = {}
    for case in cases:
        if case.work.samples or case.work.tokens:
            series.setdefault(f"{case.fingerprint} {without_ranks(case.case)}", {})[case.world_size] = case
    several = sorted((members for members in series.values() if len(members) > 1), key=lambda members: -len(members))
    return [result for members in several[:_MOST_KNOWN] for result in members.values()]


def _ranks(scaling: Scaling) -> int:
    return scaling.point.ranks


def _chart(kind: str, series: dict[str, list[Scaling]]) -> Chart:
    ordered = sorted(series.items(), key=lambda pair: -len(pair[1]))
    drawn = ordered[:MOST_SERIES]
    names = {case: shortened(bare_name(case).removeprefix("test_"), 30) for case, _ in drawn}
    points: list[dict[str, Any]] = []
    for case, members in drawn:
        for scaling in members:
            told = f"{bare_name(scaling.point.case)}: x {scaling.speed_up:.3g} over {scaling.base_name}"
            points.append(
                {"ranks": scaling.point.ranks, "speed": scaling.speed_up, "series": names[case], "told": told}
            )
    least = min(scaling.base.ranks for _, members in drawn for scaling in members)
    most = max(scaling.point.ranks for _, members in drawn for scaling in members)
    linear = [{"ranks": ranks, "speed": ranks / least} for ranks in (least, most)]
    table = scaling_grid(scaling for _, members in ordered for scaling in members)
    caption = "; ".join(filter(None, ("dotted: linear", left_out(len(drawn), len(ordered)))))
    spec = curves(points, linear, list(dict.fromkeys(names.values())), f"speed-up over {plural(least, 'rank')}")
    return Chart(title=f"{kind.capitalize()} scaling", spec=spec, grid=table, caption=caption)
