"""``--perf-html[=FILE]``: the run as one HTML page, written after the last case.

A place that cannot be written to is told before anything is measured.  After that a page that cannot be written is a
line at the end and fails the run: the journal has everything, and ``perfsuite report --html`` writes it from there.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite.base.errors import ConfigurationError, PerfsuiteError
from perfsuite.plugin import collisions, written
from perfsuite.plugin.options import runs_tests
from perfsuite.plugin.output import Out, level_key
from perfsuite.plugin.recorded import record_key
from perfsuite.plugin.state import suite_key

BESIDE = "beside the journal"
"""Where the page goes when no file is named; no file is called so."""
page_key = pytest.StashKey[Path]()
"""Where the page of this run goes."""
written_key = pytest.StashKey[Path]()
"""Where it was written."""


def declare(parser: pytest.Parser) -> None:
    """Declare option and ini key."""
    group = parser.getgroup("perfsuite", "performance of distributed training")
    group.addoption(
        "--perf-html",
        nargs="?",
        const=BESIDE,
        metavar="FILE",
        help="write one page with charts, offline in one file; default: beside the journal (ini: perf_html)",
    )
    parser.addini("perf_html", "file of the page, relative to the root; yes: beside the journal", default="")


def configure(config: pytest.Config) -> None:
    """Refuse what is no file for a page: ``--perf-html test_perf`` takes the tests for it."""
    asked = collisions.option(config, "perf_html")
    if asked and asked != BESIDE and not asked.lower().endswith((".html", ".htm")):
        raise pytest.UsageError(
            f"--perf-html: {asked} does not end in .html; write --perf-html=FILE.html, or --perf-html as the last word"
        )


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Find out now, before anything is measured, whether the page can be written."""
    path = _place(session.config)
    if path is None or not cases or not runs_tests(session.config):
        return
    written.require_writable(path, "--perf-html")
    session.config.stash[page_key] = path


def _place(config: pytest.Config) -> Path | None:
    """Where the page goes; None where none was asked for."""
    asked, written = collisions.option(config, "perf_html"), str(collisions.ini(config, "perf_html")).strip()
    if asked is None and written.lower() in ("", "no", "false"):
        return None
    if asked not in (None, BESIDE):
        return config.invocation_params.dir / str(asked)
    if asked is None and written.lower() not in ("yes", "true"):
        return Path(config.rootpath / written)
    suite = config.stash.get(suite_key, None)
    journal = suite.session.journal if suite is not None and suite.session is not None else None
    return Path(journal.path).with_suffix(".html") if journal is not None else None


def write(config: pytest.Config) -> None:
    """Write the page of the run, and keep where for the screen and :func:`show`; ConfigurationError on failure."""
    path, record = config.stash.get(page_key, None), config.stash.get(record_key, None)
    if path is None or record is None:
        return
    from perfsuite.reports.page.page import write_page
    from perfsuite.reports.page.runs import material_of
    from perfsuite.reports.tables.recording import Recording

    suite = config.stash[suite_key]
    try:
        run = Recording(run=record, device=suite.machine.model)
        write_page(material_of([run], show_hosts=collisions.option(config, "perf_show_hosts")), path)
    except PerfsuiteError as error:
        journal = suite.session.journal if suite.session else None
        later = f"; perfsuite report {shlex.quote(str(journal.path))} --html FILE writes it" if journal else ""
        raise ConfigurationError(f"{error}{later}") from None
    config.stash[written_key] = path


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the page where no screen did."""
    record = config.stash.get(record_key, None)
    on_screen = record is not None and (record.results or record.failures) and config.stash[level_key] != "quiet"
    if written_key in config.stash and not on_screen:
        Out(terminalreporter).line(f"page {config.stash[written_key]}")
