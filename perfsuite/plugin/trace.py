"""``--perf-trace DIR``: a trace and a picture of every pipeline case, written as soon as the case is measured.

A folder that cannot be written to is told before anything is measured.  After that a file that cannot be written is a
line at the end and fails the run: the timeline is in the journal, and ``perfsuite trace`` writes it from there.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite.base.errors import PerfsuiteError
from perfsuite.base.units import plural
from perfsuite.plugin import written
from perfsuite.plugin.fixtures import state_key
from perfsuite.plugin.options import runs_tests, settings_key
from perfsuite.plugin.output import Out
from perfsuite.plugin.state import suite_key


class Tracing:
    """What ``--perf-trace`` did in one pytest run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[tuple[str, Path, Path]] = []
        """Cases whose files are in the folder, with their trace and picture."""
        self.problems: dict[str, str] = {}
        """Why a case's files are missing, by node id."""

    def add(self, item: pytest.Item) -> None:
        """Write the files of the case that ``item`` measured; a problem is kept, never raised."""
        state = item.stash.get(state_key, None)
        result = state.result if state else None
        if result is None or result.outcome != "measured" or result.measurement is None:
            return
        timeline = result.measurement.timeline
        if timeline is None:
            return
        from perfsuite.reports.timelines.files import write_case

        try:
            files = write_case(result.case, timeline, self.folder)
        except PerfsuiteError as problem:
            self.problems[result.case] = str(problem)
        else:
            self.written.append((result.case, *files))


tracing_key = pytest.StashKey[Tracing]()


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Find out now, before anything is measured, whether the folder can be written to."""
    folder = session.config.stash[settings_key].trace
    if folder is None or not cases or not runs_tests(session.config):
        return
    from perfsuite.base.files import make_folder

    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except PerfsuiteError as error:
        raise pytest.UsageError(f"--perf-trace: {error}") from None
    except OSError as error:
        raise pytest.UsageError(
            f"--perf-trace: folder {folder} cannot be written to: {error.strerror}; name another one"
        ) from None
    session.config.stash[tracing_key] = Tracing(folder)


def add(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Write the case's files once its test is over, also when the gate or the test found fault with it."""
    tracing = item.config.stash.get(tracing_key, None)
    if tracing is not None and call.when == "call":
        tracing.add(item)


def write(config: pytest.Config) -> None:
    """Write the page of the pictures; cases whose files could not be written fail the run."""
    tracing = config.stash.get(tracing_key, None)
    if tracing is None:
        return
    for case, problem in tracing.problems.items():
        written.fail(config, f"--perf-trace: {case}: {problem}{_remedy(config)}")
    if tracing.written:
        from perfsuite.reports.timelines.index import write_index

        write_index(tracing.written, tracing.folder)


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """How many cases are in the folder."""
    tracing = config.stash.get(tracing_key, None)
    if tracing is not None:
        Out(terminalreporter).line(_said(tracing))


def _said(tracing: Tracing) -> str:
    if tracing.written:
        return f"timelines of {plural(len(tracing.written), 'case')} in {tracing.folder}"
    return f"no timeline in {tracing.folder}: {'see below' if tracing.problems else 'no measured case recorded one'}"


def _remedy(config: pytest.Config) -> str:
    """Where the timeline still is; nothing where the journal failed too."""
    suite = config.stash.get(suite_key, None)
    session = suite.session if suite else None
    if session is not None and session.journal is not None and not session.journal_problem:
        return f"; the case was measured: perfsuite trace {shlex.quote(str(session.journal.path))} --out DIR writes it"
    return "; the case was measured"
