"""``perfsuite checklist``: report 004's tuning checklist, answered from results."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from perfsuite.base.errors import ConfigurationError
from perfsuite.cli.command import EXIT_OK, Command, json_argument, platform_file_argument, print_json, print_lines
from perfsuite.cli.results import read_recording
from perfsuite.platforms import load_catalog
from perfsuite.record.codec import to_json
from perfsuite.reports.checklist import Answer, answers, facts_of
from perfsuite.reports.recording import Recording

_MARKS = {"yes": "[x]", "no": "[ ]", "not measured": "[?]", "does not apply": "[-]"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.epilog = "RESULTS are journals (.perfsuite/journal-*.jsonl) or baseline files of one machine"
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="journal or baseline file")
    json_argument(parser)
    platform_file_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Carry out ``perfsuite checklist``."""
    catalog = load_catalog(options.platform_file)
    recordings = [read_recording(path, catalog) for path in options.results]
    if not any(recording.run.results for recording in recordings):
        raise ConfigurationError(
            f"{', '.join(map(str, options.results))}: nothing was measured, so nothing can be answered; run cases of "
            "test_perf and give their journal"
        )
    told = list(answers(facts_of(recordings)))
    if options.json:
        print_json([to_json(answer) for answer in told])
    else:
        print_lines(_lines(recordings, told))
    return EXIT_OK


def _lines(recordings: list[Recording], told: list[Answer]) -> Iterator[str]:
    yield f"report 004's checklist for {recordings[-1].run.hardware}"
    if any(recording.run.simulated for recording in recordings):
        yield "the devices are simulated: no time here is a measurement"
    yield ""
    for answer in told:
        yield f"{_MARKS[answer.verdict]} {answer.line}: {answer.verdict}"
        if answer.evidence:
            yield f"      {answer.evidence}"
        if answer.advice:
            yield f"      -> {answer.advice}"


COMMAND = Command(
    name="checklist",
    help="answer report 004's tuning checklist from results, with evidence and advice",
    arguments=arguments,
    run=run,
)
