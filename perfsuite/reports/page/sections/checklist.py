"""Report 004's tuning checklist, answered as ``perfsuite checklist`` answers it."""

from __future__ import annotations

from perfsuite.reports.checklist import answers, facts_of
from perfsuite.reports.page.blocks import Section, Table
from perfsuite.reports.page.material import Material
from perfsuite.reports.page.runs import recordings
from perfsuite.reports.page.sections.cut import grid


def section(material: Material) -> Section | None:
    """One line each; nothing for results of several machines, and where no training was measured."""
    trained = any("step_time_s" in case.values for case in material.measured)
    if len({one.run.hardware for one in material.runs}) != 1 or not trained:
        return None
    told = [
        (answer.line, answer.verdict, answer.evidence, answer.advice)
        for answer in answers(facts_of(recordings(material)))
    ]
    table = Table(grid=grid(("asked by report 004", "answer", "measured", "what to do"), told))
    return Section(key="checklist", title="Tuning checklist", blocks=[table])
