"""The page's training and collective cases as the tables of the published reports and the checklist take them."""

from __future__ import annotations

from perfsuite.reports.page.material import Material, PageCase, Run
from perfsuite.reports.tables.case import from_result
from perfsuite.reports.tables.recording import Recording

MOST_CASES = 150
"""Of more the tables would be longer than anybody reads, and the page slower than it may be."""


def recordings(material: Material) -> list[Recording]:
    """A recording per run: its training steps, then its collectives, no more than MOST_CASES together."""
    left = MOST_CASES
    told = []
    for run in reversed(material.runs):
        ordered = sorted(filter(_of_a_report, run.cases), key=lambda case: bool(case.values.get("busbw_gb_per_s")))
        told.append(_recording(run, ordered[:left]))
        left -= len(told[-1].cases)
    return told[::-1]


def _of_a_report(case: PageCase) -> bool:
    return case.outcome != "smoke" and ("model" in case.parameters or "busbw_gb_per_s" in case.values)


def _recording(run: Run, cases: list[PageCase]) -> Recording:
    return Recording(
        name=run.name,
        platform=run.platform,
        fingerprint=run.fingerprint,
        cases=tuple(from_result(case.result) for case in cases),
        missing=run.missing,
        environment=run.environment,
        versions=run.versions,
        device=run.device,
        simulated=run.simulated,
    )
