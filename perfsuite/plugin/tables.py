"""``--perf-report FILE``: the tables of the published reports at the end of a run.

What was skipped or failed is kept too, so that its rows say why they are empty; the journal notes skips for
``perfsuite report``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perfsuite.base.errors import PerfsuiteError, first_line
from perfsuite.plugin import collisions, written
from perfsuite.plugin.options import runs_tests
from perfsuite.plugin.output import Out
from perfsuite.plugin.state import suite_key, suite_of

STYLE_NAMES = ("opensora", "latte", "flagperf", "oneflow", "methods")
"""Names of ``perfsuite.reports.tables.styles.STYLES``, which a run that asks for no report does not import."""

SKIPPED = "skipped: "
"""What the reason of a skip begins with."""


@dataclass(kw_only=True)
class ReportState:
    """What a run's report is made of beside its results."""

    path: Path | None
    """Where it goes; None when none was asked for."""
    style: str
    """Empty: those that fit what was measured."""
    said: str = ""
    """What became of it."""
    missing: dict[str, str] = field(default_factory=dict)
    """Why a case has no result, by node id."""


state_key = pytest.StashKey[ReportState]()


def declare(parser: pytest.Parser) -> None:
    """Declare options and ini keys."""
    group = parser.getgroup("perfsuite", "performance of distributed training")
    styles = "|".join(STYLE_NAMES)
    group.addoption(
        "--perf-report", metavar="FILE", help="write the published reports' tables as Markdown (ini: perf_report)"
    )
    group.addoption(
        "--perf-report-style", metavar=styles, help="whose tables; default: those that fit (ini: perf_report_style)"
    )
    parser.addini("perf_report", "file of the report in Markdown, relative to the root", default="")
    parser.addini("perf_report_style", f"whose tables it has: {styles}", default="")


def configure(config: pytest.Config) -> None:
    """Check the options before anything is measured."""
    asked, written = collisions.option(config, "perf_report"), collisions.ini(config, "perf_report")
    chosen = collisions.option(config, "perf_report_style")
    style = chosen or collisions.ini(config, "perf_report_style")
    path = config.invocation_params.dir / asked if asked else config.rootpath / written if written else None
    if style:
        from perfsuite.reports.tables.report import find_style

        try:
            find_style(style)
        except PerfsuiteError as error:
            where = "--perf-report-style" if chosen else "ini perf_report_style"
            raise pytest.UsageError(f"{where}: {error}") from None
        if chosen and path is None:
            raise pytest.UsageError(f"--perf-report-style={style} says how a report looks; give --perf-report=FILE too")
    if asked and path is not None and path.is_dir():
        raise pytest.UsageError(f"--perf-report: {path} is a folder; name a file in it")
    config.stash[state_key] = ReportState(path=path, style=style or "")


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Find out before anything is measured whether the report can be written."""
    path = session.config.stash[state_key].path
    if path is not None and cases and runs_tests(session.config):
        written.require_writable(path, "--perf-report")


def keep_reason(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Keep why a perf case has no result; a skip goes into the journal."""
    if call.excinfo is None:
        return
    missing = item.config.stash[state_key].missing
    if report.skipped:
        from perfsuite.record.run import XFAILED

        reason = str(getattr(call.excinfo.value, "msg", None) or call.excinfo.value)
        reason = f"{XFAILED * hasattr(report, 'wasxfail')}{reason}"
        missing[item.nodeid] = f"{SKIPPED}{reason}"
        session = suite_of(item.config).session
        if session is not None:
            session.skip(item.nodeid, reason)
    elif report.failed:
        missing[item.nodeid] = f"failed: {first_line(call.excinfo.value)}"


def write(config: pytest.Config) -> None:
    """Write the report, unless nothing was measured that a report shows.

    Raises ConfigurationError where the file cannot be written.
    """
    suite, state = config.stash.get(suite_key, None), config.stash[state_key]
    if state.path is None or suite is None or suite.session is None or not (suite.session.results or state.missing):
        return
    from perfsuite.base.files import write_file
    from perfsuite.plugin.recorded import record_key
    from perfsuite.reports.tables.recording import Recording
    from perfsuite.reports.tables.report import find_style, fitting_styles, report

    run = Recording(run=config.stash[record_key], device=suite.machine.model)
    styles = (find_style(state.style),) if state.style else fitting_styles([run])
    try:
        if not styles:
            raise PerfsuiteError("nothing was measured that any report has a table for")
        text = report([run], styles)
    except PerfsuiteError as error:  # nothing went wrong: there is nothing to show
        state.said = f"report {state.path} was not written: {error}"
    else:
        write_file(state.path, text)
        state.said = f"report {state.path}: {', '.join(style.name for style in styles)}"


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the report."""
    state = config.stash[state_key]
    if state.said:
        Out(terminalreporter).line(state.said)
