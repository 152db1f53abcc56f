"""The last sections: the table of all cases with details, the checklist, other tools, the run's environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from perfsuite.base.masking import masked_words
from perfsuite.base.text import listed, visible, without_paths
from perfsuite.base.units import format_seconds, plural, scaled
from perfsuite.metrics.disturbance import disturbance
from perfsuite.record.describe import describe, word
from perfsuite.record.result import Result
from perfsuite.record.run import RunRecord
from perfsuite.reports.checklist import answers, facts_of
from perfsuite.reports.document import OPEN_ROWS, Block, CaseRow, CaseTable, Grid, Section, Table, Words, grid, grouped
from perfsuite.reports.ids import anchor_of, named
from perfsuite.reports.material import Material, named_run, recordings
from perfsuite.reports.page.sections.verdict import commit_of
from perfsuite.reports.tables.environment import environment_grids
from perfsuite.reports.terminal import case_facts, case_metrics

_ROWS_BYTES, _DETAILS_BYTES = 2_600_000, 900_000
"""Maximum bytes of rows and of details on a page of 5 MB; failed and slow cases get their details first."""
_STRIP_PX = 240
_LOOKED_INTO = 2000  # With more cases, only those with details show their rank spread and disturbed samples.
_KEY = (
    ("busbw_gb_per_s", 1e9, "B/s bus"),
    ("tflops", 1e12, "FLOPS"),
    ("gb_per_s", 1e9, "B/s"),
    ("tokens_per_s", 1.0, "tokens/s"),
    ("samples_per_s", 1.0, "samples/s"),
)
"""Metric, factor and unit of the figure in a row: the first metric that the case has."""
COLUMNS = ("case", "ranks", "median", "figure", "rank spread", "disturbed", "verdict")


def section(material: Material) -> Section | None:
    """Return as many rows as the page may hold; where not all fit, cases that need attention come first."""
    if not material.cases:
        return None
    room, details = _ROWS_BYTES, _DETAILS_BYTES
    rows: dict[str, CaseRow] = {}
    for case in sorted(material.cases, key=lambda case: not _needs_reader(case, material)):
        row = _row(case, material, looked_into=len(material.cases) <= _LOOKED_INTO)
        room -= 230 + 2 * len(row.name)
        if room < 0:
            break
        rows[f"{case.fingerprint} {case.case}"] = row
    took_s = {id(case): case.median_s for case in material.measured}
    for case in sorted(material.cases, key=lambda one: (not _needs_reader(one, material), -took_s.get(id(one), 0.0))):
        key = f"{case.fingerprint} {case.case}"
        if key in rows:
            row = _with_details(case, material)
            details -= 400 + 2 * len(row.strip) + 2 * sum(len(text) + 60 for _, text in row.details)
            if details < 0:
                break
            rows[key] = row
    ordered = list(rows.values())
    if len(ordered) <= OPEN_ROWS:  # with more rows, cases that need attention stay first: the others are folded
        ordered = [found for case in material.cases if (found := rows.get(f"{case.fingerprint} {case.case}"))]
    left = len(material.cases) - len(ordered)
    more = [f"{plural(left, 'more case')} than the page can hold: perfsuite show prints all."] if left else []
    if len(material.cases) > _LOOKED_INTO:
        more.append("Rank spread and disturbed samples are shown only for cases with details.")
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
    return case.outcome != "measured" or bool(verdict and verdict.name not in ("pass", "no-baseline", "learning"))


def _row(case: Result, material: Material, *, looked_into: bool) -> CaseRow:
    """Return the row without details; ``looked_into``: also show rank spread and disturbed samples."""
    measurement = case.measurement if looked_into and case.outcome == "measured" else None
    verdict = material.verdicts.get(case.case)
    spread = measurement.rank_spread if measurement is not None and case.world_size > 1 else None
    disturbed = disturbance(case) if measurement is not None else ""
    why_not = without_paths(case.detail) if case.outcome == "out_of_memory" else "run once, not measured"
    median = format_seconds(case.median_s, 3) if case.outcome == "measured" else why_not
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


def _figure(case: Result) -> str:
    for name, factor, unit in _KEY:
        if name in case.values and case.outcome == "measured":
            return scaled(case.values[name] * factor, unit)
    return ""


def _with_details(case: Result, material: Material) -> CaseRow:
    row = _row(case, material, looked_into=True)
    details = tuple((label, text) for label, text in _details(case, material) if text)
    measurement = case.measurement
    times_s = measurement.times_s if measurement is not None else ()
    strip, strip_tip = _strip(times_s) if case.outcome == "measured" else ("", "")
    return dataclasses.replace(row, details=details, strip=strip, strip_tip=strip_tip)


def _strip(times_s: Sequence[float]) -> tuple[str, str]:
    """Return a line per sample from the fastest to the slowest, at most one per pixel, and a description.

    >>> _strip([1.0, 2.0])
    ('M0 0v12M240 0v12', '2 samples from 1 s to 2 s')
    """
    if not times_s:
        return "", ""
    low, high = min(times_s), max(times_s)
    places = sorted({round(_STRIP_PX * (time_s - low) / (high - low)) if high > low else 0 for time_s in times_s})
    tip = f"{plural(len(times_s), 'sample')} from {format_seconds(low, 3)} to {format_seconds(high, 3)}"
    return "".join(f"M{place} 0v12" for place in places), tip


def _details(case: Result, material: Material) -> Iterator[tuple[str, str]]:
    verdict = material.verdicts.get(case.case)
    yield "file", case.case.partition("::")[0]
    yield "verdict", describe(verdict) if verdict else ""
    yield from case_facts(case)
    yield "metrics", "; ".join(f"{name} {text}" for name, text in case_metrics(case) if not text.startswith("unknown"))
    if case.measurement is not None and case.outcome == "measured":
        measurement = case.measurement
        yield "spans", ", ".join(f"{span.name} {format_seconds(span.time_s, 3)}" for span in measurement.spans)
        if len(measurement.ranks) > 1:
            ranks = [f"{rank.rank}: {format_seconds(rank.median_s, 3)}" for rank in measurement.ranks]
            yield "median of each rank", listed(ranks, 16)


_LONGEST = 240  # Maximum characters of a reason.


def environment(material: Material) -> Section | None:
    """Return the reasons of missing cases, remarks, and folded tables of run, hardware and software."""
    blocks: list[Block] = []
    if material.missing:
        rows = list(_reasons(material.missing))
        blocks.append(Table(grid=grid(("reason", "cases", "such as"), rows, (), "Cases that were not measured")))
    notes = dict.fromkeys(str(note) for one in material.runs for note in one.run.environment.get("notes") or ())
    blocks += [Words(text=without_paths(note)) for note in notes]
    if (facts := _run_facts(material)).rows:
        blocks.append(Table(grid=facts, folded=True))
    machines = list({one.run.hardware: one.run.environment for one in material.runs}.items())
    for machine_grid in environment_grids(machines):
        cells = [tuple(without_paths(cell) for cell in row) for row in machine_grid.rows]
        blocks.append(Table(grid=grid(machine_grid.columns, cells, (), machine_grid.title), folded=True))
    return Section(key="environment", title="Run and environment", blocks=blocks) if blocks else None


def _run_facts(material: Material) -> Grid:
    recordings_ = (*material.runs, *((material.base,) if material.base else ()))
    facts = [dict(_facts_of(one.run)) for one in recordings_]
    labels = dict.fromkeys(label for one in facts for label in one)
    rows = [(label, *(without_paths(one.get(label, "")) for one in facts)) for label in labels]
    names = [*map(named_run, material.runs), *([f"base: {named_run(material.base)}"] if material.base else [])]
    return grid(("run", *names), [row for row in rows if any(row[1:])], (), "Run")


def _facts_of(run: RunRecord) -> Iterator[tuple[str, str]]:
    revision = run.revision
    yield "hardware", run.hardware
    yield "torch", run.torch
    yield "started", run.started_at
    yield "took", format_seconds(run.end.took_s, 3) if run.end else ""
    yield "exit status", str(run.end.exit_status) if run.end else ""
    yield "commit", commit_of(revision)
    yield "branch", revision.branch
    yield "subject", revision.subject
    yield "command", " ".join(("pytest", *masked_words(run.arguments))) if run.arguments else ""
    yield "devices", "SIMULATED: no time is a measurement" if run.simulated else ""


def _reasons(missing: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield a row per reason: failures first, then the most frequent."""
    cases = grouped((visible(without_paths(why), _LONGEST), node) for node, why in missing.items())
    for why, nodes in sorted(cases.items(), key=lambda pair: (pair[0].startswith("skipped"), -len(pair[1]))):
        yield why, str(len(nodes)), named(nodes)


def checklist(material: Material) -> Section | None:
    """Return a row per question; None for results of several machines, and where no training was measured."""
    trained = any("step_time_s" in case.values for case in material.measured)
    if len({one.run.hardware for one in material.runs}) != 1 or not trained:
        return None
    found = answers(facts_of(recordings(material)))
    rows = [(answer.line, answer.verdict, answer.evidence, answer.advice) for answer in found]
    table = Table(grid=grid(("question", "answer", "measured", "advice"), rows))
    return Section(key="checklist", title="Tuning checklist", blocks=[table])


def other_tools(material: Material) -> Section | None:
    """Return the tables of other tools' figures; None without them."""
    if not material.beside:
        return None
    tables = [Table(grid=grid(one.columns, one.rows, one.notes, one.title)) for one in material.beside]
    return Section(key="beside", title="Other tools", blocks=tables)
