"""What a CI service shows: the Markdown summary, and annotations at the tests that failed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfsuite.base.errors import first_line
from perfsuite.plugin import collisions, projecting, written
from perfsuite.plugin.options import runs_tests
from perfsuite.plugin.recorded import record_key
from perfsuite.plugin.state import suite_key

if TYPE_CHECKING:
    from perfsuite.record.run import RunRecord

Places = Mapping[str, tuple[str, int]]
"""File relative to the root directory, and line from 1, of each perf case by node id."""
MOST_ANNOTATIONS = 10
"""GitHub shows no more errors of one step."""


@dataclass(kw_only=True)
class CiState:
    """What this run tells a CI service."""

    summary: Path | None
    annotations: bool
    show_hosts: bool
    places: Places


ci_key = pytest.StashKey[CiState]()


def declare(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("perfsuite", "performance of distributed training")
    add = group.addoption
    add("--perf-summary", metavar="FILE", help="write a Markdown summary; $GITHUB_STEP_SUMMARY gets it too")
    add("--perf-annotations", action="store_true", help="under GitHub Actions: an annotation at each case that fails")
    add("--perf-show-hosts", action="store_true", help="keep names of hosts in files meant for others")


def begin(session: pytest.Session, cases: list[pytest.Item]) -> None:
    """Find out before anything is measured whether the summary can be written."""
    config = session.config
    if not cases or not runs_tests(config) or hasattr(config, "workerinput"):
        return
    asked = collisions.option(config, "perf_summary")
    path = config.invocation_params.dir / asked if asked else None
    if path is not None:
        written.require_writable(path, "--perf-summary")
    config.stash[ci_key] = CiState(
        summary=path,
        annotations=collisions.option(config, "perf_annotations"),
        show_hosts=collisions.option(config, "perf_show_hosts"),
        places={item.nodeid: (item.location[0], (item.location[1] or 0) + 1) for item in cases},
    )


def write(config: pytest.Config) -> None:
    """To the file asked for and to the page of the CI service; a file that cannot be written fails the run."""
    state, run = config.stash.get(ci_key, None), config.stash.get(record_key, None)
    step = os.environ.get("GITHUB_STEP_SUMMARY")
    if state is None or run is None or not (state.summary or step):
        return
    suite = config.stash.get(suite_key, None)
    projected = "".join(f"{line}\n" for line in projecting.markdown(suite)) if suite is not None else ""
    if not (run.results or run.failures or projected):
        return
    from perfsuite.base import files
    from perfsuite.reports.notable import notable
    from perfsuite.reports.summary import LIMIT_BYTES, markdown_summary

    text = markdown_summary(run, notable(run), show_hosts=state.show_hosts)
    if len((text + projected).encode()) <= LIMIT_BYTES:
        text += projected
    data = text.encode("utf-8", "backslashreplace")
    for path, put in ((state.summary, files.put), (Path(step) if step else None, files.append)):
        if path:
            try:
                put(path, data)
            except files.WriteFailed as error:
                written.fail(config, f"summary {path} {error}")


def show(terminalreporter: Any, config: pytest.Config) -> None:
    """Annotations."""
    state, run = config.stash.get(ci_key, None), config.stash.get(record_key, None)
    if state is None:
        return
    if run is not None and state.annotations and os.environ.get("GITHUB_ACTIONS"):
        terminalreporter.ensure_newline()
        workspace = os.environ.get("GITHUB_WORKSPACE", "")
        for line in error_commands(run, state.places, root=config.rootpath, workspace=workspace):
            terminalreporter.write_line(line)


def error_commands(run: RunRecord, places: Places, *, root: Path, workspace: str = "") -> Iterator[str]:
    """A workflow command for each of the first failing cases; the last one counts the others."""
    from perfsuite.base.text import printable, without_paths
    from perfsuite.gate.describe import headline

    failing = {case: f"failed: {first_line(message)}" for case, message in run.failures.items()}
    for verdict in run.gate.verdicts if run.gate is not None else ():
        if run.gate is not None and run.gate.fails(verdict.name):
            reasons = f": {'; '.join(verdict.reasons)}" if verdict.reasons else ""
            failing[verdict.case] = headline(verdict) + reasons
    known = [(case, message, *places[case]) for case, message in failing.items() if case in places]
    for case, message, file, line in known[:MOST_ANNOTATIONS]:
        place = _from(workspace, root / file, file)
        told = f"{printable(case)}: {without_paths(printable(message))}"
        yield f"::error file={_property(printable(place))},line={line}::{_data(told)}"
    if len(known) > MOST_ANNOTATIONS:
        yield f"::error::and {len(known) - MOST_ANNOTATIONS} more cases fail, see the log"


def _from(workspace: str, path: Path, otherwise: str) -> str:
    """The file as the service knows it: relative to its checkout."""
    return path.relative_to(workspace).as_posix() if workspace and path.is_relative_to(workspace) else otherwise


def _data(text: str) -> str:
    """Escaped as GitHub's toolkit escapes a command's message."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
