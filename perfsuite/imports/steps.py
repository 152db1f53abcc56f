"""What trainers' logs have in common: a line per step with figures by name, of which every rank may print its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from perfsuite.base.units import plural
from perfsuite.imports.row import Imported, ImportedRow, Source, Told
from perfsuite.record.own_metrics import Better


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of a step's line."""

    pattern: re.Pattern[str]
    """Finds it: group 1 is the number."""
    metric: str
    unit: str
    better: Better
    convention: str


def read_steps(
    source: Source,
    told: Told,
    *,
    tool: str,
    step: re.Pattern[str],
    figures: Sequence[Figure],
    needed: str,
    settings: Sequence[tuple[str, re.Pattern[str]]] = (),
) -> Imported:
    """All steps of a log; of ranks that print the same step the first counts.

    ``step`` finds a step's line, group 1 its number.  A line without ``needed`` was cut.  Raises ImportFailed.
    """
    rows: list[ImportedRow] = []
    again = 0
    seen: set[str] = set()
    for number, line in enumerate(source.lines, start=1):
        match = step.search(line)
        if match is None:
            continue
        if needed not in line:
            raise source.fault(number, f"the line of step {match[1]} ends before {needed!r}: it was cut", "remove it")
        if match[1] in seen:
            again += 1
            continue
        seen.add(match[1])
        said = {name: hit[1] for name, pattern in settings if (hit := pattern.search(line))}
        rows += _rows(source, told, number, line=line, tool=tool, figures=figures, settings={"step": match[1], **said})
    if not rows:
        raise source.fault(1, "no line of a step", "give the log of a run that reached its first report")
    notes = [plural(len(seen), "step"), "the first steps of a run are warm-up"]
    notes += [f"{plural(again, 'line')} of other ranks for the same steps left out"] if again else []
    return Imported(source=str(source.path), tool=tool, rows=tuple(rows), notes=tuple(notes))


def _rows(
    source: Source,
    told: Told,
    number: int,
    *,
    line: str,
    tool: str,
    figures: Sequence[Figure],
    settings: dict[str, str],
) -> Iterator[ImportedRow]:
    for figure in figures:
        hit = figure.pattern.search(line)
        if hit is None:
            continue
        yield ImportedRow(
            name=f"step {settings['step']}",
            metric=figure.metric,
            value=source.number(number, hit[1], figure.metric),
            unit=figure.unit,
            better=figure.better,
            printed=hit[1],
            source=str(source.path),
            line=number,
            tool=tool,
            convention=figure.convention,
            platform=told.platform,
            settings=settings,
        )
