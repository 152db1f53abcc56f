"""The machine and its software, and what was not measured and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perfsuite.base.text import visible, without_paths
from perfsuite.reports.page.blocks import Block, Section, Table, Words
from perfsuite.reports.page.material import Material, named
from perfsuite.reports.page.sections.cut import grid
from perfsuite.reports.tables.environment import environment_grids

_LONGEST = 240
"""Characters of a reason."""


def section(material: Material) -> Section | None:
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
