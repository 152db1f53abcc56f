"""The files that options request: a row for each, and a loop over the rows at each stage of the run.

A place without write access is an error before anything is measured.  At the end each file is written separately from
the record of the run.  A failed write loses only that file, prints one line at every verbosity and fails the run.  The
file can be written later from the journal.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perfsuite.base.errors import BaselineError, ConfigurationError, PerfsuiteError
from perfsuite.base.units import plural
from perfsuite.plugin import collisions, ending, fixtures, projecting
from perfsuite.plugin.ending import Out, level_key
from perfsuite.plugin.options import BESIDE, file_of, runs_tests, settings_key
from perfsuite.plugin.state import suite_key, suite_of


@dataclass(frozen=True, kw_only=True)
class Output:
    """One kind of file."""

    name: str  # pytest's name of its option.
    problem: str  # Beginning of the line about a failure; ``{}`` is replaced by the place.
    place: Callable[[pytest.Config], Path | None]  # Return the path of the file; None without the option.
    begin: Callable[[pytest.Session, Path], Path | None]
    """Return the path, None if nothing will be written.  Raises UsageError if it could not be written."""
    write: Callable[[pytest.Config, Path], str | None]
    """Write the file and return a line about it, which may be empty; None if there is nothing to write."""
    before_others: bool = False  # Whether it is written before the files of other plugins.


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files of one run, by the name of their option."""

    places: dict[str, Path] = field(default_factory=dict)  # Files to write.
    written: dict[str, Path] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)  # Lines about written files.
    traced: list[tuple[str, Path, Path]] = field(default_factory=list)
    """Cases with written timelines: case, trace, picture."""
    untraced: dict[str, str] = field(default_factory=dict)  # Reasons of missing timelines, by node id.


outputs_key = pytest.StashKey[Outputs]()


def configure(config: pytest.Config) -> None:
    """Check the options.  Raises UsageError before anything is measured."""
    config.stash[outputs_key] = Outputs()
    config.stash[ending.missing_key] = {}
    chosen, asked = collisions.option(config, "perf_report_style"), collisions.option(config, "perf_report")
    style, path = _style(config), file_of("perf_report", config)
    if style:
        from perfsuite.reports.tables.report import find_style

        try:
            find_style(style)
        except PerfsuiteError as error:
            where = "--perf-report-style" if chosen else "ini perf_report_style"
            raise pytest.UsageError(f"{where}: {error}") from None
        if chosen and path is None:
            raise pytest.UsageError(
                f"--perf-report-style={style} is the style of a report; give --perf-report=FILE too"
            )
    if asked and path is not None and path.is_dir():
        raise pytest.UsageError(f"--perf-report: {path} is a folder; give a file in it")
    page = collisions.option(config, "perf_html")
    if page and page != BESIDE and not page.lower().endswith((".html", ".htm")):  # the option took the next word
        raise pytest.UsageError(
            f"--perf-html: {page} does not end in .html; write --perf-html=FILE.html, or --perf-html as the last word"
        )


def begin(session: pytest.Session, cases: Sequence[pytest.Item]) -> None:
    """Check that every requested file can be written.  Raises UsageError before anything is measured."""
    config, option = session.config, session.config.getoption
    if not cases or not runs_tests(config):
        return
    places = config.stash[outputs_key].places
    for output in OUTPUTS:
        asked = output.place(config)
        place = output.begin(session, asked) if asked is not None else None
        if place is not None:
            places[output.name] = place
    saved = "--benchmark-save" if option("benchmark_save", None) else "--benchmark-autosave"
    saves = option("benchmark_save", None) or option("benchmark_autosave", False)
    benchmarks = getattr(config, "_benchmarksession", None)  # it has no public way
    folder = getattr(getattr(benchmarks, "storage", None), "path", None)
    if saves and isinstance(folder, Path):
        _require_writable(saved, session, folder / "run.json")


def write(config: pytest.Config, *, before_others: bool) -> None:
    """Write the files; a failed write becomes a line at the end."""
    state = config.stash[outputs_key]

    def write_one(output: Output, place: Path) -> None:
        if (line := output.write(config, place)) is not None:
            state.lines[output.name], state.written[output.name] = line, place

    for output in OUTPUTS:
        place = state.places.get(output.name)
        if place is not None and output.before_others == before_others:
            ending.attempt(config, output.problem.format(place), functools.partial(write_one, output, place))


def show(terminalreporter: Any, config: pytest.Config, *names: str) -> None:
    """Print the lines about these files."""
    for line in filter(None, map(config.stash[outputs_key].lines.get, names)):
        Out(terminalreporter).line(line)


def _require_writable(option: str, session: pytest.Session, path: Path) -> Path:
    from perfsuite.base import writing

    try:
        writing.require_writable(path, option, with_folder=True)
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from None
    return path


# -- traces ------------------------------------------------------------------------------------------------------


def _begin_trace(session: pytest.Session, folder: Path) -> Path:
    from perfsuite.base.writing import make_folder

    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except PerfsuiteError as error:
        raise pytest.UsageError(f"--perf-trace: {error}") from None
    except OSError as error:
        raise pytest.UsageError(
            f"--perf-trace: folder {folder} cannot be written to: {error.strerror}; give another one"
        ) from None
    return folder


def trace(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Write a case's trace and picture after its test, also if the test or the gate fails it."""
    outputs, state = item.config.stash[outputs_key], item.stash.get(fixtures.state_key, None)
    folder, result = outputs.places.get("perf_trace"), state.result if state else None
    if folder is None or call.when != "call" or result is None or result.outcome != "measured":
        return
    timeline = result.measurement.timeline if result.measurement is not None else None
    if timeline is None:
        return
    from perfsuite.reports.timelines.files import write_case

    try:
        outputs.traced.append((result.case, *write_case(result.case, timeline, folder)))
    except PerfsuiteError as problem:
        outputs.untraced[result.case] = str(problem)


def _write_trace(config: pytest.Config, folder: Path) -> str:
    outputs, suite = config.stash[outputs_key], config.stash.get(suite_key, None)
    session, later = suite.session if suite else None, "; the case was measured"
    if session is not None and session.journal is not None and not session.journal_problem:
        later += f": perfsuite trace {shlex.quote(str(session.journal.path))} --out DIR writes it"
    for case, problem in outputs.untraced.items():
        ending.fail(config, f"--perf-trace: {case}: {problem}{later}")
    if not outputs.traced:
        return f"no timeline in {folder}: {'see below' if outputs.untraced else 'no measured case recorded one'}"
    from perfsuite.reports.timelines.files import write_index

    line = outputs.lines["perf_trace"] = f"timelines of {plural(len(outputs.traced), 'case')} in {folder}"
    write_index(outputs.traced, folder)
    return line


# -- the tables of the published reports -------------------------------------------------------------------------


def _style(config: pytest.Config) -> str:
    return collisions.option(config, "perf_report_style") or collisions.ini(config, "perf_report_style") or ""


def _write_report(config: pytest.Config, path: Path) -> str:
    record = config.stash.get(ending.record_key, None)
    if record is None:
        return ""
    from perfsuite.base.writing import write_file
    from perfsuite.reports.stored import Recording
    from perfsuite.reports.tables.report import find_style, fitting_styles, report

    run = Recording(run=record, device=config.stash[suite_key].machine.model)
    styles = (find_style(_style(config)),) if _style(config) else fitting_styles([run])
    try:
        if not styles:
            raise PerfsuiteError(
                "no report has a table for these results; run cases of test_perf, or choose a --perf-report-style"
            )
        text = report([run], styles)
    except PerfsuiteError as error:  # not a failure: there is nothing to write
        return f"report {path} was not written: {error}"
    write_file(path, text)
    return f"report {path}: {', '.join(style.name for style in styles)}"


# -- the Markdown summary, also on the page of a CI service -------------------------------------------------------


def _summary_files(config: pytest.Config) -> tuple[Path | None, Path | None]:
    asked, step = collisions.option(config, "perf_summary"), os.environ.get("GITHUB_STEP_SUMMARY")
    return config.invocation_params.dir / asked if asked else None, Path(step) if step else None


def _begin_summary(session: pytest.Session, path: Path) -> Path | None:
    if hasattr(session.config, "workerinput"):
        return None
    return _require_writable("--perf-summary", session, path) if _summary_files(session.config)[0] else path


def _write_summary(config: pytest.Config, _: Path) -> str:
    run, suite = config.stash.get(ending.record_key, None), config.stash.get(suite_key, None)
    projected = ""
    if suite is not None and run and (found := projecting.projections(suite)):
        from perfsuite.reports.projected import projected_grids
        from perfsuite.reports.tables.grids import markdown

        projected = "".join(f"{line}\n" for grid in projected_grids(*found) for line in markdown(grid))
    if run is None or not (run.results or run.failures or projected or collisions.option(config, "perf_summary")):
        return ""  # a file of an earlier run would be taken for this one's: a file on the command line is written
    from perfsuite.base import writing
    from perfsuite.reports.notable import notable
    from perfsuite.reports.summary import LIMIT_BYTES, markdown_summary

    text = markdown_summary(run, notable(run), show_hosts=collisions.option(config, "perf_show_hosts"))
    if len((text + projected).encode()) <= LIMIT_BYTES:
        text += projected
    data = text.encode("utf-8", "backslashreplace")
    for path, put in zip(_summary_files(config), (writing.put, writing.append), strict=True):
        if path:
            try:
                put(path, data)
            except writing.WriteFailed as error:
                ending.fail(config, f"summary {path} {error}")
    return ""


# -- a line of this session in a history -------------------------------------------------------------------------


def _begin_history(session: pytest.Session, path: Path) -> Path | None:
    suite = suite_of(session.config)
    if hasattr(session.config, "workerinput") or suite.session is None or suite.settings.budget.smoke:
        return None
    from perfsuite.history import file
    from perfsuite.history.file import HistorySession

    machine, fingerprint = suite.machine, suite.session.fingerprint
    if path.is_dir():
        path /= f"{machine.name}-{fingerprint}.jsonl"
    blank = HistorySession(
        session=suite.session.id,
        time=suite.started_at,
        platform=machine.name,
        fingerprint=fingerprint,
        simulated=machine.simulated,
        revision=suite.revision,
    )
    try:
        file.require_fit(path, blank)
    except PerfsuiteError as error:
        raise pytest.UsageError(f"--perf-history: {error}") from None
    return path


def _write_history(config: pytest.Config, path: Path) -> str:
    suite = config.stash[suite_key]
    assert suite.session is not None
    from perfsuite.history import file
    from perfsuite.history.file import session_of
    from perfsuite.record.describe import instrumented_line

    if slowed := instrumented_line(suite.session.results.values()):
        raise BaselineError(slowed)
    line = session_of(
        [result for case, result in suite.session.results.items() if case not in suite.session.reused],
        session=suite.session.id,
        time=suite.started_at,
        platform=suite.machine.name,
        fingerprint=suite.session.fingerprint,
        revision=suite.revision,
    )
    if not line.cases and collisions.option(config, "perf_history"):  # an ini key is for runs of other tests too
        raise BaselineError("no case was measured")
    if not line.cases:
        return ""
    file.append(path, line)
    added = plural(len(line.cases), "case")
    return f"history {path}: {added} added; perfsuite history show {shlex.quote(str(path))}"


def _page(config: pytest.Config) -> Path | None:
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


def _write_page(config: pytest.Config, path: Path) -> str | None:
    record = config.stash.get(ending.record_key, None)
    if record is None:
        return None
    from perfsuite.reports.material import material_of
    from perfsuite.reports.page.page import page_line, write_page
    from perfsuite.reports.stored import Recording

    suite = config.stash[suite_key]
    journal = suite.session.journal if suite.session else None
    record = dataclasses.replace(record, path=Path(journal.path) if journal else None)
    try:
        run = Recording(run=record, device=suite.machine.model)
        write_page(material_of([run], show_hosts=collisions.option(config, "perf_show_hosts")), path)
    except PerfsuiteError as error:
        later = f"; perfsuite report {shlex.quote(str(journal.path))} --html FILE writes it" if journal else ""
        raise ConfigurationError(f"{error}{later}") from None
    on_screen = (record.results or record.failures) and config.stash[level_key] != "quiet"
    return "" if on_screen else f"page {page_line(path)}"


OUTPUTS = (
    Output(
        name="perf_trace",
        problem="--perf-trace",
        place=lambda config: config.stash[settings_key].trace,
        begin=_begin_trace,
        write=_write_trace,
    ),
    Output(
        name="perf_report",
        problem="report {} was not written",
        place=functools.partial(file_of, "perf_report"),
        begin=functools.partial(_require_writable, "--perf-report"),
        write=_write_report,
    ),
    Output(
        name="perf_summary",
        problem="the summary was not written",
        place=lambda config: next(filter(None, _summary_files(config)), None),
        begin=_begin_summary,
        write=_write_summary,
        before_others=True,
    ),
    Output(
        name="perf_history",
        problem="nothing was added to the history",
        place=functools.partial(file_of, "perf_history"),
        begin=_begin_history,
        write=_write_history,
        before_others=True,
    ),
    Output(
        name="perf_html",
        problem="page {} was not written",
        place=_page,
        begin=functools.partial(_require_writable, "--perf-html"),
        write=_write_page,
    ),
)
