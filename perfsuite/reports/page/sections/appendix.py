"""The last sections of a page: the tuning checklist, other tools' figures, the machine, what was not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perfsuite.base.text import visible, without_paths
from perfsuite.reports.checklist import answers, facts_of
from perfsuite.reports.document import Block, Section, Table, Words, grid
from perfsuite.reports.ids import named
from perfsuite.reports.material import Material, recordings
from perfsuite.reports.tables.environment import environment_grids

_LONGEST = 240
"""Characters of a reason."""


def environment(material: Material) -> Section | None:
    """Hardware, software, remarks, reasons."""
    machines = list({one.run.hardware: one.run.environment for one in material.runs}.items())
    blocks: list[Block] = []
    for machine_grid in environment_grids(machines):
        cells = [tuple(without_paths(cell) for cell in row) for row in machine_grid.rows]
        blocks.append(Table(grid=grid(machine_grid.columns, cells, (), machine_grid.title)))
    notes = dict.fromkeys(str(note) for one in material.runs for note in one.run.environment.get("notes") or ())
    blocks += [Words(text=without_paths(note)) for note in notes]
    if material.missing:
        blocks.append(Table(grid=grid(("not measured because", "cases", ""), list(_reasons(material.missing)))))
    return Section(key="environment", title="Environment", blocks=blocks) if blocks else None


def _reasons(missing: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """A line per reason: failures first, then the commonest."""
    cases: dict[str, list[str]] = {}
    for node, why in missing.items():
        cases.setdefault(visible(without_paths(why), _LONGEST), []).append(node)
    for why, nodes in sorted(cases.items(), key=lambda pair: (pair[0].startswith("skipped"), -len(pair[1]))):
        yield why, str(len(nodes)), named(nodes)


def checklist(material: Material) -> Section | None:
    """One line each; nothing for results of several machines, and where no training was measured."""
    trained = any("step_time_s" in case.values for case in material.measured)
    if len({one.run.hardware for one in material.runs}) != 1 or not trained:
        return None
    told = [
        (answer.line, answer.verdict, answer.evidence, answer.advice)
        for answer in answers(facts_of(recordings(material)))
    ]
    table = Table(grid=grid(("question", "answer", "measured", "what to do"), told))
    return Section(key="checklist", title="Tuning checklist", blocks=[table])


def other_tools(material: Material) -> Section | None:
    """A table each, where they were asked for."""
    if not material.beside:
        return None
    tables = [Table(grid=grid(told.columns, told.rows, told.notes, told.title)) for told in material.beside]
    return Section(key="beside", title="Other tools", blocks=tables)
