"""The sections of a page, a function each: material in, a :class:`~perfsuite.reports.document.Section` out.

A section without anything to show is None.  A new section is one function and its line in ``SECTIONS``.
"""

from __future__ import annotations

from collections.abc import Callable

from perfsuite.reports.document import Section
from perfsuite.reports.material import Material
from perfsuite.reports.page.sections import cases, collectives, device, history, options, training, verdict

SECTIONS: tuple[Callable[[Material], Section | None], ...] = (
    verdict.section,
    verdict.comparison,
    history.section,
    device.section,
    collectives.section,
    training.section,
    training.scaling,
    options.section,
    training.pipelines,
    cases.checklist,
    cases.other_tools,
    cases.section,
    cases.environment,
)
"""In the order of the page."""
