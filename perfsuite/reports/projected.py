"""Measured, projected and published figures of a case in one row, with both ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from perfsuite.base.units import GIB, plural, significant
from perfsuite.metrics import find
from perfsuite.published.lookup import lookup
from perfsuite.record.result import Result
from perfsuite.record.run import Projected
from perfsuite.reports.document import Grid
from perfsuite.reports.ids import name_of

_STEP = "step_time_s"
_WORKLOAD = "train_step"
_FIELDS = ("case", "metric", "projected", "low", "high", "measured", "published", "label", "lower_bound")
_COLUMNS = (
    *("case", "metric", "measured", "projected", "80 % band", "published"),
    *("projected/measured", "projected/published", "waits most for", "memory"),
)


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One metric of one case: projected, measured and published."""

    case: str
    metric: str
    projected: float
    low: float
    high: float
    measured: float | None = None
    published: float | None = None
    label: str = ""  # Plausibility of the published figure.
    lower_bound: bool = False
    binding: str = ""  # Resource that most of the step waits for, and its share; in the row of the step time.
    memory: str = ""  # Of the fullest rank; in the row of the step time.

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of the columns."""
        at_most = {"higher": "<= ", "lower": ">= "}.get(find(self.metric).better, "") if self.lower_bound else ""
        return (
            name_of(self.case),
            self.metric,
            _number(self.metric, self.measured),
            f"{at_most}{_number(self.metric, self.projected)}",
            f"{_number(self.metric, self.low)} to {_number(self.metric, self.high)}",
            f"{_number(self.metric, self.published)}{f' [{self.label}]' if self.label else ''}",
            _ratio(self.projected, self.measured),
            _ratio(self.projected, self.published),
            self.binding,
            self.memory,
        )


def beside(projections: Mapping[str, Projected], results: Mapping[str, Result]) -> tuple[Beside, ...]:
    """Return a row per case for its step time, and one for each published metric of it."""
    rows = []
    for case, one in projections.items():
        if one.reason:
            continue
        measured = results[case].values if case in results else {}
        binding = f"{one.binding} {100 * one.seconds.get(one.binding, 0.0) / one.step_time_s:.0f} %"
        figures = lookup(one.platform, _WORKLOAD, one.parameters, one.world_size)
        names = [_STEP, *dict.fromkeys(figure.metric for figure in figures if figure.metric != _STEP)]
        for name in names:
            value = one.value(name)
            if value is None:
                continue
            published = [figure for figure in figures if figure.metric == name]
            low, high = one.low_s, one.high_s
            if name != _STEP:
                low, high = value * one.step_time_s / high, value * one.step_time_s / low
            row = Beside(
                case=case,
                metric=name,
                projected=value,
                low=low,
                high=high,
                measured=measured.get(name),
                lower_bound=one.lower_bound,
                binding=binding if name == _STEP else "",
                memory=f"{one.memory_bytes / GIB:.3g} GiB" if name == _STEP and one.memory_bytes else "",
            )
            rows += [replace(row, published=one.metric_value, label=one.label) for one in published] or [row]
    return tuple(dict.fromkeys(rows))  # two tables of a report may have one figure


def projected_grids(projections: Mapping[str, Projected], results: Mapping[str, Result]) -> list[Grid]:
    """Return a table of all figures with remarks; empty without projections."""
    if not projections:
        return []
    rows = tuple(row.cells for row in beside(projections, results))
    title = "projected: estimated figures, none of them measured"
    return [Grid(title=title, columns=_COLUMNS, rows=rows, notes=tuple(remarks(projections)))]


def remarks(projections: Mapping[str, Projected]) -> Iterator[str]:
    """Yield the sources of projections, their flags, and the reasons of missing ones, with counts."""
    projected = [one for one in projections.values() if not one.reason]
    sources = Counter((one.regime, one.band_source, one.calibration) for one in projected)
    for (regime, source, calibration), count in sources.items():
        parts = ", ".join(part for part in (f"regime {regime}", f"band {source}", calibration) if part)
        yield f"{plural(count, 'case')}: {parts}"
    for flag, count in Counter(flag for one in projected for flag in one.flags).most_common():
        yield f"{plural(count, 'case')}: {flag}"
    for reason, count in Counter(one.reason for one in projections.values() if one.reason).most_common():
        yield f"{plural(count, 'case')} not projected: {reason}"


def as_json(projections: Mapping[str, Projected], results: Mapping[str, Result]) -> list[Mapping[str, object]]:
    """Return the rows as JSON objects."""
    return [
        {
            "kind": "projected",
            **{name: getattr(row, name) for name in _FIELDS},
            "projected_to_measured": None if not row.measured else row.projected / row.measured,
            "projected_to_published": None if not row.published else row.projected / row.published,
        }
        for row in beside(projections, results)
    ]


def _number(metric: str, value: float | None) -> str:
    return "" if value is None else f"{significant(value)} {find(metric).unit}".strip()


def _ratio(value: float, of: float | None) -> str:
    return f"{value / of:.2f}" if of else ""
