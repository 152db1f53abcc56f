"""All tables of a run, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.reports.pairs import pair_tables
from perfsuite.reports.pipeline import pipeline_section
from perfsuite.reports.scaling import scaling_table
from perfsuite.reports.terminal import TerminalRow, alpha_beta_table, metric_tables


def tables(rows: Sequence[TerminalRow], width: int) -> list[str]:
    """Metrics by file, fits of collectives, scaling, pipelines; wide tables in blocks of ``width`` columns."""
    results = [row.result for row in rows]
    return [
        *metric_tables(rows, width),
        *alpha_beta_table(results, width),
        *pair_tables(results, width),
        *scaling_table(results, width),
        *pipeline_section(results, width),
    ]
