"""Progress of a long run: a hint that is rewritten on a terminal, or a line every 30 s in a log."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from perfsuite.base.units import clock_time
from perfsuite.plugin.state import suite_key

QUIET_S = 10.0  # Runs with a shorter expected time show no progress.
LOG_EVERY_S = 30.0
_LEAST_ROOM = 30
_JOURNALS = 3  # Newest journals that are read for the times of cases.
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[K"


@dataclass(kw_only=True)
class Progress:
    """Counts the perf cases of a run and estimates its end.  All times are seconds of the monotonic clock."""

    total: int
    started_at: float
    done: int = 0
    logged_at: float | None = None  # Time of the last line in a log.
    pending: set[str] = field(default_factory=set)  # Cases that are not done.
    expected_s: Mapping[str, float] = field(default_factory=dict)  # Seconds of each case in the last run, by node id.
    took_s: dict[str, float] = field(default_factory=dict)  # Seconds of each finished case of this run.

    def describe(self, case: str, now: float) -> str:
        """Return the hint for a case that starts now: number, elapsed time, remaining time with its source, name."""
        left = self.left(now)
        remaining = "" if left is None else f", about {clock_time(left[0])} left ({left[1]})"
        return f"case {self.done + 1} of {self.total}, {clock_time(now - self.started_at)}{remaining}: {case}"

    def left(self, now: float) -> tuple[float, str] | None:
        """Return the estimated seconds until the end and the source of the estimate; None without one.

        The estimate of a case is its time in the last run, else that of other cases of its test, else that of the cases
        so far.
        """
        tests: dict[str, list[float]] = defaultdict(list)
        for case, seconds in (*self.expected_s.items(), *self.took_s.items()):
            tests[case.partition("[")[0]].append(seconds)
        usual_s = (now - self.started_at) / self.done if self.done else None
        by_source: dict[str, list[float]] = defaultdict(list)
        for case in self.pending:
            alike = tests.get(case.partition("[")[0])
            if case in self.expected_s:
                source, seconds = "last run", self.expected_s[case]
            elif alike:
                source, seconds = "same test", sum(alike) / len(alike)
            elif usual_s is not None:
                source, seconds = "so far", usual_s
            else:
                continue
            by_source[source].append(seconds)
        if not self.pending and usual_s is not None:
            return usual_s * (self.total - self.done), "so far"
        if not by_source:
            return None
        estimates = [seconds for times in by_source.values() for seconds in times]
        most = max(by_source, key=lambda source: sum(by_source[source]))
        return sum(estimates) * len(self.pending) / len(estimates), most

    def is_long(self, now: float) -> bool:
        """Return whether the estimated time of the run is long enough to show progress."""
        left = self.left(now)
        return now - self.started_at + (left[0] if left else 0.0) >= QUIET_S

    def log_is_due(self, now: float) -> bool:
        """Return whether LOG_EVERY_S seconds have passed since the start or the last line of a log."""
        since = self.started_at if self.logged_at is None else self.logged_at
        return now - since >= LOG_EVERY_S


class ProgressReporter:
    """Shows the progress of a run; registered if there are perf cases to run."""

    def __init__(self, config: pytest.Config, cases: frozenset[str], expected_s: Mapping[str, float]) -> None:
        """``cases``: node ids of the perf cases that will run; ``expected_s``: their seconds in the last run."""
        self._config = config
        self._cases = cases
        self._progress = Progress(
            total=len(cases), started_at=time.monotonic(), pending=set(cases), expected_s=expected_s
        )
        self._began_at = 0.0
        self._shown = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logstart(self, nodeid: str) -> Iterator[None]:
        """Write a line of a log before pytest's output for a test, or a hint after it."""
        now = self._began_at = time.monotonic()
        is_shown = nodeid in self._cases and self._progress.is_long(now)
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        on_a_terminal = terminal.hasmarkup and sys.stderr.isatty()
        if is_shown and not on_a_terminal and self._progress.log_is_due(now):
            self._progress.logged_at = now
            terminal.ensure_newline()
            terminal.write_line(f"perfsuite: {self._progress.describe(nodeid, now)}")
        yield
        if is_shown and on_a_terminal:
            self._show(self._progress.describe(nodeid.partition("::")[2], now))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remove the hint before pytest prints the result of a phase."""
        if self._shown and (report.when == "call" or not report.passed):
            self._write(_CLEAR)
            self._shown = False
        if report.when == "teardown" and report.nodeid in self._cases:
            self._progress.done += 1
            self._progress.pending.discard(report.nodeid)
            self._progress.took_s[report.nodeid] = time.monotonic() - self._began_at

    def _show(self, hint: str) -> None:
        """Write right of the cursor and move it back: pytest continues its line there."""
        writer = self._config.get_terminal_writer()
        room = writer.fullwidth - writer.width_of_current_line - 2
        if room >= _LEAST_ROOM:
            text = hint if len(hint) <= room else hint[: room - 3] + "..."
            self._write(f"{_SAVE} {text}{_CLEAR}{_RESTORE}")
            self._shown = True

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Start to count, unless nothing will run or -q is used."""
    config = session.config
    if config.getoption("collectonly") or config.getoption("verbose", 0) < 0:
        return
    nodes = frozenset(item.nodeid for item in cases if item.get_closest_marker("skip") is None)
    if nodes and config.pluginmanager.has_plugin("terminalreporter"):
        config.pluginmanager.register(ProgressReporter(config, nodes, _last_run(config)), "perfsuite-progress")


def _last_run(config: pytest.Config) -> Mapping[str, float]:
    suite = config.stash.get(suite_key, None)
    if suite is None or suite.session is None or suite.session.journal is None:
        return {}
    from perfsuite.record.journal import durations_s  # not imported in a run without perf cases

    own = suite.session.journal.path
    try:
        journals = sorted((path for path in own.parent.glob("journal-*.jsonl") if path != own), reverse=True)
    except OSError:
        return {}
    return next((took for path in journals[:_JOURNALS] if (took := durations_s(path, suite.session.fingerprint))), {})
