"""``--perf-history FILE``: a line of this session in a history, for ``perfsuite history``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import HistoryError, PerfsuiteError
from perfsuite.base.units import plural
from perfsuite.plugin import collisions
from perfsuite.plugin.options import runs_tests
from perfsuite.plugin.output import Out
from perfsuite.plugin.state import suite_key, suite_of

if TYPE_CHECKING:
    from perfsuite.history.session import HistorySession


@dataclass(kw_only=True)
class HistoryState:
    """What this run's line needs beside its results."""

    path: Path | None
    """File, or a folder that gets one for each hardware; None when no history is kept."""
    blank: HistorySession | None = None
    """The line without cases, made before anything is measured; None where nothing will be added."""
    said: str = ""
    """What became of it."""


state_key = pytest.StashKey[HistoryState]()


def declare(parser: pytest.Parser) -> None:
    """Declare the option and its ini key."""
    parser.getgroup("perfsuite", "performance of distributed training").addoption(
        "--perf-history",
        metavar="FILE",
        help="add a line of this session to a history; a folder gets a file for each hardware (ini: perf_history)",
    )
    parser.addini("perf_history", "history that every run adds a line to, relative to the root", default="")


def configure(config: pytest.Config) -> None:
    """Keep the options."""
    asked, written = collisions.option(config, "perf_history"), collisions.ini(config, "perf_history")
    path = config.invocation_params.dir / asked if asked else config.rootpath / written if written else None
    config.stash[state_key] = HistoryState(path=path)


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Refuse a history that could not take this session before anything is measured."""
    config = session.config
    state = config.stash[state_key]
    if state.path is None or not cases or not runs_tests(config) or hasattr(config, "workerinput"):
        return
    suite = suite_of(config)
    if suite.session is None or suite.settings.budget.smoke:
        return
    from perfsuite.history import file
    from perfsuite.history.session import HistorySession

    machine, fingerprint = suite.machine, suite.session.fingerprint
    if state.path.is_dir():
        state.path /= f"{machine.name}-{fingerprint}.jsonl"
    state.blank = HistorySession(
        session=suite.session.id,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        platform=machine.name,
        fingerprint=fingerprint,
        simulated=machine.simulated,
        revision=suite.revision,
    )
    try:
        file.require_fit(state.path, state.blank)
    except PerfsuiteError as error:
        raise pytest.UsageError(f"--perf-history: {error}") from None


def finish(session: pytest.Session) -> None:
    """Add the line of what this session measured; PerfsuiteError where that fails."""
    state = session.config.stash[state_key]
    suite = session.config.stash.get(suite_key, None)
    if state.path is None or state.blank is None or suite is None or suite.session is None:
        return
    from perfsuite.history import file
    from perfsuite.history.session import session_of
    from perfsuite.record.run import instrumented_line

    blank, state.blank = state.blank, None
    if slowed := instrumented_line(suite.session.results.values()):
        raise HistoryError(slowed)
    results = [result for case, result in suite.session.results.items() if case not in suite.session.reused]
    line = session_of(
        results,
        session=blank.session,
        time=blank.time,
        platform=blank.platform,
        fingerprint=blank.fingerprint,
        revision=blank.revision,
    )
    if not line.cases:
        return
    file.append(state.path, line)
    added = plural(len(line.cases), "case")
    state.said = f"history {state.path}: {added} added; perfsuite history show {shlex.quote(str(state.path))}"


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the history."""
    state = config.stash[state_key]
    if state.said:
        Out(terminalreporter).line(state.said)
