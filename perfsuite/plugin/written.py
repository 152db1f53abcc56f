"""Files that a run writes: places are checked before anything is measured, a missing file at the end fails the run.

Each file is written on its own: a failure costs that file alone, neither the verdicts nor another plugin's files such
as JUnit's, and is one line at every verbosity.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from perfsuite.base.errors import ConfigurationError, PerfsuiteError, first_line
from perfsuite.plugin.options import runs_tests
from perfsuite.plugin.state import suite_key

problems_key = pytest.StashKey[list[str]]()
"""Lines for the end of the run, each of which fails it."""
summarised_key = pytest.StashKey[bool]()
"""Whether perfsuite's sections were printed: older pytest prints none with --no-summary."""


def require_writable(path: Path, option: str) -> None:
    """Raise UsageError, which names ``option``, unless the file can be written; its folder is made."""
    from perfsuite.base import files

    try:
        files.require_writable(path, option, with_folder=True)
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from None


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Find out before anything is measured whether pytest-benchmark can save what it is asked to."""
    option = session.config.getoption
    asked = "--benchmark-save" if option("benchmark_save", None) else "--benchmark-autosave"
    saves = option("benchmark_save", None) or option("benchmark_autosave", False)
    storage = getattr(getattr(session.config, "_benchmarksession", None), "storage", None)  # it has no public way
    folder = getattr(storage, "path", None)
    if cases and saves and isinstance(folder, Path) and runs_tests(session.config):
        require_writable(folder / "run.json", asked)


def attempt(config: pytest.Config, what: str, write: Callable[[], object]) -> bool:
    """Call ``write``; where it fails the run goes on, and ends with a line on ``what`` and a failing exit code."""
    try:
        write()
    except PerfsuiteError as error:
        fail(config, f"{what}: {error}")
    except OSError as error:
        fail(config, f"{what}: {error.strerror or error}")
    except Exception as error:
        # A defect of perfsuite: still no reason to lose what others write.
        place = traceback.extract_tb(error.__traceback__)[-1]
        fail(config, f"{what}: {type(error).__name__} in {place.name}: {first_line(error)}; please report this")
    else:
        return True
    return False


def fail(config: pytest.Config, problem: str) -> None:
    """End the run with this line and a failing exit code."""
    config.stash.setdefault(problems_key, []).append(problem)


def settle(session: pytest.Session) -> None:
    """Look for the journal once more, and make the exit code a failing one where anything was not written."""
    config = session.config
    suite = config.stash.get(suite_key, None)
    journal = suite.session.journal if suite is not None and suite.session is not None else None
    if journal is not None:
        journal.check()
    lost = journal.problem if journal is not None else ""
    if (lost or config.stash.get(problems_key, [])) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def tell(session: pytest.Session) -> None:
    """Print what is not where it should be, last of all, at every verbosity and where there is no terminal reporter."""
    settle(session)
    suite, stash = session.config.stash.get(suite_key, None), session.config.stash
    lost = suite.session.journal_problem if suite is not None and suite.session is not None else ""
    elsewhere = suite.journal_elsewhere if suite is not None and not lost else ""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if elsewhere:
        _print(reporter, f"perfsuite: {elsewhere}", bad=False)
    for line in filter(None, [lost, *stash.get(problems_key, [])]):
        _print(reporter, f"perfsuite: error: {line}", bad=True)


def _print(reporter: pytest.TerminalReporter | None, line: str, *, bad: bool) -> None:
    from perfsuite.base.text import encodable, escaped

    text = encodable(escaped(line), getattr(sys.stderr, "encoding", None))
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone takes no line, and the exit code stays
        if reporter is None:
            print(text, file=sys.stderr)
        else:
            reporter.ensure_newline()
            reporter.write_line(text, red=bad, yellow=not bad)
