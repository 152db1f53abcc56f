"""What other tools measured, beside the runs."""

from __future__ import annotations

from perfsuite.reports.page.blocks import Section, Table
from perfsuite.reports.page.material import Material
from perfsuite.reports.page.sections.cut import grid


def section(material: Material) -> Section | None:
    """A table each, where they were asked for."""
    if not material.beside:
        return None
    tables = [Table(grid=grid(told.columns, told.rows, told.notes, told.title)) for told in material.beside]
    return Section(key="beside", title="Other tools", blocks=tables)
