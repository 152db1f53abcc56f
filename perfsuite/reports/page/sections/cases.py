"""Every case, to be filtered and sorted, with its samples, spans, ranks and parameters folded below its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from perfsuite.base.text import listed, without_paths
from perfsuite.base.units import format_seconds, plural, scaled
from perfsuite.metrics.disturbance import disturbance
from perfsuite.record.describe import describe, word
from perfsuite.record.result import Result
from perfsuite.reports.case_details import case_facts, case_metrics
from perfsuite.reports.document import OPEN_ROWS, CaseRow, CaseTable, Section
from perfsuite.reports.ids import anchor_of
from perfsuite.reports.material import Material

_ROWS_BYTES, _DETAILS_BYTES = 2_600_000, 900_000
"""What rows and what details may take of the page's 5 MB; details of what failed and of slow cases come first."""
_STRIP_PX = 240
_LOOKED_INTO = 2000
"""Of more cases only those with details have their spread of ranks and disturbed samples told."""
_KEY = (
    ("busbw_gb_per_s", 1e9, "B/s bus"),
    ("tflops", 1e12, "FLOPS"),
    ("gb_per_s", 1e9, "B/s"),
    ("tokens_per_s", 1.0, "tokens/s"),
    ("samples_per_s", 1.0, "samples/s"),
)
"""The figure of a row: the first that the case has."""
COLUMNS = ("case", "ranks", "median", "figure", "rank spread", "disturbed", "verdict")


def section(material: Material) -> Section | None:
    """Rows as far as the page's size allows, those that need a reader first where they do not all fit."""
    if not material.cases:
        return None
    room, details = _ROWS_BYTES, _DETAILS_BYTES
    detailed = _detailed(material)
    rows: dict[str, CaseRow] = {}
    for case in sorted(material.cases, key=lambda case: not _needs_reader(case, material)):
        row = _row(case, material, looked_into=len(material.cases) <= _LOOKED_INTO)
        room -= 230 + 2 * len(row.name)
        if room < 0:
            break
        rows[f"{case.fingerprint} {case.case}"] = row
    for case in detailed:
        key = f"{case.fingerprint} {case.case}"
        if key in rows:
            told = _with_details(case, material)
            details -= 400 + 2 * len(told.strip) + 2 * sum(len(text) + 60 for _, text in told.details)
            if details < 0:
                break
            rows[key] = told
    ordered = list(rows.values())
    if len(ordered) <= OPEN_ROWS:  # else those that need a reader stay first: the others are folded
        ordered = [found for case in material.cases if (found := rows.get(f"{case.fingerprint} {case.case}"))]
    left = len(material.cases) - len(ordered)
    more = [f"{plural(left, 'more case')} than fit here: perfsuite show has them."] if left else []
    if len(material.cases) > _LOOKED_INTO:
        more.append("Of so many cases only those with details have their rank spread and disturbed samples here.")
    verdicts = {row.cells[-1][0] for row in ordered}
    if len(verdicts) == 1 < len(ordered) and verdicts != {""}:
        more.append(f"Verdict of each: {''.join(verdicts)}.")
        ordered = [dataclasses.replace(row, cells=(*row.cells[:-1], ("", None))) for row in ordered]
    kept = [place for place in range(len(COLUMNS)) if not place or any(row.cells[place - 1][0] for row in ordered)]
    columns = tuple(COLUMNS[place] for place in kept)
    shown = [dataclasses.replace(row, cells=tuple(row.cells[place - 1] for place in kept if place)) for row in ordered]
    table = CaseTable(columns=columns, rows=shown, more=" ".join(more))
    return Section(key="cases", title="All cases", blocks=[table])


def _needs_reader(case: Result, material: Material) -> bool:
    verdict = material.verdicts.get(case.case)
    return case.outcome != "measured" or (
        verdict is not None and verdict.name not in ("pass", "no-baseline", "learning")
    )


def _detailed(material: Material) -> list[Result]:
    """In which order cases get their details."""
    took_s = {id(case): case.median_s for case in material.measured}
    return sorted(material.cases, key=lambda case: (not _needs_reader(case, material), -took_s.get(id(case), 0.0)))


def _row(case: Result, material: Material, *, looked_into: bool) -> CaseRow:
    """``looked_into``: its measurement is worth the time that decoding it takes."""
    measurement = case.measurement if looked_into and case.outcome == "measured" else None
    verdict = material.verdicts.get(case.case)
    spread = measurement.rank_spread if measurement is not None and case.world_size > 1 else None
    disturbed = disturbance(case) if measurement is not None else ""
    median = format_seconds(case.median_s, 3) if case.outcome == "measured" else _why(case)
    return CaseRow(
        anchor=anchor_of(case.case, case.fingerprint),
        name=case.name,
        cells=(
            (str(case.world_size), float(case.world_size)),
            (median, case.median_s if case.outcome == "measured" else None),
            (_figure(case), None),
            ("" if spread is None else f"{spread:.0%}", spread),
            (disturbed, None),
            ("" if verdict is None else word(verdict), None),
        ),
    )


def _why(case: Result) -> str:
    return without_paths(case.detail) if case.outcome == "out_of_memory" else "run once, not measured"


def _figure(case: Result) -> str:
    for name, factor, unit in _KEY:
        if name in case.values and case.outcome == "measured":
            return scaled(case.values[name] * factor, unit)
    return ""


def _with_details(case: Result, material: Material) -> CaseRow:
    row = _row(case, material, looked_into=True)
    told = tuple((label, text) for label, text in _details(case, material) if text)
    measurement = case.measurement
    times_s = measurement.times_s if measurement is not None else ()
    strip, strip_told = _strip(times_s) if case.outcome == "measured" else ("", "")
    return dataclasses.replace(row, details=told, strip=strip, strip_told=strip_told)


def _strip(times_s: Sequence[float]) -> tuple[str, str]:
    """A line per sample from the fastest to the slowest; at most one a pixel.

    >>> _strip([1.0, 2.0])
    ('M0 0v12M240 0v12', '2 samples from 1 s to 2 s')
    """
    if not times_s:
        return "", ""
    low, high = min(times_s), max(times_s)
    places = sorted({round(_STRIP_PX * (time_s - low) / (high - low)) if high > low else 0 for time_s in times_s})
    told = f"{plural(len(times_s), 'sample')} from {format_seconds(low, 3)} to {format_seconds(high, 3)}"
    return "".join(f"M{place} 0v12" for place in places), told


def _details(case: Result, material: Material) -> Iterator[tuple[str, str]]:
    verdict = material.verdicts.get(case.case)
    yield "file", case.case.partition("::")[0]
    yield "verdict", describe(verdict) if verdict else ""
    yield from case_facts(case)
    yield "metrics", "; ".join(f"{name} {told}" for name, told in case_metrics(case) if not told.startswith("unknown"))
    if case.measurement is not None and case.outcome == "measured":
        measurement = case.measurement
        yield "spans", ", ".join(f"{span.name} {format_seconds(span.time_s, 3)}" for span in measurement.spans)
        if len(measurement.ranks) > 1:
            ranks = [f"{rank.rank}: {format_seconds(rank.median_s, 3)}" for rank in measurement.ranks]
            yield "median of each rank", listed(ranks, 16)
