"""The end of a run: the amount of output, reasons of missing results, and files that could not be written."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest

from perfsuite.base.errors import PerfsuiteError, first_line
from perfsuite.plugin import collisions
from perfsuite.plugin.gate_options import without_tests
from perfsuite.plugin.options import SHOWN
from perfsuite.plugin.state import suite_key, suite_of

if TYPE_CHECKING:
    from perfsuite.record.run import RunRecord

Level = Literal["quiet", "summary", "tables", "cases"]
level_key = pytest.StashKey[Level]()
_DISPLAY = (
    "--benchmark-columns",
    "--benchmark-sort",
    "--benchmark-group-by",
    "--benchmark-name",
    "--benchmark-histogram",
    "--benchmark-verbose",
    "--benchmark-compare",
    "--benchmark-cprofile",
)
"""Options of pytest-benchmark that ask for its table."""
SKIPPED = "skipped: "  # The reason of a skip begins with this.
FAILED = "failed: "  # The reason of a failure begins with this.
cases_key = pytest.StashKey[Mapping[str, tuple[str, int]]]()
"""File relative to the root directory, and line from 1, of each perf case of this run by node id."""
missing_key = pytest.StashKey[dict[str, str]]()  # Reasons of missing results, by node id.
record_key: pytest.StashKey[RunRecord] = pytest.StashKey()
"""The record of a run that has ended; absent in runs without perf cases."""
problems_key = pytest.StashKey[list[str]]()  # Error lines for the end of the run; each of them fails it.
summarised_key = pytest.StashKey[bool]()
"""Whether perfsuite's sections were printed: older versions of pytest print none with --no-summary."""


def configure(config: pytest.Config) -> None:
    """Set the level of output by --perf-show, -v, -q or the ini key.  Raises UsageError for an unknown level."""
    asked, written = collisions.option(config, "perf_show"), collisions.ini(config, "perf_show")
    for where, value in (("--perf-show", asked), ("ini perf_show", written)):
        if value and value not in SHOWN:
            raise pytest.UsageError(f"{where}: {value!r} is not valid; choose {', '.join(SHOWN)}")
    verbose = config.getoption("verbose", 0)
    by_verbosity = "tables" if verbose > 0 else "quiet" if verbose < 0 else ""
    config.stash[level_key] = cast("Level", asked or by_verbosity or written or "summary")


def leave_out_perf_rows(config: pytest.Config, perf: Collection[str]) -> None:
    """Leave perf cases out of pytest-benchmark's table, which would compare memory copies with training steps.

    They stay in the table with ``--perf-show=cases`` or an option of pytest-benchmark for the table, and always in its
    files and comparisons.
    """
    benchmarks = getattr(config, "_benchmarksession", None)  # it has no public way to select the rows
    words = [*config.getini("addopts"), *map(str, config.invocation_params.args)]
    asked = any(word.partition("=")[0] in _DISPLAY for word in words) or config.stash[level_key] == "cases"
    if asked or benchmarks is None or not benchmarks.groups:
        return
    kept = [
        (name, [bench for bench in members if bench["fullname"] not in perf]) for name, members in benchmarks.groups
    ]
    benchmarks.groups = [(name, members) for name, members in kept if members]


class Out:
    """The terminal: its width, and lines wrapped to it."""

    def __init__(self, terminalreporter: Any) -> None:
        self._reporter = terminalreporter
        self.width: int = terminalreporter._tw.fullwidth - 1  # a line of full width wraps on some terminals
        file = getattr(terminalreporter._tw, "_file", None)
        self._encoding: str | None = getattr(file, "encoding", None) or "utf-8"

    def section(self, title: str) -> None:
        """Print a heading; the rest of one that is too long follows on further lines."""
        from perfsuite.base.text import encodable, folded

        first, *rest = folded(encodable(title, self._encoding), self.width - 4)
        self._reporter.ensure_newline()  # else an empty line would follow the heading
        self._reporter.section(first)
        for line in rest:
            self.line(line)

    def line(self, text: str, **colour: bool) -> None:
        """Print a line of text without wrapping, so that a log can be searched for it."""
        from perfsuite.base.text import encodable, escaped, screen_text

        self._reporter.write_line(encodable(screen_text(escaped(text)), self._encoding), **colour)

    def fold(self, text: str, **colour: bool) -> None:
        """Print a line of text wrapped at the terminal's width; a longer id or path gets its own line."""
        from perfsuite.base.text import folded, printable

        for part in folded(printable(text, 4 * self.width), self.width):
            self.line(part, **colour)


def keep_reason(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Store the reason why a perf case has no result, for reports; a skip goes into the journal."""
    if call.excinfo is None:
        return
    missing = item.config.stash[missing_key]
    if report.skipped:
        from perfsuite.record.run import XFAILED

        reason = str(getattr(call.excinfo.value, "msg", None) or call.excinfo.value)
        reason = f"{XFAILED * hasattr(report, 'wasxfail')}{reason}"
        missing[item.nodeid] = f"{SKIPPED}{reason}"
        session = suite_of(item.config).session
        if session is not None:
            session.skip(item.nodeid, reason)
    elif report.failed:
        missing[item.nodeid] = f"{FAILED}{first_line(call.excinfo.value)}"


def attempt(config: pytest.Config, subject: str, write: Callable[[], object]) -> None:
    """Call ``write``; after an error the run goes on, fails, and ends with a line about ``subject``."""
    try:
        write()
    except PerfsuiteError as error:
        fail(config, f"{subject}: {error}")
    except OSError as error:
        fail(config, f"{subject}: {error.strerror or error}")
    except Exception as error:
        # A defect of perfsuite must not lose the files of other plugins.
        place = traceback.extract_tb(error.__traceback__)[-1]
        fail(config, f"{subject}: {type(error).__name__} in {place.name}: {first_line(error)}; please report this")


def fail(config: pytest.Config, problem: str) -> None:
    """End the run with this line and a failing exit code."""
    config.stash.setdefault(problems_key, []).append(problem)


def settle(session: pytest.Session) -> None:
    """Check the journal once more, and fail the run if a file could not be written."""
    config = session.config
    suite = config.stash.get(suite_key, None)
    journal = suite.session.journal if suite is not None and suite.session is not None else None
    if journal is not None:
        journal.check()
    lost = journal.problem if journal is not None else ""
    if (lost or config.stash.get(problems_key, [])) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def tell(session: pytest.Session) -> None:
    """Print missing files and errors as the last lines, at every verbosity and without a terminal reporter too."""
    settle(session)
    suite, stash = session.config.stash.get(suite_key, None), session.config.stash
    lost = suite.session.journal_problem if suite is not None and suite.session is not None else ""
    elsewhere = suite.journal_elsewhere if suite is not None and not lost else ""
    for line in filter(None, [elsewhere, *without_tests(session.config)]):
        _print(session.config, f"perfsuite: {line}", bad=False)
    for line in filter(None, [lost, *stash.get(problems_key, [])]):
        _print(session.config, f"perfsuite: error: {line}", bad=True)


def _print(config: pytest.Config, line: str, *, bad: bool) -> None:
    from perfsuite.base.text import encodable, escaped

    reporter: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    text = encodable(escaped(line), getattr(sys.stderr, "encoding", None))
    with contextlib.suppress(OSError, ValueError):  # the terminal is closed; the exit code stays
        if reporter is None:
            print(text, file=sys.stderr)
        else:
            reporter.ensure_newline()
            reporter.write_line(text, red=bad, yellow=not bad)
