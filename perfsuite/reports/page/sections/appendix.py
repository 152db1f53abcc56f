"""The last sections of a page: the tuning checklist, figures of other tools, the run and its environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perfsuite.base.masking import masked_words
from perfsuite.base.text import visible, without_paths
from perfsuite.base.units import format_seconds
from perfsuite.record.run import RunRecord
from perfsuite.reports.checklist import answers, facts_of
from perfsuite.reports.document import Block, Grid, Section, Table, Words, grid
from perfsuite.reports.ids import named
from perfsuite.reports.material import Material, named_run, recordings
from perfsuite.reports.page.sections.verdict import commit_of
from perfsuite.reports.tables.environment import environment_grids

_LONGEST = 240
"""Maximum characters of a reason."""


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
    """Return a column per run."""
    recordings_ = (*material.runs, *((material.base,) if material.base else ()))
    facts = [dict(_facts_of(one.run)) for one in recordings_]
    labels = dict.fromkeys(label for one in facts for label in one)
    rows = [(label, *(without_paths(one.get(label, "")) for one in facts)) for label in labels]
    names = [*map(named_run, material.runs), *([f"base: {named_run(material.base)}"] if material.base else [])]
    return grid(("run", *names), [row for row in rows if any(row[1:])], (), "Run")


def _facts_of(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield label and text of each fact; a text may be empty."""
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
    cases: dict[str, list[str]] = {}
    for node, why in missing.items():
        cases.setdefault(visible(without_paths(why), _LONGEST), []).append(node)
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
