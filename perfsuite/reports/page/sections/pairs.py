"""Every pair of ranks: the matrix of its figures beside a picture of how much longer each takes than its like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfsuite.records import Result
from perfsuite.reports.page.blocks import Block, Chart, Charts, Table, Words
from perfsuite.reports.page.charts import rows
from perfsuite.reports.pairs import PairMatrix, pair_grids, pair_matrices
from perfsuite.units import plural

_MOST_DRAWN = 16
"""Ranks of a picture; of more the table stands alone."""
MOST_MATRICES = 12
"""Those with links slower than their like first; the others are counted."""


def pair_blocks(results: Sequence[Result]) -> list[Block]:
    """A chart with its table for every matrix, and the links between the devices."""
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
        rest.append(Words(text=f"{plural(left, 'more case')} of pairs: perfsuite show --show tables has them"))
    return [*([Charts(charts=charts)] if charts else []), *rest]


def _drawn(matrix: PairMatrix) -> Any:
    """A square per pair, darker where it takes longer."""
    values = [
        {
            "first": matrix.names[first],
            "second": matrix.names[second],
            "value": time_s,
            "text": matrix.figure(time_s),
            "told": f"{matrix.names[first]} to {matrix.names[second]} ({matrix.links[first, second]}): "
            f"{matrix.figure(time_s)} {'us' if matrix.as_time else 'GB/s'}",
        }
        for (first, second), time_s in matrix.times_s.items()
    ]
    return rows.matrix(values, list(matrix.names), list(matrix.names), ("from", "to"))
