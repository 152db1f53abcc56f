"""``perfsuite show``: print the screen of an earlier run from its journal or from a baseline file."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perfsuite.base.errors import ConfigurationError
from perfsuite.base.files import open_regular, why
from perfsuite.base.text import encodable, printable
from perfsuite.baselines.baseline import Baseline
from perfsuite.cli.main import Command, color_argument, print_marked
from perfsuite.metrics import read_run
from perfsuite.record.codec import plain_json
from perfsuite.record.describe import word
from perfsuite.record.journal_writer import newest
from perfsuite.record.run import GateRecord, RunRecord
from perfsuite.reports.layout import fit, grid_lines
from perfsuite.reports.notable import notable
from perfsuite.reports.screen import ScreenLine, screen, title

_LONGEST_HEADER = 1 << 24


def read_results(path: Path) -> RunRecord | Baseline:
    """Return the contents of a journal or a baseline file.  Raises PerfsuiteError if it is neither, or damaged."""
    require_file(path, "a journal or a baseline file")
    first = first_object(path)
    is_journal = path.suffix == ".jsonl" if first is None else "header" in first
    if is_journal:
        return read_run(path)
    from perfsuite.baselines import store

    return store.read(path)


def require_file(path: Path, kinds: str) -> None:
    """Raise ConfigurationError with the accepted ``kinds`` of files unless ``path`` is a file."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file; give {kinds}")


def first_object(path: Path) -> Mapping[str, Any] | None:
    """Return the JSON object on the first line; None without one: a baseline file has no object on its first line."""
    try:
        with open_regular(path) as file:
            first = file.readline(_LONGEST_HEADER)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {why(error)}; correct the path or the permissions") from None
    try:
        plain = plain_json(first)
    except ValueError:
        return None
    return plain if isinstance(plain, dict) else {}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        nargs="?",
        type=Path,
        metavar="RESULTS",
        help="read this journal or baseline file (default: the newest journal of this directory's project)",
    )
    parser.add_argument("--case", metavar="TEXT", help="print cases whose id contains TEXT, in full (default: all)")
    parser.add_argument(
        "--show",
        choices=("summary", "tables", "cases"),
        help="print one screen, tables, or each case in full (default: summary; cases with --case)",
    )
    color_argument(parser)


def _run(options: argparse.Namespace) -> None:
    path = options.results or newest(Path.cwd())
    if options.results is None:
        print(f"journal {printable(path)}")
    results = read_results(path)
    if isinstance(results, RunRecord):
        record = results
    else:
        from perfsuite.reports.stored import record_of_baseline

        record = record_of_baseline(results, path.name)
    if options.case:
        record = _only(record, options.case)
    width = shutil.get_terminal_size((80, 24)).columns - 1
    show = options.show or ("cases" if options.case else "summary")
    marked = (
        (encodable(text, sys.stdout.encoding), mark)
        for line, mark in lines(record, show, width, options.results)
        for text in fit([line], width)
    )
    print_marked(marked, options.color)


def _only(record: RunRecord, text: str) -> RunRecord:
    results = {case: result for case, result in record.results.items() if text in case}
    failures, interrupted, skips = (
        {case: reason for case, reason in cases.items() if text in case}
        for cases in (record.failures, record.interrupted, record.skips)
    )
    if not (results or failures or interrupted or skips):
        raise ConfigurationError(f"no case of {record.name} has {text!r} in its id; leave --case out to see all")
    gate = record.gate
    if gate is not None:
        judged = tuple(verdict for verdict in gate.verdicts if text in verdict.case)
        gate = GateRecord(gate=gate.gate, fail_on=gate.fail_on, verdicts=judged)
    return dataclasses.replace(
        record, results=results, failures=failures, interrupted=interrupted, skips=skips, gate=gate
    )


def lines(record: RunRecord, show: str, width: int, path: Path | None) -> Iterator[ScreenLine]:
    """Yield the lines of one screen, of all tables or of every case, at most ``width`` wide.

    ``path`` is the file as the user named it, None for the newest journal.
    """
    if show != "summary":
        yield from ((text, "") for text in _in_full(record, show, width))
    yield title(record), ""
    place = f" {shlex.quote(str(path))}" if path is not None else ""
    links = [("next", f"perfsuite show{place} --show=tables")] if show == "summary" and record.results else []
    yield from screen(record, notable(record), width=width, full=show != "summary", links=links)


def _in_full(record: RunRecord, show: str, width: int) -> Iterator[str]:
    verdicts = record.gate.by_case if record.gate is not None else {}
    results = record.results.values()
    if show == "cases":
        from perfsuite.reports.terminal import case_lines

        for result in results:
            yield from (*case_lines(result, verdicts.get(result.case), width), "")
        return
    from perfsuite.reports.terminal import clock_lines, peak_lines, tables

    if results:
        words = {case: word(verdict) for case, verdict in verdicts.items()}
        yield from tables(list(results), width, verdicts=words)
        yield from ("", *peak_lines(results), *clock_lines(results), "")
    if record.projections:
        from perfsuite.reports.projected import projected_grids

        yield from (*grid_lines(projected_grids(record.projections, record.results), width), "")


SHOW = Command(
    help="print one screen, tables or single cases of a journal (default: the newest) or a baseline file",
    example="perfsuite show --case all_reduce",
    arguments=_arguments,
    run=_run,
)
