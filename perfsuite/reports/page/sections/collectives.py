"""Collectives: bus bandwidth over message size, fits t = alpha + S / beta, and the matrix of all pairs of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perfsuite.base.collectives import busbw_factor
from perfsuite.base.units import format_seconds, plural, readable_rate, scaled, size
from perfsuite.record.result import Result
from perfsuite.reports.document import Block, Chart, Charts, Grid, Section, Table, Words, grid_of, spread_out
from perfsuite.reports.families import drawable, marked, share_of_peak
from perfsuite.reports.ids import kernel_of
from perfsuite.reports.material import Material
from perfsuite.reports.page.charts import rows
from perfsuite.reports.page.charts.rows import bandwidth
from perfsuite.reports.pairs import PairMatrix, pair_grids, pair_matrices
from perfsuite.reports.terminal import CollectiveFit, fit_collectives, fits_grid

_MOST_DRAWN = 16  # Maximum ranks of a matrix that is drawn; a larger one is only a table.
MOST_MATRICES = 12  # Maximum matrices; those with slow links come first.


def pair_blocks(results: Sequence[Result]) -> list[Block]:
    """Return a chart and a table for every matrix."""
    matrices = pair_matrices(results)
    shown = sorted(matrices, key=lambda matrix: not matrix.slow)[:MOST_MATRICES]
    cases = {matrix.case for matrix in shown}
    pictures = {matrix.title: matrix for matrix in shown if len(matrix.names) <= _MOST_DRAWN}
    grids = pair_grids([result for result in results if result.case in cases])
    charts = [
        Chart(title=grid.title, spec=_drawn(pictures[grid.title]), grid=grid, caption="; ".join(grid.notes))
        for grid in grids
        if grid.title in pictures
    ]
    rest: list[Block] = [Table(grid=grid) for grid in grids if grid.title not in pictures]
    if left := len(matrices) - len(shown):
        rest.append(Words(text=f"{plural(left, 'more case')} of pairs: perfsuite show --show=tables prints them"))
    return [*([Charts(charts=charts)] if charts else []), *rest]


def _drawn(matrix: PairMatrix) -> Any:
    values = []
    for pair, time_s in matrix.times_s.items():
        text, (first, second) = matrix.figure(time_s), (matrix.names[rank] for rank in pair)
        tip = f"{first} to {second} ({matrix.links[pair]}): {text} {'us' if matrix.as_time else 'GB/s'}"
        values.append({"first": first, "second": second, "value": time_s, "text": text, "tip": tip})
    return rows.matrix(values, list(matrix.names), list(matrix.names), ("from", "to"))


MOST_CHARTS = 6
_MOST_POINTS = 120
_MOST_RANKS = 6  # Maximum numbers of ranks in a chart, evenly spread.


def section(material: Material) -> Section | None:
    """Return a chart per collective and dtype, the largest groups first, and the fits in one table."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for case in material.measured:
        if "busbw_gb_per_s" in case.values and message_bytes(case):
            groups.setdefault((collective(case), dtype(case)), []).append(case)
    pairs = pair_blocks(material.measured)
    if not groups:
        return Section(key="collectives", title="Collectives", blocks=pairs) if pairs else None
    results = [case for members in groups.values() for case in members]
    fits = fit_collectives(results)
    ordered = sorted(groups.items(), key=lambda group: -len({message_bytes(case) for case in group[1]}))
    several = [group for group in ordered if len({message_bytes(case) for case in group[1]}) > 1]
    charts = [_chart(name, kind, members, fits) for (name, kind), members in several[:MOST_CHARTS]]
    blocks: list[Block] = [Charts(charts=charts)] if charts else []
    rest = [case for group in (*several[MOST_CHARTS:], *(g for g in ordered if g not in several)) for case in group[1]]
    if fits:
        blocks.append(Table(grid=fits_grid(fits)))
    if rest:
        blocks.append(Table(grid=_points(rest, "Other collectives"), folded=bool(charts)))
    return Section(key="collectives", title="Collectives", blocks=[*blocks, *pairs])


def collective(case: Result) -> str:
    """Return the name that nccl-tests uses."""
    return case.work.collective or kernel_of(case.workload, case.parameters)


def dtype(case: Result) -> str:
    """Return the dtype of the message."""
    return str(case.work.dtype or case.parameters.get("dtype", ""))


def message_bytes(case: Result) -> float:
    """Return the size S as nccl-tests counts it; 0 where it is unknown."""
    return float(case.work.message_bytes or case.parameters.get("message_bytes") or 0)


def _chart(name: str, kind: str, members: Sequence[Result], fits: Sequence[CollectiveFit]) -> Chart:
    counts = sorted({case.world_size for case in members})
    drawn = counts if len(counts) <= _MOST_RANKS else counts[:: -(-len(counts) // _MOST_RANKS)]
    unit, times = readable_rate([case.values["busbw_gb_per_s"] for case in members], "GB/s")
    calm, disturbed = drawable(members)
    points = []
    for case in spread_out(calm, _MOST_POINTS):
        count, bus, ranks = message_bytes(case), case.values["busbw_gb_per_s"], case.world_size
        if ranks in drawn and bus > 0:
            tip = f"{size(count)} on {ranks} ranks: {scaled(bus * 1e9, 'B/s')} bus, {format_seconds(case.median_s, 3)}"
            points.append({"bytes": count, "bus": bus * times, "ranks": str(ranks), "tip": tip})
    title = f"{name} {kind}".strip()
    grid = _points(members, "", disturbed, one=True)
    if not points:
        return Chart(title=title, spec={}, grid=grid)
    low, high = (pick(float(str(point["bytes"])) for point in points) for pick in (min, max))
    curves = []
    for fit in fits:
        if fit.collective == name and fit.dtype == kind and fit.world_size in drawn and fit.fit is not None:
            for step in range(25):
                count = low * (high / low) ** (step / 24)
                time_s = fit.fit.alpha_us / 1e6 + count / (fit.fit.beta_gb_per_s * 1e9)
                bus = count / time_s / 1e9 * times * busbw_factor(name, fit.world_size)
                curves.append({"bytes": count, "bus": bus, "ranks": str(fit.world_size)})
    peak = next((peak for case in members if (peak := case.peak("busbw_gb_per_s"))), None)
    spec = bandwidth(points, curves, [str(count) for count in drawn], peak.value * times if peak else None, unit)
    bound = f"dotted: link peak, {peak.value:.4g} GB/s ({peak.kind})" if peak else "the link peak is unknown"
    return Chart(title=title, spec=spec, grid=grid, caption=f"lines: fit; {bound}")


def _points(members: Sequence[Result], title: str, notes: Sequence[str] = (), *, one: bool = False) -> Grid:
    """Return a row per case; ``one``: all are of one collective and dtype, so their columns are left out."""
    ordered = sorted(members, key=lambda case: (collective(case), dtype(case), case.world_size, message_bytes(case)))
    columns: dict[str, Callable[[Result], str]] = {
        "collective": collective,
        "dtype": dtype,
        "ranks": lambda case: str(case.world_size),
        "message": lambda case: size(message_bytes(case)),
        "time": lambda case: marked(case, format_seconds(case.median_s, 3)),
        "algbw": lambda case: scaled(case.values.get("algbw_gb_per_s", 0.0) * 1e9, "B/s"),
        "busbw": lambda case: marked(case, scaled(case.values["busbw_gb_per_s"] * 1e9, "B/s")),
        "share of link": lambda case: share_of_peak(case.metric("busbw_gb_per_s"), case),
    }
    return grid_of(ordered, dict([*columns.items()][2 * one :]), notes, title)
