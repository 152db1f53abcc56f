"""perfsuite's section at the end of a pytest run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

from perfsuite.gate.physics import examine
from perfsuite.platforms.quiet import disturbance, read_host_load, warning
from perfsuite.plugin import projecting
from perfsuite.plugin.state import suite_key
from perfsuite.plugin.suite import Suite
from perfsuite.plugin.tables import SKIPPED, state_key
from perfsuite.records import Result
from perfsuite.reports.beside import published_lines
from perfsuite.reports.devices import sustained_lines, throttled_lines
from perfsuite.reports.every_device import every_device_lines
from perfsuite.reports.pipeline import pipeline_section
from perfsuite.reports.scaling import scaling_table, scalings
from perfsuite.reports.terminal import (
    CaseRow,
    alpha_beta_table,
    clock_lines,
    metric_tables,
    outcome_line,
    peak_lines,
)
from perfsuite.session import PerfSession
from perfsuite.units import format_seconds, plural

_REASONS = 3
"""Reasons that a run which measured nothing tells beside those of platforms."""


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """Tables of metrics, fits, peaks, clocks, and what to beware of; nothing when no perf case finished."""
    suite = config.stash.get(suite_key, None)
    if suite is None or suite.session is None:
        return
    session = suite.session
    for line in skip_lines(config.stash[state_key].missing, suite.absent, nothing_measured=not session.results):
        terminalreporter.write_line(f"perfsuite: {line}", yellow=True)
    projections = projecting.lines(suite)
    if not session.results:
        for line in projections:
            terminalreporter.write_line(line)
        return
    results = list(session.results.values())
    rows = [
        CaseRow(result=result, verdict=suite.verdicts.get(case, ""), reused=case in session.reused)
        for case, result in session.results.items()
    ]
    terminalreporter.section(f"perfsuite: {suite.machine}")
    terminalreporter.write_line(f"{outcome_line(rows)}; hardware {session.fingerprint}")
    tables = (metric_tables(rows), alpha_beta_table(results), scaling_table(results), pipeline_section(results))
    for line in (line for table in tables for line in table):
        terminalreporter.write_line(line)
    terminalreporter.write_line("")
    for line in (
        *every_device_lines(results),
        *published_lines(results),
        *peak_lines(results),
        *clock_lines(results),
    ):
        terminalreporter.write_line(line)
    for line in projections:
        terminalreporter.write_line(line)
    if suite.settings.budget.sustain_s is not None:
        terminalreporter.write_line(f"sustained for {format_seconds(suite.settings.budget.sustain_s)} each")
        for line in sustained_lines(results):
            terminalreporter.write_line(line)
    for line in warnings(suite, session):
        terminalreporter.write_line(f"warning: {line}", yellow=True)
    if session.journal is not None:
        terminalreporter.write_line(f"journal {session.journal.path}")


def skip_lines(missing: Mapping[str, str], absent: Collection[str], *, nothing_measured: bool) -> Iterator[str]:
    """Why cases were skipped, a line each: platforms that are not here, and the commonest reasons of a run without
    any result.
    """
    skips = Counter(told for told in missing.values() if told.startswith(SKIPPED)).most_common()
    others = [told for told, _ in skips if told.removeprefix(SKIPPED) not in absent]
    hidden = others[_REASONS:] if nothing_measured else others
    for told, count in skips:
        if told not in hidden:
            yield f"{plural(count, 'case')} {told}"
    if nothing_measured and hidden:
        yield f"{plural(len(hidden), 'more reason')}: -rs prints all"


def warnings(suite: Suite, session: PerfSession) -> list[str]:
    """What makes the numbers less than they look: a busy machine, a journal that could not be kept up."""
    host = suite.machine.family.host
    disturbed = [
        (result.case, disturbance(result.measurement, waits=_waits(result), cores=host.cores()))
        for result in session.results.values()
        if result.outcome == "measured" and result.measurement is not None and result.case not in session.reused
    ]
    after = read_host_load(host) if suite.load_before else None
    lines = [warning(disturbed, before=suite.load_before, after=after), session.journal_problem]
    return [line for line in (*lines, *throttled_lines(session.results.values()), *oddities(session.results)) if line]


def oddities(results: Mapping[str, Result]) -> list[str]:
    """What breaks no law of physics and is unlikely all the same, such as a speed-up above the number of ranks."""
    bases = {case: results[scaling.base.case] for case, scaling in scalings(results.values()).items()}
    return [
        f"{case}: {violation}"
        for case, result in results.items()
        for violation in examine(result, base=bases.get(case))
        if violation.severity == "flagged"
    ]


def _waits(result: Result) -> bool:
    """Whether ranks wait inside a sample, so that their share of CPU time says nothing."""
    measurement = result.measurement
    return measurement is not None and (measurement.world_size > 1 or not measurement.aligned)
