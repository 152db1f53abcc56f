"""``perfsuite trace``: write traces and pictures of the pipeline cases of an earlier run, from its journal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from perfsuite.base.errors import ConfigurationError, InvalidParameter
from perfsuite.base.text import printable
from perfsuite.base.units import plural
from perfsuite.cli.main import EXIT_OK, EXIT_USAGE, Command, print_lines
from perfsuite.metrics import read_run
from perfsuite.record.run import RunRecord
from perfsuite.record.step import Timeline
from perfsuite.reports.layout import grid_lines
from perfsuite.reports.pipeline import pipeline_grids
from perfsuite.reports.timelines.files import check_timeline, write_case
from perfsuite.schedules import replay


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "journal", type=Path, metavar="JOURNAL", help="read this journal of a run, .perfsuite/journal-*.jsonl"
    )
    parser.add_argument("--case", default="", metavar="TEXT", help="write cases whose id contains TEXT (default: all)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="write the files into this folder (no default)"
    )
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="write the simulated schedule of each step too; the difference is the time lost between actions",
    )


def run(options: argparse.Namespace) -> int:
    """Write the files of every case with a timeline.  Raises PerfsuiteError without one, or if a write fails."""
    journal = read_run(options.journal)
    timelines = _timelines(journal, options.case)
    problems = []
    written: list[Path] = []
    for case, timeline in timelines.items():
        try:
            written += write_case(case, timeline, options.out)
            if options.simulated:
                written += write_case(case, simulated_schedule(timeline), options.out)
        except InvalidParameter as problem:
            problems.append(f"{case}: {problem}")
    print_lines(grid_lines(pipeline_grids(journal.results[case] for case in timelines)))
    print_lines(["", *map(str, written)])
    for line in problems:
        print(f"perfsuite: error: {printable(line, 1000)}", file=sys.stderr)
    return EXIT_USAGE if problems else EXIT_OK


def simulated_schedule(timeline: Timeline) -> Timeline:
    """Return the simulated schedule of ``timeline`` with its own durations.  Raises InvalidParameter without one."""
    check_timeline(timeline)
    again = replay(timeline)
    if again.simulated is None:
        raise InvalidParameter(again.reason)
    return again.simulated


def _timelines(journal: RunRecord, text: str) -> Mapping[str, Timeline]:
    with_one = {
        case: result.measurement.timeline
        for case, result in journal.results.items()
        if result.outcome == "measured" and result.measurement is not None and result.measurement.timeline is not None
    }
    chosen = {case: timeline for case, timeline in with_one.items() if text in case}
    if not with_one:
        raise ConfigurationError(
            f"journal {journal.path} has {plural(len(journal.results), 'case')} and none with a timeline; "
            "give the journal of a run with pipeline cases"
        )
    if not chosen:
        raise ConfigurationError(
            f"--case {text!r}: no id of {plural(len(with_one), 'case')} with a timeline contains it; give a part of "
            f"an id such as {next(iter(with_one))}"
        )
    return chosen


TRACE = Command(
    help="write a Perfetto trace and a picture of each pipeline case of an earlier run, from its journal",
    example="perfsuite trace .perfsuite/journal-20251121T120000.jsonl --out traces",
    arguments=_arguments,
    run=run,
)
