"""Published figures beside measured ones, where a report has the very run of a case.  Never a gate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perfsuite.base.units import significant
from perfsuite.published.lookup import lookup
from perfsuite.record.result import Result


def published_lines(results: Iterable[Result]) -> Iterator[str]:
    """A line per published figure of a measured case: measured value, published one, its label and why."""
    for result in results:
        for metric in result.metrics if not result.simulated else ():
            if metric.value is None:
                continue
            for figure in lookup(
                result.platform, result.workload, result.parameters, result.world_size, metric=metric.name
            ):
                measured = f"{significant(metric.value)} {metric.unit}".strip()
                yield f"{result.case}: {metric.name} measured {measured}; {figure}"
