"""The record of a pytest run, and perfsuite's section at its end."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from perfsuite.base.errors import first_line
from perfsuite.base.text import folded, printable, without_paths
from perfsuite.base.units import format_seconds, plural
from perfsuite.gate.physics import examine
from perfsuite.metrics.disturbance import disturbance
from perfsuite.platforms.environment import congestion_control
from perfsuite.platforms.quiet import read_host_load
from perfsuite.platforms.quiet import warnings as signs_of_others
from perfsuite.plugin import collisions, outcome, projecting
from perfsuite.plugin.ending import FAILED, SKIPPED, Out, cases_key, level_key, missing_key, record_key, settle
from perfsuite.plugin.gate_options import gate_options_key
from perfsuite.plugin.outputs import outputs_key
from perfsuite.plugin.state import suite_key
from perfsuite.plugin.suite import Suite
from perfsuite.record.describe import headline, instrumented_line
from perfsuite.record.journal_writer import FOLDER, newest
from perfsuite.record.result import Result
from perfsuite.record.run import GateRecord, RunEnd, RunRecord
from perfsuite.reports.devices import sustained_lines, throttled_lines
from perfsuite.reports.layout import fit, grid_lines
from perfsuite.reports.notable import notable
from perfsuite.reports.projected import projected_grids
from perfsuite.reports.scaling import scalings
from perfsuite.reports.screen import outcomes, screen, title
from perfsuite.reports.tables.published import published_lines
from perfsuite.reports.terminal import clock_lines, peak_lines, tables
from perfsuite.run.session import PerfSession

_LONGEST = 2000  # Most characters of a failure's message.
_REASONS = 3  # Most reasons, besides those of platforms, in a run that measured nothing.
MOST_ANNOTATIONS = 10  # GitHub shows at most this number of errors of one step.


def make_record(session: pytest.Session, judged: GateRecord | None) -> None:
    """Build the record of the run after every case has its verdict, and complete the journal.

    A run that -x, Ctrl-C or SIGTERM ended has a record of the cases that it reached.
    """
    config = session.config
    suite, missing = config.stash[suite_key], config.stash[missing_key]
    assert suite.session is not None
    run = suite.session
    settle(session)
    projected = projecting.projections(suite)  # written into the journal before its end

    def fails(case: str) -> bool:  # by its verdict, which is reported instead
        verdict = judged.by_case.get(case) if judged else None
        return judged is not None and verdict is not None and judged.fails(verdict.name)

    expecting = config.pluginmanager.get_plugin("perfsuite.expecting")
    last = RunEnd(
        at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        took_s=round(time.monotonic() - suite.first_case_at, 1) if suite.first_case_at is not None else 0.0,
        exit_status=int(session.exitstatus),
        warnings=() if suite.signals.hurried else tuple(warnings(suite, run)),
        failed={
            case: reason.removeprefix(FAILED)[:_LONGEST]
            for case, reason in missing.items()
            if reason.startswith(FAILED) and case not in run.interrupted and not fails(case)
        },
        verdict=expecting.verdict if expecting is not None else "",
        remarks=expecting.remarks if expecting is not None else (),
    )
    run.end(judged, last)
    if run.journal_problem and run.journal_problem not in last.warnings:  # these very lines found the disk full
        last = replace(last, warnings=(*last.warnings, run.journal_problem))
    config.stash[record_key] = RunRecord(
        name=f"session {run.id}",
        platform=str(suite.machine),
        fingerprint=run.fingerprint,
        results=run.results,
        session=run.id,
        started_at=suite.started_at,
        versions=suite.versions,
        revision=suite.revision,
        arguments=suite.arguments,
        failures=last.failed,
        interrupted=run.interrupted,
        projections=projected[0] if projected else {},
        skips={
            case: reason.removeprefix(SKIPPED)
            for case, reason in missing.items()
            if reason.startswith(SKIPPED) and case not in run.results
        },
        gate=judged,
        end=last,
    )


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the reasons of skips, with ``--perf-show=tables`` every table, and the projections."""
    suite, level = config.stash[suite_key], config.stash[level_key]
    session = suite.session
    if session is None:
        return
    out, missing = Out(terminalreporter), config.stash[missing_key]
    if not session.results:
        for line in skip_lines(missing, suite.absent, nothing_measured=True):
            out.fold(f"perfsuite: {line}", yellow=True)
    elif level in ("tables", "cases"):
        for line in skip_lines(missing, suite.absent, nothing_measured=False):
            out.line(f"perfsuite: {line}", yellow=True)
        _show_tables(out, suite, session)
    if level != "quiet":
        projected = projecting.projections(suite)
        if projected is not None and not projected[0]:
            out.line(f"--perf-project: nothing is projected; {projecting.NO_TRAINING}", yellow=True)
        for line in grid_lines(projected_grids(*projected)) if projected else ():
            out.line(line)


def show_screen(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the screen of the run, the last section."""
    run, suite = config.stash[record_key], config.stash[suite_key]
    if not (run.results or run.failures or run.interrupted):
        return
    out = Out(terminalreporter)
    expecting = config.pluginmanager.get_plugin("perfsuite.expecting")
    lines = screen(
        run,
        notable(run),
        width=out.width,
        quiet=config.stash[level_key] == "quiet",
        stores=config.stash[gate_options_key].update is not None,
        links=links(suite, config),
        expected=expecting.entries if expecting is not None and expecting.rows is not None else None,
    )
    out.section(title(run))
    for line, mark in lines:
        out.line(line, **_COLOURS[mark])


_COLOURS: Mapping[str, Mapping[str, bool]] = {
    "": {},
    "bad": {"red": True},
    "doubt": {"yellow": True},
    "good": {"green": True},
}


def links(suite: Suite, config: pytest.Config) -> list[tuple[str, str]]:
    """Return the page; after an interruption the journal and the option that continues it, else the next command.

    The next command after an acceptance run is the comparison with other nodes.
    """
    session = suite.session
    page = config.stash[outputs_key].written.get("perf_html")
    pages = []
    if page is not None:
        from perfsuite.reports.page.page import page_line

        pages.append(("page", page_line(_shown(page, config))))
    if session is None or session.journal is None or session.journal_problem:
        return pages
    path, here = session.journal.path, config.invocation_params.dir
    if not path.exists():  # no case was measured, so nothing was written
        return pages
    quoted = shlex.quote(_shown(path, config))
    if config.stash[record_key].was_interrupted:
        return [*pages, ("journal", quoted), ("next", f"add --perf-resume={quoted} to the same command")]
    expecting = config.pluginmanager.get_plugin("perfsuite.expecting")
    if expecting is not None and expecting.rows is not None and expecting.is_acceptance:
        return [*pages, ("next", f"perfsuite fleet {quoted}  # and the journals of other nodes")]
    is_newest = path.parent == here / FOLDER and newest(here) == path
    place = "" if is_newest else f" {quoted}"
    if page is None and config.stash[level_key] in ("tables", "cases"):
        return [("next", f"perfsuite report {quoted} --html run.html")]
    return [*pages, ("next", f"perfsuite show{place} --show=tables")]


def _shown(path: Path, config: pytest.Config) -> str:
    here = config.invocation_params.dir
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def annotate(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the annotations for GitHub Actions, with --perf-annotations."""
    if collisions.option(config, "perf_annotations") and os.environ.get("GITHUB_ACTIONS"):
        terminalreporter.ensure_newline()
        workspace = os.environ.get("GITHUB_WORKSPACE", "")
        run, places = config.stash[record_key], config.stash[cases_key]
        for line in error_commands(run, places, root=config.rootpath, workspace=workspace):
            terminalreporter.write_line(line)


def error_commands(
    run: RunRecord, places: Mapping[str, tuple[str, int]], *, root: Path, workspace: str = ""
) -> Iterator[str]:
    """Yield a workflow command for each of the first failing cases, and one with the number of the others.

    ``places``: file relative to ``root``, and line from 1, of each case.
    """

    def escaped(text: str) -> str:  # like GitHub's toolkit
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    failing = {case: f"failed: {first_line(message)}" for case, message in run.failures.items()}
    for verdict in run.gate.verdicts if run.gate is not None else ():
        if run.gate is not None and run.gate.fails(verdict.name):
            reasons = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
            failing[verdict.case] = headline(verdict) + reasons
    placed = [(case, message, *places[case]) for case, message in failing.items() if case in places]
    for case, message, file, line in placed[:MOST_ANNOTATIONS]:
        path = root / file  # GitHub needs paths relative to its checkout
        place = path.relative_to(workspace).as_posix() if workspace and path.is_relative_to(workspace) else file
        file_property = escaped(printable(place)).replace(":", "%3A").replace(",", "%2C")
        text = f"{printable(case)}: {without_paths(printable(message))}"
        yield f"::error file={file_property},line={line}::{escaped(text)}"
    if len(placed) > MOST_ANNOTATIONS:
        yield f"::error::and {plural(len(placed) - MOST_ANNOTATIONS, 'more case')} failed, see the log"


def _show_tables(out: Out, suite: Suite, session: PerfSession) -> None:
    results = list(session.results.values())
    out.section(f"perfsuite: {suite.machine}")
    out.line(f"{outcomes(results, session.reused)}; hardware {session.fingerprint}")
    for line in fit(tables(results, out.width, verdicts=suite.verdicts, reused=session.reused), out.width):
        out.line(line)
    out.line("")
    for line in fit((*published_lines(results), *peak_lines(results), *clock_lines(results)), out.width):
        out.line(line)
    if suite.settings.budget.sustain_s is not None:
        out.line(f"sustained for {format_seconds(suite.settings.budget.sustain_s)} each")
        for line in sustained_lines(results):
            out.line(line)
    for line in warnings(suite, session):
        for part in folded(f"warning: {line}", out.width):
            out.line(part, yellow=True)
    if session.journal is not None:
        out.line(f"journal {session.journal.path}")


def skip_lines(missing: Mapping[str, str], absent: Collection[str], *, nothing_measured: bool) -> Iterator[str]:
    """Yield the reasons of skips: absent platforms, and the most frequent reasons in a run without any result."""
    skips = Counter(reason for reason in missing.values() if reason.startswith(SKIPPED)).most_common()
    others = [reason for reason, _ in skips if reason.removeprefix(SKIPPED) not in absent]
    hidden = others[_REASONS:] if nothing_measured else others
    for reason, count in skips:
        if reason not in hidden:
            yield f"{plural(count, 'case')} {reason}"
    if nothing_measured and hidden:
        yield f"{plural(len(hidden), 'more reason')}: -rs prints all"


def warnings(suite: Suite, session: PerfSession) -> list[str]:
    """Return the warnings about the results: a busy machine, a journal that could not be written, and so on."""
    host = suite.machine.family.host
    disturbed = [
        (result.case, disturbance(result))
        for result in session.results.values()
        if result.outcome == "measured" and result.measurement is not None and result.case not in session.reused
    ]
    after = read_host_load(host, suite.own_processes()) if suite.load_before else None
    code = "whether the code equals its commit" if suite.revision.commit else "the revision"
    lines = [
        instrumented_line(session.results.values()),
        *signs_of_others(disturbed, before=suite.load_before, after=after),
        session.journal_problem,
        f"{code} is unknown: {suite.revision.problem}" if suite.revision.problem else "",
        paced(congestion_control(host), [session.results[case] for case, _ in disturbed]),
    ]
    lines += outcome.retried_lines(suite.config)
    lines += throttled_lines(session.results.values())
    return [line for line in (*lines, *oddities(session.results)) if line]


def paced(control: str, results: Iterable[Result]) -> str:
    """Return a warning that TCP's congestion control scatters gloo's message times; empty if it does not apply."""
    sent = any(
        result.measurement and result.measurement.world_size > 1 and result.measurement.backend == "gloo"
        for result in results
    )
    if not (sent and control.startswith("bbr")):
        return ""
    return (
        f"TCP uses {control}: gloo message times can vary several times more than with cubic "
        "(sysctl -w net.ipv4.tcp_congestion_control=cubic; perfsuite docs truth)"
    )


def oddities(results: Mapping[str, Result]) -> list[str]:
    """Return results that are possible but unlikely, such as a speed-up above the number of ranks."""
    bases = {case: results[scaling.base.case] for case, scaling in scalings(results.values()).items()}
    return [
        f"{case}: {violation}"
        for case, result in results.items()
        for violation in examine(result, base=bases.get(case))
        if violation.severity == "flagged"
    ]
